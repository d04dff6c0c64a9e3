"""Killing all processes of a run in the middle of a step, again and again, and what became of every finished response.

A response counts as finished once the run's journal has its end; the journal is flushed at each event. It is kept if
the store has it trained on, filtered, or still in flight when the run ended, and no later start sampled its trajectory
again.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soaking.cluster import ENVIRONMENT
from benchmarks.soaking.counting import audited
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.events import InstanceReported, PullFinished, RunResumed, TrajectorySampled
from staleflow.pipeline.coordination.journal import list_start_files
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import AbortReason

START_S = 300.0
"""Seconds in which a start must train a step."""
STEP_S = 5.0
"""Most seconds after a step until the kill: it strikes within one of the next steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Finished responses at the kills, and those lost by how. resampled: sampled again by a later start. undone:
    of those,
    the ones that ended when a version was served already that the resume went back behind: its weights are gone."""

    finished: int
    resampled: int
    undone: int
    lost: dict[str, int]

    @property
    def whole(self) -> bool:
        return self.resampled == self.undone and not self.lost


@dataclass(slots=True)
class _Start:
    """What a start's journal says. resumed: the version it began with. ends: when each response ended. begun: what it
    sampled of. served: when an instance first served each version."""

    resumed: int = 0
    ends: dict[int, float] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    served: dict[int, float] = field(default_factory=dict)

    def hear(self, now: float, event: object) -> None:
        match event:
            case RunResumed(step=step):
                self.resumed = step
            case TrajectorySampled(trajectory=trajectory):
                self.ends[int(trajectory)] = now
                self.begun.add(int(trajectory))
            case InstanceReported(progress=progress):
                self.begun |= {int(trajectory) for trajectory, _ in progress}
            case PullFinished(version=version):
                self.served.setdefault(int(version), now)
            case _:
                pass


def kept(run_dir: Path) -> Kept:
    """What became of the responses that each start but the last had finished."""
    starts = []
    for _, path in list_start_files(run_dir):
        starts.append(_Start())
        for entry in journal.JournalReader(path):
            starts[-1].hear(entry.now, entry.event)
    resampled, undone = set(), set()
    for k, start in enumerate(starts[:-1]):
        sampled = set(start.ends) & set().union(*(later.begun for later in starts[k + 1 :]))
        gone = min((at for v, at in start.served.items() if v > starts[k + 1].resumed), default=math.inf)
        resampled |= sampled
        undone |= {i for i in sampled if start.ends[i] >= gone}
    hows = _hows(run_dir)
    before = set().union(*(start.ends for start in starts[:-1]))
    lost = Counter(hows.get(i, "not in the store") for i in before)
    return Kept(
        finished=len(before),
        resampled=len(resampled),
        undone=len(undone),
        lost={how: n for how, n in lost.items() if how},
    )


def _hows(run_dir: Path) -> dict[int, str]:
    """How each stored trajectory was lost; empty if it was not."""
    store = VersionedStore.open(run_dir / "store")
    kinds = [record.kind for record in store.commits() for _ in range(record.num_rows)]
    hows = {}
    for kind, row in zip(kinds, store.trajectories(), strict=True):
        given_up = row.reason is AbortReason.RUN_ENDED and kind != "end"
        hows[int(row.trajectory.id)] = f"given up at a {kind}" if given_up else ""
    return hows


async def kill_all(
    job: Path, overrides: tuple[str, ...], run_dir: Path, times: int, rng: random.Random, *, limit_s: float = math.inf
) -> list[str]:
    """Run a job to its end through `times` kills of everything, fewer if they take longer than `limit_s`; returns the
    findings."""
    findings: list[str] = []
    begin = time.monotonic()
    number = 0
    while number < times and time.monotonic() - begin < limit_s:
        number += 1
        begun = (run_dir / "config.toml").is_file()
        words = ["resume", str(run_dir)] if begun else ["run", str(job), *_sets(overrides)]
        with _started(words) as process:
            step = _next_step(process)
            if not step:
                findings.append(f"kill {number}: trained no step within {START_S:g} s, or ended")
                return findings
            time.sleep(rng.uniform(0.0, STEP_S))
            _kill(process)
        print(f"{time.monotonic() - begin:8.1f} s  kill {number}, after {step}", flush=True)
    steps = _trained(run_dir) + 5
    with _started(["resume", str(run_dir), "--set", f"steps={steps}"]) as process:
        _, err = process.communicate(timeout=2 * START_S)
        if process.returncode != 0:
            findings.append(f"the last resume: exit {process.returncode}: {err.strip().splitlines()[-1:]}")
    findings += await audited(run_dir)
    found = kept(run_dir)
    print(
        f"{number} kills: {found.finished} responses finished before; {found.resampled} sampled again, "
        f"lost {found.lost}"
    )
    if not found.whole:
        findings.append(
            f"of {found.finished} finished responses {found.resampled} were sampled again, lost: {found.lost}"
        )
    return findings


def _sets(overrides: tuple[str, ...]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _trained(run_dir: Path) -> int:
    return sum(record.kind == "step" for record in VersionedStore.open(run_dir / "store").commits())


@contextlib.contextmanager
def _started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "staleflow.cli.main", *words],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _kill(process)


def _next_step(process: subprocess.Popen[str]) -> str:
    """Wait for a line on a training step; empty if the run ends first, or takes too long."""
    assert process.stderr is not None
    deadline = time.monotonic() + START_S
    for line in process.stderr:
        if line.startswith("step "):
            return " ".join(line.split()[:2])
        if time.monotonic() > deadline:
            break
    return ""


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a run with all its workers, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30.0
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
