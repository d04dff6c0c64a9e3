"""Filtering, sorting and paging over columns, and the series of the charts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from staleflow.pipeline.run_page import charts, listing
from staleflow.stores.errors import ConfigError
from staleflow.stores.metrics import STEP_METRICS
from staleflow.stores.trajectories.columns import has_reward
from staleflow.stores.trajectories.records import CommitRecord, LedgerState


def columns(count: int = 200) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    consumed = rng.random(count) < 0.9
    return {
        "trajectory": rng.permutation(count),
        "group": np.arange(count) // 4,
        "step": np.arange(count) // 40,
        "fate": np.where(consumed, "consumed", "aborted"),
        "reward": rng.choice([0.0, 0.5, 1.0, np.nan], count).astype(np.float32),
        "response_tokens": rng.integers(1, 90, count),
        "staleness": np.where(consumed, 1, -1),
        "reason": np.where(consumed, "none", rng.choice(["surplus_member", "engine_failed"], count)),
        "finish": rng.choice(["stop", "length"], count),
        "rewarded_s": np.zeros(count, np.float32),
        "loss_mask": consumed.astype(np.int64),
    }


@pytest.mark.parametrize("sort", ["reward", "-reward", "response_tokens", "-response_tokens", "fate", "-trajectory"])
def test_all_pages_together_are_the_list_in_order(sort: str) -> None:
    table = columns()
    where = "response_tokens > 20"
    pages = [listing.trajectory_page(table, where, sort, page) for page in range(1, 5)]
    at = np.concatenate([page.items for page in pages[: pages[0].num_pages]])
    assert sorted(at) == np.flatnonzero(table["response_tokens"] > 20).tolist()
    assert pages[0].total == len(at)
    values = table[sort.removeprefix("-")][at].tolist()
    finite = [v for v in values if isinstance(v, str) or math.isfinite(v)]
    assert finite == sorted(finite, reverse=sort.startswith("-"))
    assert all(math.isnan(v) for v in values[len(finite) :])


@pytest.mark.parametrize("page", [-5, 0, 1, 99])
def test_a_page_number_out_of_range_gives_the_nearest_page(page: int) -> None:
    trajectories = listing.trajectory_page(columns(60), "", "step", page)
    assert (trajectories.page, trajectories.num_pages) == ((1, 2) if page < 2 else (2, 2))
    nothing = listing.trajectory_page(columns(60), "reward > 9", "step", page)
    assert (nothing.page, nothing.num_pages, nothing.total, len(nothing.items)) == (1, 1, 0, 0)


@pytest.mark.parametrize("order", listing.GROUP_ORDERS)
def test_groups_of_a_step_are_ordered_by_their_members(order: str) -> None:
    table = columns()
    table["loss_mask"][np.isnan(table["reward"])] = 0  # their rewards failed
    table["reward"] = np.nan_to_num(table["reward"])
    pages = [listing.group_page(table, 2, "", order, page) for page in (1, 2)]
    groups = np.concatenate([page.items for page in pages])
    assert sorted(groups) == list(range(20, 30))

    def key(group: int) -> float:
        at = (table["group"] == group) & (table["fate"] == "consumed")
        rewards, lengths = table["reward"][at & (table["loss_mask"] > 0)], table["response_tokens"][at]
        keys = {
            "trained": group,
            "best": -rewards.mean(),
            "worst": rewards.mean(),
            "spread": -rewards.var(),
            "longest": -lengths.max(),
        }
        return round(float(keys[order]), 5)

    assert [key(g) for g in groups] == sorted(key(g) for g in groups)


def test_a_filter_keeps_groups_with_a_matching_member() -> None:
    table = columns()
    result = listing.group_page(table, 1, "response_tokens > 80", "trained", 1)
    some = (table["step"] == 1) & (table["fate"] == "consumed") & (table["response_tokens"] > 80)
    assert result.items.tolist() == sorted(set(table["group"][some].tolist()))
    with pytest.raises(ConfigError, match="groups cannot be ordered by 'size'"):
        listing.group_page(table, 1, "", "size", 1)


def test_trained_members_come_first() -> None:
    table = columns()
    placed = listing.positions_by_group(table, np.asarray([7, 3]))
    assert list(placed) == [7, 3]
    for group, at in placed.items():
        assert sorted(at) == np.flatnonzero(table["group"] == group).tolist()
        fates = table["fate"][at].tolist()
        assert fates == sorted(fates, reverse=True)


def test_a_distribution_counts_every_selected_value_once() -> None:
    table = columns()
    for name in ("response_tokens", "reward", "step"):
        result = listing.histograms_by_fate(table, "response_tokens > 20", name)
        chosen = (table["response_tokens"] > 20) & np.isfinite(table[name])
        if name == "reward":
            chosen &= table["fate"] == "consumed"
        assert sum(map(sum, result["fates"].values())) == chosen.sum()
    assert listing.histograms_by_fate(table, "reward > 9", "reward")["fates"] == {}
    whole = listing.histograms_by_fate(table, "", "step")
    assert whole["edges"] == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]


def test_statistics_are_grouped_by_fate() -> None:
    table = columns()
    rows = listing.statistics_by_outcome(table, "response_tokens > 20")
    assert [(row["fate"], row["reason"]) for row in rows] == [
        ("consumed", "none"), ("aborted", "engine_failed"), ("aborted", "surplus_member"),
    ]  # fmt: skip
    assert sum(row["count"] for row in rows) == (table["response_tokens"] > 20).sum()
    at = (table["response_tokens"] > 20) & (table["fate"] == "consumed")
    assert rows[0]["response_tokens"] == pytest.approx(table["response_tokens"][at].mean())
    assert rows[0]["reward"] == pytest.approx(np.nanmean(table["reward"][at]))
    assert rows[0]["truncated"] == pytest.approx((table["finish"][at] == "length").mean())
    failed = {**table, "loss_mask": table["loss_mask"] * (table["reward"] > 0)}
    assert listing.statistics_by_outcome(failed, "response_tokens > 20")[0]["reward"] == pytest.approx(
        np.nanmean(table["reward"][at & (table["reward"] > 0)])
    ), "rewards that failed are none"
    assert 0.0 not in failed["reward"][has_reward(failed)]
    assert rows[1]["reward"] is None, "unscored trajectories have no reward of 0"
    assert listing.statistics_by_outcome(table, "reward > 9") == []


def test_the_mean_of_a_step_is_over_its_trained_trajectories() -> None:
    table = columns()
    table["reward"] = np.nan_to_num(table["reward"])
    table["step"][table["step"] == 3] = 4
    result = listing.mean_reward_by_step([table, table])
    trained = (table["fate"] == "consumed") & (table["step"] == 1)
    assert result["means"][0][1] == pytest.approx(float(table["reward"][trained].mean()))
    assert result["means"][1][3] is None


def record(step: int, ended: dict[str, int], kind: str = "step", **metrics: float) -> CommitRecord:
    ledger = LedgerState(num_started=0, num_ended=ended, live=(), next_step=step + 1, version=step)
    return CommitRecord(kind=kind, step=step, ledger=ledger, metrics={"elapsed_s": float(step + 1), **metrics})


RECORDS = [
    record(0, {"consumed:none": 4, "aborted:surplus_member": 1}, reward=0.5, loss=math.nan, response_tokens=10.0),
    record(1, {"consumed:none": 8, "aborted:surplus_member": 3, "filtered:no_signal": 4}, reward=0.25, loss=1.0),
    record(2, {"consumed:none": 8, "aborted:surplus_member": 3, "filtered:no_signal": 4}, kind="resume"),
    record(2, {"consumed:none": 12, "aborted:surplus_member": 3, "filtered:no_signal": 8}, reward=math.inf, loss=2.0),
]


def test_series_have_a_value_per_step_and_none_for_nan() -> None:
    result = charts.chart_values(RECORDS, 0)
    assert result["step"] == [0, 1, 2]
    assert result["lines"]["reward"] == [0.5, 0.25, None]
    assert result["lines"]["loss"] == [None, 1.0, 2.0]
    assert result["lines"]["tokens_per_s"][0] == 10.0
    assert result["drops"] == {"aborted: surplus member": [1, 2, 0], "filtered: no signal": [0, 4, 4]}


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_later_steps_have_the_same_values_as_in_the_whole_series(first: int) -> None:
    whole, part = charts.chart_values(RECORDS, 0), charts.chart_values(RECORDS, first)
    assert part["step"] == whole["step"][first:]
    for name in part["lines"]:
        assert part["lines"][name] == whole["lines"][name][first:]
    for name in part["drops"]:
        assert part["drops"][name] == whole["drops"][name][first:]


def test_charts_of_turns_are_drawn_for_multi_turn_runs() -> None:
    of_one, of_many = charts.charts(RECORDS), charts.charts([*RECORDS, record(3, {}, turns_max=2.0)])
    assert {chart.title for chart in of_many} - {chart.title for chart in of_one} == {"turns", "branches", "tools"}


def test_charts_of_several_tasks_have_a_line_for_each() -> None:
    assert [c.title for c in charts.charts(RECORDS, ["a"])][1:3] == ["reward by task", "trained groups by task"]
    (chart,) = [c for c in charts.charts(RECORDS, ["sums", "letters"]) if c.title == "reward by task"]
    assert [line["label"] for line in chart.page_values()["lines"]] == ["sums", "letters"]
    assert [c.page_values()["unit"] for c in charts.charts(RECORDS, ["a"])[1:3]] == ["", "share"]
    values: dict[str, Any] = {"task/sums/reward": 0.5, "task/letters/trained_share": 0.25}
    lines = charts.chart_values([record(0, {}, **values)], 0)["lines"]
    assert {name: lines[name] for name in values} == {name: [value] for name, value in values.items()}


def test_every_chart_has_known_metrics_of_one_unit_drawn_once() -> None:
    drawn = [name for chart in charts.CHARTS for name in chart.names]
    assert len(drawn) == len(set(drawn))
    for chart in charts.CHARTS:
        assert len({STEP_METRICS[name].unit for name in chart.names}) == 1, chart.title
