"""Runs a job on a cluster by hand while everything that can fail does, and counts what was lost.

    python -m benchmarks.soak --faults 1000 --seed 1      the long one: hours
    python -m benchmarks.soak --faults 30                  minutes
    python -m benchmarks.soak --only "kill -9 trainer"     one kind of fault
    python -m benchmarks.soak --overlap 0.75               most faults strike before the last one has passed
    python -m benchmarks.soak --job-kind turns             episodes of several turns; agents: these over HTTP
    python -m benchmarks.soak --job-kind agents ranks      several kinds at once; ranks: two trainer processes
    python -m benchmarks.soak --bucket                     the store is in a bucket, which fails too
    python -m benchmarks.soak --mode kill-all --times 100  kill -9 of everything in the middle of a step, the demo's job

A scheduler, workers and the run are processes of their own; the engine is emulated. Faults strike one after another,
some before the last one has passed. Whatever has ended is started again by this program, as an operator's tools would,
and what the run does by itself is left to it. After a resume the whole store is audited, beside the run, and after the
last one of those that come meanwhile; at the end the run is stopped, and every prompt is counted against the source.
After Ctrl-C no more faults strike.

It fails (exit 1) if an audit has findings, a prompt was skipped or trained on twice, a start of the run ended by an
error of its own, the run did not train again within its deadlines, a process outlived the run, or the tokens do not
balance: what engines sampled, by their own record, is stored, in flight, or discarded for a reason that the journals
have. The logs of a soak with findings are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soaking.balance import balance
from benchmarks.soaking.bucket import BUCKET, FailingProxy, served
from benchmarks.soaking.cluster import Cluster
from benchmarks.soaking.counting import AUDIT_S, Recoveries, audited, prompts
from benchmarks.soaking.faults import FAULTS, NEEDS_ROOT, Scene, left_out
from benchmarks.soaking.job import EPISODES, KINDS, STEPS, Job
from benchmarks.soaking.killing import kill_all
from benchmarks.soaking.machine import Machine, isolated
from benchmarks.soaking.running import Run, by_own_error
from benchmarks.soaking.watching import Watch

LOOK_S = 0.25
"""Seconds between two looks at the cluster."""
STEPS_AFTER = 2
"""Training steps reported after a fault until it has passed: the first may have been under way."""
MORE_STEPS = 3
"""Steps that the run is trained further at the end, to its regular end."""

LEFT_S = 20.0
"""Seconds after the run's end until no process may be left that belongs to nobody."""

ANEW = "everything was started anew"


@dataclass(slots=True)
class Soak:
    """One soak. overlap: share of the faults that strike while the one before has not passed. findings: what must not
    have happened."""

    scene: Scene
    every_s: float
    overlap: float
    rng: random.Random
    only: tuple[str, ...] = ()
    findings: list[str] = field(default_factory=list)
    recoveries: Recoveries = field(default_factory=Recoveries)
    num_audits: int = 0
    num_overlapping: int = 0
    _begin: float = field(default_factory=time.monotonic)
    _starts_seen: int = 1
    """Up to the last audit; the first start is no resume, and its store comes a moment later."""
    _retry_at: float = 0.0
    _audit: asyncio.Task[None] | None = None

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:8.1f} s  step {self.scene.watch.step:>5}  {what}", flush=True)

    async def run(self, num_faults: int) -> None:
        scene = self.scene
        interrupted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        scene.cluster.start()
        self.say(scene.run.start())
        if not await self.trains("the start"):
            return
        for number in range(1, num_faults + 1):
            if interrupted.is_set():
                break
            name, what, at = await self.strike()
            self.say(f"fault {number}: {name}: {what}")
            if number < num_faults and self.rng.random() < self.overlap:
                self.num_overlapping += 1
                await self.go_on(self.rng.uniform(0.0, 5.0))
                continue
            if await self.trains(name):
                self.recoveries.note(name, scene.watch.step_at - at)
            await self.go_on(self.rng.expovariate(1 / self.every_s))
        await self.finish()

    async def strike(self) -> tuple[str, str, float]:
        """Choose a fault that can strike now; returns its name, what it did, and when."""
        scene = self.scene
        never = left_out(scene.machine, scene.job.kinds, bucket=scene.bucket is not None)
        names = [name for name in FAULTS if (not self.only or name in self.only) and name not in never]
        while True:
            name = self.rng.choices(names, [FAULTS[n][0] for n in names])[0]
            at = time.monotonic()
            if what := FAULTS[name][1](self.scene):
                return name, what, at
            await self.go_on(LOOK_S)

    async def trains(self, after: str) -> bool:
        """Look after the cluster until the run has trained again. False, and a finding, if it does not within the job's
        deadlines; everything is then started anew."""
        scene = self.scene
        goal, deadline = scene.watch.steps + STEPS_AFTER, time.monotonic() + scene.job.limit_s
        while scene.watch.steps < goal or scene.passing:
            if scene.watch.steps >= goal:
                deadline = max(deadline, time.monotonic() + scene.job.limit_s)  # only waits for a fault to end
            if time.monotonic() > deadline:
                self.found(f"after {after}: not trained within {scene.job.limit_s:g} s; {self._state()}")
                if after != ANEW:
                    await self.anew()
                return False
            await self.look()
        return True

    async def go_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self.look()

    async def look(self) -> None:
        """Start again what has ended, of the cluster and of the run."""
        scene = self.scene
        await self.tend()
        if scene.run.foreground is scene.run.submitting is None and self._retry_at:
            if time.monotonic() > self._retry_at and scene.cluster.file.exists():
                self._retry_at = 0.0
                self.say(scene.run.start())
        elif why := scene.run.over():
            self.say(f"the run has ended: {why}")
            self._own_errors()
            self._retry_at = time.monotonic() + self.rng.uniform(0.0, 2.0)
        await asyncio.sleep(LOOK_S)

    async def tend(self) -> None:
        """Start again what has ended of the cluster."""
        scene = self.scene
        if not scene.full:
            scene.machine.keep_space()
        for name in scene.cluster.revive():
            self.say(f"{name} is started again")
        await scene.watch.look()
        self.audit()

    def audit(self) -> None:
        """Audit the store, beside the run, if the run was resumed since the last audit began."""
        starts = len(self.scene.run.starts())
        if starts > self._starts_seen and (self._audit is None or self._audit.done()):
            self._starts_seen = starts
            self.num_audits += 1
            self._audit = asyncio.create_task(self._find())

    async def _find(self) -> None:
        try:
            findings = await audited(self.scene.job.run_dir)
        except TimeoutError:
            findings = [f"audit: not done within {AUDIT_S:g} s"]
        for finding in findings:
            self.found(finding)

    async def anew(self) -> None:
        """End all processes, and begin again with the run's folder as it is."""
        scene = self.scene
        for task in scene.passing:
            task.cancel()
        scene.run.kill()
        scene.cluster.close()
        self._retry_at = time.monotonic()
        if not await self.trains(ANEW):
            raise RuntimeError("the run does not go on, whatever is done")

    async def finish(self) -> None:
        """Stop the run; train it to a regular end; count."""
        scene = self.scene
        self.say("no more faults: the run is asked to stop")
        scene.run.ask_to_stop()
        if await self._until_over("stopping"):
            last = scene.watch.step + 1 + MORE_STEPS
            self.say(f"{scene.run.start(here=True, steps=last)} to the end of step {last}")
            if await self._until_over("training to the end") and (summary := self._summary()) != last:
                self.found(f"the run was to end after {last} steps, its summary has {summary}")
        await self._leaks()
        if self._audit is not None:
            await self._audit
        await self._find()

    def _own_errors(self) -> None:
        """Note how starts of the run ended by themselves, also those that the run's driver resumed."""
        ends = [str(start["end"]) for start in self.scene.run.starts()]
        for why in [*self.scene.run.errors, *(end for end in ends if by_own_error(end))]:
            self.found(f"the run ended by an error of its own: {why}")

    async def _leaks(self) -> None:
        """Note processes that outlive the run and their workers for longer than it takes a nanny's to notice."""
        deadline = time.monotonic() + LEFT_S
        while (left := self.scene.cluster.orphans()) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        for command in left:
            self.found(f"a process outlives the run: {command}")

    async def _until_over(self, what: str) -> bool:
        """Wait until the run is over. False, and a finding, if it does not end within the job's deadlines."""
        scene = self.scene
        deadline = time.monotonic() + scene.job.limit_s
        while True:
            await self.tend()
            if why := scene.run.over():
                self.say(f"{what}: {why}")
                self._own_errors()
                return True
            if time.monotonic() > deadline:
                self.found(f"{what}: not ended within {scene.job.limit_s:g} s; {self._state()}")
                return False
            await asyncio.sleep(LOOK_S)

    def _summary(self) -> int:
        """Training steps in the run's summary; -1 if it has none."""
        path = self.scene.job.run_dir / "summary.json"
        return int(json.loads(path.read_text())["steps"]) if path.is_file() else -1

    def found(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)
            self.say(f"FINDING: {finding}")

    def _state(self) -> str:
        job = self.scene.watch.job
        if not self.scene.watch.answers:
            return "the scheduler does not answer"
        return f"job {job.get('state')}: {job.get('why')}; {job.get('status', {}).get('doing')}" if job else "no job"

    def report(self) -> None:
        scene = self.scene
        run_dir = scene.job.run_dir
        print(f"\n{scene.watch.steps} steps seen, {scene.run.num_starts} starts by hand, {self.num_audits} audits, ")
        print(f"{self.num_overlapping} faults before the last had passed")
        print("seconds until it trained again:", *self.recoveries.lines(), sep="\n")
        print("how starts ended:")
        for why, count in scene.run.ends.most_common():
            print(f"  {count:5}  {why}")
        if (run_dir / "store").exists():
            counted = prompts(run_dir)
            print(
                f"prompts: {counted.trained} trained on, the last is number {counted.last}; {counted.stopped} given up "
                "when the run was asked to stop"
            )
            self.findings += counted.findings()
            tokens = balance(run_dir, scene.cluster.records)
            print(tokens.line())
            self.findings += tokens.findings


async def soak(
    args: argparse.Namespace, folder: Path, machine: Machine, bucket: FailingProxy | None = None
) -> list[str]:
    rng = random.Random(args.seed)
    store = "" if bucket is None else f"s3://{BUCKET}/soak"
    job = Job(folder=folder, seed=args.seed, eta=rng.choice((1, 2, 3)), kinds=tuple(args.job_kind), store=store)
    job.write()
    cluster = Cluster(folder, machine, job.kinds)
    watch = Watch(cluster.file, job.run_dir)
    scene = Scene(job, cluster, machine, watch, Run(job, cluster, watch, rng), rng, bucket=bucket)
    one = Soak(scene=scene, every_s=args.every, overlap=args.overlap, rng=rng, only=tuple(args.only))
    try:
        await one.run(args.faults)
    finally:
        for task in scene.passing:
            task.cancel()
        await asyncio.gather(*scene.passing, return_exceptions=True)
        await watch.close()
        scene.run.kill()
        cluster.close()
    one.report()
    return one.findings


@contextlib.contextmanager
def bucket_of(args: argparse.Namespace) -> Iterator[FailingProxy | None]:
    """What stands before a bucket, which this process and those it starts find in their environment; None without
    --bucket."""
    if not args.bucket:
        yield None
        return
    with served() as environment, FailingProxy(environment["AWS_ENDPOINT_URL"]) as bucket:
        os.environ.update(environment | {"AWS_ENDPOINT_URL": bucket.endpoint})
        yield bucket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--every", type=float, default=2.0, help="mean seconds between a fault's end and the next")
    parser.add_argument("--overlap", type=float, default=0.2, help="share of faults before the last one has passed")
    parser.add_argument("--mode", choices=("faults", "kill-all"), default="faults")
    parser.add_argument("--times", type=int, default=100, help="kill-all: how often")
    parser.add_argument(
        "--job", default="examples/demo.toml", help="kill-all: the job; `make running-sums-model` makes its model"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="kill-all: override of the job")
    parser.add_argument("--job-kind", choices=KINDS, nargs="+", default=[], help="by default one that the seed chooses")
    parser.add_argument("--bucket", action="store_true", help="the store is in a bucket, which fails too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one, kept if there are findings")
    parser.add_argument("--quick", action="store_true", help="three faults: whether it works")
    args = parser.parse_args()
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # that the scheduler is gone is no news here
    if unknown := set(args.only) - set(FAULTS):
        parser.error(f"no fault {min(unknown)!r}; there are {', '.join(FAULTS)}")
    args.job_kind = args.job_kind or [KINDS[args.seed % len(KINDS)]]
    if set(EPISODES) <= set(args.job_kind):
        parser.error(f"--job-kind: episodes are of one kind, {' or '.join(EPISODES)}")
    kinds = " ".join(args.job_kind)
    if unfit := set(args.only) & left_out(Machine("second", Path()), args.job_kind, bucket=args.bucket):
        parser.error(f"--job-kind {kinds}{' without --bucket' * (not args.bucket)} has no fault {min(unfit)!r}")
    if min(args.faults, args.times) < 1 or args.every < 0 or not 0 <= args.overlap <= 1:
        parser.error("--faults and --times must be 1 or more, --every 0 or more, --overlap from 0 to 1")
    if args.quick:
        args.faults = 3
    folder = args.folder or Path(tempfile.mkdtemp(prefix="staleflow-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    planned = f"{args.faults} faults" if args.mode == "faults" else f"{args.times} kills of everything"
    kind = "" if args.mode == "kill-all" else f", job kind {kinds}"
    print(f"seed {args.seed}, {planned}{kind}, in {folder}", flush=True)
    if args.mode == "kill-all":
        overrides = (
            "task.eval_prompts=0",
            *args.overrides,
            f"runs_dir={folder.resolve()}/runs",
            "name=killed",
            f"steps={STEPS}",
        )
        killed = folder.resolve() / "runs" / "killed"
        end(
            asyncio.run(kill_all(Path(args.job), overrides, killed, args.times, random.Random(args.seed))), args, folder
        )
        return
    machine = isolated(folder.resolve() / "runs")
    for lacking, what in ((machine.disk is None, NEEDS_ROOT[:1]), (not machine.namespace, NEEDS_ROOT[1:])):
        if lacking:
            print(f"left out, as this process may not mount or make a network: {', '.join(what)}")
    with bucket_of(args) as bucket:
        findings = asyncio.run(soak(args, folder.resolve(), machine, bucket))
    if machine.disk is not None and (findings or args.folder):
        shutil.copytree(machine.disk, folder / "kept")  # the disk ends with this process
        print(f"the run is kept in {folder / 'kept'}")
    end(findings, args, folder)


def end(findings: list[str], args: argparse.Namespace, folder: Path) -> None:
    """Print the findings and exit with 1 if there are any; else remove a temporary folder."""
    print("findings:" if findings else "no findings", *findings, sep="\n  ")
    if findings:
        print(f"the logs are kept in {folder / 'logs'}")
        sys.exit(1)
    if args.folder is None:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
