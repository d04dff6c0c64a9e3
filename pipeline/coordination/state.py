"""All that the coordinator believes, in one place: to be looked at, and to be checked. Changed only by it. Pure."""

from __future__ import annotations

from pipeline.coordination.fleet import Fleet
from pipeline.coordination.forecast import ForecastError
from pipeline.coordination.measured import Measured
from pipeline.coordination.snapshot import InstanceView, Snapshot
from pipeline.coordination.trajectories import LiveTrajectory, Phase
from pipeline.coordination.work_queue import FRESH, WorkQueue
from stores.errors import ProtocolViolation
from stores.staleness import EntryState, StalenessLedger
from stores.trajectory import AbortReason, GroupId, TrajectoryId


class CoordinatorState:
    """Speculative: a command is taken to have landed the moment it is given."""

    def __init__(self, ledger: StalenessLedger) -> None:
        self.ledger = ledger
        self.live: dict[TrajectoryId, LiveTrajectory] = {}
        self.fleet = Fleet()
        self.waiting = WorkQueue()
        self.fresh_groups: set[GroupId] = set()
        """Of these no member was routed yet."""
        self.training = False
        self.measured = Measured()

    def waiting_for(self, now: float, limit: int) -> str:
        """One paragraph for a run that makes no progress: what the next step waits for, and where that is."""
        ledger = self.ledger
        if self.training:
            return f"step {ledger.next_step - 1} is training"
        head = (
            f"step {ledger.next_step} waits for {ledger.groups_per_step - ledger.num_occupied} more of its "
            f"{ledger.groups_per_step} groups; {ledger.num_reserved} are being sampled, "
            f"{len(self.fresh_groups)} queued, {len(self.fleet)} instances"
        )
        oldest = sorted(
            (t for t in self.live.values() if t.phase is not Phase.DONE),
            key=lambda t: (FRESH if (version := ledger.entries[t.group].version) < 0 else version, t.since),
        )[:limit]
        lines = [
            f"group {t.group}, trajectory {t.id}: {t.phase.value} for {now - t.since:.1f} s"
            + (f" on {t.instance}" if t.instance is not None else "")
            + f", {t.tokens} tokens, version {t.v_traj}"
            for t in oldest
        ]
        return "\n  ".join([head, *lines])

    def snapshot(self, refusals: dict[str, int], forecast: ForecastError) -> Snapshot:
        """The run as it stands. O(groups + instances)."""
        phases = dict.fromkeys(Phase, 0)
        for live in self.live.values():
            phases[live.phase] += 1
        ages: dict[EntryState, list[int]] = {s: [] for s in EntryState}
        for entry in self.ledger.entries.values():
            ages[entry.state].append(self.ledger.version - entry.version)
        return Snapshot(
            version=self.ledger.version,
            next_step=self.ledger.next_step,
            training=self.training,
            num_queued=phases[Phase.QUEUED],
            num_running=phases[Phase.RUNNING],
            num_scoring=phases[Phase.SCORING],
            num_started=self.ledger.num_started,
            num_live=self.ledger.num_live,
            ended={
                fate.value if reason is AbortReason.NONE else f"{fate.value}:{reason.value}": n
                for (fate, reason), n in self.ledger.num_ended.items()
            },
            staleness_in_flight=_mean(ages[EntryState.RESERVED]),
            staleness_in_queue=_mean(ages[EntryState.OCCUPIED]),
            buffers=self.ledger.view(),
            instances=tuple(
                InstanceView(
                    instance=i.instance,
                    version=i.version,
                    pulling=i.pulling,
                    num_running=i.num_running,
                    max_running=i.max_running,
                    kv_tokens=i.kv_tokens,
                    kv_capacity=i.kv_capacity,
                )
                for i in self.fleet
            ),
            refusals=dict(refusals),
            forecast=forecast,
        )

    def validate(self) -> None:
        """The ledger's invariants, and that the coordinator and the ledger speak of the same trajectories."""
        self.ledger.validate()
        held = {m for e in self.ledger.entries.values() for m in e.members}
        if held != self.live.keys():
            raise ProtocolViolation(f"ledger and coordinator differ about {sorted(held ^ self.live.keys())[:10]}")
        for instance in self.fleet:
            if instance.kv_tokens != sum(self.live[m].kv_tokens for m in instance.trajectories):
                raise ProtocolViolation(f"{instance.instance} is taken to hold {instance.kv_tokens} KV tokens")
            moving = [t for t in self.live.values() if t.target == instance.instance]
            moving += [self.live[m] for m in instance.trajectories if self.live[m].target is not None]
            if instance.in_transit != len(moving):
                raise ProtocolViolation(f"{instance.instance}: {instance.in_transit} in transit, {len(moving)} move")
            row = (instance.num_running, instance.kv_tokens, instance.version)
            held_row = tuple(a[instance.row] for a in (self.fleet.running, self.fleet.kv_tokens, self.fleet.version))
            if row != held_row:
                raise ProtocolViolation(f"{instance.instance} has {row}, the arrays say {held_row}")
            for member in instance.trajectories:
                live = self.live[member]
                if live.phase is not Phase.RUNNING or live.instance != instance.instance:
                    raise ProtocolViolation(f"{member} is listed on {instance.instance} but {live.phase.value}")
        queued = {
            t.id: FRESH if self.ledger.entries[t.group].version < 0 else self.ledger.entries[t.group].version
            for t in self.live.values()
            if t.phase is Phase.QUEUED
        }
        standing = {t.id: t.level for t in self.waiting}
        if queued != standing:
            raise ProtocolViolation(f"queued and waiting differ: {sorted(queued.items() ^ standing.items())[:10]}")


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
