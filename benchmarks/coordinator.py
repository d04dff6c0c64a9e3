"""What a decision costs: the coordinator's processor time per event and per tick, by instances and live trajectories.

    python benchmarks/coordinator.py

The most expensive strategies are on: staggered pulls and migration. A tick decides over the
whole fleet; a round of reports is what one tick hears from all instances before that. The longest calls are those
while all trajectories arrive at once, and afterwards; Python's garbage collector is off, and the time of a full
collection is printed beside them.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from typing import Any

from staleflow.pipeline.config import factories, loading
from staleflow.pipeline.coordination.commands import Command, FetchPrompts, Route
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.coordination.events import (
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceReported,
    RoutingContinued,
    Tick,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.pipeline.runtime.driver import GROUPS_PER_EVENT
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion, TrajectoryId

SIZES = ((16, 1_024), (128, 8_192), (1_024, 65_536), (4_096, 262_144))
KINDS = ("GroupsArrived", "InstanceReported", "TrajectorySampled", "TrajectoryScored", "VersionPublished", "Tick")


class Bench:
    """Keeps `live` trajectories in flight and times every call."""

    def __init__(self, instances: int, live: int) -> None:
        tree: dict[str, Any] = {
            "steps": 10_000,
            "batch": {"groups_per_step": live // 32, "group_size": 8},
            "staleness": {"eta": 3},
            "rollout": {
                "instances": instances, "max_new_tokens": 4000,
                "migration": "largest_gain", "engine": {"name": "emulated", "max_running": 64, "kv_tokens": 10**6},
            },
        }  # fmt: skip
        self.coordinator: Coordinator = factories.make_coordinator(loading.from_tree(tree))
        self.rng = random.Random(0)
        self.now = 0.0
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.routes: dict[TrajectoryId, Route] = {}
        self.next_group = 0
        self.drawn = 0
        for i in range(instances):
            self.tell(
                InstanceJoined(
                    instance=InstanceId(f"i{i}"), version=PolicyVersion(0), kv_capacity=10**6, max_running=64
                )
            )

    def tell(self, event: Event) -> list[Command]:
        """Handle an event, and route all that it leaves in the queue."""
        commands = self.handle(event)
        while self.coordinator.has_more_routes:
            commands += self.handle(RoutingContinued())
        return commands

    def handle(self, event: Event) -> list[Command]:
        self.now += 0.001
        begin = time.thread_time()
        commands = self.coordinator.handle(event, self.now)
        self.seconds.setdefault(type(event).__name__, []).append(time.thread_time() - begin)
        for command in commands:
            if isinstance(command, Route):
                self.routes[command.trajectory] = command
            elif isinstance(command, FetchPrompts):
                self.drawn += command.num_groups
        return commands

    def arrive(self) -> None:
        groups = range(self.next_group, self.next_group + self.drawn)
        self.next_group, self.drawn = groups.stop, 0
        for first in range(groups.start, groups.stop, GROUPS_PER_EVENT):
            arrived = groups[first - groups.start :][:GROUPS_PER_EVENT]
            self.tell(GroupsArrived(groups=tuple(NewGroup(group=GroupId(g), prompt_tokens=500) for g in arrived)))

    def finish(self, count: int) -> None:
        """Sample and score this many random trajectories, and train when a batch is there."""
        self.finish_these(self.rng.sample(sorted(self.routes), min(count, len(self.routes))))

    def train_step(self) -> None:
        """Finish the oldest groups until one more step is trained."""
        version = self.coordinator.ledger.version
        while self.coordinator.ledger.version == version:
            self.finish_these(sorted(self.routes)[:1000])

    def finish_these(self, trajectories: list[TrajectoryId]) -> None:
        for trajectory in trajectories:
            route = self.routes.pop(trajectory)
            tokens = min(3999, int(self.rng.lognormvariate(6.5, 0.8)) + 1)
            self.tell(TrajectorySampled(trajectory=trajectory, route_number=route.route_number, tokens=tokens))
            self.tell(TrajectoryScored(trajectory=trajectory, reward=1.0))
            if self.coordinator.is_training:
                self.now += 20.0
                self.tell(VersionPublished(version=PolicyVersion(self.coordinator.ledger.version + 1)))
            if self.drawn:
                self.arrive()

    def longest_s(self) -> float:
        """Seconds of the longest call so far."""
        return max(s for seconds in self.seconds.values() for s in seconds)

    def report(self) -> float:
        """A round of reports from all instances; seconds of it."""
        by_instance: dict[InstanceId, list[tuple[TrajectoryId, int]]] = {}
        for trajectory, route in self.routes.items():
            by_instance.setdefault(route.instance, []).append((trajectory, self.rng.randint(1, 1500)))
        before = sum(self.seconds["InstanceReported"])
        for instance, progress in by_instance.items():
            self.tell(InstanceReported(instance=instance, progress=tuple(progress)))
        return sum(self.seconds["InstanceReported"]) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=4000, help="finished trajectories that are timed")
    parser.add_argument("--quick", action="store_true", help="the smallest size")
    args = parser.parse_args()
    print(
        f"{'instances':>9} {'live':>7}  "
        + "".join(f"{k:>19}" for k in KINDS)
        + f"{'round of reports':>19}   (median us); longest call of the first fill and of a step, and a collection (ms)"
    )
    for instances, live in SIZES[:1] if args.quick else SIZES:
        gc.collect()
        gc.disable()
        bench = Bench(instances, live)
        bench.arrive()
        longest = [bench.longest_s()]
        bench.finish(min(1000, live // 4))  # lengths are known from here on
        bench.seconds = {kind: [] for kind in KINDS}
        rounds = []
        for _ in range(20):
            bench.finish(min(args.events // 20, live // 32))
            rounds.append(bench.report())
            bench.now += 2.0
            bench.tell(Tick())
        medians = [statistics.median(bench.seconds[k]) * 1e6 if bench.seconds[k] else float("nan") for k in KINDS]
        num_live = bench.coordinator.ledger.num_live
        bench.seconds = {}
        bench.train_step()
        longest.append(bench.longest_s())
        begin = time.thread_time()
        gc.collect()
        longest.append(time.thread_time() - begin)
        gc.enable()
        line = "".join(f"{m:19,.0f}" for m in [*medians, statistics.median(rounds) * 1e6])
        print(f"{instances:9} {num_live:7}  {line}   " + "".join(f"{s * 1e3:8.1f}" for s in longest), flush=True)


if __name__ == "__main__":
    main()
