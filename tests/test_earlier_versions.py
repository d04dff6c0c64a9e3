"""Runs, stores, journals and job files of an earlier version: read, audited, replayed and resumed by this one.

tests/earlier has the runs, and the output about them of the version that made them; tests/earlier/make.py made them.
Only the command line and files are used here, so that internals may change. A new key in the output is no difference;
a missing key or another value is.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config.job_conversion import convert_job
from tests.earlier import asking
from tests.support import forking


@pytest.fixture(scope="module", params=asking.NAMES)
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(name, folder of the run) of each fixture. Tests here only read it."""
    return request.param, asking.unpack(request.param, tmp_path_factory.mktemp(request.param))


@functools.cache
def expected(name: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((asking.HERE / f"{name}.json").read_text())
    return answers


def assert_says(present: Any, before: Any, where: str = "") -> None:
    """The present answer has all that the one before had. Fractions may differ by another machine's rounding."""
    if isinstance(before, dict):
        assert isinstance(present, dict), where
        assert not before.keys() - present.keys(), where
        for key, value in before.items():
            assert_says(present[key], value, f"{where} > {key}")
    elif isinstance(before, list):
        assert isinstance(present, list), where
        assert len(present) == len(before), where
        for i, value in enumerate(before):
            assert_says(present[i], value, f"{where} > {i}")
    elif isinstance(before, float):
        assert present == pytest.approx(before, rel=1e-6, abs=1e-9), where
    else:
        assert present == before, where


def with_moved_keys(rows: dict[str, Any]) -> dict[str, Any]:
    """What `config explain` said of a job, by the keys that its values have now."""
    tree: dict[str, Any] = {}
    for key, value in rows.items():
        *tables, name = key.split(".")
        functools.reduce(lambda table, part: table.setdefault(part, {}), tables, tree)[name] = value

    def flat(below: dict[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in below.items():
            key = f"{prefix}{name}"
            found |= (
                flat(value, f"{key}.")
                if isinstance(value, dict) and not isinstance(rows.get(key), dict)
                else {key: value}
            )
        return found

    return flat(convert_job(tree), "")


def test_the_command_line_says_of_it_what_it_said(earlier: tuple[str, Path]) -> None:
    name, run = earlier
    answers = asking.ask(run)
    for question, present in answers.items():
        before = expected(name)[question]
        if question == "config explain":
            before = {file: with_moved_keys(rows) for file, rows in before.items()}
        assert_says(present, before, f"{name}: {question}")
    assert answers["store audit"]["clean"]
    assert answers["store audit"]["findings"] == []
    assert answers["replay"]["difference"] == ""
    for step in answers["store show --at-step"].values():
        assert step["fingerprint"] == step["recorded_fingerprint"]


def test_the_journals_hold_all_kinds_of_words(tmp_path: Path) -> None:
    """Of the fixtures themselves: ones that are made anew must not know less. No engine failed in any."""
    events, commands = Counter[str](), Counter[str]()
    for name in asking.NAMES:
        more_events, more_commands = asking.journal_words(asking.unpack(name, tmp_path / name))
        events += more_events
        commands += more_commands
    assert set(events) == {
        "RunResumed", "GroupsArrived", "InstanceJoined", "InstanceLost", "InstanceReported", "TrajectorySampled",
        "TrajectoryInterrupted", "TrajectoryScored", "PullFinished", "VersionPublished", "StopRequested", "Tick",
    }  # fmt: skip
    assert set(commands) == {"Draw", "Route", "Interrupt", "Abort", "Pull", "Score", "Train", "Retire"}


def test_what_if_it_had_been_another_is_answered_as_before(earlier: tuple[str, Path]) -> None:
    """The bound is what the stored run and its measured costs say; the rest may move with the simulator's own rules."""
    name, run = earlier
    (present,), (before,) = (
        json.loads(asking.answer("simulate", "--from", run, "--json")),
        expected(name)["simulate --from"],
    )
    # What was prefilled again is the simulated run's. Where two of its events fall in one moment, rounding orders them,
    # and processors round differently.
    work_s = before["bound"]["work_s"]
    # That version sampled again what was trained on alone; of `credits` a ninth was filtered.
    assert present["bound"]["work_s"] == pytest.approx(work_s, rel=0.06 if name == "credits" else 0.01)
    assert_says({**present["bound"], "work_s": work_s}, before["bound"], name)
    for key in ("steps_measured", "bound_kept", "losses"):
        assert present[key] == before[key]
    # What that version called tokens_per_s was that of the steady part; see tests/earlier/README.md.
    now = {"tokens_per_s": "steady_tokens_per_s"}
    for key in ("step_s", "tokens_per_s", "sampled_tokens"):
        assert present[now.get(key, key)] == pytest.approx(before[key], rel=0.1), key


def test_a_branch_with_other_rewards_is_compared_and_exported_as_before(tmp_path: Path) -> None:
    run = asking.unpack("finished", tmp_path)
    before = expected("finished")
    assert_says(json.loads(asking.answer("store", "diff", run, "main", "odd", "--json")), before["store diff"])
    assert before["store diff"]["changed"] > 0
    assert_says(asking.exported(run, "odd"), before["store export"])


def test_a_run_that_was_killed_goes_on_and_the_audit_is_clean(tmp_path: Path) -> None:
    run = asking.unpack("killed", tmp_path)
    before = expected("killed")
    trained = sum(record["kind"] == "step" for record in before["store show"])
    words = ["resume", str(run), "--set", f"steps={trained + 2}", "--set", "rollout.instances=1", "--json"]
    done = forking.run(
        [sys.executable, "-m", "staleflow.cli.main", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [e["version"] for e in summary["evaluations"]] == [0, trained + 2]

    answers = asking.ask(run)
    assert answers["store audit"]["clean"]
    assert answers["store audit"]["num_steps"] == trained + 2
    assert answers["replay"]["difference"] == ""
    assert answers["replay"]["events"] > before["replay"]["events"]
    assert {"config.1.toml", "config.toml"} <= answers["config explain"].keys()
    assert (answers["store ls"]["state"], answers["store ls"]["steps"]) == ("ended", trained + 2)
    kept = [record for record in answers["store show"] if record["kind"] == "step"][:trained]
    assert_says(kept, [record for record in before["store show"] if record["kind"] == "step"])
    for step, batch in before["store show --at-step"].items():
        assert answers["store show --at-step"][step]["fingerprint"] == batch["fingerprint"]
