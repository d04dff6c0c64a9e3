"""Keeps the checkpoint of the version with the best evaluation result so far.

An evaluation ends after later versions have replaced its weights, so a version is saved as soon as sampling for its
evaluation begins, as checkpoints/evaluated-VERSION. When its mean reward is known, the folder becomes checkpoints/best
if that is the highest of all versions after version 0, the base model; otherwise it is removed.

Invariants:
- Only versions of the current history count: results of versions that a resumed run retrains are ignored.
- No evaluated-VERSION outlives its evaluation, unless the process is killed; the next start cleans up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.stores.files import replace_text
from staleflow.stores.trajectory import PolicyVersion

logger = logging.getLogger(__name__)

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
        """
        best, rolled_back = self._folder / BEST, self._folder / ROLLED_BACK
        if (score := self._read_best_score()).version > version:
            logger.info("%s is of version %d, which is trained again; it is %s now", best, score.version, ROLLED_BACK)
            shutil.rmtree(rolled_back, ignore_errors=True)
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
            record = json.loads((self._folder / BEST / RECORD_FILE).read_text())
            return BestScore(PolicyVersion(int(record["version"])), float(record["reward"]))
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or another program wrote the folder
            return NO_SCORE
