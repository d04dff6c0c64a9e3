"""`training.compile` changes how long a step takes, and nothing else. Graphs are captured as for a GPU, but run by
PyTorch's own kernels, because the compiler takes minutes on a CPU; tests/gpu/ has the compiler's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.tasks.training.trainer_settings import KlConfig
from tests.tasks.test_numerics import trainer
from tests.tasks.test_ranks import ragged_rows

KL = KlConfig(coefficient=0.1, estimator="k3", place="loss")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that PyTorch's tracing reads


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Count compiled graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "knobs",
    [{}, {"recompute_activations": True, "offload": True, "microbatch_tokens": 64, "kl": KL}],
    ids=str,
)
def test_a_compiled_model_trains_the_same(tiny_model: Path, knobs: dict[str, Any], graphs: Any) -> None:
    """Nothing is compiled again for other row lengths, also with a reference model."""
    expected, compiled = trainer(tiny_model, **knobs), trainer(tiny_model, compile=True, **knobs)
    assert compiled.logprob_model.packs_rows and graphs.frame_count == 0
    num_graphs = []
    for step in range(3):
        rows = ragged_rows(9 + step, np.random.default_rng(step))
        assert compiled.step(step, rows) == pytest.approx(expected.step(step, rows), rel=1e-4, abs=1e-5)
        num_graphs.append(graphs.frame_count)
    assert 0 < num_graphs[1] == num_graphs[-1]
