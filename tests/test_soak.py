"""The soak: what it counts, and a short one on a real cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.soaking.balance import Balance, balance
from benchmarks.soaking.counting import Recoveries, prompts
from benchmarks.soaking.faults import FAULTS, NEEDS_ROOT, left_out
from benchmarks.soaking.job import DIGITS, KINDS, Job, Kind, number_of
from benchmarks.soaking.killing import kept
from benchmarks.soaking.machine import Machine
from benchmarks.soaking.running import by_own_error
from staleflow.pipeline.coordination.commands import Command, Discard, Route
from staleflow.pipeline.coordination.events import (
    Event,
    InstanceLost,
    InstanceReported,
    PullFinished,
    RunResumed,
    Tick,
    TrajectorySampled,
)
from staleflow.pipeline.coordination.journal import CODEC, JournalEntry
from staleflow.stores.staleness.ledger_groups import Ending
from staleflow.stores.trajectories.records import RunHeader
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    Fate,
    GroupId,
    InstanceId,
    PolicyVersion,
    TrajectoryId,
)
from tests.stores.store_conformance import ended, record
from tests.support import forking, planted
from tests.support.planted import DEFECTS

HEADER = RunHeader(run="soak", eta=1, groups_per_step=1, group_size=2, members_started_per_group=2)
GIVEN_UP: dict[str, Any] = {"fate": Fate.ABORTED, "reason": AbortReason.RUN_ENDED}


def row(trajectory: int, *, number: int | None = None, **changes: Any) -> EndedTrajectory:
    """Return a stored trajectory of group trajectory // 2 with its prompt, or the prompt of another number."""
    group = trajectory // 2
    tokens = [int(digit) + 2 for digit in f"{group if number is None else number:0{DIGITS}d}"]
    rows = ended(np.random.default_rng(trajectory), trajectory, 0)
    whole = replace(rows.trajectory, group=GroupId(group), prompt_tokens=np.asarray(tokens, np.int32))
    return replace(rows, trajectory=whole, **changes)


def folder_with(tmp_path: Path, journals: Sequence[Sequence[Event]] = ()) -> VersionedStore:
    """Create the folder of a run with a store and the journals of its starts."""
    for number, events in enumerate(journals, 1):
        name = "events.jsonl" if number == len(journals) else f"events.{number}.jsonl"
        entries = [JournalEntry(now=float(at), event=event, commands=()) for at, event in enumerate(events)]
        lines = [CODEC.encode(entry) for entry in entries]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return VersionedStore.create(tmp_path / "store", HEADER)


def report(*progress: tuple[int, int]) -> InstanceReported:
    return InstanceReported(instance=InstanceId("rollout-0"), progress=tuple((TrajectoryId(t), n) for t, n in progress))


def end(trajectory: int, tokens: int) -> TrajectorySampled:
    return TrajectorySampled(trajectory=TrajectoryId(trajectory), route_number=0, tokens=tokens)


def test_every_prompt_is_counted_against_the_source(tmp_path: Path) -> None:
    store = folder_with(tmp_path)
    store.commit(record(0), [row(0), row(1), row(6), row(7)])
    store.commit(record(1, "resume"), [row(2, **GIVEN_UP), row(3, **GIVEN_UP)])
    store.commit(record(1), [row(10, number=77), row(11, number=77), row(14), row(15), row(12, **GIVEN_UP)])
    result = prompts(tmp_path)
    assert (result.trained, result.last, result.doubled, result.wrong) == (4, 7, 0, 1)
    assert result.stopped == 0
    assert result.skipped == {
        "aborted:run_ended at a resume": 1,
        "not in the store": 2,
        "aborted:run_ended at a step": 1,
    }
    assert len(result.findings()) == 4
    store.commit(record(2, "end"), [row(4, **GIVEN_UP), row(5, **GIVEN_UP)])
    assert prompts(tmp_path).stopped == 1
    assert number_of((2, 2, 3, 11)) == 19


@dataclass
class Recorded:
    """A run of one start in a folder: engine records, journal and stored trajectories."""

    folder: Path
    lines: list[dict[str, object]] = field(default_factory=list)
    entries: list[tuple[Event, tuple[Command, ...]]] = field(default_factory=list)
    rows: list[EndedTrajectory] = field(default_factory=list)

    def sampled(
        self, trajectory: int, start: int, stop: int, instance: str = "rollout-0", route_number: int = 0
    ) -> None:
        self.lines.append(
            {"instance": instance, "trajectory": trajectory, "route_number": route_number, "start": start, "stop": stop}
        )

    def stored(self, trajectory: int) -> int:
        """Store a trajectory of one span; returns its number of tokens."""
        one = row(3 * trajectory)  # whose rows have one span
        whole = replace(one.trajectory, id=TrajectoryId(trajectory), group=GroupId(trajectory // 2))
        self.rows.append(replace(one, trajectory=whole))
        return whole.num_tokens

    def heard(self, event: Event, *commands: Command) -> None:
        self.entries.append((event, commands))

    def balance(self) -> Balance:
        (self.folder / "records").mkdir()
        lines = [json.dumps(line) + "\n" for line in self.lines]
        (self.folder / "records" / "1.jsonl").write_text("".join(lines))
        entries = [JournalEntry(now=0.0, event=event, commands=commands) for event, commands in self.entries]
        encoded = [json.dumps(CODEC.encode(entry)) + "\n" for entry in entries]
        (self.folder / "events.jsonl").write_text("".join(encoded))
        VersionedStore.create(self.folder / "store", HEADER).commit(
            replace(record(0), ledger=replace(record(0).ledger, live=())), self.rows
        )
        return balance(self.folder, self.folder / "records")


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def route(trajectory: int, instance: str = "rollout-0", route_number: int = 0) -> Route:
    return Route(
        trajectory=TrajectoryId(trajectory),
        route_number=route_number,
        instance=InstanceId(instance),
        version=PolicyVersion(0),
    )


def test_tokens_balance_if_each_is_stored_or_discarded_for_a_reason(recorded: Recorded) -> None:
    sizes = [recorded.stored(trajectory) for trajectory in range(2)]
    for trajectory, size in enumerate(sizes):
        recorded.sampled(trajectory, 0, size // 2)  # looked at
        recorded.sampled(trajectory, 0, size)
    recorded.sampled(1, 0, 7, instance="rollout-1")
    recorded.heard(Tick(), route(1, "rollout-1"))
    recorded.heard(InstanceLost(instance=InstanceId("rollout-1"), why="killed"))
    result = recorded.balance()
    assert result.findings == ()
    assert (result.sampled, result.stored, result.live) == (sum(sizes) + 7, sum(sizes), 0)
    assert result.discarded == {"its instance was lost": 7}


@pytest.mark.parametrize("resumed_step", [4, 5])
def test_tokens_discarded_at_an_end_that_a_resume_undoes_are_in_flight_then(
    recorded: Recorded, resumed_step: int
) -> None:
    sizes = [recorded.stored(trajectory) for trajectory in range(2)]
    for trajectory, size in enumerate(sizes):
        recorded.sampled(trajectory, 0, size)
    recorded.sampled(1, 0, 7, instance="rollout-1")
    ending = Ending(
        trajectory=TrajectoryId(1), group=GroupId(0), fate=Fate.ABORTED, reason=AbortReason.RUN_ENDED, step=4
    )
    recorded.heard(Tick(), route(1, "rollout-1"))
    recorded.heard(Tick(), Discard(endings=(ending,), versions=(PolicyVersion(0),)))
    recorded.heard(RunResumed(step=resumed_step, num_ended=()))
    result = recorded.balance()
    assert result.discarded == ({"in flight when the run was resumed": 7} if resumed_step == 4 else {})
    assert len(result.findings) == (resumed_step == 5)


def test_tokens_lost_without_a_reason_are_found_even_if_sampled_again(recorded: Recorded) -> None:
    sizes = [recorded.stored(trajectory) for trajectory in range(2)]
    for trajectory, size in enumerate(sizes):
        recorded.sampled(trajectory, 0, size)
    recorded.sampled(1, 0, 7, instance="rollout-1")
    recorded.heard(Tick(), route(1, "rollout-1"))
    recorded.heard(InstanceLost(instance=InstanceId("rollout-2"), why="killed"))
    (finding,) = recorded.balance().findings
    assert finding.startswith("7 tokens of 1 trajectories were sampled, and are neither stored nor in flight")
    assert finding.endswith("first 1")


def test_a_trajectory_missing_from_the_store_and_a_missing_member_are_found(recorded: Recorded) -> None:
    recorded.sampled(0, 0, recorded.stored(0))
    recorded.sampled(1, 0, 9)
    findings = recorded.balance().findings
    assert [finding.split(",")[0] for finding in findings] == [
        "9 tokens of 1 trajectories were sampled",
        "1 groups were trained on with other than 2 members",
        "1 groups have other than 2 stored members",
    ]


def test_stored_tokens_without_a_sampling_engine_are_found(recorded: Recorded) -> None:
    sizes = [recorded.stored(trajectory) for trajectory in range(2)]
    recorded.sampled(0, 0, sizes[0])
    recorded.sampled(1, 0, sizes[1] - 1)
    recorded.lines.append({"instance": "rollout-0", "version": 4, "loaded_version": 3})
    recorded.lines.append({"instance": "rollout-0", "version": 5, "loaded_version": 5})
    for version in (4, 5):
        recorded.heard(PullFinished(instance=InstanceId("rollout-0"), version=PolicyVersion(version)))
    assert recorded.balance().findings == (
        "1 pulls without the weights being loaded, first rollout-0 version 4",
        "1 trajectories have stored tokens that no engine sampled, first 1",
    )


def test_a_finished_response_is_kept_unless_it_is_resampled_or_abandoned(tmp_path: Path) -> None:
    pulled = PullFinished(instance=InstanceId("rollout-0"), version=PolicyVersion(4))
    first: list[Event] = [end(0, 5), end(1, 5), end(2, 5), end(4, 5), pulled, end(7, 5)]
    resumed = RunResumed(step=3, num_ended=())  # version 4 is undone
    second: list[Event] = [resumed, report((1, 3), (7, 1)), end(6, 5)]
    store = folder_with(tmp_path, [first, second])
    store.commit(record(0, "resume"), [row(2, **GIVEN_UP)])
    store.commit(record(0), [row(0), row(1), row(7)])
    result = kept(tmp_path)
    assert (result.finished, result.resampled, result.undone) == (5, 2, 1)
    assert result.lost == {"given up at a resume": 1, "not in the store": 1}
    assert not result.whole


def test_recoveries_are_reported_by_fault() -> None:
    one = Recoveries()
    for seconds in (1.0, 9.0, 2.0):
        one.note("kill -9 trainer", seconds)
    (line,) = one.lines()
    assert line.split() == ["kill", "-9", "trainer", "3", "median", "2.0", "s", "most", "9.0", "s"]


@pytest.mark.parametrize(
    ("why", "own"),
    [
        ("failed: a bug in staleflow, please report it: the 2 ranks of the trainer are not a group yet", True),
        ("exit 1: staleflow: server failed: KeyError: 3", True),
        ("failed: the ranks of the trainer are not a group yet", True),
        ("exit 2: staleflow: task.source: no such file", True),
        ("submitting ended with 1: staleflow: cluster: cannot be used", True),
        ("exit 1: server was lost 4 times within an hour, last: server is gone", False),
        (
            "failed: trainer was lost 4 times within an hour, last: trainer-1 is gone: in <TCP>: ConnectionResetError: "
            "[Errno 104] Connection reset by peer",
            False,
        ),
        ("exit 1: /runs/soak/store: step 3 could not be stored: No space left on device; free space", False),
        ("failed: the process of its driver is gone", False),
        ("exit -9: step 12/1000000  reward 1.000", False),
        ("exit 0: see: summary.png", False),
        ("stopped: cancelled", False),
        ("killed", False),
    ],
)
def test_by_own_error_recognizes_errors_of_the_run(why: str, own: bool) -> None:
    assert by_own_error(why) is own


@pytest.mark.parametrize("kinds", [("plain",), ("turns", "ranks"), ("agents", "ranks")])
def test_the_job_is_valid(tmp_path: Path, kinds: tuple[Kind, ...]) -> None:
    from staleflow.pipeline.config import loading, preflight

    job = Job(folder=tmp_path, seed=1, kinds=kinds)
    job.write()
    assert preflight.check_job(loading.load(job.file)) == []


def test_each_kind_of_job_has_the_faults_of_its_roles() -> None:
    by_kind = {kind: set(FAULTS) - left_out(Machine("second", Path()), (kind,)) for kind in KINDS}
    assert "kill -9 reward" in by_kind["plain"] & by_kind["ranks"]
    assert by_kind["turns"] - by_kind["plain"] == {"kill -9 environment", "SIGSTOP environment"}
    assert by_kind["ranks"] - by_kind["plain"] == {"kill -9 rank", "SIGSTOP rank"}
    together = set(FAULTS) - left_out(Machine("second", Path()), ("agents", "ranks"))
    assert together == (by_kind["agents"] | by_kind["ranks"]) - {"kill -9 reward", "SIGSTOP reward", "reward hangs"}
    plain: tuple[Kind] = ("plain",)
    with_bucket = set(FAULTS) - left_out(Machine("second", Path()), plain, bucket=True)
    assert len(with_bucket - by_kind["plain"]) == 4
    assert set(FAULTS) - left_out(Machine(), plain) == by_kind["plain"] - set(NEEDS_ROOT)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder on disk: the soak's second host has a /dev/shm of its own, where pytest's folders may be."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def run_soak(disk_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.soaking", "--folder", str(disk_path / "soak"), *words]
    return forking.run(command, capture_output=True, text=True, timeout=3000)


def soak(disk_path: Path, *words: str) -> None:
    ran = run_soak(disk_path, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "no findings" in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_soak_that_is_interrupted_counts_what_it_has_done(disk_path: Path) -> None:
    words = ("--faults", "1000", "--seed", "1", "--job-kind", "plain", "--only", "kill -9 reward", "--overlap", "0")
    command = [sys.executable, "-m", "benchmarks.soak", "--folder", str(disk_path / "soak"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "fault 1: " in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 0, "".join(lines)
    assert not any("fault 2: " in line for line in lines)
    assert any(line.startswith("tokens: ") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_reported(disk_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    monkeypatch.setenv(planted.NAME, defect)
    ran = run_soak(disk_path, "--faults", "1", "--seed", "1", "--job-kind", "plain", "--only", "kill -9 reward")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert DEFECTS[defect][1] in ran.stdout.partition("findings:")[2]
    assert (disk_path / "soak" / "logs" / "run.log").is_file()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_thirty_faults(disk_path: Path, kind: Kind) -> None:
    soak(disk_path, "--faults", "30", "--seed", "1", "--job-kind", kind)
