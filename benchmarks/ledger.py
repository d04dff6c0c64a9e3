"""What each protocol verb costs with 1,000, 10,000 and 100,000 live groups, in one run.

A ledger with eta 3 is filled with live groups of one member, of several versions, half of them finished; then each verb
is timed alone, many times, and the median is printed with its growth from the smallest to the largest ledger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from staleflow.stores.staleness.ledger import StalenessLedger
from staleflow.stores.trajectory import AbortReason, GroupId, PolicyVersion, TrajectoryId

ETA = 3
SAMPLES = 2000


def finish(ledger: StalenessLedger, group: GroupId) -> None:
    ledger.complete(group, TrajectoryId(group))
    ledger.occupy(group)


def filled(live: int) -> tuple[StalenessLedger, list[GroupId]]:
    """A ledger at version 1 that can hold 5/4 of `live` groups and holds `live`; and its unfinished groups."""
    batch = live * 5 // 4 // (ETA + 1)
    ledger = StalenessLedger(eta=ETA, groups_per_step=batch, group_size=1)
    unfinished: list[GroupId] = []
    group = 0

    def add(count: int) -> None:
        nonlocal group
        for _ in range(count):
            ledger.start(GroupId(group))
            ledger.reserve(GroupId(group), TrajectoryId(group), ledger.version)
            if group % 2:
                finish(ledger, GroupId(group))
            else:
                unfinished.append(GroupId(group))
            group += 1

    add(2 * batch)
    ledger.consume(0)
    ledger.publish(PolicyVersion(1))
    add(live - batch)
    return ledger, unfinished


def median_us(action: Callable[[], object], samples: int) -> float:
    times = []
    for _ in range(samples):
        begin = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def measure(live: int) -> dict[str, float]:
    """Median microseconds of each verb."""
    ledger, unfinished = filled(live)
    result = {"live": float(len(ledger.live_groups))}
    samples = min(SAMPLES, live // 8)
    version = ledger.version
    fresh = [GroupId(10**9 + i) for i in range(samples)]
    queue, waiting = fresh.copy(), fresh.copy()
    result["start"] = median_us(lambda: ledger.start(queue.pop()), samples)
    result["reserve"] = median_us(lambda: ledger.reserve(g := waiting.pop(), TrajectoryId(g), version), samples)
    running = fresh.copy()
    result["complete"] = median_us(lambda: ledger.complete(g := running.pop(), TrajectoryId(g)), samples)
    done = fresh.copy()
    result["occupy"] = median_us(lambda: ledger.occupy(done.pop()), samples)
    result["abort"] = median_us(lambda: ledger.abort(unfinished.pop(), AbortReason.RUN_ENDED), samples)
    result["ready"] = median_us(ledger.is_batch_ready, samples)
    for group in unfinished:
        finish(ledger, group)
    begin = time.perf_counter_ns()
    ledger.consume(ledger.next_step)
    result["consume, per group"] = (time.perf_counter_ns() - begin) / 1000 / ledger.groups_per_step
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the two smaller ledgers")
    args = parser.parse_args()
    rows = [measure(live) for live in (1_000, 10_000, 100_000)[: 2 if args.quick else 3]]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'microseconds':<20}" + "".join(f"{int(r['live']):>10,} live" for r in rows) + "   growth")
    for verb in (k for k in rows[0] if k != "live"):
        values = [r[verb] for r in rows]
        print(f"{verb:<20}" + "".join(f"{v:>15.2f}" for v in values) + f"{values[-1] / values[0]:>8.2f}x")


if __name__ == "__main__":
    main()
