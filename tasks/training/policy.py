"""What the Trainer actor trains, as a contract, and the settings it is made from. Loads no torch: a driver places a
trainer without having a model."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tasks.training.packing import Row
from tasks.training.settings import TrainingConfig

if TYPE_CHECKING:
    from stores.weight_hash import Tensors


class Policy(Protocol):
    """The policy that the Trainer actor trains and publishes."""

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]: ...

    def published(self) -> Tensors: ...

    def probe(self, tokens: Sequence[int]) -> tuple[float, ...]: ...

    def save(self, folder: Path) -> None: ...

    def save_state(self, path: Path) -> None: ...

    def load_state(self, path: Path) -> None: ...


class PolicySettings(Protocol):
    """Settings from which a worker builds its policy. Picklable."""

    def build(self, threads: int) -> Policy:
        """threads: of this process, for what computes on processors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Settings of the trainer; see ModelConfig. training: the job's table. num_steps: length of a schedule that
    decays, unless the table has one. max_length: for constant_length."""

    model: str
    dtype: str
    device: str
    training: TrainingConfig
    num_steps: int
    temperature: float
    max_length: int
    seed: int

    def build(self, threads: int) -> Policy:
        import torch

        torch.set_num_threads(threads)
        policy: Policy = importlib.import_module("tasks.training.policy_trainer").PolicyTrainer(self)
        return policy
