"""Results of evaluations: mean reward on held-out prompts at one policy version.

Each number comes with its basis: the number of distinct prompts, the responses that could not be scored (left out of
the mean, as in a batch's), the standard error, and fingerprints of the reward, data and template.

RUN/evaluations/VERSION.json has the rewards of each prompt. It is written before the evaluation is listed in
evaluations.json, so what a resumed run evaluates again replaces it. RUN/evaluations/suite-VERSION-ID.json has a
figure of a benchmark task that was run on a checkpoint afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.evaluation_settings import HELD_OUT
from staleflow.pipeline.recovery.run_folder import read_json_file
from staleflow.pipeline.recovery.source_fingerprints import PARTS
from staleflow.pipeline.runtime.evaluation_figures import (
    NO_FIGURES,
    EvaluationFigures,
    PromptRewards,
    SetRewards,
    format_mean,
)
from staleflow.stores.errors import StoreError, raised_as
from staleflow.stores.files import replace_text
from staleflow.stores.reward_statistics import Estimate, estimate
from staleflow.stores.serialization import Codec, PlainValue
from staleflow.tasks.actors.server_messages import EvaluatedResponse
from staleflow.tasks.sources.evaluation_items import GREEDY, ItemSummary
from staleflow.tasks.sources.reward_process import ScoredResponse

NO_RESPONSE = ScoredResponse(reward=0.0, error="the engine gave no response")

NOT_REQUESTED = -1
"""Value of `greedy_failed` if no greedy responses were requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean reward on held-out prompts at one policy version, over the responses that could be scored."""

    version: int
    num_prompts: int
    """Distinct prompts. Each has `samples` responses at the rollout temperature, and a greedy one if requested."""
    sampled: float | None
    """Mean reward at the rollout temperature; None if no response was requested or could be scored."""
    greedy: float | None
    """The same of greedy responses."""
    sampled_stderr: float | None = None
    """Standard error of the mean, over prompts; None for fewer than two."""
    greedy_stderr: float | None = None
    sampled_failed: int = 0
    """Responses that could not be scored."""
    greedy_failed: int = 0
    failure: str = ""
    """Error of the first response that could not be scored."""
    reward_fingerprint: str = ""
    """Fingerprint of the reward function; empty if unknown. See pipeline/recovery/source_fingerprints.py."""
    data_fingerprint: str = ""
    template_fingerprint: str = ""
    input_changes: tuple[str, ...] = ()
    """Changes to them since the run began, one line each."""
    name: str = HELD_OUT
    """Name of its evaluation set."""
    samples: int = 1
    """Responses that were sampled per prompt, besides the greedy one."""
    tokens: int = 0
    """Number of sampled tokens."""
    seconds: float = 0.0
    """Seconds from its request to its last score."""
    figures: EvaluationFigures = NO_FIGURES
    """Intervals, pass@k, majority and the change since version 0."""

    @classmethod
    def summarize(
        cls,
        version: int,
        sampled: Sequence[ScoredResponse],
        greedy: Sequence[ScoredResponse],
        fingerprints: Mapping[str, str],
        input_changes: Sequence[str] = (),
        *,
        name: str = HELD_OUT,
        samples: int = 1,
        tokens: int = 0,
        seconds: float = 0.0,
        figures: EvaluationFigures = NO_FIGURES,
    ) -> Evaluation:
        """Summarize scores in the order of prompts: `samples` sampled responses per prompt, a greedy one, or both.
        fingerprints: of `reward`, `data` and `template`."""
        failures = [s.error for s in (*sampled, *greedy) if s.error]
        sampled_estimate, greedy_estimate = _estimate(sampled, samples), _estimate(greedy, 1)
        return cls(
            version=version,
            num_prompts=len(greedy) or len(sampled) // max(1, samples),
            sampled=sampled_estimate.mean,
            greedy=greedy_estimate.mean,
            sampled_stderr=sampled_estimate.stderr,
            greedy_stderr=greedy_estimate.stderr,
            sampled_failed=sum(bool(s.error) for s in sampled),
            greedy_failed=sum(bool(s.error) for s in greedy) if greedy else NOT_REQUESTED,
            failure=next((line for f in failures for line in f.splitlines() if line.strip()), ""),
            input_changes=tuple(input_changes),
            name=name,
            samples=samples,
            tokens=tokens,
            seconds=seconds,
            figures=figures,
            **{f"{part}_fingerprint": fingerprint for part, fingerprint in fingerprints.items()},
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_json`. Raises ValueError."""
        return CODEC.decode(value, cls)

    def to_json(self) -> PlainValue:
        """Its values as a run's folder keeps them."""
        return CODEC.encode(self)

    @property
    def line(self) -> str:
        """A one-line summary for display."""
        sampled, greedy = f"{self.sampled_text} at temperature", f"{self.greedy_text} greedy"
        means = ", ".join([sampled] * bool(self.samples) + [greedy] * (self.greedy_failed != NOT_REQUESTED))
        figures = "".join(f"; {line}" for line in self.figures.lines(self.samples))
        return f"{self.name} reward at version {self.version}: {means} ({self.basis}){figures}"

    @property
    def sampled_text(self) -> str:
        """The mean at temperature with its standard error and interval, for display; "-" if none was sampled."""
        if not self.samples:
            return "-"
        return format_mean(self.sampled, self.sampled_stderr, self.figures.sampled_interval)

    @property
    def greedy_text(self) -> str:
        """The greedy mean with its standard error and interval, for display; "-" if none was requested."""
        if self.greedy_failed == NOT_REQUESTED:
            return "-"
        return format_mean(self.greedy, self.greedy_stderr, self.figures.greedy_interval)

    @property
    def mean_reward(self) -> float | None:
        """Mean reward by which versions are compared: of samples at temperature or, if none, of greedy responses."""
        return self.sampled if self.samples else self.greedy

    @property
    def basis(self) -> str:
        """What the means are based on, for display."""
        sampled, greedy = self.sampled_failed, self.greedy_failed
        if greedy == NOT_REQUESTED:
            greedy = sampled
        failures = f", {sampled} not scored" if sampled else ""
        if sampled != greedy:
            failures = f", not scored: {sampled} at temperature, {greedy} greedy"
        return f"{self.num_prompts} prompts{failures}" + (f"; first: {self.failure}" if self.failure else "")


STORED_NAMES = {f"{part}_fingerprint": part for part in PARTS} | {"input_changes": "changed"}
CODEC = Codec(stored_names={Evaluation: STORED_NAMES})
"""Encodes evaluations as a run's folder keeps them."""


def describe_progress(version: int, num_left: int) -> str:
    """Describe the running evaluation, for display. version: -1 while it is not chosen yet."""
    subject = f"version {version}" if version >= 0 else "the next version"
    return f"evaluating {subject}: {num_left} responses to come"


def explain_not_comparable(evaluations: Sequence[Evaluation]) -> list[str]:
    """Reasons why consecutive evaluations of a set cannot be compared, one line per pair; empty if all can."""
    lines = []
    for previous, evaluation in (
        pair for set_evaluations in group_by_set(evaluations).values() for pair in itertools.pairwise(set_evaluations)
    ):
        pairs = (
            (previous.reward_fingerprint, evaluation.reward_fingerprint, "reward functions"),
            (previous.data_fingerprint, evaluation.data_fingerprint, "data"),
            (previous.template_fingerprint, evaluation.template_fingerprint, "templates"),
        )
        reasons = [f"different {difference}" for a, b, difference in pairs if a and b and a != b]
        if previous.num_prompts != evaluation.num_prompts:
            reasons.append(f"{previous.num_prompts} and {evaluation.num_prompts} prompts")
        if reasons:
            lines.append(
                f"{previous.name} rewards at versions {previous.version} and {evaluation.version} cannot be compared: "
                + ", ".join(reasons)
            )
    return lines


def fewer_prompts_warning(num_requested: int, available: int, source: str, key: str = "task.eval_prompts") -> str:
    """A warning that fewer held-out prompts are evaluated than requested; empty if there are enough."""
    if available >= num_requested:
        return ""
    return f"{key} = {num_requested}: {source} gives only {available} distinct held-out prompts that are short enough"


def write_evaluations(run_dir: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations to the run's folder, from which a resumed run reads them. Raises StoreError."""
    text = json.dumps([e.to_json() for e in evaluations]) + "\n"
    replace_text(run_dir / "evaluations.json", text, "free space or move runs_dir")


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Read a run's evaluations; empty if there are none. Raises StoreError."""
    remedy = "remove it to resume without earlier evaluations"
    return read_json_file(run_dir / "evaluations.json", list[Evaluation], remedy, CODEC) or []


def write_suite(run_dir: Path, evaluations: Sequence[Evaluation]) -> Path:
    """Write the figures of benchmark tasks on a checkpoint, each in place of an earlier one with its name. Returns the
    folder. Raises StoreError."""
    folder, remedy = run_dir / EVALUATIONS_FOLDER, "free space or move the run's folder"
    with raised_as(StoreError, f"{folder}: cannot be created", OSError, remedy=remedy):
        folder.mkdir(exist_ok=True)
    for evaluation in evaluations:
        id = hashlib.sha256(evaluation.name.encode()).hexdigest()[:16]
        path = folder / f"suite-{evaluation.version:06d}-{id}.json"
        replace_text(path, json.dumps(evaluation.to_json()) + "\n", remedy)
    return folder


def _suite_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / EVALUATIONS_FOLDER).glob("suite-[0-9]*-*.json"))


def read_suites(run_dir: Path) -> list[Evaluation]:
    """Read the figures of benchmark tasks on a run's checkpoints. Raises StoreError."""
    suites = (read_json_file(path, Evaluation, "remove it", CODEC) for path in _suite_files(run_dir))
    return sorted(filter(None, suites), key=lambda evaluation: (evaluation.version, evaluation.name))


def remove_evaluations_after(run_dir: Path, version: int) -> list[Evaluation]:
    """Remove the evaluations, and the figures of benchmark tasks, of later versions than the one that a run resumes
    from. Returns the remaining evaluations. Raises StoreError."""
    evaluations = read_evaluations(run_dir)
    remaining = [evaluation for evaluation in evaluations if evaluation.version <= version]
    if len(remaining) < len(evaluations):
        write_evaluations(run_dir, remaining)
    for path in _suite_files(run_dir):
        if int(path.name.split("-")[1]) > version:
            path.unlink(missing_ok=True)
    return remaining


def group_by_set(evaluations: Iterable[Evaluation]) -> dict[str, list[Evaluation]]:
    """Group evaluations by the name of their set, in order of evaluation."""
    results: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        results.setdefault(evaluation.name, []).append(evaluation)
    return results


def _estimate(scores: Sequence[ScoredResponse], per_prompt: int) -> Estimate:
    """The mean over prompts of the scores without error, which are ordered by prompt."""
    prompts = [scores[i : i + per_prompt] for i in range(0, len(scores), max(1, per_prompt))]
    return estimate([[s.reward for s in group if not s.error] for group in prompts])


EVALUATIONS_FOLDER = "evaluations"


ItemResponse = tuple[ItemSummary, EvaluatedResponse]
"""An item of an evaluation, and its response."""


def group_by_prompt(responses: Sequence[ItemResponse]) -> dict[str, PromptRewards]:
    """Rewards of a set by prompt."""
    by_prompt: dict[str, list[ItemResponse]] = {}
    for item, response in responses:
        by_prompt.setdefault(item.digest, []).append((item, response))
    return {digest: _make_prompt_rewards(pairs) for digest, pairs in by_prompt.items()}


def _make_prompt_rewards(responses: Sequence[ItemResponse]) -> PromptRewards:
    scored_responses = [
        (item.sample_number, r, r.score.reward) for item, r in responses if r.score is not None and not r.score.error
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
    (run_dir / EVALUATIONS_FOLDER).mkdir(exist_ok=True)
    replace_text(_path(run_dir, version), json.dumps(rows) + "\n", "free space or move runs_dir")


def read_rewards(run_dir: Path, version: int) -> dict[str, dict[str, PromptRewards]]:
    """Read the rewards of an evaluation, by set and prompt; empty if they were not kept. Raises StoreError."""
    remedy = "remove it to resume without comparisons with it"
    return read_json_file(_path(run_dir, version), dict[str, dict[str, PromptRewards]], remedy) or {}


def _path(run_dir: Path, version: int) -> Path:
    return run_dir / EVALUATIONS_FOLDER / f"{version:06d}.json"
