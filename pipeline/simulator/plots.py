"""Pictures of simulated runs: activity of trainer and instances, and fill of the staleness buffers, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from staleflow.pipeline.simulator.trace import Trace

MAX_LANES = 32
"""Largest number of instances drawn, evenly picked: lanes of more would be thinner than a line."""


def draw_run(trace: Trace, title: str, path: Path, *, span_s: float | None = None) -> None:
    """Draw a Gantt chart of trainer and instances above the buffers, for the middle `span_s` seconds (all if None)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    end_s = trace.finished_s
    low, high = (0.0, end_s) if span_s is None or span_s >= end_s else ((end_s - span_s) / 2, (end_s + span_s) / 2)
    lanes = trace.instances[:: max(1, -(-len(trace.instances) // MAX_LANES))]
    figure = Figure(figsize=(11, 3.2 + 0.17 * len(lanes) + 2.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2, 1, height_ratios=[1.2 + 0.17 * len(lanes), 2.4])
    gantt = figure.add_subplot(grid[0])
    _gantt(gantt, trace, lanes)
    gantt.set(xlim=(low, high), ylabel="instances, then the trainer", title="trajectories decoding, and pulls")
    buffers = figure.add_subplot(grid[1])
    _buffers(buffers, trace)
    buffers.set(xlim=(low, high), xlabel="seconds", ylabel="groups", title="staleness buffers")
    figure.savefig(path, dpi=100, format="png")


def _gantt(axes: Any, trace: Trace, lanes: list[Any]) -> None:
    max_load = max((n for lane in lanes for _, n in lane.loads), default=1) or 1
    for row, lane in enumerate(lanes):
        if len(lane.loads) > 1:
            times = np.array([t for t, _ in lane.loads])
            loads = np.array([[n for _, n in lane.loads[:-1]]])
            mesh = axes.pcolormesh(times, [row - 0.4, row + 0.4], loads, cmap="YlGnBu", vmin=0, vmax=max_load)
            if row == 0:
                axes.figure.colorbar(mesh, ax=axes, pad=0.01, label="decoding", fraction=0.03)
        for ordered_s, loaded_s in lane.pulls:
            axes.barh(row, max(loaded_s - ordered_s, 1e-9), left=ordered_s, height=0.8, color="#d94801")
        if lane.lost_s is not None:
            axes.plot(lane.lost_s, row, "x", color="black")
    for step in trace.steps:
        color = "#807dba" if step.step % 2 else "#bcbddc"
        axes.barh(len(lanes), step.finished_s - step.ready_s, left=step.ready_s, height=0.8, color=color)
    axes.set(ylim=(-0.6, len(lanes) + 0.6))


def _buffers(axes: Any, trace: Trace) -> None:
    """Stack the buffers from the next step's upwards: finished groups, then reserved ones."""
    times = [t for t, _, _ in trace.buffers]
    if not times:
        return
    deepest = max((len(r) for _, r, _ in trace.buffers), default=0)
    layers, labels, colors = [], [], []
    for depth in range(min(deepest, 6)):
        for state, column, shade in (("finished", 2, 0.85), ("reserved", 1, 0.4)):
            layers.append([_at_depth(sample, column, depth) for sample in trace.buffers])
            labels.append(f"{state}, next step" + (f" + {depth}" if depth else ""))
            colors.append((*_COLORS[depth % len(_COLORS)], shade))
    axes.stackplot(times, layers, labels=labels, colors=colors)
    axes.legend(fontsize=7, ncols=4, loc="upper left")


_COLORS = ((0.03, 0.32, 0.61), (0.14, 0.55, 0.27), (0.85, 0.28, 0.0), (0.42, 0.32, 0.64), (0.6, 0.5, 0.1), (0.3,) * 3)


def _at_depth(sample: tuple[float, dict[int, int], dict[int, int]], column: int, depth: int) -> int:
    by_step = sample[1] if column == 1 else sample[2]
    steps = sorted(by_step)
    return by_step[steps[depth]] if depth < len(steps) else 0
