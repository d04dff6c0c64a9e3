"""Mean reward on held-out prompts, by the run's own instances and reward worker, while nothing else runs on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.runtime.actors import Actors


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean reward on held-out prompts at one policy version."""

    version: int
    num_prompts: int
    sampled: float
    """At the rollout temperature."""
    greedy: float

    @property
    def line(self) -> str:
        """For people."""
        return (
            f"held-out reward at version {self.version}: {self.sampled:.3f} at temperature, {self.greedy:.3f} greedy "
            f"({self.num_prompts} prompts)"
        )


def write_evaluations(run_dir: Path, evaluations: Sequence[Evaluation]) -> None:
    """Keep them in the run's folder: a resumed run has those of the time before."""
    part = run_dir / ".evaluations.part"
    part.write_text(json.dumps([asdict(e) for e in evaluations]) + "\n")
    part.rename(run_dir / "evaluations.json")  # whole or not at all: whoever resumes reads it


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """What was kept; none if there is nothing yet."""
    path = run_dir / "evaluations.json"
    return [Evaluation(**e) for e in json.loads(path.read_text())] if path.is_file() else []


async def evaluate(actors: Actors, config: RunConfig, version: int) -> Evaluation:
    """One sampled and one greedy response to each held-out prompt, spread over the instances."""
    limit_s = config.deadlines.train_s
    prompts = await actors.ask("server", "held_out", config.task.eval_prompts, within_s=limit_s)
    names = list(actors.instances)
    shares = [prompts[i :: len(names)] for i in range(len(names))]
    means = {}
    for greedy in (False, True):
        answers = await asyncio.gather(
            *(
                actors.ask(name, "evaluate", [p.tokens for p in share], greedy, limit_s, within_s=limit_s)
                for name, share in zip(names, shares, strict=True)
            )
        )
        tokens = [a.tokens for share in answers for a in share]
        texts = await actors.ask("server", "decode", tokens, within_s=limit_s)
        records = [p.record for share in shares for p in share]
        items = list(zip(texts, records, strict=True))
        scores = await actors.ask("reward-0", "score_texts", items, within_s=limit_s)
        means[greedy] = sum(s.reward for s in scores) / len(prompts)
    return Evaluation(version=version, num_prompts=len(prompts), sampled=means[False], greedy=means[True])
