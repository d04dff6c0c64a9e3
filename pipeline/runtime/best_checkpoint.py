"""The checkpoint of the version that an evaluation has found to be the best so far.

An evaluation ends after the trainer has gone on, so the weights of each version that is evaluated are saved when it is
published, as checkpoints/evaluated-VERSION. When its figure is known, the folder becomes checkpoints/best if it is the
best of those after the first version, which is the base model; else it is removed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.runtime.actors import Actors
from pipeline.runtime.evaluation import Evaluation
from stores.files import replace_text
from stores.trajectory import PolicyVersion

FILE = "evaluation.json"
"""In checkpoints/best: its version, set and mean reward."""


class BestCheckpoint:
    """One run's. name: of the set that judges; empty: nothing is kept."""

    def __init__(self, actors: Actors, run_dir: Path, name: str) -> None:
        self._actors = actors
        self._folder = run_dir / "checkpoints"
        self._name = name
        self._saving: dict[PolicyVersion, asyncio.Task[None]] = {}

    def version_is_due(self, version: PolicyVersion) -> None:
        """Save the version that was just published, in the background."""
        if self._name:
            self._saving[version] = asyncio.ensure_future(self._actors.checkpoint(f"evaluated-{version:06d}"))

    async def evaluated(self, version: PolicyVersion, results: Sequence[Evaluation]) -> None:
        """Keep or remove what was saved of a version, and of those before it that nobody has evaluated."""
        figure = next((one.figure for one in results if one.name == self._name), None)
        for saved in [v for v in self._saving if v <= version]:
            await self._saving.pop(saved)
            folder = self._folder / f"evaluated-{saved:06d}"
            if saved == version and figure is not None and figure > self._best():
                await asyncio.to_thread(self._keep, folder, {"version": version, "set": self._name, "reward": figure})
            else:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        """End what is being saved."""
        for task in self._saving.values():
            task.cancel()
        await asyncio.gather(*self._saving.values(), return_exceptions=True)

    def _best(self) -> float:
        path = self._folder / "best" / FILE
        return float(json.loads(path.read_text())["reward"]) if path.is_file() else float("-inf")

    def _keep(self, folder: Path, what: dict[str, object]) -> None:
        replace_text(folder / FILE, json.dumps(what) + "\n", "free space or move runs_dir")
        best = self._folder / "best"
        shutil.rmtree(best, ignore_errors=True)
        folder.rename(best)
