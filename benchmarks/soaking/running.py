"""The run of a soak: started in the foreground or submitted, and resumed whenever it has ended."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soaking.cluster import Cluster
from benchmarks.soaking.job import Job
from benchmarks.soaking.watching import Watch

ENDED = ("done", "stopped", "failed")
BY_FAULTS = re.compile(
    r"free space|No space left|scheduler|does not take|the bucket cannot be used|no free worker|"
    r"was lost \d+ times within an hour|not submitted|"
    r"(exit|ended with) (0|130|143|-\d+): |is gone"
)
"""What a run says that ended by what was done to it, or because it was asked to stop."""
OWN_FAULTS = re.compile(
    r"a bug in staleflow|Traceback|could not start|\b(?!Connection|CommClosed|OSError)[A-Z]\w*Error: "
)
"""What it never says then: errors but those by which a connection shows that a process is gone."""
SUBMIT_S = 60.0
"""Seconds `staleflow submit` may take."""
SETTLED_S = 8.0
"""Seconds after which it shows what a process has submitted that was killed while it did."""


@dataclass(slots=True)
class Run:
    """One run and its starts. ends: how its starts ended, by reason, numbers left out. errors: those that were the
    run's own, and not what was done to it."""

    job: Job
    cluster: Cluster
    watch: Watch
    rng: random.Random
    foreground: subprocess.Popen[bytes] | None = None
    submitting: subprocess.Popen[bytes] | None = None
    kill_submitter: bool = False
    """Whether the next process that submits is killed while it does."""
    num_starts: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    _mark: int = 0
    """Where the log of the present start begins."""
    _at: float = 0.0
    _killed: bool = False
    _old: set[str] = field(default_factory=set)
    """Jobs in the registry that are over, or were given up."""

    @property
    def log(self) -> Path:
        return self.cluster.folder / "logs" / "run.log"

    @property
    def driver(self) -> int | None:
        """The process of the driver: its own, or the worker of a submitted job's."""
        if self.foreground is not None:
            return self.foreground.pid if self.foreground.poll() is None else None
        return self.watch.places.get("driver")

    def start(self, *, here: bool | None = None, steps: int = 0) -> str:
        """Run the job, or resume it; returns how. here: in the foreground and not as a submitted job; by chance if not
        given. steps: to train until then; else as many as the job has."""
        self.num_starts += 1
        begun = (self.job.run_dir / "config.toml").is_file()
        words = ["resume", str(self.job.run_dir)] if begun else ["run", str(self.job.file)]
        if here is None:
            here = self.rng.random() < 0.5 and not self.kill_submitter
        if not here:
            words = [*(words if begun else ["submit", str(self.job.file)]), "--scheduler-file", str(self.cluster.file)]
        elif begun:
            places = ("cluster.kind=file", f"cluster.scheduler_file={self.cluster.file}", "cluster.address=")
            words += [word for place in places for word in ("--set", place)]
        words += ["--set", f"steps={steps}"] if steps else []
        self._mark = self.log.stat().st_size if self.log.exists() else 0
        process = self._command(*words)
        if here:
            self.foreground = process
        else:
            self.submitting = process
        self._at = time.monotonic()
        what = "resumed" if begun else "begun"
        return f"{what} {'in the foreground' if here else 'as a submitted job'}"

    def over(self) -> str:
        """Why the run goes on no more; empty if it does, or nobody can tell."""
        if self.submitting is not None:
            return self._submitted(self.submitting)
        if self.foreground is not None:
            code = self.foreground.poll()
            if code is None:
                return ""
            self.foreground = None
            return self._ended(f"exit {code}: {self._last_line()}")
        if not self.watch.answers:
            return ""
        job = self.watch.job
        if not job or job["id"] in self._old:
            why, self._killed = "killed" if self._killed else "its scheduler is gone", False
            return self._ended(why)
        if job["state"] in ENDED:
            self._old.add(job["id"])
            return self._ended(f"{job['state']}: {job['why']}")
        return ""

    def _submitted(self, process: subprocess.Popen[bytes]) -> str:
        """`over` while the job is being submitted."""
        after_s = time.monotonic() - self._at
        if process.poll() is None:
            if self.kill_submitter and after_s > self.rng.uniform(0.3, 2.5):
                process.kill()
                self.kill_submitter = False
            elif after_s > SUBMIT_S:
                process.kill()
                process.wait()
                self.submitting = None
                return self._ended(f"submitting took more than {SUBMIT_S:g} s")
            return ""
        if not self.watch.answers:
            return ""
        job = self.watch.job
        if process.returncode == -signal.SIGKILL and after_s < SETTLED_S:
            return ""  # whether the scheduler has the job shows later
        if job and job["id"] not in self._old:
            self.submitting = None
            return ""
        if job:
            self._old.add(job["id"])
        if process.returncode == 0 and after_s < SUBMIT_S / 2:
            return ""  # what was seen last may be older than the job
        self.submitting = None
        return self._ended(f"submitting ended with {process.returncode}: {self._last_line()}")

    def kill(self) -> None:
        """Kill what the soak itself has started of the run."""
        for process in (self.foreground, self.submitting):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        self.foreground = self.submitting = None
        self._killed = True
        if self.watch.job:
            self._old.add(self.watch.job["id"])

    def ask_to_stop(self) -> None:
        """Ask the run to end after the step in flight."""
        if self.foreground is not None:
            self.foreground.send_signal(signal.SIGINT)
        elif self.watch.job:
            self._command("cancel", self.watch.job["id"], "--scheduler-file", str(self.cluster.file)).wait()

    def starts(self) -> list[dict[str, Any]]:
        """The run's own list of its starts."""
        path = self.job.run_dir / "starts.json"
        return list(json.loads(path.read_text())) if path.is_file() else []

    def _command(self, *words: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            log.write(f"\n$ staleflow {' '.join(words)}\n".encode())
            log.flush()
            return subprocess.Popen(
                [sys.executable, "-m", "staleflow.cli.main", *words],
                env=self.cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _last_line(self) -> str:
        lines = self.log.read_bytes()[self._mark :].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _ended(self, why: str) -> str:
        self.ends[re.sub(r"[\d.]+", "#", why).replace(str(self.job.folder), "")] += 1
        if by_own_error(why):
            self.errors.append(why)
        return why


def by_own_error(why: str) -> bool:
    """Whether a run that has ended, and why, did so by an error of its own and not by what was done to it.

    >>> by_own_error("failed: a bug in staleflow, please report it: the 2 ranks of the trainer are not a group yet")
    True
    >>> by_own_error("exit 1: server was lost 4 times within an hour, last: server is gone"), by_own_error("killed")
    (False, False)
    """
    if not why.startswith(("exit ", "failed", "submitting ")):
        return False
    return OWN_FAULTS.search(why) is not None or BY_FAULTS.search(why) is None
