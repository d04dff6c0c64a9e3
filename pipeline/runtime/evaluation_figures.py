"""Statistics of an evaluation besides its means: intervals, pass@k, majority, changes since the base model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from staleflow.stores.reward_statistics import (
    Interval,
    PairedDifference,
    best_of,
    estimate,
    is_binary,
    majority_reward,
    paired_difference,
    pass_at_ks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRewards:
    """The rewards of one prompt's responses, without those that could not be scored."""

    sampled: tuple[float, ...] = ()
    answers: tuple[str, ...] = ()
    """Digests of the sampled responses' answers, as task.answer_pattern finds them; empty for episodes of turns."""
    greedy: tuple[float, ...] = ()
    """Reward of the greedy response, if there is one."""


SetRewards = Mapping[str, PromptRewards]
"""The rewards of an evaluation set, by the digest of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigures:
    """Statistics of one evaluation set at one policy version besides its means."""

    sampled_interval: Interval | None = None
    """Confidence interval of the mean of the sampled responses; None if there are too few prompts for one."""
    greedy_interval: Interval | None = None
    binary: bool = False
    """Whether all rewards are 0 or 1: then the best of k is pass@k."""
    best_of: dict[int, float] = field(default_factory=dict)
    """Expected highest reward of k sampled responses, by k, over the prompts whose responses could all be scored; empty
    with one response per prompt."""
    best_of_intervals: dict[int, Interval] = field(default_factory=dict)
    majority: float | None = None
    """Reward of the most frequent answer of all sampled responses, over the same prompts; None with fewer than three
    responses per prompt, or without answers."""
    majority_interval: Interval | None = None
    sampled_change: PairedDifference | None = None
    """Difference to version 0, over the same prompts; None at version 0, and if the rewards are not comparable."""
    greedy_change: PairedDifference | None = None

    def lines(self, samples: int) -> list[str]:
        """The statistics as short lines for display. samples: sampled responses per prompt."""
        best_label = "pass" if self.binary else "best"
        lines = [
            f"{best_label}@{k} {format_mean(mean, None, self.best_of_intervals.get(k))}"
            for k, mean in self.best_of.items()
        ]
        if self.majority is not None:
            lines.append(f"majority@{samples} {format_mean(self.majority, None, self.majority_interval)}")
        for name, change in (("sampled", self.sampled_change), ("greedy", self.greedy_change)):
            if change is not None:
                p = f"p = {change.p:.3f}" if change.p >= 0.001 else "p < 0.001"
                lines.append(f"{name} since version 0: {change.mean:+.3f} {change.interval}, {p}")
        return lines


NO_FIGURES = EvaluationFigures()


def format_mean(mean: float | None, stderr: float | None, interval: Interval | None) -> str:
    """Format a mean, its standard error and its 95 % interval for display.

    >>> format_mean(0.4713, 0.0249, Interval(low=0.421, high=0.521))
    '0.471 ± 0.025 [0.421, 0.521]'
    """
    if mean is None:
        return "none scored"
    return f"{mean:.3f}" + (f" ± {stderr:.3f}" if stderr is not None else "") + (f" {interval}" if interval else "")


def compute_figures(rewards: SetRewards, samples: int, base_rewards: SetRewards) -> EvaluationFigures:
    """Compute the statistics of an evaluation. samples: sampled responses per prompt. base_rewards: rewards of version
    0; empty if they are not comparable."""
    prompts = list(rewards.values())
    complete_prompts = [p for p in prompts if len(p.sampled) == samples]
    best_estimates = {k: estimate([[best_of(p.sampled, k)] for p in complete_prompts]) for k in pass_at_ks(samples)}
    votes = [[majority_reward(p.answers, p.sampled)] for p in complete_prompts if p.answers] if samples > 2 else []
    majority_estimate = estimate(votes)
    sampled, greedy = estimate([p.sampled for p in prompts]), estimate([p.greedy for p in prompts])
    return EvaluationFigures(
        sampled_interval=sampled.interval,
        greedy_interval=greedy.interval,
        binary=is_binary([(*p.sampled, *p.greedy) for p in prompts]),
        best_of={k: result.mean for k, result in best_estimates.items() if result.mean is not None},
        best_of_intervals={k: result.interval for k, result in best_estimates.items() if result.interval},
        majority=majority_estimate.mean,
        majority_interval=majority_estimate.interval,
        sampled_change=paired_difference(_sampled(base_rewards), _sampled(rewards)),
        greedy_change=paired_difference(_greedy(base_rewards), _greedy(rewards)),
    )


def _sampled(rewards: SetRewards) -> dict[str, Sequence[float]]:
    return {prompt: prompt_rewards.sampled for prompt, prompt_rewards in rewards.items()}


def _greedy(rewards: SetRewards) -> dict[str, Sequence[float]]:
    return {prompt: prompt_rewards.greedy for prompt, prompt_rewards in rewards.items()}
