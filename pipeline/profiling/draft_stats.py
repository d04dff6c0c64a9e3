"""Draft statistics of a run, reduced to one acceptance rate for simulations. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from staleflow.pipeline.coordination.events import DecodeStats
from staleflow.tasks.emulation.cost_model import CostModel, probability_at, tokens_per_step


@dataclass(slots=True)
class DraftStats:
    """Draft statistics, summed over reports. steps: number of steps by maximum draft length. drafted, accepted:
    tokens."""

    steps: dict[int, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def add(self, stats: DecodeStats, length: int) -> None:
        """Add a report of an instance that drafts up to `length` tokens."""
        if stats.drafts:
            self.count(length, stats.tokens - stats.accepted_tokens, stats.drafted_tokens, stats.accepted_tokens)

    def count(self, length: int, steps: int, drafted: int, accepted: int) -> None:
        """Add `steps` steps with `drafted` draft tokens in total, and at most `length` in each."""
        if not length or steps <= 0:
            return
        self.steps[length] = self.steps.get(length, 0) + steps
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate that explains the tokens per step if every request drafted its maximum; None without drafts.

        Lower than accepted / drafted where requests often had no draft.
        """
        if not self.steps:
            return None

        def kept(acceptance: float) -> float:
            return sum(steps * tokens_per_step(length, acceptance) for length, steps in self.steps.items())

        return probability_at(kept, sum(self.steps.values()) + self.accepted)

    def cost(self, model: CostModel) -> CostModel:
        """Cost model for use with `acceptance`: verify_share is scaled by the ratio of draft tokens to their
        maximum."""
        max_drafted = sum(length * steps for length, steps in self.steps.items())
        return replace(model, verify_share=model.verify_share * self.drafted / max_drafted) if max_drafted else model
