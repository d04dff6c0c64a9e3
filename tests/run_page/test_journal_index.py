"""The journal index: instances, trainer and queues over time, and the story of each trajectory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.run_page.journal_index import JournalIndex, ValueOverTime

Entry = tuple[float, dict[str, Any], list[dict[str, Any]]]
"""Time, event and commands."""


def index(*entries: Entry, members: int = 2) -> JournalIndex:
    made = JournalIndex(members)
    made.begin_start()
    add(made, *entries)
    return made


def add(journal_index: JournalIndex, *entries: Entry) -> None:
    for now, event, commands in entries:
        journal_index.add(json.dumps({"now": now, "event": event, "commands": commands}), "a line")
    assert journal_index.read_error == ""


def joined(name: str, version: int = 0) -> dict[str, Any]:
    return {"type": "InstanceJoined", "instance": name, "version": version, "kv_capacity": 9, "max_running": 2}


def route(trajectory: int, instance: str, version: int = 0) -> dict[str, Any]:
    return {
        "type": "Route",
        "trajectory": trajectory,
        "route_number": 1,
        "instance": instance,
        "version": version,
    }


def ended(kind: str, trajectory: int, tokens: int = 5) -> dict[str, Any]:
    return {"type": kind, "trajectory": trajectory, "route_number": 1, "tokens": tokens}


ARRIVED = {"type": "GroupsArrived", "groups": [{"type": "NewGroup", "group": 3, "prompt_tokens": 4}]}


def act(trajectory: int) -> dict[str, Any]:
    return {"type": "StepEnvironment", "trajectory": trajectory, "route_number": 1, "truncated": False}


def test_the_story_of_an_episode_has_its_turns_and_environment_steps() -> None:
    journal_index = index(
        (0.0, joined("a"), []),
        (1.0, ARRIVED, [route(6, "a"), route(7, "a")]),
        (2.0, ended("TrajectorySampled", 6, 9), [act(6)]),
        (4.0, ended("EnvironmentStepped", 6, 12), [route(6, "a")]),
        (4.5, ended("EnvironmentStepped", 6, 12), []),  # a late one
        (5.0, ended("TrajectorySampled", 6, 15), [act(6)]),
        (6.0, {"type": "EnvironmentFailed", "trajectory": 6, "route_number": 2, "error": "hung"}, [route(6, "a")]),
        (7.0, ended("TrajectorySampled", 6, 4), [act(6)]),
        (9.0, {"type": "TrajectoryScored", "trajectory": 6, "reward": 1.0}, []),
    )
    received = [(mark["at_s"], mark["what"], mark["phase"]) for mark in journal_index.story(6)]
    assert received[2:] == [
        (2.0, "sampled a turn, 9 tokens so far", "acting"),
        (4.0, "its environment answered, 12 tokens so far", "waiting"),
        (4.0, "routed to a at version 0", "sampling"),
        (5.0, "sampled a turn, 15 tokens so far", "acting"),
        (6.0, "its environment failed: hung", "waiting"),
        (6.0, "routed to a at version 0", "sampling"),
        (7.0, "sampled a turn, 4 tokens so far", "acting"),
        (9.0, "reward 1", "ready"),
    ]
    places = {place["name"]: place["count"] for place in journal_index.window(2.0, 4.0, 2)["phases"]}
    assert places["waiting for their environment"] == [1.0, 1.0]
    assert places["being scored"] == [0.0, 0.0]


LIFE: tuple[Entry, ...] = (
    (0.0, joined("a"), []),
    (0.0, joined("b"), []),
    (1.0, ARRIVED, [route(6, "a"), route(7, "a")]),
    (2.0, ended("TrajectoryInterrupted", 6), [route(6, "b")]),
    (2.5, {"type": "Tick"}, [{"type": "Pull", "instance": "b", "version": 1}]),
    (3.0, {"type": "PullFinished", "instance": "b", "version": 1}, []),
    (4.0, ended("TrajectorySampled", 6, 9), [{"type": "Score", "trajectory": 6}]),
    (5.0, {"type": "TrajectoryScored", "trajectory": 6, "reward": 0.25}, []),
    (6.0, ended("TrajectorySampled", 7, 3), []),
    (7.0, {"type": "TrajectoryScored", "trajectory": 7, "reward": 1.0},
     [{"type": "Train", "step": 0, "trajectories": [[6, 2]], "versions": [[0, 2]]}]),
    (9.0, {"type": "VersionPublished", "version": 1}, []),
    (10.0, {"type": "Tick"}, []),
)  # fmt: skip


def test_the_story_of_a_trajectory_is_in_order() -> None:
    story = index(*LIFE).story(6)
    assert [(m["at_s"], m["what"], m["phase"]) for m in story] == [
        (1.0, "arrived", "waiting"),
        (1.0, "routed to a at version 0", "sampling"),
        (2.0, "interrupted at 5 tokens", "waiting"),
        (2.0, "routed to b at version 0", "sampling"),
        (3.0, "goes on under version 1", "sampling"),
        (4.0, "sampled to its end, 9 tokens", "scoring"),
        (5.0, "reward 0.25", "ready"),
        (7.0, "consumed by step 0", ""),
    ]
    assert index(*LIFE).story(99) == []


def test_lives_are_split_where_the_version_changed() -> None:
    assert index(*LIFE).phase_intervals([7, 6, 99]) == [
        [(1.0, 1.0, "waiting", -1), (1.0, 6.0, "sampling", 0), (6.0, 7.0, "scoring", -1), (7.0, 7.0, "ready", -1)],
        [
            (1.0, 1.0, "waiting", -1), (1.0, 2.0, "sampling", 0), (2.0, 2.0, "waiting", -1), (2.0, 3.0, "sampling", 0),
            (3.0, 4.0, "sampling", 1), (4.0, 5.0, "scoring", -1), (5.0, 7.0, "ready", -1),
        ],
        [],
    ]  # fmt: skip


def test_a_window_shows_the_load_of_each_instance_over_time() -> None:
    window = index(*LIFE).window(0.0, 10.0, 10)
    a, b = window["instances"]
    assert a["running"] == [0, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert b["running"] == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert b["version"] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert b["pulling"] == [0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0]
    assert window["training"] == [0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert window["step"] == [-1] * 7 + [0, 0, 0]
    places = {place["name"]: place["count"] for place in window["phases"]}
    assert places["being sampled"] == [0, 2, 2, 2, 1, 1, 0, 0, 0, 0]
    assert places["being scored"] == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert places["ready or waiting for siblings"] == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]


def test_a_part_of_a_window_has_the_same_numbers() -> None:
    journal_index = index(*LIFE)
    whole, part = journal_index.window(0.0, 10.0, 10), journal_index.window(3.0, 6.0, 3)
    assert part["instances"][0]["running"] == whole["instances"][0]["running"][3:6]
    assert (part["begin_s"], part["end_s"], part["last_s"]) == (3.0, 6.0, 10.0)


@pytest.mark.parametrize(("begin", "end"), [(5.0, 5.0), (8.0, 2.0), (50.0, 60.0), (-9.0, -3.0), (0.0, 1e18)])
def test_an_invalid_window_shows_the_whole_run(begin: float, end: float) -> None:
    window = index(*LIFE).window(begin, end, 10**9)
    assert (window["begin_s"], window["end_s"], len(window["step"])) == (0.0, 10.0, 1_000)


def test_an_empty_journal_has_a_window() -> None:
    window = JournalIndex(1).window(0.0, 1e9, 5)
    assert (window["num_events"], window["instances"], window["training"]) == (0, [], [0.0] * 5)


def test_trajectories_of_a_lost_instance_wait_again() -> None:
    lost = index(*LIFE[:3], (3.0, {"type": "InstanceLost", "instance": "a", "why": "killed"}, [route(6, "b")]))
    add(lost, (4.0, joined("a", 1), []), (6.0, {"type": "Tick"}, []))
    assert [m["what"] for m in lost.story(6)][2:] == ["a was lost", "routed to b at version 0"]
    window = lost.window(0.0, 6.0, 6)
    assert window["instances"][0]["version"] == [0, 0, 0, -1, 1, 1]
    assert window["instances"][0]["running"] == [0, 2, 2, 0, 0, 0]
    assert window["instances"][1]["running"] == [0, 0, 0, 1, 1, 1]
    assert window["events"] == [[3.0, "a lost: killed"]]


def test_a_dropped_trajectory_has_its_reason_and_late_results_are_ignored() -> None:
    ending = {"type": "Ending", "trajectory": 7, "group": 3, "fate": "aborted", "reason": "surplus_member", "step": 0}
    retire = {"type": "Discard", "endings": [ending], "versions": [0]}
    abort = {"type": "Abort", "trajectory": 7, "instance": "a"}
    dropped = index(*LIFE[:3], (2.0, {"type": "Tick"}, [abort, retire]), (3.0, ended("TrajectorySampled", 7), []))
    assert [m["what"] for m in dropped.story(7)][2:] == ["sampling aborted on a", "aborted: surplus_member"]
    assert dropped.window(0.0, 3.0, 3)["instances"][0]["running"] == [0, 2, 1]


@pytest.mark.parametrize(
    ("resumed_s", "begin_s"),
    [(0.4, 0.4), (0.0, 0.0), (70.0, 0.0)],
    ids=["from the resume point", "from 0", "RunResumed is on the clock of the previous start"],
)
def test_the_next_start_begins_where_the_previous_one_ended(resumed_s: float, begin_s: float) -> None:
    journal_index = index(*LIFE[:3])
    journal_index.begin_start()
    add(
        journal_index,
        (resumed_s, {"type": "RunResumed", "step": 0, "num_ended": []}, []),
        (begin_s, joined("a", 2), []),
        (begin_s + 2.0, {"type": "Tick"}, []),
    )
    window = journal_index.window(0.0, 3.0, 3)
    assert (window["last_s"], window["starts"]) == (3.0, [1.0])
    assert window["instances"][0]["version"] == [0, 2, 2]
    assert window["instances"][0]["running"] == [0, 0, 0]
    assert window["phases"][1]["count"] == [0, 0, 0]


def test_the_next_start_shows_its_recovered_trajectories() -> None:
    journal_index = index(*LIFE[:3])
    journal_index.begin_start()
    members = [
        {"type": "MemberInFlight", "trajectory": 6, "version": 0, "tokens": 9, "sampled": True, "scored": True},
        {"type": "MemberInFlight", "trajectory": 7, "version": 0, "tokens": 4, "sampled": True},
    ]
    group = {"type": "GroupInFlight", "group": 3, "prompt_tokens": 4, "members": members}
    fresh = {"type": "GroupInFlight", "group": 4, "prompt_tokens": 4,
             "members": [{"type": "MemberInFlight", "trajectory": id} for id in (8, 9)]}  # fmt: skip
    score = {"type": "Score", "trajectory": 7}
    add(
        journal_index,
        (0.5, {"type": "RunResumed", "step": 0, "num_ended": [], "groups": [group, fresh]}, [score]),
        (1.0, joined("a", 2), [route(8, "a")]),
        (1.5, {"type": "TrajectoryScored", "trajectory": 7, "reward": 1.0}, []),
        (2.5, {"type": "Tick"}, []),
    )
    counts = {place["name"]: place["count"] for place in journal_index.window(1.0, 3.0, 4)["phases"]}
    assert counts == {
        "waiting for an instance": [2, 1, 1, 1],
        "being sampled": [0, 1, 1, 1],
        "being scored": [1, 1, 0, 0],
        "ready or waiting for siblings": [1, 1, 2, 2],
        "waiting for their environment": [0, 0, 0, 0],
    }
    phases = {id: [(m["at_s"], m["phase"]) for m in journal_index.story(id)] for id in (6, 7, 8)}
    assert phases == {
        6: [(1.0, "waiting"), (1.0, "sampling"), (1.0, "ready")],
        7: [(1.0, "waiting"), (1.0, "sampling"), (1.0, "scoring"), (2.0, "ready")],
        8: [(1.0, "waiting"), (1.5, "sampling")],
    }
    assert journal_index.story(6)[-1]["what"] == "the run was resumed; it has 9 tokens and a reward"


def test_the_life_of_a_trajectory_that_an_undone_step_consumed_begins_at_the_resume() -> None:
    journal_index = index(*LIFE)
    journal_index.begin_start()
    member = {"type": "MemberInFlight", "trajectory": 6, "version": 0, "tokens": 9, "sampled": True, "scored": True}
    group = {"type": "GroupInFlight", "group": 3, "prompt_tokens": 4, "members": [member]}
    add(
        journal_index,
        (4.0, {"type": "RunResumed", "step": 0, "num_ended": [], "groups": [group]}, []),
        (6.0, {"type": "Tick"}, [{"type": "Train", "step": 0, "trajectories": [6], "versions": [0]}]),
    )
    assert journal_index.phase_intervals([6]) == [[(10.0, 12.0, "ready", -1)]]
    assert [(m["at_s"], m["phase"]) for m in journal_index.story(6)] == [(10.0, "ready"), (12.0, "")]


def test_responses_of_a_finished_evaluation_are_in_no_phase() -> None:
    finish = {"type": "FinishEvaluation", "evaluation": 0, "version": 0, "failed": [-3]}
    journal_index = index(
        (0.0, joined("a"), []),
        (0.0, ARRIVED, [route(-2, "a"), route(-3, "a"), route(-4, "a"), route(6, "a")]),
        (1.0, ended("TrajectorySampled", -2), [{"type": "Score", "trajectory": -2}]),
        (2.0, {"type": "TrajectoryScored", "trajectory": -2, "reward": 1.0}, []),
        (2.0, ended("TrajectorySampled", -3), [{"type": "Score", "trajectory": -3}]),
        (3.0, {"type": "Tick"}, [finish]),
        (3.5, {"type": "TrajectoryScored", "trajectory": -3, "reward": 1.0}, []),
        (4.0, {"type": "Tick"}, []),
    )
    window = journal_index.window(2.0, 4.0, 2)
    counts = {place["name"]: place["count"] for place in window["phases"]}
    assert counts["ready or waiting for siblings"] == [1, 0]
    assert counts["being scored"] == [1, 0]
    assert (counts["being sampled"], window["instances"][0]["running"]) == ([2, 1], [2, 1])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 9)), max_size=20), st.integers(1, 9))
def test_step_function_means_match_fine_sampling(changes: list[tuple[float, int]], bins: int) -> None:
    function = ValueOverTime()
    for at, value in sorted(changes):
        function.set(at, value)
    edges = np.linspace(0, 11, bins + 1)
    fine = np.linspace(0, 11, 11 * 400 * bins, endpoint=False)
    sampled = function.at(fine, 0).reshape(bins, -1).mean(axis=1)
    assert function.means(edges) == pytest.approx(sampled, abs=0.2)
