"""Alarms about what training steps report: importance weights that have collapsed, and updates that were dropped."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_ESS = 0.3
"""Effective sample size, as a share of the tokens, below which a step counts as collapsed. Were log ratios normal,
their standard deviation would be 1.1 there, and a token in twenty would weigh over three times as much as the mean."""
STEPS = 3
"""Steps in a row that must have collapsed: one token whose logprob is far off is enough for a single step."""


class TrainingWatch:
    """Watches one start of a run. Each kind of alarm is given once."""

    def __init__(self) -> None:
        self._collapsed = 0
        self._given: set[str] = set()

    def heard(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The alarms of a finished training step, each a line with value, limit and remedy."""
        ess = metrics.get("ess", 1.0)
        self._collapsed = self._collapsed + 1 if ess < LEAST_ESS else 0
        alarms = []
        if self._collapsed >= STEPS and self._once("ess"):
            alarms.append(
                f"step {step}: the effective sample size of the importance ratios is {ess:.2g} of the tokens, for "
                f"{STEPS} steps below {LEAST_ESS:g}: few tokens outweigh the batch; lower staleness.eta or "
                "training.learning_rate, or choose a loss that bounds or masks them (docs/losses.md)"
            )
        if (dropped := metrics.get("updates_dropped", 0.0)) and self._once("dropped"):
            alarms.append(
                f"step {step}: updates dropped because their gradient was not finite: {dropped:.0f}; lower "
                "training.learning_rate, and look for rewards and logprobs that are not finite"
            )
        return alarms

    def _once(self, kind: str) -> bool:
        """Whether this kind is given for the first time."""
        first = kind not in self._given
        self._given.add(kind)
        return first
