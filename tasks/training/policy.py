"""What the Trainer actor trains, as a contract, and the settings it is made from. Loads no torch: a driver places a
trainer without having a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.rank import ALONE, Rank
from staleflow.tasks.training.trainer_settings import PolicyTrainerSettings

if TYPE_CHECKING:
    from staleflow.stores.weights.weight_hash import Weights

T = TypeVar("T")


class Policy(Protocol):
    """The policy that the Trainer actor trains and publishes. Each process of a group has one: all of them have the
    same methods called, and only the leading one's results count."""

    def wake(self) -> None:
        """Have the device, as all else needs it but `begin_save`, `end_save`, `save` and `close`. In turns a policy is
        asleep when it is built; otherwise it never sleeps."""
        ...

    def sleep(self) -> None:
        """Free the device, in turns."""
        ...

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]: ...

    def fine_tune(self, step: int) -> dict[str, float]:
        """Do step `step` of supervised fine-tuning. Returns metrics by name."""
        ...

    def apply_to_weights(self, function: Callable[[Weights], T]) -> T:
        """Call `function` with the weights as engines load them, and return its result. They may be a TensorStream."""
        ...

    def probe(self, tokens: Sequence[int]) -> tuple[float, ...]: ...

    def save(self, folder: Path, published: Path) -> None:
        """Save weights for `from_pretrained`. published: the file that they were published in. Called on the leading
        rank alone."""
        ...

    def begin_save(self, path: Path) -> None:
        """Begin to write all that the next step depends on: to a file, or, of a group, into a folder. When this
        returns training may go on: what is written is a copy. At most one is being written at a time."""
        ...

    def end_save(self) -> None:
        """Wait until that is written, or raise what keeps it from being. Called in another thread than the rest, and
        on the leading rank alone."""
        ...

    def load_state(self, path: Path) -> None: ...

    def close(self) -> None: ...


class PolicySettings(Protocol):
    """Settings from which a worker builds its policy. Picklable."""

    def build(self, threads: int, rank: Rank = ALONE) -> Policy:
        """threads: of this process, for what computes on processors. rank: its place in the trainer's group; waits for
        the others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(PolicyTrainerSettings):
    """Settings of the trainer, from which a worker builds its policy."""

    def build(self, threads: int, rank: Rank = ALONE) -> Policy:
        import torch

        from staleflow.tasks.training.policy_trainer import PolicyTrainer

        torch.set_num_threads(threads)
        return PolicyTrainer(self, rank)
