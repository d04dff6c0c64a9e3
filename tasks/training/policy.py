"""The policy that the Trainer actor trains: its contract, and the settings of one with a model. Importing this loads no
torch, because a driver places trainers without loading a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from staleflow.tasks.training.trainer_settings import PolicyTrainerSettings

if TYPE_CHECKING:
    from staleflow.stores.weights.weight_hash import Weights

T = TypeVar("T")


class Policy(Protocol):
    """The policy that the Trainer actor trains and publishes. Each rank of a group has one. `save` and `end_save`
    are called on the leading rank only, the other methods on all; only results of the leading rank are used."""

    def wake(self) -> None:
        """Move to the device. Needed with cluster.layout = "turns", where a policy is created asleep, before all
        methods but `begin_save`, `end_save`, `save` and `close`; other policies never sleep."""
        ...

    def sleep(self) -> None:
        """Free the device, with cluster.layout = "turns"."""
        ...

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train on the rows of training step `step`. Returns metrics by name."""
        ...

    def fine_tune(self, step: int) -> dict[str, float]:
        """Run step `step` of supervised fine-tuning. Returns metrics by name."""
        ...

    def apply_to_weights(self, function: Callable[[Weights], T]) -> T:
        """Call `function` with the weights as engines load them, and return its result. The weights may be a
        TensorStream."""
        ...

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprobs, in nats, of the tokens after the first, each given those before it."""
        ...

    def save(self, folder: Path, published: Path) -> None:
        """Save weights for `from_pretrained`. published: the file in which they were published."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy the state that the next step depends on, so that training may continue. path: a file, or in a group a
        folder, into which ranks start writing. Only one save runs at a time."""
        ...

    def end_save(self) -> None:
        """Write the copied state, and raise the error of writing it. May be called in another thread than the other
        methods."""
        ...

    def load_state(self, path: Path) -> None:
        """Continue from a state that `begin_save` and `end_save` wrote. path: as in `begin_save`."""
        ...

    def close(self) -> None: ...


class PolicySettings(Protocol):
    """Settings from which a worker builds its policy. Picklable."""

    def build(self, threads: int, rank: Rank = SINGLE_RANK) -> Policy:
        """Build the policy. threads: number of CPU threads. rank: rank of this process; the call waits for the
        others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(PolicyTrainerSettings):
    """PolicyTrainerSettings with the method that builds the policy. The trainer's module imports only the former, since
    modules must not import each other."""

    def build(self, threads: int, rank: Rank = SINGLE_RANK) -> Policy:
        import torch

        from staleflow.tasks.training.policy_trainer import PolicyTrainer

        torch.set_num_threads(threads)
        return PolicyTrainer(self, rank)
