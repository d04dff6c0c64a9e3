"""The transformers engine under the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stores import parameters
from stores.parameters import ParameterFolder
from stores.trajectory import InstanceId, PolicyVersion
from tasks.engines.base import Engine
from tasks.engines.settings import TransformersSettings
from tasks.engines.transformers import TransformersEngine, load_model
from tests.tasks.engine_conformance import EngineTests, asked_beside, collect, model_settings, request


def settings(model: Path, **changes: Any) -> TransformersSettings:
    return TransformersSettings(**(model_settings(model) | changes))


class TestTransformersEngine(EngineTests):
    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[TransformersEngine]:
        torch.set_num_threads(1)
        one = TransformersEngine(settings(tiny_model), InstanceId("rollout-0"))
        yield one
        one.close()

    def kill(self, engine: Engine) -> None:
        assert isinstance(engine, TransformersEngine)
        engine._managers[False].stop(block=True, timeout=10, hard_stop=True)

    @contextmanager
    def hang(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine, TransformersEngine)
        with engine._managers[False].pause():
            yield

    @contextmanager
    def during_load(self, engine: Engine, ask: Callable[[], None]) -> Iterator[None]:
        assert isinstance(engine, TransformersEngine)
        paused = engine._paused

        @contextmanager
        def asked() -> Iterator[None]:
            with paused():
                asked_beside(ask)
                yield

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_paused", asked)
            yield

    @pytest.fixture
    def reference(self, tiny_model: Path) -> Callable[..., list[float]]:
        return lambda tokens, first, weights=None: plain_logprobs(tiny_model, tokens, first, weights)

    @pytest.fixture
    def other_weights(self, tiny_model: Path, tmp_path: Path) -> tuple[Path, str]:
        return changed_weights(tiny_model, tmp_path)

    def test_temperature_is_in_the_logprobs(self, tiny_model: Path) -> None:
        one = TransformersEngine(settings(tiny_model, temperature=2.0), InstanceId("i"))
        try:
            one.submit([request(0)])
            (segment,) = collect(one, 1)[0].segments
        finally:
            one.close()
        tokens = [3, 10, 14, 7, *segment.tokens.tolist()]
        expected = plain_logprobs(tiny_model, tokens, 4, None, temperature=2.0)
        assert segment.logprobs.tolist() == pytest.approx(expected, abs=2e-4)


def changed_weights(folder: Path, tmp_path: Path) -> tuple[Path, str]:
    """Other weights for the same model, as version 5 is published, and their fingerprint."""
    model = load_model(str(folder), "float32", "cpu", "sdpa")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    named = dict(model.named_parameters())
    folder = ParameterFolder(tmp_path / "weights")
    held = folder.publish(PolicyVersion(5), named)
    return folder.path(PolicyVersion(5)), held


def plain_logprobs(
    folder: Path, tokens: list[int], first: int, weights: Path | None, temperature: float = 1.0
) -> list[float]:
    """By one forward pass of the plain model."""
    model = load_model(str(folder), "float32", "cpu", "eager")
    if weights is not None:
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in parameters.read(weights).items():
                named[name].copy_(tensor)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    return [float(table[i - 1, tokens[i]]) for i in range(first, len(tokens))]
