"""The checkpoint of the version that an evaluation has found to be the best so far.

An evaluation ends after the trainer has gone on, so the weights of a version are saved as soon as anything is sampled
for its evaluation, as checkpoints/evaluated-VERSION. When its figure is known, the folder becomes checkpoints/best if
it is the best of those after the first version, which is the base model; else it is removed.

Invariants:
- What is kept, or is compared with, is of a version that the run still has: of one that a resumed run trains again
  nothing counts.
- No evaluated-VERSION outlives its evaluation, but through a kill; the next start settles what that has left.
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

FILE = "evaluation.json"
"""In checkpoints/best: its version, set and mean reward."""
BEST, SAVED, UNDONE = "best", "evaluated-", "best-undone"
"""Folders of checkpoints/: the best, what is saved until that is known (with the version after it), and the best of a
version that the run went back behind."""


class Figure(NamedTuple):
    """What a kept version is judged by."""

    version: PolicyVersion
    reward: float


NOTHING_KEPT = Figure(PolicyVersion(0), -math.inf)


class BestCheckpoint:
    """One run's. name: of the set that judges; empty: nothing is kept."""

    def __init__(self, actors: Actors, run_dir: Path, name: str) -> None:
        self._actors = actors
        self._folder = run_dir / "checkpoints"
        self._name = name
        self._saving: dict[PolicyVersion, asyncio.Task[bool]] = {}

    def settle(self, version: PolicyVersion, results: Sequence[Evaluation]) -> None:
        """Keep or remove what an earlier start has left. version: that the run begins or goes on with. found: the
        evaluations that it still has. Before any version is evaluated."""
        best = self._folder / BEST
        if self._kept().version > version:
            logger.info("%s is of version %d, which is trained again; it is %s now", best, self._kept().version, UNDONE)
            shutil.rmtree(self._folder / UNDONE, ignore_errors=True)
            best.rename(self._folder / UNDONE)
        for part in self._folder.glob(f".{SAVED}*"):
            shutil.rmtree(part, ignore_errors=True)
        for left in sorted(self._folder.glob(f"{SAVED}*")):
            number = left.name.removeprefix(SAVED)
            of = PolicyVersion(int(number)) if number.isdecimal() else None
            self._settle(left, of, [result for result in results if result.version == of])

    def sampling(self, version: PolicyVersion) -> None:
        """Save a version for which something is sampled, in the background; once, however often this is called."""
        if self._name and version and version not in self._saving:
            request = self._actors.checkpoint(f"{SAVED}{version:06d}", version)
            self._saving[version] = asyncio.ensure_future(request)

    async def evaluated(self, version: PolicyVersion, results: Sequence[Evaluation]) -> None:
        """Keep or remove what was saved of a version. results: of its evaluation; none if that was given up."""
        if version in self._saving:
            await self._saving[version]
            del self._saving[version]
            await asyncio.to_thread(self._settle, self._folder / f"{SAVED}{version:06d}", version, results)

    async def close(self) -> None:
        """End what is being saved, and remove what was."""
        saving, self._saving = self._saving, {}
        for task in saving.values():
            task.cancel()
        await asyncio.gather(*saving.values(), return_exceptions=True)
        for version in saving:
            await asyncio.to_thread(shutil.rmtree, self._folder / f"{SAVED}{version:06d}", ignore_errors=True)

    def _settle(self, folder: Path, version: PolicyVersion | None, results: Sequence[Evaluation]) -> None:
        """Make a folder the best if that is what the version's results say; else remove it."""
        figure = next((result.figure for result in results if result.name == self._name), None)
        if figure is None or version is None or not folder.is_dir() or figure <= self._kept().reward:
            shutil.rmtree(folder, ignore_errors=True)
            return
        record = {"version": version, "set": self._name, "reward": figure}
        replace_text(folder / FILE, json.dumps(record) + "\n", "free space or move runs_dir")
        shutil.rmtree(self._folder / BEST, ignore_errors=True)
        folder.rename(self._folder / BEST)

    def _kept(self) -> Figure:
        """Version and figure of the best so far."""
        try:
            record = json.loads((self._folder / BEST / FILE).read_text())
            return Figure(PolicyVersion(int(record["version"])), float(record["reward"]))
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or a folder of somebody else's
            return NOTHING_KEPT
