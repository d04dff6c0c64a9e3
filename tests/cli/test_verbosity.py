"""Output of `-v`: one line per training step and per event; in a pipe, with JSON, and above a live view."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from staleflow.cli import train_offline
from staleflow.cli.display import ConsoleHandler, Display, logging_to
from staleflow.pipeline.config import loading
from staleflow.pipeline.config.factories import make_coordinator
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs import execution
from staleflow.pipeline.jobs.execution import RunEnd
from staleflow.pipeline.jobs.reporter import Reporter, WarningHandler, capturing_warnings
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.runtime.run_report import RunListener, RunListeners, RunReport
from tests.commands import command

JOB = "examples/dryrun.toml"
METRICS = "reward response_mean staleness_mean staleness_max loss grad_norm train_s wait_s elapsed_s"
STEP = dict.fromkeys(METRICS.split(), 0.5)
SUMMARY: dict[str, Any] = {
    "steps": 2, "evaluations": [], "seconds": {}, "alarms": [], "trajectories_consumed": 0, "response_tokens": 0,
    "staleness_histogram": {}, "eta": 1, "tasks": [], "cost_model": {"measured_over_predicted": None, "drifted": False},
    "overhead": {
        "trainer_waits_though_ready": 0.4,
        "trainer_waits_for_resume_point": 0.35,
        "rollout_idle_though_routable": 0.0,
    },
}  # fmt: skip


async def short_run(config: RunConfig, listener: RunListener, **_: Any) -> RunEnd:
    """A run reported and logged as by the command, without a cluster."""
    reporter = Reporter("a-job", 2, Path("runs/none"))
    listeners = RunListeners(reporter, listener)
    with capturing_warnings(reporter.on_line):
        listener.on_line("Dask dashboard: nowhere")
        listeners.on_activity("evaluating version 0")
        listeners.on_status(make_coordinator(config).snapshot(), RunReport())
        listeners.on_evaluation(Evaluation(version=0, num_prompts=8, sampled=0.25, greedy=0.5))
        logging.getLogger("staleflow.pipeline.processes.dask_workers").debug("server placed on w")
        for step in range(2):
            listeners.on_step_stored({"step": float(step), **STEP}, "")
        logging.getLogger("staleflow.pipeline.runtime.actors").warning("rollout-0 is gone; replacing it")
        logging.getLogger("some.library").info("chatter")
    assert any("rollout-0 is gone" in line for line in reporter._lines)
    return RunEnd(run_dir=Path("runs/x"), summary=SUMMARY, stop_reason="")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "execute", short_run)


RESUME_POINTS = "35.0% for resume points: raise training.resume_every"
LINES = {
    "step 0/2": 1, "step 1/2": 1, "evaluating version 0": 1, "held-out reward at version 0": 1, "rollout-0 is gone": 1,
    RESUME_POINTS: 1, "Dask dashboard": 1, "chatter": 0, "server placed": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ((), {"rollout-0 is gone": 0}),
        (("-v",), {}),
        (("-vv",), {"server placed": 1}),
        (("--json",), dict.fromkeys(LINES, 0)),
        (("--json", "-v"), {"Dask dashboard": 0, RESUME_POINTS: 0}),
    ],
)
def test_each_event_is_one_log_line(options: tuple[str, ...], differs: dict[str, int]) -> None:
    result = command("run", JOB, "--set", "steps=2", *options)
    assert result.returncode == 0, result.stderr
    assert {line: result.stderr.count(line) for line in LINES} == LINES | differs
    if "--json" in options:
        assert json.loads(result.stdout) == SUMMARY
    levels = Counter(re.findall(r"\d\d:\d\d:\d\d (\w+) \w+\.", result.stderr))
    logged = {"INFO": 4, "WARNING": 1, "DEBUG": 1}
    shown = {"-v": ("INFO", "WARNING"), "-vv": tuple(logged)}.get(options[-1] if options else "", ())
    assert levels == {level: logged[level] for level in shown}


def test_log_handlers_and_levels_are_restored_afterwards() -> None:
    def state() -> list[object]:
        loggers = [logging.getLogger(), logging.getLogger("staleflow")]
        return [(item.level, tuple(item.handlers)) for item in loggers]

    before = state()
    command("run", JOB, "-vv")
    assert state() == before


class Screen:
    """Emulates a terminal: text, line feeds, and the cursor moves of rich."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def feed(self, text: str) -> None:
        for move, count, action, word in re.findall(r"(\x1b\[\??(\d*)[;\d]*([A-Za-z]))|([^\x1b])", text, re.DOTALL):
            if not move:
                self._write(word)
            elif action == "A":
                self.row -= int(count or 1)
            elif action == "K":
                self.lines[self.row] = ""

    def _write(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1


def test_log_lines_are_complete_above_a_live_view() -> None:
    config, written = loading.load(JOB), io.StringIO()
    display = Display(config, quiet=False, verbosity=1)
    display.console = Console(file=written, force_terminal=True, width=200, height=50)
    outcomes, snapshot = RunReport(), make_coordinator(config).snapshot()
    with display, logging_to(display.console, 1):
        for step in range(3):
            outcomes.steps.append({"step": float(step), **STEP, "response_tokens": 5.0})
            display.on_status(snapshot, outcomes)
            display.on_step_stored(outcomes.steps[-1], "")
            assert display._live is not None
            display._live.refresh()  # as it does four times a second
            logging.getLogger("staleflow.pipeline.jobs.reporter").info("step %d is done", step)
    screen = Screen()
    screen.feed(written.getvalue())
    received = [line.rstrip() for line in screen.lines if line.strip()]
    assert [line.partition(": ")[2] for line in received] == [f"step {step} is done" for step in range(3)]


def test_a_malformed_log_call_does_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    written, messages = io.StringIO(), list[str]()
    for handler in (ConsoleHandler(Console(file=written), logging.INFO), WarningHandler(messages.append)):
        for argument in ("one", 1):
            handler.handle(logging.makeLogRecord({"name": "staleflow", "msg": "step %d", "args": (argument,)}))
        assert "--- Logging error ---" in capsys.readouterr().err
    assert [line.partition("staleflow: ")[2] for line in written.getvalue().splitlines()] == messages == ["step 1"]


def test_names_with_brackets_are_shown_as_they_are() -> None:
    config, written = replace(loading.load(JOB), name="[/x]"), io.StringIO()
    display = Display(config, quiet=False)
    display.console = Console(file=written, force_terminal=True, width=200, height=50, color_system=None)
    display.on_activity("starting actors: rollout-0 (loading [/m])")
    display.console.print(display._view(make_coordinator(config).snapshot(), RunReport(instances_line="1 [/of] 2")))
    drifted = {"measured_over_predicted": 2.0, "drifted": True}
    summary = SUMMARY | {"alarms": ["[/a] is zero"], "cost_model": drifted}
    display.summarize(RunEnd(run_dir=Path("[/r]"), summary=summary, stop_reason=""))
    for text in ("[/x]", "(loading [/m])", "1 [/of] 2", "[/a] is zero", "[/r]/summary.png"):
        assert text in written.getvalue()


def test_lines_about_a_training_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with train_offline.training_progress(quiet=False) as report:
        report({"say": "with training.targets = [/q]: 0.125"})
    assert "with training.targets = [/q]: 0.125" in capsys.readouterr().err


def test_a_pipe_gets_a_line_on_the_next_step_after_half_a_minute_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    config, written, now = loading.load(JOB), io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    coordinator = make_coordinator(config)
    display = Display(config, quiet=False)
    display.console = Console(file=written, width=200)
    for now[0] in (29.0, 31.0, 32.0, 60.0, 62.0):
        display.on_status(coordinator.snapshot(), RunReport())
    line = "step 0: 0 of 16 groups are ready, trajectories: 0 sampling, 0 queued, 0 scoring"
    assert written.getvalue().splitlines() == [f"[  31.0 s] {line}", f"[  62.0 s] {line}"]


def printed(
    steps: list[dict[str, float]], limits: Mapping[int, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Return (lines of the display in a pipe, lines of the job log) for these steps. limits: bottleneck by step."""
    config, written = loading.load(JOB), io.StringIO()
    display, reporter = Display(config, quiet=False), Reporter("a-job", 4, Path("runs/none"))
    display.console = Console(file=written, width=200)
    for step in steps:
        RunListeners(display, reporter).on_step_stored(step, limits.get(int(step["step"]), ""))
    return written.getvalue().splitlines(), [line.partition("  ")[2] for line in reporter._lines]


def test_a_resumed_run_reports_its_earlier_steps_without_lines() -> None:
    reporter = Reporter("a-job", 4, Path("runs/none"))
    reporter.add_earlier_steps([{"step": float(step), **STEP} for step in range(2)])
    assert ([int(step["step"]) for step in reporter._steps], reporter._lines) == ([0, 1], [])


def test_a_step_line_counts_failed_rewards_and_names_the_bottleneck() -> None:
    steps = [{"step": 0.0, **STEP}, {"step": 1.0, **STEP, "reward_errors": 3.0}]
    for first, second in printed(steps, {1: "bottleneck: reward (trainer idle 41%)"}):
        assert "failed" not in first and "limit" not in first
        assert "reward 0.500  rewards failed 3  length" in second
        assert second.endswith("bottleneck: reward (trainer idle 41%)")


def test_a_step_line_counts_dropped_updates() -> None:
    kept, dropped = printed([{"step": 0.0, **STEP}, {"step": 1.0, **STEP, "updates_dropped": 2.0}])[0]
    assert "dropped" not in kept
    assert "grad 0.50  updates dropped 2  train" in dropped


def test_a_step_line_counts_branches_of_multi_turn_episodes() -> None:
    turns = {"turns_mean": 2.0, "turns_max": 3.0, "tool_s": 0.5}
    went_on, branched = printed([{"step": 0.0, **STEP, **turns}, {"step": 1.0, **STEP, **turns, "branches": 4.0}])[0]
    assert "branches" not in went_on
    assert "environment 0.5 s  context forks 4  staleness" in branched
