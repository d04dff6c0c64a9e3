"""Lines over steps, as the dashboard draws them: few points for many steps, extremes kept, missing values left out."""

from __future__ import annotations

import numpy as np
import pytest

from staleflow.pipeline.cluster.dashboard import METRICS_SHOWN, View, headline, most_telling
from staleflow.pipeline.cluster.downsampling import MOST_BINS, SMOOTH, columns, smoothed
from staleflow.pipeline.cluster.job_registry import JobRegistry
from staleflow.stores.metrics import STEP


def steps(count: int) -> list[dict[str, float]]:
    needle = {1234: 50.0}
    return [{"step": float(i), "loss": needle.get(i, float(i % 2))} for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 400, 401, 2800])
def test_columns_are_of_one_length_and_bounded(count: int) -> None:
    found = columns(steps(count), ("loss", "grad_norm"))
    lengths = {len(column) for column in found.values()}
    assert lengths == {min(count, 2 * MOST_BINS)}
    assert set(found) == {"step", "loss", "grad_norm", f"{SMOOTH}loss", f"{SMOOTH}grad_norm"}
    assert np.isnan(found["grad_norm"]).all() and np.isnan(found[f"{SMOOTH}grad_norm"]).all()
    assert (np.diff(found["step"]) >= 0).all()


def test_a_needle_stays_visible_and_the_smooth_line_is_smooth() -> None:
    found = columns(steps(2800), ("loss",))
    assert found["loss"].max() == 50.0
    (at,) = np.flatnonzero(found["loss"] == 50.0)
    assert abs(found["step"][at] - 1234) < 14
    assert (abs(found[f"{SMOOTH}loss"] - 0.5) < 0.8).all()


def test_missing_values_are_left_out_of_the_mean() -> None:
    assert smoothed(np.array([1.0, np.nan, 3.0])).tolist() == [1.0, 2.0, 3.0]
    assert smoothed(np.array([1.0, 5.0])).tolist() == [1.0, 5.0]


# -- what the page shows -----------------------------------------------------------------------------------------


def board_of(*states: str) -> JobRegistry:
    """A board with a job per state, oldest first."""
    board = JobRegistry()
    for i, state in enumerate(states):
        board.submit(f"job-{i}", "job", f"/runs/job-{i}", 9)
        board.jobs[f"job-{i}"].state = state
        if state in ("running", "done"):
            board.jobs[f"job-{i}"].history[0] = {"step": 0.0}
    return board


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        (("running", "waiting"), "job-0"),
        (("running", "running", "done"), "job-1"),
        (("done", "done", "waiting"), "job-1"),
        (("waiting", "waiting"), "job-1"),
    ],
)
def test_the_page_opens_on_the_newest_job_that_runs_or_has_steps(states: tuple[str, ...], chosen: str) -> None:
    job = most_telling(list(board_of(*states).jobs.values()))
    assert job is not None and job.id == chosen
    assert most_telling([]) is None


def test_the_chosen_job_is_marked() -> None:
    jobs = list(board_of("done", "running").jobs.values())
    jobs[1].history[0] |= dict.fromkeys(STEP, 1.0)
    head = headline(jobs[1], jobs)
    marked = [part for part in head.split("<a ") if "aria-current" in part]
    assert len(marked) == 1 and "job-1" in marked[0]


def test_a_long_run_is_few_points_with_its_bound_and_held_out_rewards() -> None:
    board = board_of("running", "waiting")
    job = board.jobs["job-0"]
    job.history = {i: dict.fromkeys(STEP, 1.0) | {"step": float(i)} for i in range(2800)}
    one = {"version": 0, "sampled": 0.5, "sampled_stderr": 0.1, "greedy": None, "greedy_stderr": None}
    view = View(board, "")
    view._show_held_out({"evaluations": [one]})
    view._history.data = columns(list(job.history.values()), METRICS_SHOWN)
    view._show_eta({"eta": 2})
    assert len(view._history.data["step"]) == 2 * MOST_BINS
    assert dict(view._eta.data) == {"step": [0.0, 2799.0], "eta": [2, 2]}
    assert dict(view._held_out["sampled"].data) == {"version": [0], "reward": [0.5], "low": [0.4], "high": [0.6]}
    assert dict(view._held_out["greedy"].data)["version"] == []
    view._show_eta({"eta": None})
    assert dict(view._eta.data) == {"step": [], "eta": []}


def test_legends_cover_no_curve_and_steps_have_whole_numbers() -> None:
    from bokeh.models import Legend
    from bokeh.plotting import figure

    root = View(JobRegistry(), "").root
    plots = list(root.select({"type": figure}))
    assert len(plots) == 11
    for plot in plots:
        assert [item for item in plot.center if isinstance(item, Legend)] == []  # they are above the plot
        if plot.xaxis[0].axis_label == "step":
            assert plot.xaxis[0].ticker.min_interval == 1
