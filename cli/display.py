"""The live view of a run in a terminal; in a pipe, one line per step. Reads snapshots and decides nothing.

If the log is shown too (`-v`), it contains these lines and the view leaves them out. It is printed on the
view's console.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.jobs.execution import RunEnd
from staleflow.pipeline.jobs.summary import format_step
from staleflow.pipeline.runtime.evaluation_results import Evaluation, describe_progress, explain_not_comparable
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.metrics import tokens_per_s
from staleflow.stores.printable import printable

BAR_CELLS = 24
"""Width of a staleness buffer's bar, in characters."""
MAX_SILENCE_S = 30.0
"""In a pipe, seconds without a line after which one says how far the next step is."""


class Display(RunListener):
    """The live view; use as a context manager around a run."""

    def __init__(self, config: RunConfig, *, quiet: bool, verbosity: int = 0) -> None:
        """quiet: whether to print nothing. verbosity: verbosity of the log that is shown on `console` with the view."""
        self._config = config
        self._quiet = quiet
        self._verbosity = verbosity
        self.console = Console(stderr=True)
        self._live: Live | None = None
        self._activity = "starting"
        self._begin_s = self._last_line_s = time.monotonic()

    def __enter__(self) -> Display:
        # With -vv Dask's processes log too, and would write across a live view.
        if not self._quiet and self.console.is_terminal and self._verbosity < 2:
            self._live = Live(Text("starting ..."), console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def on_line(self, text: str) -> None:
        """Print a line above the view."""
        if not self._quiet:
            self._print(text)

    def _print(self, text: str, *, markup: bool = False) -> None:
        self._last_line_s = time.monotonic()
        self.console.print(text, highlight=False, markup=markup, soft_wrap=True)

    def on_activity(self, activity: str) -> None:
        self._activity = activity
        if self._live is None and not self._verbosity:
            self.on_line(f"[{time.monotonic() - self._begin_s:6.1f} s] {activity}")

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        self._activity = "training"
        if self._live is None and not self._verbosity:
            self.on_line(format_step(step, self._config.steps, bottleneck))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if not self._verbosity:
            self.on_line(evaluation.line)

    def on_status(self, snapshot: Snapshot, report: RunReport) -> None:
        if self._live is not None:
            self._live.update(self._view(snapshot, report))
        elif not self._verbosity and time.monotonic() - self._last_line_s >= MAX_SILENCE_S:
            self.on_line(self._progress_line(snapshot))

    def _progress_line(self, snapshot: Snapshot) -> str:
        """Describe how far the next step is, in one line."""
        elapsed = f"[{time.monotonic() - self._begin_s:6.1f} s]"
        if snapshot.training or not snapshot.buffers:
            return f"{elapsed} {'training' if snapshot.training else self._activity}, step {snapshot.version}"
        buffer, num_evaluated = snapshot.buffers[0], snapshot.num_eval_in_flight
        evaluating = describe_progress(snapshot.evaluated_version, num_evaluated) if num_evaluated else ""
        phases = f"{snapshot.num_running} sampling, {snapshot.num_queued} queued, {snapshot.num_scoring} scoring"
        return (
            f"{elapsed} step {buffer.step}: {sum(buffer.occupied.values())} of {buffer.capacity} groups are ready, "
            f"trajectories: {phases}" + (f"; {evaluating}" if evaluating else "")
        )

    def _view(self, snapshot: Snapshot, report: RunReport) -> Group:
        config, steps = self._config, report.steps
        head = Table.grid(padding=(0, 2))
        recent_rewards = [s["reward"] for s in steps[-10:]]
        head.add_row(
            f"[bold]{escape(config.name)}[/]  {escape(self._activity)}",
            f"step [bold]{snapshot.version}[/]/{config.steps}",
            f"{time.monotonic() - self._begin_s:.0f} s",
        )
        if steps:
            head.add_row(
                f"reward [bold]{sum(recent_rewards) / len(recent_rewards):.3f}[/] (last {len(recent_rewards)})",
                f"staleness in flight {snapshot.staleness_in_flight:.2f}, in queue {snapshot.staleness_in_queue:.2f}",
                f"{tokens_per_s(steps):.0f} tokens/s",
            )
        head.add_row(
            f"{snapshot.num_queued} queued, {snapshot.num_running} sampling, "
            + (f"{snapshot.num_in_environment} in environment, " if snapshot.num_in_environment else "")
            + f"{snapshot.num_scoring} scoring",
            f"{snapshot.num_started} started, {snapshot.num_live} in flight",
            ", ".join(f"{n} {k}" for k, n in snapshot.ended.items()),
        )
        if snapshot.num_eval_in_flight:
            head.add_row(describe_progress(snapshot.evaluated_version, snapshot.num_eval_in_flight))
        if report.instances_line:
            head.add_row(escape(report.instances_line))
        buffers = Table.grid(padding=(0, 1))
        for view in snapshot.buffers:
            counts = sum(view.occupied.values()), sum(view.reserved.values())
            scale = BAR_CELLS / max(view.capacity, *counts, sum(counts), 1)
            cells = [round(count * scale) for count in counts]
            bar = f"[green]{'█' * cells[0]}[/][yellow]{'▒' * cells[1]}[/]{'·' * (BAR_CELLS - sum(cells))}"
            line = f"{counts[0]} finished, {counts[1]} reserved of {view.capacity}"
            buffers.add_row(f"buffer {view.step}", bar, line)
        instances = Table.grid(padding=(0, 2))
        for instance in snapshot.instances:
            instances.add_row(
                escape(instance.instance),
                f"v{instance.version}" + (" pulling" if instance.pulling else ""),
                f"{instance.num_running}/{instance.max_running} running",
                f"{instance.kv_tokens}/{instance.kv_capacity} KV tokens",
            )
        for host in report.environment_hosts:
            instances.add_row(escape(host.host), "", f"{host.num_in_environment} in environment", f"{host.slots} slots")
        return Group(head, buffers, instances)

    def summarize(self, end: RunEnd) -> None:
        """Print the results of a run, and the commands that show more."""
        summary = end.summary
        self._show_evaluations(summary)
        seconds: Any = summary["seconds"]
        overhead: Any = summary["overhead"]
        histogram: Any = summary["staleness_histogram"]
        num_trained = sum(histogram.values())
        staleness = ", ".join(f"{lag} ({count / num_trained:.0%})" for lag, count in histogram.items())
        self._print(
            f"{summary['trajectories_consumed']} trajectories, {summary['response_tokens']} tokens in "
            f"{seconds.get('wall_s', 0.0):.0f} s" + (f"; staleness {staleness}" if staleness else "")
        )
        for_point = overhead["trainer_waits_for_resume_point"]
        note = f" ({for_point:.1%} for resume points: raise training.resume_every)" if for_point >= 0.01 else ""
        self._print(
            f"overhead: trainer waiting with a batch ready {overhead['trainer_waits_though_ready']:.1%}{note}, "
            f"instances idle with work to route {overhead['rollout_idle_though_routable']:.1%}"
        )
        tasks: Any = summary["tasks"]
        for task in tasks:
            self._print(task["line"])
        if "diagnosis" in summary:
            diagnosis: Any = summary["diagnosis"]
            self._print(f"[bold]{escape(diagnosis['line'])}[/]", markup=True)
        forecast: Any = summary.get("forecast", {})
        for line in forecast.get("lines", ()):
            self._print(line)
        if summary.get("bias"):
            bias: Any = summary["bias"]
            for line in bias["lines"][:2]:
                self._print(line)
        weights: Any = summary.get("weights", {})
        for line in weights.get("lines", ()) if weights.get("not_verified") or weights.get("contradicted") else ():
            self._print(line)
        alarms: Any = summary["alarms"]
        for alarm in alarms[:1]:
            suffix = f" (and {len(alarms) - 1} more in summary.json)" if len(alarms) > 1 else ""
            self._print(f"[red]alarm[/]: {escape(alarm)}{suffix}", markup=True)
        cost: Any = summary["cost_model"]
        ratio = cost["measured_over_predicted"]
        if self._config.uses_cost_model and cost["drifted"]:
            self._print(
                f"[yellow]decode steps took {ratio:.2f} times as long as the strategies' cost model predicts[/]; "
                f"staleflow profile {escape(os.path.relpath(end.run_dir))} fits it to this run",
                markup=True,
            )
        run_dir = os.path.relpath(end.run_dir)
        if end.stop_reason:
            steps = f"all {summary['steps']} finished steps are stored" if summary["steps"] else "no step was finished"
            self._print(f"stopped: {end.stop_reason}; {steps}; go on: staleflow resume {run_dir}")
        if not summary["steps"]:
            return
        self._print(
            f"see: {run_dir}/summary.png, staleflow view {run_dir}, staleflow store show {run_dir} --worst 3, "
            f"staleflow store audit {run_dir}"
        )
        checkpoint = Path(run_dir) / "checkpoints" / f"step-{summary['steps']:06d}"
        if checkpoint.is_dir():
            self._print(
                f"model: {checkpoint}; talk to it: staleflow chat {run_dir}; train again on what is stored: "
                f"staleflow train-offline {run_dir}"
            )

    def _show_evaluations(self, summary: Mapping[str, object]) -> None:
        """Print the held-out rewards of a run, with their figures."""
        rows: Any = summary["evaluations"]
        evaluations = [Evaluation.from_json(row) for row in rows]
        table = Table(title=f"{escape(self._config.name)}: {summary['steps']} steps")
        for column in ("held-out reward", "sampled", "greedy", "basis"):
            table.add_column(column)
        for e in evaluations:
            means = (escape(mean) for mean in (e.sampled_text, e.greedy_text))
            table.add_row(f"{escape(e.name)}, version {e.version}", *means, escape(e.basis))
        if rows:
            self.console.print(table)
        for e in evaluations:
            for line in e.figures.lines(e.samples):
                self._print(f"{e.name}, version {e.version}: {line}")
        for line in explain_not_comparable(evaluations):
            self._print(f"[yellow]{escape(line)}[/]", markup=True)


class ConsoleHandler(logging.Handler):
    """A log handler that prints through a rich console, which keeps the live view below the records."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = printable(self.format(record))
        except Exception:  # noqa: BLE001  a malformed log call must not end its caller
            self.handleError(record)
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def logging_to(console: Console, verbosity: int) -> Iterator[None]:
    """Context manager: shows the log on a console. verbosity: 0 shows errors; 1 also training steps and run events
    (INFO); 2 also single placements and pulls (DEBUG). Of other libraries, 0 shows errors, more than 0 also
    warnings."""
    level = {0: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    root, package_logger = logging.getLogger(), logging.getLogger("staleflow")
    handler, previous_level = ConsoleHandler(console, level), package_logger.level
    root.addHandler(handler)
    package_logger.setLevel(min(level, logging.WARNING))  # a run's own log keeps warnings, shown here or not
    try:
        yield
    finally:
        root.removeHandler(handler)
        package_logger.setLevel(previous_level)
