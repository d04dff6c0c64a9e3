"""The staleflow page of the Dask dashboard, with JSON routes and Prometheus metrics, in the scheduler process.

It only reads the reports of runs in the job registry. While no browser shows the page, it takes no time of the
scheduler's event loop.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from bokeh.layouts import column, row
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DataTable,
    Div,
    HoverTool,
    Range1d,
    TableColumn,
)
from bokeh.plotting import figure
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from tornado import web
from tornado.ioloop import IOLoop

from staleflow.pipeline.cluster import run_pages
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.pipeline.cluster.submitted_job import Job
from staleflow.stores.metrics import GAUGES, METRICS, PROMETHEUS_PREFIX, STEP_METRICS, Kind

REFRESH_MS = 500
"""Milliseconds between refreshes, as between two reports of a run."""
LAG_COLORS = ("#1b7837", "#7fbf7b", "#f6c244", "#f08a24", "#d6301f")
"""Colours by version lag: green for the newest version, red for four versions behind or more."""
EMPTY_COLOR = "#ececec"
HOST_COLOR = "#8c6bb1"
"""Colour of the bars of environment hosts."""
STATE_COLORS = {
    "waiting": "#b07d00", "running": "#1b7837", "done": "#1b5e9e", "stopped": "#666666", "failed": "#d6301f",
}  # fmt: skip
CELL_COLUMNS = ("x", "y", "colour", "line", "what")
"""Columns of the plot of staleness buffers."""
MIN_PLOT_WIDTH = 330
"""Minimum width of a plot, pixels. On a narrow screen the plots are placed one below the other."""
PLOT_STYLE = {"flex": f"1 1 {MIN_PLOT_WIDTH}px"}


def add_to(scheduler: Any, registry: JobRegistry) -> None:
    """Add the page, its tab and its routes to a scheduler's dashboard, if it has one."""
    application = getattr(scheduler, "http_application", None)
    # A scheduler without the attribute `services` has a dashboard; one started without a dashboard has no such service.
    if application is None or "dashboard" not in getattr(scheduler, "services", {"dashboard": None}):
        return
    variables = template_variables(scheduler)
    if "staleflow" not in variables["pages"]:
        variables["pages"].append("staleflow")  # this list is shared by all pages
    pages = {"/staleflow": lambda server, variables, doc: fill_page(registry, variables, doc)}
    bokeh = BokehApplication(pages, scheduler, template_variables=variables)
    application.add_application(bokeh)
    bokeh.initialize(IOLoop.current())
    bokeh.start()
    application.add_handlers(
        r".*",
        [
            (r"/staleflow/jobs\.json", JobsHandler, {"registry": registry}),
            (r"/staleflow/job/(.+)\.json", JobHandler, {"registry": registry}),
        ],
    )
    run_pages.add_to(scheduler, registry)
    export_metrics(registry)


# -- JSON and Prometheus ---------------------------------------------------------------------------------------------


class JobsHandler(web.RequestHandler):
    """GET /staleflow/jobs.json: all jobs, without their histories."""

    def initialize(self, registry: JobRegistry) -> None:
        self._registry = registry

    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(self._registry.all_jobs()))


class JobHandler(JobsHandler):
    """GET /staleflow/job/ID.json: a job with the metrics of all its steps."""

    def get(self, id: str) -> None:  # type: ignore[override]
        job = self._registry.jobs.get(id)
        if job is None:
            raise web.HTTPError(404, f"no job {id}")
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(job.to_plain() | {"steps": list(job.history.values())}))


class JobMetricsCollector(Collector):
    """Prometheus metrics of the jobs of all registries in this process. Tests and notebooks may start several
    schedulers in one process."""

    registries: ClassVar[weakref.WeakSet[JobRegistry]] = weakref.WeakSet()

    def collect(self) -> Iterable[Metric]:
        jobs = [job for registry in self.registries for job in registry.jobs.values()]
        for metric in (m for m in METRICS if m.prometheus_name):
            family_class = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = family_class(f"{PROMETHEUS_PREFIX}{metric.prometheus_name}", metric.help, labels=["job"])
            for job in jobs:
                values = job.last_metrics if metric.kind is Kind.STEP else {**job.status, "step": len(job.history)}
                if (number := values.get(metric.name)) is not None:
                    family.add_metric([job.id], float(number))
            yield family


def export_metrics(registry: JobRegistry) -> None:
    """Add the jobs of a registry to the scheduler's /metrics."""
    if not JobMetricsCollector.registries:
        with contextlib.suppress(ValueError):  # already registered by an earlier scheduler
            REGISTRY.register(JobMetricsCollector())
    JobMetricsCollector.registries.add(registry)


# -- the page --------------------------------------------------------------------------------------------------------


def fill_page(registry: JobRegistry, variables: Mapping[str, Any], doc: Any) -> None:
    """Fill the Bokeh document of one browser with the job in its URL (?job=ID), or with `default_job`."""
    arguments = doc.session_context.request.arguments if doc.session_context else {}
    (job_id,) = arguments.get("job", [b""])
    view = DashboardView(registry, job_id.decode())
    view.update()
    doc.title = "Dask: staleflow"
    doc.add_root(view.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(variables)
    doc.add_periodic_callback(view.update, REFRESH_MS)


class DashboardView:
    """Plots and tables of the page in one browser. job_id: the job to show; `default_job` if empty or unknown."""

    def __init__(self, registry: JobRegistry, job_id: str) -> None:
        self._registry = registry
        self._job_id = job_id
        self._last_token_counts: tuple[float, Mapping[str, int]] = (0.0, {})
        """Time and tokens sampled by instance, when these last changed."""
        self._tokens_per_s: dict[str, float] = {}
        """Tokens per second by instance, between the last two changes."""
        self._headline = Div(sizing_mode="stretch_width")
        self._buffer_cells = ColumnDataSource({name: [] for name in CELL_COLUMNS})
        self._instance_bars = ColumnDataSource({name: [] for name in ("y", "right", "kv", "colour", "label", "text")})
        self._decisions = ColumnDataSource({name: [] for name in ("at", "who", "what", "cause")})
        self._buffers = self._buffer_plot()
        self._instances = self._instance_plot()
        table = DataTable(
            source=self._decisions, height=220, index_position=None, sizing_mode="stretch_width",
            columns=[
                TableColumn(field="at", title="at, s", width=70),
                TableColumn(field="who", title="trajectory", width=80),
                TableColumn(field="what", title="decision", width=360), TableColumn(field="cause", title="cause"),
            ],
        )  # fmt: skip
        self.root = column(
            self._headline,
            row(self._buffers, self._instances, sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}),
            table,
            sizing_mode="stretch_width",
        )

    # -- plots ---------------------------------------------------------------------------------------------------

    def _buffer_plot(self) -> Any:
        plot = figure(
            title="staleness buffers: the groups of each coming step", height=240, toolbar_location=None,
            styles=PLOT_STYLE, sizing_mode="stretch_width", y_range=Range1d(0, 1), x_range=Range1d(0, 1),
        )  # fmt: skip
        plot.rect(
            x="x",
            y="y",
            width=0.9,
            height=0.8,
            fill_color="colour",
            line_color="line",
            line_width=2,
            source=self._buffer_cells,
        )
        plot.add_tools(HoverTool(tooltips="@what"))
        plot.xaxis.axis_label = "entry"
        plot.xaxis.ticker = BasicTicker(min_interval=1, mantissas=[1, 2, 5])  # integers only
        plot.yaxis.axis_label = "step"
        plot.grid.visible = False
        return plot

    def _instance_plot(self) -> Any:
        plot = figure(
            title="instances: running trajectories (bar), KV cache (line); environment hosts: in environment",
            height=240, toolbar_location=None, styles=PLOT_STYLE,
            sizing_mode="stretch_width", y_range=["none"], x_range=Range1d(0, 1.8),
        )  # fmt: skip
        plot.hbar(y="y", right="right", height=0.5, color="colour", source=self._instance_bars)
        plot.scatter(x="kv", y="y", marker="dash", angle=1.5708, size=26, color="#222222", source=self._instance_bars)
        plot.text(x=1.02, y="y", text="text", text_baseline="middle", text_font_size="11px", source=self._instance_bars)
        plot.xaxis.axis_label = "share of max_running, of kv_tokens, of environment.concurrency"
        return plot

    # -- updates -------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Refresh all plots and tables from the registry."""
        jobs = self._registry.jobs
        job = jobs.get(self._job_id) or default_job(list(jobs.values()))
        if job is None:
            self._headline.text = "<h3>No job yet.</h3><code>staleflow submit job.toml</code>"
            return
        self._headline.text = headline(job, list(jobs.values()))
        status = job.status
        if status:
            self._show_buffers(status)
            self._show_instances(status)
            decisions = status.get("decisions", ())
            self._decisions.data = {
                "at": [f"{d[0]:.1f}" for d in decisions], "who": [d[1] for d in decisions],
                "what": [d[2] for d in decisions], "cause": [d[3] for d in decisions],
            }  # fmt: skip

    def _show_buffers(self, status: Mapping[str, Any]) -> None:
        cells, num_columns = list[tuple[float, int, str, str, str]](), 1
        for buffer in status["buffers"]:
            step, entries = buffer["step"], list[tuple[str, str, str]]()
            for state in ("occupied", "reserved"):
                for version, count in sorted(buffer[state].items(), key=lambda item: int(item[0])):
                    colour = LAG_COLORS[min(max(status["version"] - int(version), 0), len(LAG_COLORS) - 1)]
                    fill = colour if state == "occupied" else "white"
                    entries += [(fill, colour, f"{state}, version {version}")] * count
            entries += [(EMPTY_COLOR, EMPTY_COLOR, "empty")] * (buffer["capacity"] - len(entries))
            cells += [
                (x + 0.5, step, fill, line, f"step {step}: {what}") for x, (fill, line, what) in enumerate(entries)
            ]
            num_columns = max(num_columns, len(entries))
        self._buffer_cells.data = {name: [cell[i] for cell in cells] for i, name in enumerate(CELL_COLUMNS)}
        steps = [b["step"] for b in status["buffers"]] or [0]
        self._buffers.x_range.update(start=0, end=num_columns)
        self._buffers.y_range.update(start=max(steps) + 0.6, end=min(steps) - 0.6)
        self._buffers.yaxis.ticker = steps

    def _show_instances(self, status: Mapping[str, Any]) -> None:
        now, tokens = time.monotonic(), status.get("tokens_sampled", {})
        previous_s, previous_tokens = self._last_token_counts
        if tokens != previous_tokens:
            self._tokens_per_s = {
                name: max(0.0, (tokens[name] - previous_tokens.get(name, tokens[name])) / max(now - previous_s, 1e-9))
                for name in tokens
            }
            self._last_token_counts = (now, dict(tokens))
        cached_texts = {name: f" and {count} cached" for name, count in status.get("kept_tokens", {}).items() if count}
        instances, hosts = status["instances"], status.get("environments", ())
        names = [*(instance["instance"] for instance in instances), *(host["host"] for host in hosts)]
        if names and self._instances.y_range.factors != names[::-1]:
            self._instances.y_range.factors = names[::-1]
        lags = [status["version"] - instance["version"] for instance in instances]
        self._instance_bars.data = {
            "y": names,
            "right": [
                *(instance["num_running"] / max(1, instance["max_running"]) for instance in instances),
                *(min(1.0, host["num_in_environment"] / host["slots"]) for host in hosts),
            ],
            "kv": [
                *(instance["kv_tokens"] / max(1, instance["kv_capacity"]) for instance in instances),
                *(math.nan for _ in hosts),
            ],
            "colour": [*(LAG_COLORS[min(max(n, 0), len(LAG_COLORS) - 1)] for n in lags), *(HOST_COLOR for _ in hosts)],
            "label": names,
            "text": [
                f"v{instance['version']} (-{n}){' pulling' if instance['pulling'] else ''}, "
                f"{instance['num_running']} running, "
                f"{instance['kv_tokens']} KV{cached_texts.get(instance['instance'], '')}, samples "
                f"{self._tokens_per_s.get(instance['instance'], 0.0):.0f} {GAUGES['instance_tokens_per_s'].unit}"
                for instance, n in zip(instances, lags, strict=True)
            ]
            + [f"{host['num_in_environment']} in environment, {host['slots']} slots" for host in hosts],
        }


def headline(job: Job, jobs: list[Job]) -> str:
    """HTML at the top of the page: one line about the job, and links to all jobs."""
    step = job.last_metrics
    parts = [
        f"<b>{escape(job.id)}</b>",
        f"<b style='color:{STATE_COLORS[job.state]}'>{job.state}</b>",
        f"step <b>{len(job.history)}</b> of {job.steps}",
    ]
    if step:
        parts.append(f"reward <b>{step['reward']:.3f}</b>")
        parts.append(f"staleness {step['staleness_mean']:.2f}, at most {step['staleness_max']:.0f}")
        parts.append(f"{step['tokens_per_s']:.0f} {STEP_METRICS['tokens_per_s'].unit}")
    if job.status.get("doing") and job.state == "running":
        parts.append(escape(job.status["doing"]))
    if job.status.get("num_in_environment") and job.state == "running":
        parts.append(f"{job.status['num_in_environment']} wait for their environment")
    if job.status.get("bottleneck") and job.state == "running":
        parts.append(escape(job.status["bottleneck"]))
    if job.why:
        parts.append(escape(job.why))
    if Path(job.run_dir).is_dir():
        parts.append(f"<a href='staleflow/run/{quote(job.id)}' target='_blank'>run page</a>")
    line = " &nbsp;·&nbsp; ".join(parts)
    if len(jobs) > 1:
        links = (job_link(other, is_displayed=other is job) for other in reversed(jobs))
        line += "<div style='font-size:13px; padding-top:4px'>jobs: " + " ".join(links) + "</div>"
    return f"<div style='font-size:15px; padding:6px 0'>{line}</div>"


def job_link(job: Job, *, is_displayed: bool) -> str:
    """HTML of a link to a job's page. is_displayed: whether it is the displayed job, whose link is filled."""
    colour = STATE_COLORS[job.state]
    style = f"background:{colour}; color:white; font-weight:bold" if is_displayed else f"color:{colour}"
    return (
        f"<a href='staleflow?job={escape(job.id)}' style='{style}; border:1px solid {colour}; border-radius:4px; "
        f"padding:1px 6px; margin-right:4px; text-decoration:none; display:inline-block'"
        f"{' aria-current=page' if is_displayed else ''}>{escape(job.id)}</a>"
    )


def default_job(jobs: list[Job]) -> Job | None:
    """Return the job to show by default: the newest that runs, else the newest with steps, else the newest."""
    running_jobs = [job for job in jobs if job.state == "running"]
    return next(reversed(running_jobs or [job for job in jobs if job.history] or jobs), None)
