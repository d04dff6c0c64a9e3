"""Planted defects that a soak must find: workers that load this module at startup have the named one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ProtocolViolation
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from staleflow.stores.weights import weight_folder, weight_hash
from staleflow.stores.weights.weight_report import WeightReport
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.engines.base import LoadResult, SampledTokens
from staleflow.tasks.engines.emulated_engine import EmulatedEngine
from staleflow.tasks.engines.running_requests import RunningRequest

NAME = "STALEFLOW_TESTS_PLANTED"
"""Environment variable: the defect."""
FOLDER = "STALEFLOW_SOAK"
CHILD_S = 90
"""Seconds that a leaked child lives."""


def dropped_member() -> None:
    """The first row of the batch of step 1 is never stored."""
    commit = VersionedStore.commit

    def planted(self: VersionedStore, record: CommitRecord, ended: Sequence[EndedTrajectory]) -> str:
        return commit(self, record, ended[1:] if (record.kind, record.step) == ("step", 1) else ended)

    _put(VersionedStore, "commit", planted)


def unreported_tokens() -> None:
    """The engine does not report the last two tokens of some responses."""
    sampled = RunningRequest.sampled_tokens

    def planted(self: RunningRequest, *args: Any) -> SampledTokens:
        whole = sampled(self, *args)
        if whole.trajectory % 8 or not whole.segments or len(whole.segments[-1].tokens) < 3:
            return whole
        last = whole.segments[-1]
        short = replace(last, tokens=last.tokens[:-2], logprobs=last.logprobs[:-2])
        return replace(whole, segments=(*whole.segments[:-1], short))

    _put(RunningRequest, "sampled_tokens", planted)


def crash_at_start() -> None:
    """The first start of the run fails before its first step."""
    held_out = TrajectoryServer.held_out

    async def planted(self: TrajectoryServer, *args: Any) -> Any:
        crashed = Path(os.environ[FOLDER]) / "crashed"
        if not crashed.exists():
            crashed.touch()
            raise ProtocolViolation("the ranks of the trainer are not a group yet")
        return await held_out(self, *args)

    _put(TrajectoryServer, "held_out", planted)


def pull_without_load() -> None:
    """An instance reports every other version as loaded without loading it."""
    load = EmulatedEngine.load

    def planted(self: EmulatedEngine, version: Any, weights: Path) -> LoadResult:
        if version % 2 == 0:
            return load(self, version, weights)
        with self._condition:
            self._requests.version, self._requests._served_versions = version, [version]
        fingerprint = weight_hash.fingerprint(weight_folder.read_arrays(weights))
        claimed = WeightReport(verified=1)
        return LoadResult(fingerprint=fingerprint, weights=claimed)

    _put(EmulatedEngine, "load", planted)


def leaked_child() -> None:
    """A closed instance leaves a child process."""
    close = EmulatedEngine.close

    def planted(self: EmulatedEngine) -> None:
        subprocess.run(["setsid", "--fork", "sleep", str(CHILD_S)], check=True)
        close(self)

    _put(EmulatedEngine, "close", planted)


DEFECTS: dict[str, tuple[Callable[[], None], str]] = {
    "dropped_member": (dropped_member, "groups were trained on with other than 4 members"),
    "unreported_tokens": (unreported_tokens, "were sampled, and are neither stored nor in flight nor discarded"),
    "crash_at_start": (crash_at_start, "the run ended by an error of its own"),
    "pull_without_load": (pull_without_load, "pulls without the weights being loaded"),
    "leaked_child": (leaked_child, f"a process outlives the run: sleep {CHILD_S}"),
}
"""Defects by name, with the message of a soak that finds one."""


def dask_setup(worker: Any) -> None:
    """Plant the defect in this process. Called by Dask when a worker starts."""
    DEFECTS[os.environ[NAME]][0]()


def _put(cls: type[Any], method: str, planted: Any) -> None:
    setattr(cls, method, planted)
