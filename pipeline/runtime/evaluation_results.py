"""Mean reward on held-out prompts at one policy version, as a run records and shows it.

Each number comes with its basis: the number of distinct prompts, the responses that could not be scored (left out of
the mean, as in a batch's), the standard error, and fingerprints of the reward, data and template.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.evaluation_settings import HELD_OUT
from staleflow.stores.errors import StoreError
from staleflow.stores.files import replace_text
from staleflow.tasks.sources.reward_process import ScoredResponse

NO_RESPONSE = ScoredResponse(reward=0.0, error="the engine gave no response")

NOT_ASKED = -1
"""In place of the number of greedy responses that could not be scored, if none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean reward on held-out prompts at one policy version, over the responses that could be scored."""

    version: int
    num_prompts: int
    """Distinct prompts, each answered once at the rollout temperature and once greedily."""
    sampled: float | None
    """Mean at the rollout temperature; None if no response could be scored."""
    greedy: float | None
    sampled_stderr: float | None = None
    """Standard error of the mean, over prompts; None for fewer than two."""
    greedy_stderr: float | None = None
    sampled_failed: int = 0
    """Responses that could not be scored."""
    greedy_failed: int = 0
    failure: str = ""
    """Error of the first response that could not be scored."""
    reward: str = ""
    """Fingerprints of the reward, data and template; empty if unknown. See pipeline/recovery/source_fingerprints.py."""
    data: str = ""
    template: str = ""
    changed: tuple[str, ...] = ()
    """Changes to them since the run began, one line each."""
    name: str = HELD_OUT
    """Of its set."""
    samples: int = 1
    """Responses that were sampled per prompt, besides the greedy one."""
    tokens: int = 0
    """Tokens that were sampled for it."""
    seconds: float = 0.0
    """From its request to its last score."""

    @classmethod
    def of(
        cls,
        version: int,
        sampled: Sequence[ScoredResponse],
        greedy: Sequence[ScoredResponse],
        prints: Mapping[str, str],
        changed: Sequence[str] = (),
        *,
        name: str = HELD_OUT,
        samples: int = 1,
        tokens: int = 0,
        seconds: float = 0.0,
    ) -> Evaluation:
        """Summarize scores that lie prompt by prompt: `samples` sampled ones of each, and a greedy one, or either.
        prints: fingerprints of reward, data and template."""
        failures = [s.error for s in (*sampled, *greedy) if s.error]
        at_temperature, at_greedy = _mean(sampled, samples), _mean(greedy, 1)
        return cls(
            version=version,
            num_prompts=len(greedy) or len(sampled) // max(1, samples),
            sampled=at_temperature[0],
            greedy=at_greedy[0],
            sampled_stderr=at_temperature[1],
            greedy_stderr=at_greedy[1],
            sampled_failed=sum(bool(s.error) for s in sampled),
            greedy_failed=sum(bool(s.error) for s in greedy) if greedy else NOT_ASKED,
            failure=next((line for f in failures for line in f.splitlines() if line.strip()), ""),
            changed=tuple(changed),
            name=name,
            samples=samples,
            tokens=tokens,
            seconds=seconds,
            **prints,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """The inverse of `asdict`."""
        return cls(**{**value, "changed": tuple(value["changed"])})

    @property
    def line(self) -> str:
        """A one-line summary for display."""
        sampled = f"{shown(self.sampled, self.sampled_stderr)} at temperature"
        greedy = f"{shown(self.greedy, self.greedy_stderr)} greedy"
        means = ", ".join([sampled] * bool(self.samples) + [greedy] * (self.greedy_failed != NOT_ASKED))
        return f"{self.name} reward at version {self.version}: {means} ({self.basis})"

    @property
    def figure(self) -> float | None:
        """What the version is judged by: the mean at temperature, or the greedy one if nothing was sampled."""
        return self.sampled if self.samples else self.greedy

    @property
    def basis(self) -> str:
        """What the means are based on, for display."""
        sampled, greedy = self.sampled_failed, self.greedy_failed
        if greedy == NOT_ASKED:
            greedy = sampled
        failed = f", {sampled} not scored" if sampled else ""
        if sampled != greedy:
            failed = f", not scored: {sampled} at temperature, {greedy} greedy"
        return f"{self.num_prompts} prompts{failed}" + (f"; first: {self.failure}" if self.failure else "")


def shown(mean: float | None, stderr: float | None) -> str:
    """Format a mean and its standard error for display.

    >>> shown(0.4713, 0.0249)
    '0.471 ± 0.025'
    """
    if mean is None:
        return "none scored"
    return f"{mean:.3f}" if stderr is None else f"{mean:.3f} ± {stderr:.3f}"


def evaluating(version: int, num_left: int) -> str:
    """What is being evaluated, for display. version: -1 while none is chosen yet."""
    subject = f"version {version}" if version >= 0 else "the next version"
    return f"evaluating {subject}: {num_left} responses to come"


def not_comparable(evaluations: Sequence[Evaluation]) -> list[str]:
    """Reasons why consecutive evaluations cannot be compared, one line per pair; empty if all can."""
    lines = []
    for earlier, later in (pair for alike in by_set(evaluations).values() for pair in itertools.pairwise(alike)):
        pairs = (
            (earlier.reward, later.reward, "reward functions"), (earlier.data, later.data, "data"),
            (earlier.template, later.template, "templates"),
        )  # fmt: skip
        reasons = [f"different {difference}" for a, b, difference in pairs if a and b and a != b]
        if earlier.num_prompts != later.num_prompts:
            reasons.append(f"{earlier.num_prompts} and {later.num_prompts} prompts")
        if reasons:
            lines.append(
                f"{earlier.name} rewards at versions {earlier.version} and {later.version} cannot be compared: "
                + ", ".join(reasons)
            )
    return lines


def fewer_prompts(requested: int, available: int, source: str, key: str = "task.eval_prompts") -> str:
    """A warning that the source has fewer held-out prompts than requested; empty if it has enough."""
    if available >= requested:
        return ""
    return f"{key} = {requested}: {source} has only {available} distinct held-out prompts; each is evaluated once"


def write_evaluations(run_dir: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations to the run's folder, where a resumed run finds them. Raises StoreError."""
    text = json.dumps([asdict(e) for e in evaluations]) + "\n"
    replace_text(run_dir / "evaluations.json", text, "free space or move runs_dir")


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Read a run's evaluations; empty if there are none yet. Raises StoreError."""
    path, remedy = run_dir / "evaluations.json", "remove it to resume without earlier evaluations"
    try:
        parsed = json.loads(path.read_text()) if path.is_file() else []
        if not isinstance(parsed, list):
            raise TypeError
        return [Evaluation.from_json(e) for e in parsed]
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; {remedy}") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise StoreError(f"{path}: is no list of a run's evaluations; {remedy}") from error


def after_resuming(evaluations: Sequence[Evaluation], version: int) -> list[Evaluation]:
    """Those of a stored run that hold when it goes on from a version: later ones are sampled and trained anew."""
    return [evaluation for evaluation in evaluations if evaluation.version <= version]


def by_set(evaluations: Iterable[Evaluation]) -> dict[str, list[Evaluation]]:
    """Evaluations by the name of their set, each in the order in which they were made."""
    results: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        results.setdefault(evaluation.name, []).append(evaluation)
    return results


def _mean(scores: Sequence[ScoredResponse], per_prompt: int) -> tuple[float | None, float | None]:
    """(mean over prompts, its standard error) of the scores without error, which lie prompt by prompt."""
    prompts = [scores[i : i + per_prompt] for i in range(0, len(scores), max(1, per_prompt))]
    scored = [[s.reward for s in group if not s.error] for group in prompts]
    rewards = [statistics.fmean(group) for group in scored if group]
    if not rewards:
        return None, None
    error = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None
    return statistics.fmean(rewards), error
