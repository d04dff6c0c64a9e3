"""A teacher computes what a trainer that holds the reference model would: for each token in its own context, at the
sampling temperature; and a trainer that reads these logprobs has the same gradient."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from staleflow.stores.context_branches import context_positions
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.actors.server_messages import TeacherItem, TeacherLogprobs
from staleflow.tasks.actors.teacher import Teacher
from staleflow.tasks.engines.base import TokenScores
from staleflow.tasks.training.loss import Dpo, Loss, PpoClip
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.tiny_model import SYMBOLS, make_tokenizer
from staleflow.tasks.training.trainer_settings import KlConfig
from tests.tasks.branching import branching_row
from tests.tasks.test_engine_transformers import settings
from tests.tasks.test_env_tokens import rows as rows_of_many_turns
from tests.tasks.test_numerics import groups, rows, trainer
from tests.tasks.test_objective import moved_model, sampled_rows


@dataclass
class RowServer:
    """The calls of a trajectory server that a teacher makes, over rows."""

    rows: Sequence[Row]
    logprobs: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    async def teacher_items(self, trajectories: tuple[TrajectoryId, ...]) -> list[TeacherItem]:
        return [TeacherItem(t, self.rows[t]) for t in trajectories]

    async def record_teacher_logprobs(self, items: list[TeacherLogprobs]) -> None:
        self.logprobs |= {item.trajectory: item.logprobs for item in items}


def teach(data: Sequence[Row], engine_settings: Any, temperature: float = 1.0) -> list[Row]:
    """Return the rows with the logprobs of a teacher."""
    server = RowServer(data)

    async def score() -> None:
        teacher = Teacher(engine_settings, InstanceId("teacher-0"), 1, temperature, 30.0)
        try:
            await teacher.score(server, tuple(map(TrajectoryId, range(len(data)))))
        finally:
            await teacher.close()

    asyncio.run(score())
    return [replace(row, reference_logprobs=server.logprobs[i]) for i, row in enumerate(data)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_tokens", [1024, 4])
def test_logprobs_are_those_of_one_forward_pass_for_each_token(
    tiny_model: Path, temperature: float, batch_tokens: int
) -> None:
    """Each pass ends before its token, so that logprobs of the tokens beside it would be found."""
    data = [Row.of(branching_row()), *rows_of_many_turns()]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for row in teach(data, settings(tiny_model, max_batch_tokens=batch_tokens), temperature):
        ids, expected = np.concatenate([row.prompt, row.response]).astype(np.int64), np.zeros(len(row.response))
        for token in np.flatnonzero(row.sampled).tolist():
            position = len(row.prompt) + token
            branches = [branch for branch in row.branches if branch.start <= position]
            context = torch.from_numpy(ids[context_positions(branches, position)][None])
            with torch.no_grad():
                logits = model(input_ids=context).logits[0, -1] / temperature
            expected[token] = float(logits.log_softmax(-1)[int(ids[position])])
        assert row.reference_logprobs is not None
        np.testing.assert_allclose(row.reference_logprobs, expected, atol=2e-5)
        assert row.reference_logprobs.dtype == np.float32


OBJECTIVES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "in the loss": (PpoClip(), {"coefficient": 0.3, "estimator": "k3", "place": "loss"}),
    "in the reward": (PpoClip(), {"coefficient": 0.3, "estimator": "k1", "place": "reward"}),
    "distillation": (PpoClip(), {"coefficient": 1.0, "estimator": "k1", "place": "advantage"}),
    "preferences": (Dpo(), {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_with_stored_logprobs_is_that_of_a_trainer_with_the_reference(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Logprobs that are off by one token give another one."""
    loss, kl = OBJECTIVES[name]
    reference = moved_model(tiny_model, tmp_path)
    data = groups(rows(6), 2) if loss.compares_pairs else [*rows_of_many_turns(), *rows(3)]
    taught = teach(data, settings(Path(reference)))

    def gradient(batch: list[Row], **changes: Any) -> torch.Tensor:
        policy_trainer = trainer(tiny_model, loss=loss, **changes)
        policy_trainer.step(0, batch)
        assert (policy_trainer.reference is None) == changes.get("has_stored_reference", False)
        return torch.cat([p.grad.flatten() for p in policy_trainer.model.parameters()])

    expected = gradient(data, kl=KlConfig(**kl, reference=reference))
    stored = {"kl": KlConfig(**kl, reference="not there"), "has_stored_reference": True}
    torch.testing.assert_close(gradient(taught, **stored), expected, atol=1e-5, rtol=1e-3)
    shifted = [replace(row, reference_logprobs=np.append(row.reference_logprobs[1:], np.float32(0))) for row in taught]  # type: ignore[index]
    difference = (gradient(shifted, **stored) - expected).norm() / expected.norm()
    assert difference > 0.002


def test_a_teacher_that_is_the_student_changes_nothing(tiny_model: Path) -> None:
    """Its logprobs are those under which the student sampled, up to the rounding of two implementations."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    data = teach(sampled_rows(model, 16, 12, seed=1), settings(tiny_model))
    for row in data:
        assert row.reference_logprobs is not None
        np.testing.assert_allclose(row.reference_logprobs, row.behaviour, atol=2e-5)
    kl = KlConfig(coefficient=1.0, estimator="k1", place="advantage")
    metrics = trainer(tiny_model, kl=kl, loss=PpoClip(), has_stored_reference=True).step(0, data)
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-8)
    assert metrics["loss"] == pytest.approx(0, abs=2e-5)


def test_a_row_without_logprobs_is_not_trained_on(tiny_model: Path) -> None:
    policy_trainer = trainer(tiny_model, kl=KlConfig(coefficient=1.0), has_stored_reference=True)
    with pytest.raises(StoreError, match=r"no logprobs of the reference.*teacher\.instances = 0"):
        policy_trainer.step(0, rows(2))


@dataclass(frozen=True)
class InfiniteSettings:
    """Settings of an engine under which a token is impossible."""

    max_running: int = 4

    def build(self, instance: InstanceId, threads: int) -> Any:
        return self

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        (tokens,) = sequences
        logprobs = (*(-1.0 for _ in tokens[2:]), -math.inf)
        return [TokenScores(logprobs=logprobs, top_tokens=(0,) * len(tokens), top_logprobs=(0.0,) * len(tokens))]

    def close(self) -> None:
        """Do nothing."""


def test_an_impossible_token_is_named() -> None:
    (row,) = rows(1)
    with pytest.raises(ConfigError, match=f"token {len(row.response) - 1} of response 0 has a logprob of -inf"):
        teach([row], InfiniteSettings())


def test_a_reference_with_other_tokens_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "other")
    symbols = [*SYMBOLS]
    symbols[5], symbols[6] = symbols[6], symbols[5]
    make_tokenizer(symbols).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"training\.kl\.reference = .*other"):
        Teacher(settings(tmp_path / "other"), InstanceId("teacher-0"), 1, 1.0, 30.0, str(tiny_model))
