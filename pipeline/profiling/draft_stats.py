"""Draft statistics of a run, reduced to one acceptance rate for simulations. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from staleflow.pipeline.coordination.events import DecodeStats
from staleflow.tasks.emulation.cost_model import CostModel, probability_at, tokens_per_step


@dataclass(slots=True)
class DraftStats:
    """Draft statistics, summed over reports. num_steps: number of steps by maximum draft length. drafted_tokens,
    accepted_tokens: numbers of tokens."""

    num_steps: dict[int, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, decode_stats: DecodeStats, length: int) -> None:
        """Add a report of an instance that drafts up to `length` tokens."""
        if decode_stats.drafts:
            self.add_steps(
                length,
                decode_stats.tokens - decode_stats.accepted_tokens,
                decode_stats.drafted_tokens,
                decode_stats.accepted_tokens,
            )

    def add_steps(self, length: int, num_steps: int, drafted_tokens: int, accepted_tokens: int) -> None:
        """Add `num_steps` steps with `drafted_tokens` draft tokens in total, and at most `length` in each."""
        if not length or num_steps <= 0:
            return
        self.num_steps[length] = self.num_steps.get(length, 0) + num_steps
        self.drafted_tokens += drafted_tokens
        self.accepted_tokens += accepted_tokens

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate that explains the tokens per step if every request drafted its maximum; None without drafts.

        Lower than accepted_tokens / drafted_tokens if requests often had no draft.
        """
        if not self.num_steps:
            return None

        def sampled_tokens(acceptance: float) -> float:
            return sum(steps * tokens_per_step(length, acceptance) for length, steps in self.num_steps.items())

        return probability_at(sampled_tokens, sum(self.num_steps.values()) + self.accepted_tokens)

    def cost_model(self, model: CostModel) -> CostModel:
        """Cost model for use with `acceptance`: verify_share is scaled by the ratio of draft tokens to their
        maximum."""
        max_drafted = sum(length * steps for length, steps in self.num_steps.items())
        return (
            replace(model, verify_share=model.verify_share * self.drafted_tokens / max_drafted)
            if max_drafted
            else model
        )
