"""What decisions cost, and how long a driver holds up its event loop: processor time, by instances and trajectories.

    python benchmarks/coordinator.py

Driver, coordinator, journal and measurements are real; their actors answer at once. Migration is on. The parts: all
trajectories arrive and are routed; all instances report at once; the responses of a step arrive, and its batch is
consumed; its version is published, all instances pull it, and new groups take the places of the batch. A call ends
when the event loop can run others; Python's garbage collections count. Replaying the journal afterwards must give the
same commands.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from staleflow.pipeline.config import factories, loading
from staleflow.pipeline.coordination import commands, events, journal
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.processes.worker_protocol import PlacedActor
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.actors.trainer import PublishedStep

SIZES = ((16, 1_024), (1_024, 65_536), (4_096, 262_144))
GROUP_SIZE = 8


class Bench:
    """A driver of `instances` instances and `live` trajectories in flight, and the times of its event-loop calls.
    Create it inside the event loop."""

    def __init__(self, instances: int, live: int, folder: Path) -> None:
        self.config = loading.from_tree({
            "name": "bench", "runs_dir": str(folder), "steps": 10_000,
            "batch": {"groups_per_step": live // 4 // GROUP_SIZE, "group_size": GROUP_SIZE},
            "staleness": {"eta": 3},
            "rollout": {
                "instances": instances, "max_new_tokens": 4000,
                "migration": "largest_gain", "engine": {"name": "emulated", "max_running": 64, "kv_tokens": 10**6},
            },
        })  # fmt: skip
        self.rng = random.Random(0)
        self.routes: dict[TrajectoryId, commands.Route] = {}
        self.calls: list[tuple[float, str]] = []
        self.decision_us: dict[str, list[float]] = defaultdict(list)
        workers, facts = SimpleNamespace(placed={}), SimpleNamespace(nonce="", context_length=None)
        actors: Any = Actors(self.config, workers, folder, facts)  # type: ignore[arg-type]  # no process is started
        self.driver = cast(Any, Driver(self.config, actors, folder, RunListener()))
        self.driver._commit_queue.put = self.driver._score_queue.put = lambda *_: None  # nobody waits for them
        actors.ask, actors.train, actors.prune = self.draw, self.train, self.prune
        actors.record_published = lambda _: None
        self.handle, self.driver._coordinator.handle = self.driver._coordinator.handle, self.time_decision
        self.instances: dict[InstanceId, InstanceHandle] = actors.instances
        self.is_trained = asyncio.Event()

    def time_decision(self, event: events.Event, now: float) -> list[commands.Command]:
        begin_s = time.thread_time()
        new_commands: list[commands.Command] = self.handle(event, now)
        self.decision_us[type(event).__name__].append((time.thread_time() - begin_s) * 1e6)
        return new_commands

    async def draw(self, _: str, __: str, first: int, count: int, *___: object, deadline: str) -> list[NewGroup]:
        return await asyncio.create_task(self.make_groups(first, count))  # not a call of the driver

    async def make_groups(self, first: int, count: int) -> list[NewGroup]:
        groups = range(first, first + count)
        return [NewGroup(group=GroupId(g), prompt_tokens=self.rng.randint(100, 900)) for g in groups]

    async def train(self, step: int, *_: object) -> PublishedStep:
        await self.is_trained.wait()
        metrics = {"train_s": 1.0, "publish_s": 0.0}
        return PublishedStep(version=PolicyVersion(step + 1), metrics=metrics, fingerprint="", path="")

    async def prune(self, _: object) -> None:
        pass

    def send(self, *new_events: events.Event) -> None:
        for event in new_events:
            self.driver._inbox.put_nowait(event)

    async def settle(self) -> None:
        """Do what the instances are sent, until nothing more is."""
        num_quiet = 0
        while num_quiet < 3:
            await asyncio.sleep(0.02)
            num_quiet += self.driver._inbox.empty() and not self.driver._coordinator.has_more_decisions
            for instance in self.instances.values():
                while not instance.outbox.empty():
                    num_quiet = 0
                    match command := instance.outbox.get_nowait():
                        case commands.Route():
                            self.routes[command.trajectory] = command
                        case commands.Pull():
                            self.send(events.PullFinished(instance=command.instance, version=command.version))

    async def measure(self) -> None:
        loop = [asyncio.ensure_future(self.driver._main_loop()), asyncio.ensure_future(self.driver._tick())]
        for i in range(self.config.rollout.instances):
            name = InstanceId(f"i{i}")
            self.instances[name] = InstanceHandle(PlacedActor(name, "rollout", "", "", "", None, None), i)
            self.send(events.InstanceJoined(instance=name, version=PolicyVersion(0), kv_capacity=10**6, max_running=64))
        await self.settle()
        self.show("first fill", len(self.routes))
        progress: dict[InstanceId, list[tuple[TrajectoryId, int]]] = {name: [] for name in self.instances}
        for trajectory, route in self.routes.items():
            progress[route.instance].append((trajectory, self.rng.randint(1, 1500)))
        self.send(*(events.InstanceReported(instance=i, progress=tuple(p)) for i, p in progress.items()))
        await self.settle()
        self.show("reports", len(self.routes))
        batch = sorted(self.routes)[: self.config.batch.groups_per_step * GROUP_SIZE]
        for trajectory in batch:
            number, tokens = self.routes.pop(trajectory).route_number, self.rng.randint(100, 3000)
            self.send(events.TrajectorySampled(trajectory=trajectory, route_number=number, tokens=tokens))
            self.send(events.TrajectoryScored(trajectory=trajectory, reward=1.0))
        await self.settle()
        self.show("responses", len(batch))
        num_running = len(self.routes)
        self.is_trained.set()
        await self.settle()
        self.show("burst", len(self.routes) - num_running)
        for task in loop:
            task.cancel()
        await asyncio.wait(loop)
        self.driver._journal.close()

    def time_calls(self, run_handle: Any) -> Any:
        """Wrap Handle._run, which makes an event loop's calls, to time those of the driver."""

        def run(handle: Any) -> None:
            task = getattr(handle._callback, "__self__", None)
            name = getattr(task.get_coro() if isinstance(task, asyncio.Task) else None, "__qualname__", "")
            begin_s = time.thread_time()
            run_handle(handle)
            if name.startswith("Driver."):
                self.calls.append((time.thread_time() - begin_s, name.removeprefix("Driver.")))

        return run

    def show(self, part: str, num_trajectories: int) -> None:
        calls, self.calls = sorted(self.calls, reverse=True), []
        total_us = sum(seconds for seconds, _ in calls) * 1e6
        longest = ", ".join(f"{seconds * 1e3:.1f} {name}" for seconds, name in calls[:3])
        print(
            f"{len(self.instances):9} {part:11}{num_trajectories:8}{len(calls):8}{total_us / num_trajectories:10.0f}"
            f"{total_us / len(self.instances):10.0f}  {longest}",
            flush=True,
        )


async def run(instances: int, live: int, folder: Path) -> None:
    bench, run_handle = Bench(instances, live, folder), asyncio.Handle._run
    asyncio.Handle._run = bench.time_calls(run_handle)  # type: ignore[method-assign]
    await bench.measure()
    asyncio.Handle._run = run_handle  # type: ignore[method-assign]
    medians = {name: statistics.median(values) for name, values in bench.decision_us.items()}
    print("us of a decision, median: " + ", ".join(f"{name} {median:.0f}" for name, median in medians.items()))
    entries = journal.JournalReader(folder / "events.jsonl")
    replayed = journal.replay(factories.make_coordinator(bench.config), entries)
    print(f"replayed: {replayed.num_events} events, {replayed.difference or 'the same commands'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest size")
    parser.add_argument("--instances", type=int, help="only the size with so many instances")
    args = parser.parse_args()
    print("instances part      trajectories calls us a trajectory  an instance  longest calls (ms)")
    for instances, live in SIZES[:1] if args.quick else SIZES:
        if args.instances in (None, instances):
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(run(instances, live, Path(folder)))


if __name__ == "__main__":
    main()
