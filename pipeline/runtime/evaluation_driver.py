"""The evaluations of one run: requests them from the coordinator when they are due, and summarizes finished ones.

Invariants:
- One evaluation is requested at a time. If another becomes due, it is requested when that one has finished, for the
  version that is newest then.
- A result is written to the run's folder before it is shown. A resumed run has the results of all versions up to the
  one that it resumes from, and requests the evaluation that was due last if it has no result.
- All tokens of a result were sampled under one version, which is checked with the trajectory server's segments.
- checkpoints/best is the evaluated version with the highest mean reward, without version 0, the base model. Versions
  that a resumed run trains again do not count.
- No checkpoints/evaluated-VERSION, which keeps a version's weights, outlives its evaluation, unless the process is
  killed, or the run is stopped while the trainer still saves it; the next start cleans up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from staleflow.pipeline.config.evaluation_settings import HELD_OUT, EvaluationSchedule
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import FinishEvaluation
from staleflow.pipeline.coordination.events import EvaluationRequested, Event
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.evaluation_figures import PromptRewards, SetRewards, compute_figures
from staleflow.pipeline.runtime.evaluation_results import (
    NO_RESPONSE,
    Evaluation,
    ItemResponse,
    fewer_prompts_warning,
    group_by_prompt,
    read_rewards,
    write_evaluations,
    write_rewards,
)
from staleflow.stores.errors import ProtocolViolation, StoreError, raised_as
from staleflow.stores.files import replace_text
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.actors.server_messages import EvaluatedResponse
from staleflow.tasks.sources.evaluation_items import GREEDY, ItemSummary, group_of

logger = logging.getLogger(__name__)


class EvaluationDriver:
    """Runs the evaluations of one run.

    Args:
        config: The run's job.
        actors: The run's actors.
        run_dir: The run's folder, to which each evaluation is written.
        results: The run's evaluations; new ones are appended.
        emit: Called with each event for the coordinator.
        note: Adds a line to the run's report.
        fingerprints: Returns the fingerprints of a set's data and reward, by the set's name, as in
        `Evaluation.summarize`.
        input_changes: Returns the changes of a set's inputs, by its name, as in `Evaluation.summarize`.
    """

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        run_dir: Path,
        results: list[Evaluation],
        emit: Callable[[Event], None],
        note: Callable[[str], None],
        fingerprints: Callable[[str], Mapping[str, str]],
        input_changes: Callable[[str], Sequence[str]],
    ) -> None:
        self._config = config
        self._sets = config.evaluation_sets
        self._schedule = EvaluationSchedule(every=config.evaluation.every, num_steps=config.steps)
        self._actors = actors
        self._run_dir = run_dir
        self._results = results
        self._emit = emit
        self._note = note
        self._fingerprints, self._input_changes = fingerprints, input_changes
        self._items: list[ItemSummary] = []
        self._num_requested = 0
        self._requested_at_s = 0.0
        self._is_running = self._is_due = False
        self.best = BestCheckpoint(actors, run_dir, config.evaluation.best_checkpoint_set)

    @property
    def is_pending(self) -> bool:
        """Whether an evaluation is running, being summarized, or due."""
        return self._is_running or self._is_due

    async def begin(self, version: PolicyVersion) -> None:
        """Fetch the prompts, and request the evaluation of the first version if it is due."""
        await asyncio.to_thread(self.best.clean_up, version, self._results)
        if not self._sets:
            return
        self._items = await self._actors.ask("server", "evaluation_items", deadline="train_s")
        tasks = {name or HELD_OUT: task for name, task in self._config.task.sources_by_name.items()}
        for name, evaluation_set in self._sets.items():
            num_prompts = len({item.prompt_number for item in self._items if item.set_name == name})
            key, source = f"evaluation.sets.{name}.prompts", evaluation_set.source
            if (task := tasks.get(name)) is not None:
                key = f"task.sources.{name}.eval_prompts" if self._config.task.sources else "task.eval_prompts"
                source = source or task.source
            self._note(fewer_prompts_warning(evaluation_set.prompts, num_prompts, source, key))
        version_due = self._schedule.latest_due(version)
        evaluated_sets = {result.name for result in self._results if result.version >= version_due}
        self._is_due = bool(self._items) and not evaluated_sets.issuperset(self._sets)
        self._request()

    def request_if_due(self, version: PolicyVersion) -> None:
        """Request an evaluation of the version just published, if it is due."""
        if self._items and self._schedule.is_due(version):
            self._is_due = True
            self._request()

    async def finish(self, command: FinishEvaluation) -> list[Evaluation]:
        """Summarize an ended evaluation, and request the next one if it is due. Returns the results by set."""
        results: list[Evaluation] = []
        if command.abandoned:
            self._is_due = True
            await self.best.finish_evaluation(command.version, ())
            self._note(
                f"the evaluation of version {command.version} was abandoned, since its instances no longer serve it; a "
                "later version is evaluated instead"
            )
        else:
            results = await self._summarize(command)
        await self._actors.ask("server", "end_evaluation")
        self._is_running = False
        self._request()
        return results

    def _request(self) -> None:
        if self._is_running or not self._is_due:
            return
        self._is_running, self._is_due = True, False
        self._requested_at_s = self._actors.clock.elapsed_s
        groups = tuple(
            NewGroup(group=group_of(self._num_requested, i, len(self._items)), prompt_tokens=item.prompt_tokens)
            for i, item in enumerate(self._items)
        )
        self._num_requested += 1
        self._emit(EvaluationRequested(evaluation=self._num_requested - 1, groups=groups))

    async def _summarize(self, command: FinishEvaluation) -> list[Evaluation]:
        groups = [group_of(command.evaluation, i, len(self._items)) for i in range(len(self._items))]
        responses: list[EvaluatedResponse] = await self._actors.ask("server", "evaluated_responses", groups)
        other_versions = {v for response in responses for v in response.versions} - {command.version}
        if other_versions:
            raise ProtocolViolation(
                f"version {command.version} was evaluated with tokens of versions {sorted(other_versions)}"
            )
        responses_by_set: dict[str, list[ItemResponse]] = {name: [] for name in self._sets}
        for item, response in zip(self._items, responses, strict=True):
            responses_by_set[item.set_name].append((item, response))
        rewards = {name: group_by_prompt(set_responses) for name, set_responses in responses_by_set.items()}
        seconds = self._actors.clock.elapsed_s - self._requested_at_s
        # Beside the event loop: the intervals of thousands of prompts take seconds.
        results = await asyncio.to_thread(self._compute_results, command.version, responses_by_set, rewards, seconds)
        write_rewards(self._run_dir, command.version, rewards)
        write_evaluations(self._run_dir, [*self._results, *results])
        self._results += results
        await self.best.finish_evaluation(command.version, results)
        return results

    def _compute_results(
        self,
        version: PolicyVersion,
        responses_by_set: Mapping[str, Sequence[ItemResponse]],
        rewards: Mapping[str, SetRewards],
        seconds: float,
    ) -> list[Evaluation]:
        base_rewards = self._base_rewards() if version else {}
        results = []
        for name, set_responses in responses_by_set.items():
            if not set_responses:
                continue
            evaluation_set = self._sets[name]
            sampled = [r.score or NO_RESPONSE for item, r in set_responses if item.sample_number != GREEDY]
            greedy = [r.score or NO_RESPONSE for item, r in set_responses if item.sample_number == GREEDY]
            results.append(
                Evaluation.summarize(
                    version, sampled, greedy, self._fingerprints(name), self._input_changes(name), name=name,
                    samples=evaluation_set.samples, tokens=sum(response.num_tokens for _, response in set_responses),
                    seconds=seconds,
                    figures=compute_figures(rewards[name], evaluation_set.samples, base_rewards.get(name, {})),
                )
            )  # fmt: skip
        return results

    def _base_rewards(self) -> dict[str, dict[str, PromptRewards]]:
        """The rewards of version 0, by set, of the sets whose reward, data and template are still the same."""
        rewards = read_rewards(self._run_dir, 0)
        base_fingerprints = {
            result.name: (result.reward_fingerprint, result.data_fingerprint, result.template_fingerprint)
            for result in self._results
            if result.version == 0
        }
        return {
            name: rewards[name]
            for name in rewards
            if base_fingerprints.get(name)
            == tuple(self._fingerprints(name).get(kind, "") for kind in ("reward", "data", "template"))
        }


RECORD_FILE = "evaluation.json"
"""In checkpoints/best: its version, evaluation set and mean reward."""
BEST, EVALUATED_PREFIX, ROLLED_BACK = "best", "evaluated-", "best-undone"
"""Folders of checkpoints/: the best; the prefix for versions under evaluation; a former best whose version was rolled
back."""


class BestScore(NamedTuple):
    """Version and mean reward of the best checkpoint."""

    version: PolicyVersion
    reward: float


NO_SCORE = BestScore(PolicyVersion(0), -math.inf)


class BestCheckpoint:
    """The best checkpoint of one run. evaluation_set: the set that selects it; empty disables."""

    def __init__(self, actors: Actors, run_dir: Path, evaluation_set: str) -> None:
        self._actors = actors
        self._folder = run_dir / "checkpoints"
        self._evaluation_set = evaluation_set
        self._saves: dict[PolicyVersion, asyncio.Task[bool]] = {}

    def clean_up(self, version: PolicyVersion, evaluations: Sequence[Evaluation]) -> None:
        """Clean up the folders that an earlier start of the run has left. Call before the first evaluation.

        Args:
            version: The version the run starts from.
            evaluations: Evaluations that are still in the store.

        Raises:
            StoreError: checkpoints/best cannot be renamed.
        """
        best, rolled_back = self._folder / BEST, self._folder / ROLLED_BACK
        if (score := self._read_best_score()).version > version:
            logger.info("%s is of version %d, which is trained again; it is %s now", best, score.version, ROLLED_BACK)
            shutil.rmtree(rolled_back, ignore_errors=True)
            with raised_as(StoreError, f"{best}: cannot be renamed to {rolled_back}", OSError, remedy="remove it"):
                best.rename(rolled_back)
        for partial in self._folder.glob(f".{EVALUATED_PREFIX}*"):
            shutil.rmtree(partial, ignore_errors=True)
        for leftover in sorted(self._folder.glob(f"{EVALUATED_PREFIX}*")):
            number = leftover.name.removeprefix(EVALUATED_PREFIX)
            evaluated_version = PolicyVersion(int(number)) if number.isdecimal() else None
            results = [result for result in evaluations if result.version == evaluated_version]
            self._keep_or_remove(leftover, evaluated_version, results)

    def start_saving(self, version: PolicyVersion) -> None:
        """Save a version whose evaluation begins, in the background. Does nothing for version 0, or while the version
        is being evaluated already."""
        if self._evaluation_set and version and version not in self._saves:
            request = self._actors.checkpoint(f"{EVALUATED_PREFIX}{version:06d}", version)
            self._saves[version] = asyncio.ensure_future(request)

    async def finish_evaluation(self, version: PolicyVersion, results: Sequence[Evaluation]) -> None:
        """Keep or remove the saved version after its evaluation. results: none if the evaluation was abandoned."""
        if version in self._saves:
            await self._saves[version]
            del self._saves[version]
            folder = self._folder / f"{EVALUATED_PREFIX}{version:06d}"
            await asyncio.to_thread(self._keep_or_remove, folder, version, results)

    async def close(self) -> None:
        """Cancel pending saves and delete their folders."""
        saves, self._saves = self._saves, {}
        for task in saves.values():
            task.cancel()
        await asyncio.gather(*saves.values(), return_exceptions=True)
        for version in saves:
            folder = self._folder / f"{EVALUATED_PREFIX}{version:06d}"
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _keep_or_remove(self, folder: Path, version: PolicyVersion | None, results: Sequence[Evaluation]) -> None:
        """Make a folder checkpoints/best if its version's results are the best so far; otherwise remove it."""
        reward = next((result.mean_reward for result in results if result.name == self._evaluation_set), None)
        if reward is None or version is None or not folder.is_dir() or reward <= self._read_best_score().reward:
            shutil.rmtree(folder, ignore_errors=True)
            return
        record = {"version": version, "set": self._evaluation_set, "reward": reward}
        replace_text(folder / RECORD_FILE, json.dumps(record) + "\n", "free space or move runs_dir")
        shutil.rmtree(self._folder / BEST, ignore_errors=True)
        folder.rename(self._folder / BEST)

    def _read_best_score(self) -> BestScore:
        """Read version and mean reward of checkpoints/best; NO_SCORE if there is none."""
        try:
            record = json.loads((self._folder / BEST / RECORD_FILE).read_text("utf-8"))
            return BestScore(PolicyVersion(int(record["version"])), float(record["reward"]))
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or another program wrote the folder
            return NO_SCORE
