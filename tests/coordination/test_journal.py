"""The journal: entries round-trip, and a replay detects any difference."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.factories import make_coordinator
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import (
    Abort,
    CloseEnvironment,
    Command,
    Discard,
    FetchPrompts,
    Interrupt,
    Pull,
    Route,
    Score,
    StepEnvironment,
    Train,
)
from staleflow.pipeline.coordination.coordinator import Coordinator
from staleflow.pipeline.coordination.events import (
    EnvironmentFailed,
    EnvironmentStepped,
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    PullFinished,
    StopRequested,
    Tick,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from staleflow.stores.errors import ConfigError
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.serialization import decode_runs
from staleflow.stores.trajectory import Fate, GroupId, InstanceId, PolicyVersion, TrajectoryId
from tests.support.driver_runs import MOVES
from tests.support.examples import num_examples

KEYS = ("trajectories", "versions")
BASE = ("model.path=x", "steps=6", "batch.groups_per_step=3", "batch.group_size=2", "staleness.eta=2")
SHAPES = {
    "plain": (),
    "strict": ("staleness.eta=0", "batch.filtering=no_signal"),
    "redundant": ("batch.extra_members=1", "batch.extra_groups=1", "batch.filtering=no_signal"),
    "redundant groups": ("rollout.routing=benchmarks.routing_rules:ThroughputOptimal", "batch.extra_groups=2"),
    "synchronous": ("staleness.admission=synchronous", "batch.extra_members=2"),
    "random": ("rollout.routing=benchmarks.routing_rules:Random",),
    "deadline": ("rollout.synchronization=staggered", "staleness.eta=3", "rollout.migration=largest_gain"),
    "moving": MOVES,
    "agents": (
        "task.multi_turn=yes",
        "batch.extra_members=1",
        "rollout.routing=benchmarks.routing_rules:ThroughputOptimal",
    ),
    "agents_cut": ("task.multi_turn=yes", "batch.stragglers=truncate", "batch.stragglers.patience=0.1"),
    "truncate": ("batch.stragglers=truncate", "batch.stragglers.patience=0.1", "batch.stragglers.share=1"),
}


def coordinator(tmp_path: Path, shape: str = "redundant") -> Coordinator:
    path = tmp_path / "job.toml"
    path.write_text("")
    return make_coordinator(loading.load(path, (*BASE, *SHAPES[shape])), validate_every_event=True)


class TinyBody:
    """Executes commands in random order and with failures, to record eventful journals."""

    def __init__(self, brain: Coordinator, path: Path, seed: int) -> None:
        self.brain, self.rng, self.journal = brain, random.Random(seed), journal.Journal(path)
        self.pending: list[Event] = []
        self.next_group = 0
        self.now = 0.0
        self.ended: dict[int, Fate] = {}
        self.losses = 0
        self.instances: list[str] = []
        self.tokens: dict[int, int] = {}
        self.route_numbers: dict[int, int] = {}
        """Trajectories with an environment."""
        self.playing: set[int] = set()
        """Trajectories whose environment is open."""

    def tell(self, event: Event) -> None:
        self.now += self.rng.random()
        commands = self.brain.handle(event, self.now)
        self.journal.append(self.now, event, commands)
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: Command) -> None:  # noqa: PLR0912  one case per command
        match command:
            case FetchPrompts():
                groups = range(self.next_group, self.next_group + command.num_groups)
                self.next_group = groups.stop
                new = tuple(NewGroup(group=GroupId(g), prompt_tokens=5) for g in groups)
                self.pending.append(GroupsArrived(groups=new))
            case Route():
                t, e = command.trajectory, command.route_number
                self.route_numbers[t] = e
                self.tokens[t] = self.tokens.get(t, 0) + self.rng.randint(1, 9)
                answer: Event = TrajectorySampled(trajectory=t, route_number=e, tokens=self.tokens[t])
                if self.rng.random() < 0.05:
                    answer = TrajectoryFailed(trajectory=t, route_number=e, error="x")
                self.pending.append(answer)
            case Score():
                reward = float(self.rng.random() < 0.5)
                self.pending.append(TrajectoryScored(trajectory=command.trajectory, reward=reward))
            case StepEnvironment():
                self.act(command)
            case CloseEnvironment():
                assert command.trajectory in self.playing
                self.playing.remove(command.trajectory)
            case Pull():
                self.pending.append(PullFinished(instance=command.instance, version=command.version))
            case Train():
                for t, v in zip(command.trajectories, command.versions, strict=True):
                    assert v <= command.step <= v + self.brain.ledger.eta
                    assert self.ended.setdefault(t, Fate.CONSUMED) is Fate.CONSUMED
                self.pending.append(VersionPublished(version=PolicyVersion(command.step + 1)))
            case Discard():
                for ending in command.endings:
                    assert ending.trajectory not in self.ended
                    self.ended[ending.trajectory] = ending.fate
            case Interrupt():
                t, e = command.trajectory, self.route_numbers[command.trajectory]
                self.pending.append(TrajectoryInterrupted(trajectory=t, route_number=e, tokens=self.tokens[t]))
            case Abort():
                pass

    def act(self, command: StepEnvironment) -> None:
        t, e = command.trajectory, command.route_number
        self.playing.add(t)
        chance = self.rng.random()
        if chance < 0.1 and not command.truncated:
            self.pending.append(EnvironmentFailed(trajectory=t, route_number=e, error="x"))
        elif chance < 0.6 and not command.truncated:
            self.tokens[t] += 2
            self.pending.append(EnvironmentStepped(trajectory=t, route_number=e, tokens=self.tokens[t]))
        else:
            self.pending.append(TrajectoryScored(trajectory=t, reward=float(self.rng.random() < 0.5)))

    def run(self) -> None:
        for name in ("a", "b"):
            self.join(name)
        while not self.brain.is_finished:
            assert self.pending, self.brain.explain_waiting()
            event = self.pending.pop(self.rng.randrange(len(self.pending)))
            if isinstance(event, EnvironmentFailed):
                self.tokens[event.trajectory] = 0
            if isinstance(event, EnvironmentFailed | TrajectoryScored):
                self.playing.discard(event.trajectory)
            self.tell(event)
            if self.rng.random() < 0.02 and self.losses < 3:
                self.losses += 1
                lost, self.instances = self.instances[0], self.instances[1:]
                for name in (lost, "unknown"):
                    self.tell(InstanceLost(instance=InstanceId(name), why="x"))
                self.join(f"{lost}.1")
            for item in map(InstanceId, self.instances):
                progress = tuple((TrajectoryId(t), self.rng.randint(1, 5)) for t in self.rng.sample(range(60), 9))
                delivered = tuple((TrajectoryId(t), self.rng.randint(1, 5)) for t in self.rng.sample(range(60), 3))
                self.tell(InstanceReported(instance=item, progress=progress, delivered=delivered))
            self.tell(Tick())
        self.tell(StopRequested(why="all steps are trained"))
        self.journal.close()

    def join(self, name: str) -> None:
        version = self.brain.ledger.version
        self.instances.append(name)
        self.tell(InstanceJoined(instance=InstanceId(name), version=version, kv_capacity=500, max_running=7))


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=max(1, num_examples() // 40))
@given(seed=st.integers(0, 2**32))
def test_an_eventful_run_keeps_all_invariants_and_replays_to_the_same_commands(
    tmp_path_factory: pytest.TempPathFactory, shape: str, seed: int
) -> None:
    """Random order, failures, lost instances, redundancy and filters together: no deadlock, and bound and conservation
    hold."""
    tmp_path = tmp_path_factory.mktemp("life")
    body = TinyBody(coordinator(tmp_path, shape), tmp_path / "events.jsonl", seed)
    body.run()
    assert len(body.ended) == body.brain.ledger.num_started
    assert not body.playing, "every environment was closed"
    assert sum(f is Fate.CONSUMED for f in body.ended.values()) == 6 * 3 * 2
    replayed = journal.replay(coordinator(tmp_path, shape), journal.JournalReader(tmp_path / "events.jsonl"))
    assert replayed.difference == ""
    assert replayed.num_commands > 80
    story = body.brain.story(TrajectoryId(0))
    assert "arrived" in story[0]
    assert any(word in story[-1] for word in ("consumed", "aborted", "filtered"))


def test_a_changed_command_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    TinyBody(coordinator(tmp_path), path, 0).run()
    text = path.read_text()
    assert text.count('"instance":"b"') > 3
    at = text.index('"type":"Route"')
    path.write_text(text[:at] + text[at:].replace('"instance":"a"', '"instance":"b"', 1))
    assert "recorded" in journal.replay(coordinator(tmp_path), journal.JournalReader(path)).difference


WRITTEN = (
    '{"now":1.5,"event":{"type":"RunResumed","step":3,"num_ended":[["consumed:none",18]]},"commands":[]}',
    '{"now":1.5,"event":{"type":"InstanceJoined","instance":"a","version":0,"kv_capacity":500,"max_running":7},'
    '"commands":[{"type":"FetchPrompts","num_groups":9}]}',
    '{"now":1.5,"event":{"type":"GroupsArrived","groups":[{"type":"NewGroup","group":3,"prompt_tokens":5}]},'
    '"commands":[{"type":"Route","trajectory":54,"route_number":1,"instance":"b","version":3}]}',
    '{"now":1.5,"event":{"type":"InstanceReported","instance":"b","progress":[[5,3],[4,2]]},"commands":[]}',
    '{"now":1.5,"event":{"type":"TrajectorySampled","trajectory":7,"route_number":1,"tokens":9},'
    '"commands":[{"type":"Score","trajectory":7}]}',
    '{"now":1.5,"event":{"type":"TrajectoryScored","trajectory":1,"reward":1.0},'
    '"commands":[{"type":"Discard","endings":[{"type":"Ending","trajectory":2,"group":0,"fate":"aborted","reason":"surplus_member",'
    '"step":0}],"versions":[0]}]}',
    '{"now":1.5,"event":{"type":"TrajectoryScored","trajectory":1,"reward":0.0,"error":"no"},"commands":[]}',
    '{"now":1.5,"event":{"type":"VersionPublished","version":1},'
    '"commands":[{"type":"Pull","instance":"a","version":1}]}',
    '{"now":1.5,"event":{"type":"PullFinished","instance":"a","version":1},'
    '"commands":[{"type":"Interrupt","trajectory":19,"instance":"b"},'
    '{"type":"Abort","trajectory":4,"instance":"a"}]}',
    '{"now":1.5,"event":{"type":"InstanceLost","instance":"b","why":"x"},"commands":[]}',
    '{"now":1.5,"event":{"type":"TrajectoryFailed","trajectory":9,"route_number":1,"error":"x"},"commands":[]}',
    '{"now":1.5,"event":{"type":"TrajectoryInterrupted","trajectory":20,"route_number":2,"tokens":7},"commands":[]}',
    '{"now":1.5,"event":{"type":"Tick"},"commands":[]}',
    '{"now":1.5,"event":{"type":"StopRequested","why":"all steps are trained"},"commands":[]}',
)
"""One line of each kind as written before the codec was introduced."""


ADDED = (
    '{"now":1.5,"event":{"type":"RunResumed","step":1,"num_ended":[["consumed:none",6],["filtered:no_signal",0]],"groups":['
    '{"type":"GroupInFlight","group":3,"prompt_tokens":5,"members":['
    '{"type":"MemberInFlight","trajectory":10,"version":0,"tokens":7,"sampled":true,"scored":true,"reward":0.5},'
    '{"type":"MemberInFlight","trajectory":9}]}]},"commands":[]}',
    '{"now":1.5,"event":{"type":"InstanceReported","instance":"b","progress":[[5,3]],"delivered":[[5,2]]},"commands":[]}',
    '{"now":1.5,"event":{"type":"InstanceReported","instance":"b","progress":[[5,3]],"steps":{"type":"DecodeStats",'
    '"running":1,"kv_tokens":9,"seconds":0.5,"tokens":3,"drafts":1,"drafted_tokens":2,"accepted_tokens":1}},'
    '"commands":[]}',
    '{"now":1.5,"event":{"type":"InstanceLeaving","instance":"b"},"commands":[]}',
    '{"now":1.5,"event":{"type":"EnvironmentStepped","trajectory":7,"route_number":1,"tokens":9},'
    '"commands":[{"type":"StepEnvironment","trajectory":7,"route_number":1},'
    '{"type":"CloseEnvironment","trajectory":8},'
    '{"type":"ReleaseCache","trajectory":8,"instance":"a"}]}',
    '{"now":1.5,"event":{"type":"EvaluationRequested","evaluation":0,"groups":['
    '{"type":"NewGroup","group":-1,"prompt_tokens":5}]},"commands":['
    '{"type":"FinishEvaluation","evaluation":0,"version":3,"failed":[-8]}]}',
    '{"now":1.5,"event":{"type":"EnvironmentFailed","trajectory":7,"route_number":1,"error":"x"},"commands":[]}',
    '{"now":1.5,"event":{"type":"EnvironmentFailed","trajectory":7,"route_number":1,"error":"x","lost":true},"commands":[]}',
    '{"now":1.5,"event":{"type":"InstanceSlept","instance":"b","step":3},'
    '"commands":[{"type":"Sleep","instance":"a","step":3}]}',
    '{"now":1.5,"event":{"type":"DecisionsContinued"},"commands":'
    '[{"type":"Train","step":0,"trajectories":[[8,2],[0,2]],"versions":[[0,3],[1,1]]}]}',
)
"""Lines with fields added by later versions."""


def test_the_journal_encodes_to_the_same_bytes_as_before(tmp_path: Path) -> None:
    path, again = tmp_path / "events.jsonl", tmp_path / "again.jsonl"
    path.write_text("".join(f"{line}\n" for line in (*WRITTEN, *ADDED)))
    entries = list(journal.JournalReader(path))
    kinds = {type(e.event) for e in entries} | {type(c) for e in entries for c in e.commands}
    assert kinds == {*get_args(Event), *get_args(Command)}
    written = journal.Journal(again)
    for entry in entries:
        written.append(entry.now, entry.event, list(entry.commands))
    written.close()
    assert again.read_bytes() == path.read_bytes()


def test_a_batch_is_read_in_the_form_of_earlier_versions(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    train = '{"type":"Train","step":0,"trajectories":[1,0],"versions":[0,1]}'
    path.write_text(f'{{"now":1.5,"event":{{"type":"Tick"}},"commands":[{train}]}}\n')
    (entry,) = journal.JournalReader(path)
    assert entry.commands == (Train(step=0, trajectories=(1, 0), versions=(0, 1)),)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["plain", "redundant", "strict", "deadline", "agents"])
def test_a_journal_of_earlier_versions_replays_to_the_same_commands(tmp_path: Path, shape: str) -> None:
    """They listed a batch's members in the order in which they were scored, and what a stop ends in that of groups."""
    path = tmp_path / "events.jsonl"
    TinyBody(coordinator(tmp_path, shape), path, 3).run()
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    rank: dict[int, int] = {}
    for number, entry in enumerate(entries):
        if entry["event"]["type"] == "TrajectoryScored":
            rank.setdefault(entry["event"]["trajectory"], number)
        for command in entry["commands"]:
            if command["type"] == "Train":
                batch = [*zip(*(decode_runs(command[k], step=k == "trajectories") for k in KEYS), strict=True)]
                order = sorted(range(len(batch)), key=lambda i: (i // 2, rank[batch[i][0]]))
                command |= {key: [batch[i][j] for i in order] for j, key in enumerate(KEYS)}
            elif command["type"] == "Discard" and entry["event"]["type"] == "StopRequested":
                command["endings"].reverse()
                command["versions"].reverse()
    text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    assert text != path.read_text()
    path.write_text(text)
    assert journal.replay(coordinator(tmp_path, shape), journal.JournalReader(path)).difference == ""
    at = text.index('"type": "Train"')
    others = [text[:at] + text[at:].replace(*other, 1) for other in (("[", "[99, "), ('"step": 0', '"step": 1'))]
    for other in others:
        path.write_text(other)
        assert "recorded" in journal.replay(coordinator(tmp_path, shape), journal.JournalReader(path)).difference


def test_a_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"events\.jsonl'$"):
        journal.open_part(tmp_path / "events.jsonl")


def test_a_torn_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    TinyBody(coordinator(tmp_path), path, 1).run()
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    whole = journal.JournalReader(path)
    assert (len(list(whole)), whole.incomplete_line_number) == (len(lines), 0)
    for torn in (lines[-1][:20], lines[-1][:-2], bytes(40), b"\xff\n"):
        path.write_bytes(b"".join([*lines[:-1], torn]))
        entries = journal.JournalReader(path)
        assert (len(list(entries)), entries.incomplete_line_number) == (len(lines) - 1, len(lines))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"3", "expected dict, got 3"),
        (b"{}", "now: missing"),
        (b'{"now":"soon","event":{"type":"Tick"},"commands":[]}', "now: expected float, got 'soon'"),
        (b'{"now":1,"event":{"type":"Tock"},"commands":[]}', "event: unknown type 'Tock'"),
        (b'{"now":1,"event":{"type":["Tick"]},"commands":[]}', "event: unhashable"),
        (
            b'{"now":1,"event":{"type":"FetchPrompts","num_groups":1},"commands":[]}',
            "event: unknown type 'FetchPrompts'",
        ),
        (b'{"now":1,"event":{"type":"Tick","tack":1},"commands":[]}', "event: unknown field 'tack'"),
        (b'{"now":1,"event":{"type":"VersionPublished"},"commands":[]}', "event.version: missing"),
        (
            b'{"now":1,"event":{"type":"VersionPublished","version":"1"},"commands":[]}',
            "event.version: expected int, got '1'",
        ),
        (b'{"now":1,"event":{"type":"Tick"},"commands":[{"type":"Tick"}]}', "commands[0]: unknown type 'Tick'"),
        (b'{"now":1,"event":{"type":"Tick"},"commands":[null]}', "commands[0]: expected dict, got None"),
        *(
            (
                b'{"now":1,"event":{"type":"Tick"},"commands":[{"type":"Train","step":0,"trajectories":%s,"versions":[]}]}'
                % value,
                "commands[0].trajectories: expected " + message,
            )
            for value, message in (
                (b'"12"', "list, got '12'"),
                (b"[0.5]", "list, got 0.5"),
                (b"[[0,0]]", "integers or [first, count], got [0, 0]"),
                (b"[[0,99999999]]", "integers or [first, count], got [0, 99999999]"),
                (b"[[true,1]]", "integers or [first, count], got [True, 1]"),
            )
        ),
        (
            b'{"now":1,"event":{"type":"Tick"},"commands":[{"type":"Train","step":0,"trajectories":[[1]],"versions":[]}]}',
            "commands[0].trajectories: not enough values",
        ),
        (b'{"now":NaN,"event":{"type":"Tick"},"commands":[]}', "now: nan is not a time"),
        (b'{"now":1e400,"event":{"type":"Tick"},"commands":[]}', "now: inf is not a time"),
        (b'{"now":1%s,"event":{"type":"Tick"},"commands":[]}' % (b"0" * 400), "now: a number of 401 digits is out of"),
        (
            b'{"now":1,"event":{"type":"TrajectorySampled","trajectory":1,"route_number":1,"tokens":1%s},"commands":[]}'
            % (b"0" * 400),
            "event.tokens: a number of 401 digits is out of range",
        ),
        *(
            (
                b'{"now":1,"event":{"type":"RunResumed","step":2,"num_ended":[["%s",%d]]},"commands":[]}' % ended,
                f"event.num_ended: '{ended[0].decode()}': {ended[1]} is not a count of a fate and its reason",
            )
            for ended in ((b"bad:key", 1), (b"consumed", 1), (b"consumed:why", 1), (b"consumed:none", -1))
        ),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join([WRITTEN[0].encode(), line, WRITTEN[0].encode(), b""]))
    with pytest.raises(ConfigError) as error:
        list(journal.JournalReader(path))
    assert str(error.value).startswith(f"{path}, line 2: {message}")
    assert "\n" not in str(error.value)


def test_a_journal_with_missing_or_repeated_lines_gives_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    TinyBody(coordinator(tmp_path), path, 2).run()
    lines = path.read_text().splitlines()
    received = [i for i, line in enumerate(lines) if '"type":"Tick"' not in line and "InstanceReported" not in line]
    result = 0
    for i in received[::36]:
        for other in ([*lines[:i], *lines[i + 1 :]], [*lines[: i + 1], *lines[i:]]):
            path.write_text("".join(f"{line}\n" for line in other))
            result += journal.replay(coordinator(tmp_path), journal.JournalReader(path)).difference != ""
    assert result > len(received) // 36
