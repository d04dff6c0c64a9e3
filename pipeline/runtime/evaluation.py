"""Mean reward on held-out prompts, computed by the run's instances and reward worker while nothing else uses them.

Each number comes with its basis: the number of distinct prompts, the responses that could not be scored (left out of
the mean, as in a batch's), the standard error, and fingerprints of the reward, data and template.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import RunConfig
from pipeline.runtime.background import side_by_side
from pipeline.runtime.evaluated_episodes import NO_RESPONSE, EpisodePlayer
from stores.errors import StoreError
from stores.files import replace_text
from tasks.scoring import ScoredResponse

if TYPE_CHECKING:  # else whoever only reads evaluations would load torch
    from pipeline.runtime.acting import Acting
    from pipeline.runtime.actors import Actors
    from pipeline.runtime.instance_handle import InstanceHandle
    from pipeline.runtime.membership import Membership
    from pipeline.runtime.scoring import Scoring
    from tasks.actors.rollout_instance import Evaluated
    from tasks.prompts import HeldOut


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
    sampled_failed: int | None = None
    """Responses that could not be scored. None in records of earlier versions, where they count as 0 in the mean and
    num_prompts may include duplicates."""
    greedy_failed: int | None = None
    failure: str = ""
    """Error of the first response that could not be scored."""
    reward: str = ""
    """Fingerprints of the reward, data and template; empty if unknown. See pipeline/runtime/fingerprints.py."""
    data: str = ""
    template: str = ""
    changed: tuple[str, ...] = ()
    """Changes to them since the run began, one line each."""

    @classmethod
    def of(
        cls,
        version: int,
        sampled: Sequence[ScoredResponse],
        greedy: Sequence[ScoredResponse],
        prints: Mapping[str, str],
        changed: Sequence[str] = (),
    ) -> Evaluation:
        """Summarize one sampled and one greedy score per prompt. prints: fingerprints of reward, data and template."""
        failures = [s.error for s in (*sampled, *greedy) if s.error]
        one, two = _mean(sampled), _mean(greedy)
        return cls(
            version=version,
            num_prompts=len(sampled),
            sampled=one[0],
            greedy=two[0],
            sampled_stderr=one[1],
            greedy_stderr=two[1],
            sampled_failed=sum(bool(s.error) for s in sampled),
            greedy_failed=sum(bool(s.error) for s in greedy),
            failure=next((line for f in failures for line in f.splitlines() if line.strip()), ""),
            changed=tuple(changed),
            **prints,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """The inverse of `asdict`; also reads records of earlier versions."""
        return cls(**{**value, "changed": tuple(value.get("changed", ()))})

    @property
    def line(self) -> str:
        """A one-line summary for display."""
        return (
            f"held-out reward at version {self.version}: {shown(self.sampled, self.sampled_stderr)} at temperature, "
            f"{shown(self.greedy, self.greedy_stderr)} greedy ({self.basis})"
        )

    @property
    def basis(self) -> str:
        """What the means are based on, for display."""
        one, two = self.sampled_failed, self.greedy_failed
        if one is None or two is None:
            return f"{self.num_prompts} prompts, counting duplicates, and failed rewards as 0"
        failed = f", {one} not scored" if one else ""
        if one != two:
            failed = f", not scored: {one} at temperature, {two} greedy"
        return f"{self.num_prompts} prompts{failed}" + (f"; first: {self.failure}" if self.failure else "")


def shown(mean: float | None, stderr: float | None) -> str:
    """Format a mean and its standard error for display.

    >>> shown(0.4713, 0.0249)
    '0.471 ± 0.025'
    """
    if mean is None:
        return "none scored"
    return f"{mean:.3f}" if stderr is None else f"{mean:.3f} ± {stderr:.3f}"


def not_comparable(evaluations: Sequence[Evaluation]) -> list[str]:
    """Reasons why consecutive evaluations cannot be compared, one line per pair; empty if all can."""
    lines = []
    for one, two in itertools.pairwise(evaluations):
        pairs = (
            (one.reward, two.reward, "reward functions"), (one.data, two.data, "data"),
            (one.template, two.template, "templates"),
        )  # fmt: skip
        reasons = [f"different {what}" for a, b, what in pairs if a and b and a != b]
        if one.num_prompts != two.num_prompts:
            reasons.append(f"{one.num_prompts} and {two.num_prompts} prompts")
        if (one.sampled_failed is None) != (two.sampled_failed is None):
            reasons.append("different counting: an earlier version counted duplicates, and failed rewards as 0")
        if reasons:
            lines.append(
                f"held-out rewards at versions {one.version} and {two.version} cannot be compared: "
                + ", ".join(reasons)
            )
    return lines


def fewer_prompts(asked: int, found: int, source: str) -> str:
    """A warning that the source has fewer held-out prompts than requested; empty if it has enough."""
    if found >= asked:
        return ""
    return f"task.eval_prompts = {asked}: {source} has only {found} distinct held-out prompts; each is evaluated once"


def write_evaluations(run_dir: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations to the run's folder, where a resumed run finds them. Raises StoreError."""
    text = json.dumps([asdict(e) for e in evaluations]) + "\n"
    replace_text(run_dir / "evaluations.json", text, "free space or move runs_dir")


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Read a run's evaluations; empty if there are none yet. Raises StoreError."""
    path = run_dir / "evaluations.json"
    try:
        return [Evaluation.from_json(e) for e in json.loads(path.read_text())] if path.is_file() else []
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; remove it to resume without earlier evaluations") from error


async def evaluate(
    actors: Actors,
    membership: Membership,
    scoring: Scoring,
    acting: Acting,
    config: RunConfig,
    version: int,
    prints: Mapping[str, str],
    changed: Sequence[str] = (),
) -> Evaluation:
    """Evaluate a sampled and a greedy response to each held-out prompt, spread over the instances; what one that is
    lost had to answer is answered by its replacement. prints, changed: as in `Evaluation.of`."""
    limit_s = config.deadlines.train_s
    prompts = await actors.ask("server", "held_out", config.task.eval_prompts, within_s=limit_s)
    scores: dict[bool, list[ScoredResponse]] = {}
    for greedy in (False, True):
        if config.acts:
            scores[greedy] = await EpisodePlayer(actors, membership, acting, config).play(prompts, greedy, version)
        else:
            scores[greedy] = await _answered(actors, membership, scoring, prompts, greedy, limit_s)
    return Evaluation.of(version, scores[False], scores[True], prints, changed)


async def _answered(
    actors: Actors, membership: Membership, scoring: Scoring, prompts: list[HeldOut], greedy: bool, limit_s: float
) -> list[ScoredResponse]:
    """The scores of one response to each prompt."""
    places = [instance.index for instance in actors.instances.values()]
    shares = [prompts[i :: len(places)] for i in range(len(places))]

    def answering(share: list[HeldOut]) -> Callable[[InstanceHandle], Awaitable[list[Evaluated]]]:
        asked = [p.tokens for p in share]
        return lambda one: actors.ask(one.placed.name, "evaluate", asked, greedy, limit_s, within_s=limit_s)

    answers = await side_by_side(
        *(membership.while_resting(place, answering(share)) for place, share in zip(places, shares, strict=True))
    )
    tokens = [a.tokens for share in answers for a in share]
    answered = [i for i, t in enumerate(tokens) if t is not None]
    texts = await actors.ask("server", "decode", [tokens[i] for i in answered], within_s=limit_s)
    records = [p.record for share in shares for p in share]
    items = [(text, records[i]) for i, text in zip(answered, texts, strict=True)]
    scored = await scoring.score_texts(items, limit_s)
    found = dict(zip(answered, scored, strict=True))
    return [found.get(i, NO_RESPONSE) for i in range(len(tokens))]


def _mean(scores: Sequence[ScoredResponse]) -> tuple[float | None, float | None]:
    """(mean, its standard error) of the scores without error."""
    rewards = [s.reward for s in scores if not s.error]
    if not rewards:
        return None, None
    error = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None
    return statistics.fmean(rewards), error
