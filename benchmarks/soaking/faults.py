"""The faults of a soak. Each is done to real processes from outside, as a machine would do it."""

from __future__ import annotations

import asyncio
import fcntl
import random
import signal
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from benchmarks.soaking.bucket import ACCESS_KEY, FailingProxy
from benchmarks.soaking.cluster import Cluster, send
from benchmarks.soaking.job import EPISODES, Job, Kind
from benchmarks.soaking.machine import Machine
from benchmarks.soaking.running import Run
from benchmarks.soaking.watching import Watch

STOPPED_S = (0.5, 40.0)
"""Least and most seconds that a process stays stopped: below and beyond every deadline of the job's calls."""
KILLED_AFTER = 0.3
"""Share of the stopped processes that are killed and not continued."""
SLOW_S = (1.0, 8.0)
"""Least and most seconds that the disk is slow: below call_s, since a commit that takes longer is a lost server."""
FULL_S = (1.0, 10.0)
"""Least and most seconds that the disk is full."""
APART_S = (0.5, 15.0)
"""Least and most seconds that something is wrong between the hosts: below and beyond call_s."""
NEEDS_ROOT = ("disk full", "transfers slow", "transfers torn", "transfers refused")
ROLES = ("trainer", "server", "reward", "rollout", "driver", "scheduler")
OWN_ROLES: dict[Kind, str] = {"turns": "environment", "agents": "environment", "ranks": "rank"}
"""The role that only a job of some kind has: an environment host, and a process of the trainer that does not lead."""


@dataclass(slots=True)
class Scene:
    """What faults are done to. passing: those that end by themselves."""

    job: Job
    cluster: Cluster
    machine: Machine
    watch: Watch
    run: Run
    rng: random.Random
    passing: set[asyncio.Task[None]] = field(default_factory=set)
    full: bool = False
    """Whether the disk is full now."""
    bucket: FailingProxy | None = None
    """What stands before the bucket that the run's store is in; None if it is in a folder."""

    def victim(self, role: str) -> tuple[str, int] | None:
        """An actor of a role and its process; None if there is none now."""
        if role == "scheduler":
            return role, self.cluster.scheduler
        if role == "driver":
            return (role, pid) if (pid := self.run.driver) is not None else None
        actors = sorted(self.watch.actors("trainer" if role == "rank" else role).items())
        if role == "rank":
            actors = [actor for actor in actors if actor[0] != "trainer"]
        return self.rng.choice(actors) if actors else None

    def later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.passing.add(task)
        task.add_done_callback(self.passing.discard)


Fault = Callable[[Scene], str]
"""Strikes; says whom and how, or nothing if it could not."""


def killing(role: str) -> Fault:
    def strike(scene: Scene) -> str:
        victim = scene.victim(role)
        if victim is None or not send(victim[1], signal.SIGKILL):
            return ""
        return f"{victim[0]}, process {victim[1]}"

    return strike


def stopping(role: str) -> Fault:
    def strike(scene: Scene) -> str:
        victim = scene.victim(role)
        if victim is None or not send(victim[1], signal.SIGSTOP):
            return ""
        seconds = scene.rng.uniform(*STOPPED_S)
        then = signal.SIGKILL if scene.rng.random() < KILLED_AFTER else signal.SIGCONT

        async def end() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                send(victim[1], then)

        scene.later(end())
        return f"{victim[0]}, process {victim[1]}, for {seconds:.1f} s, then {then.name}"

    return strike


def submitter(scene: Scene) -> str:
    """End the run, and kill the process that submits it next. Not a submitted run: its driver starts again by itself,
    and a second job would wait for the first one's workers."""
    if scene.run.foreground is None or (victim := scene.victim("driver")) is None:
        return ""
    scene.run.kill_submitter = True
    scene.run.kill()
    return f"driver {victim[1]} killed, and the next to submit it"


def leaving(*, kill: bool) -> Fault:
    """A worker leaves with its nanny, and comes back later."""

    def strike(scene: Scene) -> str:
        here = [name for name, p in scene.cluster.processes.items() if name != "scheduler" and not p.gone]
        name = scene.rng.choice(sorted(here))
        scene.cluster.leave(name, kill=kill)
        seconds = scene.rng.uniform(0.0, 10.0)

        async def back() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                scene.cluster.come_back(name)

        scene.later(back())
        return f"{name}, back after {seconds:.1f} s"

    return strike


def slow_commits(scene: Scene) -> str:
    """Hold the store's lock, as a disk that does not answer would."""
    if not (scene.job.run_dir / "store").exists():
        return ""
    seconds = scene.rng.uniform(*SLOW_S)

    async def hold() -> None:
        with (scene.job.run_dir / ".store.lock").open("a") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            await asyncio.sleep(seconds)

    scene.later(hold())
    return f"for {seconds:.1f} s"


def hanging_reward(scene: Scene) -> str:
    scene.job.hang.touch()
    return "one call"


def full_disk(scene: Scene) -> str:
    """The disk that holds the run's folder is full for a while."""
    if scene.full or not scene.machine.fill_disk():
        return ""
    scene.full = True
    seconds = scene.rng.uniform(*FULL_S)

    async def free() -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            scene.machine.free_disk()
            scene.full = False

    scene.later(free())
    return f"for {seconds:.1f} s"


def failing_bucket(begin: Callable[[FailingProxy], None]) -> Fault:
    """The bucket fails for a while."""

    def strike(scene: Scene) -> str:
        bucket = scene.bucket
        if bucket is None or bucket.fault or bucket.expired:
            return ""
        begin(bucket)
        seconds = scene.rng.uniform(*STOPPED_S)

        async def mend() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                bucket.fault, bucket.expired = "", ""

        scene.later(mend())
        return f"for {seconds:.1f} s"

    return strike


def busy(bucket: FailingProxy) -> None:
    bucket.fault = "busy"


def resetting(bucket: FailingProxy) -> None:
    bucket.fault = "reset"


def expired(bucket: FailingProxy) -> None:
    bucket.expired = ACCESS_KEY


def answer_lost(scene: Scene) -> str:
    """The next change of the store's branch is carried out, and not answered."""
    if scene.bucket is None or scene.bucket.lost_answers:
        return ""
    scene.bucket.lost_answers = 1
    return "of one commit"


def network(begin: Callable[[Machine], None], end: Callable[[Machine], None] | None = None) -> Fault:
    """Something happens between the hosts, and ends after a while."""

    def strike(scene: Scene) -> str:
        if not scene.machine.namespace:
            return ""
        begin(scene.machine)
        if end is None:
            return "all connections between the hosts"
        seconds = scene.rng.uniform(*APART_S)

        async def mend() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                end(scene.machine)

        scene.later(mend())
        return f"for {seconds:.1f} s"

    return strike


FAULTS: dict[str, tuple[float, Fault]] = {
    **{f"kill -9 {role}": (1.0, killing(role)) for role in ROLES},
    **{f"SIGSTOP {role}": (0.5, stopping(role)) for role in ROLES},
    "kill -9 submitter": (0.5, submitter),
    "worker leaves, killed": (0.5, leaving(kill=True)),
    "worker leaves, SIGTERM": (0.5, leaving(kill=False)),
    "slow commits": (0.5, slow_commits),
    "reward hangs": (0.5, hanging_reward),
    "disk full": (0.5, full_disk),
    "bucket busy": (1.0, failing_bucket(busy)),
    "bucket resets": (1.0, failing_bucket(resetting)),
    "bucket expired": (1.0, failing_bucket(expired)),
    "bucket answer lost": (1.0, answer_lost),
    "transfers slow": (0.4, network(Machine.slow_network, Machine.fast_network)),
    "transfers torn": (0.4, network(Machine.cut_connections)),
    "transfers refused": (0.4, network(Machine.part_network, Machine.join_network)),
    **{f"kill -9 {role}": (2.0, killing(role)) for role in dict.fromkeys(OWN_ROLES.values())},
    **{f"SIGSTOP {role}": (1.5, stopping(role)) for role in dict.fromkeys(OWN_ROLES.values())},
}
"""Faults by name, with how often they strike in proportion."""


def left_out(machine: Machine, kinds: Collection[Kind], *, bucket: bool = False) -> set[str]:
    """Faults that cannot strike on this machine, or in a job of these kinds. bucket: whether its store is in one."""
    others = set(OWN_ROLES.values()) - {role for own, role in OWN_ROLES.items() if own in kinds}
    names = {f"{what} {role}" for role in others for what in ("kill -9", "SIGSTOP")}
    if not bucket:
        names |= {name for name in FAULTS if name.startswith("bucket ")}
    if set(kinds) & set(EPISODES):  # nothing is scored by reward workers
        names |= {"kill -9 reward", "SIGSTOP reward", "reward hangs"}
    return (
        names | set(NEEDS_ROOT[:1] if machine.disk is None else ()) | set(() if machine.namespace else NEEDS_ROOT[1:])
    )
