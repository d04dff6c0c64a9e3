"""What a soak counts: audits, prompts against their source, seconds until training went on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.soaking.job import number_of
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import AbortReason, Fate

AT = {"step": "a step", "resume": "a resume", "end": "the end"}
AUDIT_S = 1800.0
"""Seconds an audit may take, counted anew when it is tried again."""
STOPPED = f"{Fate.ABORTED.value}:{AbortReason.RUN_ENDED.value} at the end"
"""How trajectories end that a run gives up at its end."""


async def audited(run_dir: Path) -> list[str]:
    """The findings of `staleflow store audit`, at low priority: what a run does meanwhile is being timed. It is tried
    again while the store's bucket fails."""
    while True:
        process = await asyncio.create_subprocess_exec(
            "nice", sys.executable, "-m", "staleflow.cli.main", "store", "audit", str(run_dir), "--json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(AUDIT_S):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if out or "does not take requests" not in err.decode():
            break
    try:
        parsed: dict[str, Any] = json.loads(out)
    except ValueError:
        return [f"audit: {err.decode().strip()[-300:]}"]
    return [f"audit, {item['check']}, {item['location']}: {item['message']}" for item in parsed["findings"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a run's store against their source. last: the highest group trained on. skipped: groups up to it
    that were never trained on, by how their trajectories ended. stopped: groups given up because the run was asked to
    stop, which no fault did."""

    last: int
    trained: int
    skipped: dict[str, int]
    stopped: int
    doubled: int
    wrong: int

    def findings(self) -> list[str]:
        results = [f"{count} prompts skipped: {how}" for how, count in self.skipped.items()]
        results += [f"{self.doubled} prompts trained on twice"] * (self.doubled > 0)
        return results + [f"{self.wrong} groups have another prompt than the source's"] * (self.wrong > 0)


def prompts(run_dir: Path) -> Prompts:
    """Compare the store's groups with the source, whose prompt number i is the number i."""
    store = VersionedStore.open(run_dir / "store")
    records = iter(store.commits())
    record, left = None, 0
    fates: dict[int, Counter[str]] = defaultdict(Counter)
    wrong: set[int] = set()
    for row in store.trajectories():
        while left == 0:
            record = next(records)
            left = record.num_rows
        left -= 1
        group = int(row.trajectory.group)
        assert record is not None
        how = "consumed" if row.fate is Fate.CONSUMED else f"{row.fate.value}:{row.reason.value} at {AT[record.kind]}"
        fates[group][how] += 1
        if number_of(tuple(row.trajectory.prompt_tokens.tolist())) != group:
            wrong.add(group)
    size = store.header.group_size
    trained = {group for group, how in fates.items() if how["consumed"]}
    last = max(trained, default=-1)
    skipped: Counter[str] = Counter()
    for group in set(range(last + 1)) - trained:
        hows = set(fates[group]) if group in fates else {"not in the store"}
        skipped[", ".join(sorted(hows))] += 1
    stopped = skipped.pop(STOPPED, 0)
    return Prompts(
        last=last,
        trained=len(trained),
        skipped=dict(skipped),
        stopped=stopped,
        doubled=sum(how["consumed"] > size for how in fates.values()),
        wrong=len(wrong),
    )


@dataclass(slots=True)
class Recoveries:
    """Seconds from each fault until the second training step after it was reported; the first may have been under way.
    Only of faults that had passed before the next one struck."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, fault: str, seconds: float) -> None:
        self.seconds[fault].append(seconds)

    def lines(self) -> list[str]:
        return [
            f"  {fault:34} {len(of):5}   median {median(of):6.1f} s   most {max(of):6.1f} s"
            for fault, of in sorted(self.seconds.items())
        ]
