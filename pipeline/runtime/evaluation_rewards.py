"""Rewards of each prompt in a run's evaluations, in the run's folder. Evaluations are compared prompt by prompt.

RUN/evaluations/VERSION.json has them for each set. It is written before the evaluation is listed in evaluations.json,
so what a resumed run evaluates again replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from staleflow.pipeline.runtime.evaluation_figures import PromptRewards, SetRewards
from staleflow.stores.errors import StoreError
from staleflow.stores.files import replace_text
from staleflow.stores.serialization import Codec
from staleflow.tasks.actors.server_messages import EvaluatedResponse
from staleflow.tasks.sources.evaluation_items import GREEDY, ItemSummary

FOLDER = "evaluations"
CODEC = Codec()


def group_by_prompt(responses: Sequence[tuple[ItemSummary, EvaluatedResponse]]) -> dict[str, PromptRewards]:
    """Rewards of a set by prompt, from its items and their responses."""
    by_prompt: dict[str, list[tuple[ItemSummary, EvaluatedResponse]]] = {}
    for item, response in responses:
        by_prompt.setdefault(item.digest, []).append((item, response))
    return {digest: _make_prompt_rewards(pairs) for digest, pairs in by_prompt.items()}


def _make_prompt_rewards(responses: Sequence[tuple[ItemSummary, EvaluatedResponse]]) -> PromptRewards:
    scored_responses = [
        (item.sample, r, r.score.reward) for item, r in responses if r.score is not None and not r.score.error
    ]
    answers = tuple(response.answer_digest for sample, response, _ in scored_responses if sample != GREEDY)
    return PromptRewards(
        sampled=tuple(reward for sample, _, reward in scored_responses if sample != GREEDY),
        answers=answers if all(answers) else (),
        greedy=tuple(reward for sample, _, reward in scored_responses if sample == GREEDY),
    )


def write_rewards(run_dir: Path, version: int, sets: Mapping[str, SetRewards]) -> None:
    """Write the rewards of an evaluation. Raises StoreError."""
    rows = {
        name: {digest: asdict(rewards) for digest, rewards in set_rewards.items()} for name, set_rewards in sets.items()
    }
    (run_dir / FOLDER).mkdir(exist_ok=True)
    replace_text(_path(run_dir, version), json.dumps(rows) + "\n", "free space or move runs_dir")


def read_rewards(run_dir: Path, version: int) -> dict[str, dict[str, PromptRewards]]:
    """Read the rewards of an evaluation, by set and prompt; empty if they were not kept. Raises StoreError."""
    path = _path(run_dir, version)
    try:
        parsed = json.loads(path.read_text()) if path.is_file() else {}
        return CODEC.decode(parsed, dict[str, dict[str, PromptRewards]])
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; remove it to resume without comparisons with it") from error


def _path(run_dir: Path, version: int) -> Path:
    return run_dir / FOLDER / f"{version:06d}.json"
