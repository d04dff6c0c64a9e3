"""What became of the drafts of a run, as one acceptance that a simulation can go by. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from staleflow.pipeline.coordination.events import DecodeStats
from staleflow.tasks.emulation.cost_model import CostModel, probability_at, tokens_per_step


@dataclass(slots=True)
class DraftsUsed:
    """Sums over the reports of instances that drafted. steps: of requests, by the most tokens that each might have
    drafted. drafted, accepted: tokens."""

    steps: dict[int, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def add(self, taken: DecodeStats, length: int) -> None:
        """Count a report of an instance that drafts up to `length` tokens."""
        if taken.drafts:
            self.count(length, taken.tokens - taken.accepted_tokens, taken.drafted_tokens, taken.accepted_tokens)

    def count(self, length: int, steps: int, drafted: int, accepted: int) -> None:
        """Count what was drafted in so many steps, at most `length` tokens in each."""
        if not length or steps <= 0:
            return
        self.steps[length] = self.steps.get(length, 0) + steps
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance(self) -> float | None:
        """With which steps keep as many tokens as these did, if every request drafts as many tokens as it may; None if
        nothing was drafted. Below the share of drafted tokens that were accepted where requests often had no draft."""
        if not self.steps:
            return None

        def kept(acceptance: float) -> float:
            return sum(steps * tokens_per_step(length, acceptance) for length, steps in self.steps.items())

        return probability_at(kept, sum(self.steps.values()) + self.accepted)

    def cost(self, model: CostModel) -> CostModel:
        """What steps cost if every request drafts as many tokens as it may: each costs less than a verified one where
        these had fewer."""
        asked = sum(length * steps for length, steps in self.steps.items())
        return replace(model, verify_share=model.verify_share * self.drafted / asked) if asked else model
