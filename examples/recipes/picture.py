"""python -m examples.recipes.picture FILE NAME=RUN ...: draw stored runs of recipes, each with the recipe's bands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import staleflow
from examples.recipes import recipe as recipes
from examples.recipes.recipe import Recipe

COLUMNS = 3
WIDTH = 11 / COLUMNS
"""Inches of a plot."""
SET_COLORS = ("#d94801", "#238b45", "#7a0177", "#525252")


def draw(file: Path, runs: Sequence[tuple[Recipe, staleflow.Run]]) -> None:
    """Draw one plot for each run: training reward by step, held-out rewards by version, and the bands."""
    from matplotlib.figure import Figure

    columns = min(len(runs), COLUMNS)
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(WIDTH * columns, 2.8 * rows), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes[len(runs) :]:
        axes.remove()
    for axes, (recipe, run) in zip(all_axes, runs, strict=False):
        _draw_run(axes, recipe, run)
    figure.savefig(file, dpi=110)


def _draw_run(axes: Any, recipe: Recipe, run: staleflow.Run) -> None:
    rewards = recipes.curves(run)["reward"]
    axes.plot(range(len(rewards)), rewards, color="#9ecae1", linewidth=1, label="training reward")
    evaluations = [e for e in run.evaluations() if e.sampled is not None]
    names = dict.fromkeys(f"{e.name} sampled" for e in evaluations)
    colors = dict(zip(names, SET_COLORS, strict=False))
    for metric, color in colors.items():
        points = sorted((e.version, e.sampled) for e in evaluations if f"{e.name} sampled" == metric)
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=metric)
    for band in recipe.bands:
        num_values = len(rewards)
        if band.metric == "reward" and rewards:
            first, last = band.first % num_values, band.last % num_values
        else:  # the end of the run, made wide enough to be seen
            first, last = round(0.9 * num_values), num_values
        axes.fill_between(
            [first, last], band.low, band.high, color=colors.get(band.metric, "#9ecae1"), alpha=0.25, linewidth=0,
            label=f"band of {band.metric}",
        )  # fmt: skip
    axes.set(title=recipe.name, xlabel="step", ylim=(min([0.0, *rewards]), 1.02))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, loc="lower right")


def main(arguments: Sequence[str]) -> None:
    """The command."""
    file, *pairs = arguments
    names = [pair.split("=", 1) for pair in pairs]
    draw(Path(file), [(recipes.load(name), staleflow.open_run(run)) for name, run in names])


if __name__ == "__main__":
    main(sys.argv[1:])
