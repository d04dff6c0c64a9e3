"""Mean reward on held-out prompts, by the run's own instances and reward worker, while nothing else runs on them.

A number here says what it rests on: how many different prompts, how many responses could not be scored (they are left
out of the mean, as they are of a batch's), its standard error, and by which reward, data and template it was found.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.runtime.actors import Actors
from stores.errors import StoreError
from stores.files import replace_text
from tasks.scoring import ScoredResponse

NO_RESPONSE = ScoredResponse(reward=0.0, error="the engine gave no response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean reward on held-out prompts at one policy version, over the responses that could be scored."""

    version: int
    num_prompts: int
    """Different prompts, each answered once at temperature and once greedily."""
    sampled: float | None
    """At the rollout temperature; None if no response could be scored."""
    greedy: float | None
    sampled_stderr: float | None = None
    """Standard error of the mean, over prompts; None for fewer than two."""
    greedy_stderr: float | None = None
    sampled_failed: int | None = None
    """Responses that could not be scored. None in what earlier versions wrote: there they count as 0 in the mean, and
    num_prompts may count a prompt more than once."""
    greedy_failed: int | None = None
    failure: str = ""
    """The first of them."""
    reward: str = ""
    """Fingerprints of what this was found by; empty if that is not known. See pipeline/runtime/fingerprints.py."""
    data: str = ""
    template: str = ""
    changed: tuple[str, ...] = ()
    """What had changed by then since the run began, a line each."""

    @classmethod
    def of(
        cls,
        version: int,
        sampled: Sequence[ScoredResponse],
        greedy: Sequence[ScoredResponse],
        prints: Mapping[str, str],
        changed: Sequence[str] = (),
    ) -> Evaluation:
        """From a score a prompt. prints: fingerprints of reward, data and template."""
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
        """The inverse of `asdict`, also of what earlier versions wrote."""
        return cls(**{**value, "changed": tuple(value.get("changed", ()))})

    @property
    def line(self) -> str:
        """For people."""
        return (
            f"held-out reward at version {self.version}: {shown(self.sampled, self.sampled_stderr)} at temperature, "
            f"{shown(self.greedy, self.greedy_stderr)} greedy ({self.basis})"
        )

    @property
    def basis(self) -> str:
        """What the means rest on, for people."""
        one, two = self.sampled_failed, self.greedy_failed
        if one is None or two is None:
            return f"{self.num_prompts} prompts, repeated ones counted again and failed rewards as 0"
        failed = f", {one} not scored" if one else ""
        if one != two:
            failed = f", not scored: {one} at temperature, {two} greedy"
        return f"{self.num_prompts} prompts{failed}" + (f"; first: {self.failure}" if self.failure else "")


def shown(mean: float | None, stderr: float | None) -> str:
    """A mean and its standard error, for people.

    >>> shown(0.4713, 0.0249)
    '0.471 ± 0.025'
    """
    if mean is None:
        return "none scored"
    return f"{mean:.3f}" if stderr is None else f"{mean:.3f} ± {stderr:.3f}"


def not_comparable(evaluations: Sequence[Evaluation]) -> list[str]:
    """Why evaluations that follow each other cannot be set against each other, a line a pair; empty if all can."""
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
            reasons.append("different counting: an earlier version took failed rewards for 0 and repeated prompts")
        if reasons:
            lines.append(
                f"held-out rewards at versions {one.version} and {two.version} cannot be compared: found with "
                + ", ".join(reasons)
            )
    return lines


def fewer_prompts(asked: int, found: int, source: str) -> str:
    """What to tell who asked for more held-out prompts than there are; empty if there are enough."""
    if found >= asked:
        return ""
    return f"task.eval_prompts = {asked}: {source} gives {found} different held-out prompts; each is evaluated once"


def write_evaluations(run_dir: Path, evaluations: Sequence[Evaluation]) -> None:
    """Keep them in the run's folder: a resumed run has those of the time before."""
    text = json.dumps([asdict(e) for e in evaluations]) + "\n"
    replace_text(run_dir / "evaluations.json", text, "free space or move runs_dir")


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """What was kept; none if there is nothing yet. Raises StoreError."""
    path = run_dir / "evaluations.json"
    try:
        return [Evaluation.from_json(e) for e in json.loads(path.read_text())] if path.is_file() else []
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; remove it to go on without earlier evaluations") from error


async def evaluate(
    actors: Actors, config: RunConfig, version: int, prints: Mapping[str, str], changed: Sequence[str] = ()
) -> Evaluation:
    """One sampled and one greedy response to each held-out prompt, spread over the instances. prints, changed: as in
    `Evaluation.of`."""
    limit_s = config.deadlines.train_s
    prompts = await actors.ask("server", "held_out", config.task.eval_prompts, within_s=limit_s)
    names = list(actors.instances)
    shares = [prompts[i :: len(names)] for i in range(len(names))]
    scores: dict[bool, list[ScoredResponse]] = {}
    for greedy in (False, True):
        answers = await asyncio.gather(
            *(
                actors.ask(name, "evaluate", [p.tokens for p in share], greedy, limit_s, within_s=limit_s)
                for name, share in zip(names, shares, strict=True)
            )
        )
        tokens = [a.tokens for share in answers for a in share]
        answered = [i for i, t in enumerate(tokens) if t is not None]
        texts = await actors.ask("server", "decode", [tokens[i] for i in answered], within_s=limit_s)
        records = [p.record for share in shares for p in share]
        items = [(text, records[i]) for i, text in zip(answered, texts, strict=True)]
        scored = await actors.ask("reward-0", "score_texts", items, within_s=limit_s)
        found = dict(zip(answered, scored, strict=True))
        scores[greedy] = [found.get(i, NO_RESPONSE) for i in range(len(tokens))]
    return Evaluation.of(version, scores[False], scores[True], prints, changed)


def _mean(scores: Sequence[ScoredResponse]) -> tuple[float | None, float | None]:
    """(mean, its standard error) over what could be scored."""
    rewards = [s.reward for s in scores if not s.error]
    if not rewards:
        return None, None
    error = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None
    return statistics.fmean(rewards), error
