"""Multi-turn trajectories on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from staleflow.stores.trajectories import derived_branches
from tests.run_page.page_client import Page
from tests.support.stored_runs import Response, StoredRun

CALLED = Response(text="ask", versions=(0,), reward=1.0, turns=(("tool", "4", 2.5, "four"), ("tool", "no", 0.0, "")))


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    stored = StoredRun(tmp_path)
    stored.train([("2+2", [CALLED, Response(text="5")])], given_tokens=3.0, turns_mean=1.5, turns_max=2.0, tool_s=1.25)
    return stored


def test_a_trajectory_is_a_conversation(run: StoredRun) -> None:
    one = Page(run.run_dir).ask("trajectory", id=0)
    assert [(p["role"], p["sampled"], p["start"], p["stop"], p["seconds"]) for p in one["message_spans"]] == [
        ("assistant", True, 0, 3, 0.0), ("tool", False, 3, 4, 2.5), ("assistant", True, 4, 8, 0.0),
        ("tool", False, 8, 10, 0.0),
    ]  # fmt: skip
    assert one["segments"] == [[0, "rollout-0", 3], [-1, "tool", 1, 2.5], [0, "rollout-0", 4], [-1, "tool", 2, 0.0]]
    assert (one["response_tokens"], one["turns"], one["facts"]["tool_s"]) == (7, 2, 2.5)
    assert one["tokens"]["version"] == [0, 0, 0, -1, 0, 0, 0, 0, -1, -1]
    assert one["tokens"]["ratio"] is None
    assert one["text"] == "ask4fourno"
    assert Page(run.run_dir).ask("trajectory", id=1)["messages"] == []


def test_ratios_are_of_sampled_tokens(run: StoredRun) -> None:
    logprobs = np.asarray(run.store._read_root()["tokens/logprobs"][:])
    derived_branches.derive_logprobs(run.store, run.run_dir / "store", "other", logprobs, {})
    ratios = Page(run.run_dir).ask("trajectory", id=0, branch="other")["tokens"]["ratio"]
    assert ratios == [1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0, None, None]


def test_a_group_shows_its_messages_with_roles_up_to_the_limit(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = Page(run.run_dir).ask("group", id=0)["groups"]
    assert [(p["role"], p["text"]) for p in group["members"][0]["messages"]] == [
        ("assistant", "ask"), ("tool", "4"), ("assistant", "four"), ("tool", "no"),
    ]  # fmt: skip
    from staleflow.pipeline.run_page import api

    monkeypatch.setattr(api, "MAX_TEXT_CHARACTERS", 6)
    monkeypatch.setattr(api, "EXCERPT_CHARS", 6)
    (group,) = Page(run.run_dir).ask("group", id=0)["groups"]
    assert [(p["role"], p["text"]) for p in group["members"][0]["messages"]] == [
        ("assistant", "ask"), ("tool", "4"), ("assistant", "fo"),
    ]  # fmt: skip
    assert group["members"][0]["cut"]


def test_charts_and_columns_of_turns_are_shown_for_multi_turn_runs(run: StoredRun, tmp_path: Path) -> None:
    page = Page(run.run_dir)
    shown = page.ask("overview")
    assert shown["many_turns"] and {"turns", "tools"} <= {chart["title"] for chart in shown["charts"]}
    assert page.ask("steps")["lines"]["tool_s"] == [1.25]
    assert page.ask("trajectories", where="turns > 1 and tool_s > 2")["columns"]["trajectory"] == [0]
    single = StoredRun(tmp_path / "other")
    single.train([("2+2", [Response(text="4"), Response(text="5")])], given_tokens=0.0, turns_mean=1.0, turns_max=1.0)
    shown = Page(single.run_dir).ask("overview")
    assert not shown["many_turns"] and "turns" not in {chart["title"] for chart in shown["charts"]}
