"""A trainer without a model: a step takes the time set in the job, and published weights are one number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from staleflow.stores.weights import resume_points
from staleflow.stores.weights.weight_hash import Weights
from staleflow.tasks.engines.emulated_engine import emulated_logprobs, emulated_weights
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.objective import Objective
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from staleflow.tasks.training.trainer_settings import TrainingConfig

ZERO_METRICS = (
    "loss", "grad_norm", "updates_dropped", "tokens_dropped", "clip_share", "clip_share_low", "clip_share_high",
    "entropy", "kl_old", "kl_behaviour", "learning_rate", "ess_stderr", "entropy_stderr",
    "kl_behaviour_stderr",
)  # fmt: skip
"""Metrics that are 0 because nothing is learned."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedTrainerSettings:
    """Settings of emulated training; see SimulationConfig. A step takes train_s seconds, and s_per_token for each token
    of its batch including prompts; `sleep` takes switch_s. time_scale divides all of these."""

    train_s: float
    s_per_token: float
    time_scale: float
    switch_s: float = 0.0
    training: TrainingConfig = TrainingConfig()

    def build(self, threads: int, rank: Rank = SINGLE_RANK) -> EmulatedPolicy:
        return EmulatedPolicy(self, rank)


class EmulatedPolicy:
    """The policy of an emulated run, for the Trainer actor. In a group each rank does the same, and only the leading
    rank writes."""

    def __init__(self, settings: EmulatedTrainerSettings, rank: Rank = SINGLE_RANK) -> None:
        self._settings = settings
        self._rank = rank
        self._objective = Objective.of(settings.training)
        self._version = 0

    def wake(self) -> None:
        """Do nothing: `sleep` waits for the time of waking, too."""

    def sleep(self) -> None:
        """Wait for the time it takes to free the device."""
        time.sleep(self._settings.switch_s / self._settings.time_scale)

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Wait for the time of a training step."""
        settings = self._settings
        tokens = sum(len(r.prompt) + len(r.response) for r in rows)
        time.sleep((settings.train_s + settings.s_per_token * tokens) / settings.time_scale)
        self._version = step + 1
        trained_tokens = float(sum(r.num_sampled for r in rows if self._objective.trains(r)))
        return {**dict.fromkeys(ZERO_METRICS, 0.0), "ratio_mean": 1.0, "ess": 1.0, "tokens_trained": trained_tokens}

    def fine_tune(self, step: int) -> dict[str, float]:
        """Do nothing: there is no model to tune."""
        return {}

    def apply_to_weights(self, function: Callable[[Weights], T]) -> T:
        return function(emulated_weights(self._version))

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return synthetic logprobs of tokens[1:], nats."""
        return tuple(emulated_logprobs(np.asarray(tokens[1:], np.int32)).tolist())

    def save(self, folder: Path, published: Path) -> None:
        """Do nothing: there are no weights to save."""

    def begin_save(self, path: Path) -> None:
        """Write the version as a zip archive; in a group also the file that marks the folder complete."""
        if self._rank.leads:
            with _state_file(path).open("wb") as file:
                np.savez(file, version=self._version)
            if path.is_dir():
                (path / resume_points.SHARD_METADATA).touch()

    def end_save(self) -> None:
        """Do nothing: `begin_save` has written everything."""

    def load_state(self, path: Path) -> None:
        """Restore the state that `begin_save` wrote. Raises StoreError."""
        with resume_points.loading(path), _state_file(path).open("rb") as file, np.load(file) as state:
            self._version = int(state["version"])

    def close(self) -> None:
        """Do nothing: there is no group to leave."""


def _state_file(path: Path) -> Path:
    """Path of the state's file. In a group `path` is a folder, which has one such file."""
    return path / "state.npz" if path.is_dir() else path
