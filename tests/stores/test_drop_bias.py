"""The drop bias report: planted differences are reported, chance and small samples are not."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from staleflow.stores.auditing import drop_bias
from staleflow.stores.auditing.drop_bias import (
    Contrast,
    DropBias,
    OutcomeStats,
    compute_drop_bias,
    drop_bias_of_store,
    welch_contrast,
)
from staleflow.stores.trajectory import AbortReason, Fate, FinishReason
from tests.commands import command
from tests.run_page.page_client import Page
from tests.support.simulated_store import stored_simulation


class Table:
    """A store with rows of (fate, reason, groups, mean log length, mean reward, finish reason) for each kind, eight per
    group."""

    def __init__(self, *kinds: tuple[Fate, AbortReason, int, float, float, FinishReason], seed: int = 0) -> None:
        rng, columns, first = np.random.default_rng(seed), [], 0
        for fate, reason, groups, log_length, reward, finish in kinds:
            group = np.repeat(np.arange(first, first + groups), 8)
            first += groups
            own = np.repeat(rng.normal(0, 0.5, groups), 8)
            count = len(group)
            columns.append(
                {
                    "trajectory": group * 8, "group": group, "prompt_tokens": np.full(count, 50),
                    "response_tokens": np.exp(log_length + own + rng.normal(0, 0.3, count)).astype(int),
                    "finish": np.full(count, finish.value), "fate": np.full(count, fate.value),
                    "reason": np.full(count, reason.value), "loss_mask": np.ones(count, int),
                    "reward": reward + rng.normal(0, 0.2, count), "rewarded_s": np.ones(count),
                    "turns": np.ones(count, int), "tool_s": np.zeros(count),
                }
            )  # fmt: skip
        self._columns = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}

    def displayed_columns(self, first: int = 0, last: int | None = None) -> dict[str, npt.NDArray[Any]]:
        return {name: column[first:last] for name, column in self._columns.items()}


CONSUMED = (Fate.CONSUMED, AbortReason.NONE, 200, 5.0, 0.5, FinishReason.STOP)


def dropped(groups: int, log_length: float, reward: float, finish: FinishReason = FinishReason.STOP) -> Table:
    return Table(CONSUMED, (Fate.ABORTED, AbortReason.TOO_STALE, groups, log_length, reward, finish))


def test_more_turns_and_slower_environments_of_dropped_responses_are_reported() -> None:
    table = dropped(60, 5.0, 0.5)
    own = table._columns["fate"] == "aborted"
    rng = np.random.default_rng(1)
    table._columns["turns"] = rng.integers(2, 5, len(own)) * np.where(own, 3, 1)
    table._columns["tool_s"] = rng.gamma(20.0, 1.0, len(own)) * np.where(own, 2.0, 1.0)
    (both, _) = drop_bias_of_store(table).others
    assert both.turns_ratio is not None and both.turns_ratio.effect == pytest.approx(3, rel=0.1)
    assert both.tool_ratio is not None and both.tool_ratio.effect == pytest.approx(2, rel=0.1)
    assert both.tool_s == pytest.approx(40, rel=0.1)
    (line, *_) = drop_bias_of_store(table).lines
    assert "were of 3 times as many turns (p < .001), 2 times as long with their environments (p < .001)" in line


@pytest.mark.parametrize("block", [65_536, 100])
def test_a_planted_difference_is_reported_with_its_size(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(drop_bias, "ROWS_AT_ONCE", block)
    report = drop_bias_of_store(dropped(60, 5.0 + math.log(1.8), 0.2))
    both, own = report.others
    assert (both.name, own.name) == ("dropped", "aborted:too_stale")
    assert (own.trajectories, own.groups, report.consumed.groups, report.groups) == (480, 60, 200, 260)
    assert report.never_trained == 60
    assert own.length_ratio is not None and own.length_ratio.effect == pytest.approx(1.8, rel=0.15)
    assert own.reward_difference is not None and own.reward_difference.effect == pytest.approx(-0.3, abs=0.05)
    assert own.prompt_ratio is None
    line = report.lines[0]
    assert line.startswith("not trained on: dropped responses (480 of 2,080) were ")
    assert line.endswith(" times as long (p < .001), 0.29 lower in reward (p < .001)")


def test_chance_few_groups_and_small_differences_are_not_reported() -> None:
    assert sum(bool(drop_bias_of_store(dropped(60, 5.0, 0.5)).lines) for _ in range(5)) == 0
    assert drop_bias_of_store(dropped(drop_bias.MIN_GROUPS - 1, 6.0, 0.0)).lines == []
    assert drop_bias_of_store(Table(CONSUMED)).lines == []
    many = (Fate.ABORTED, AbortReason.TOO_STALE, 20_000, 5.05, 0.5, FinishReason.STOP)
    assert drop_bias_of_store(Table((*CONSUMED[:2], 20_000, *CONSUMED[3:]), many)).lines == []


def test_siblings_do_not_count_as_independent_samples() -> None:
    """If every trajectory counted for itself, the same difference would be significant."""
    wrong = 0
    for seed in range(40):
        table = Table(CONSUMED, (Fate.ABORTED, AbortReason.TOO_STALE, 25, 5.0, 0.5, FinishReason.STOP), seed=seed)
        wrong += bool(drop_bias_of_store(table).lines)
    assert wrong == 0


def test_unfinished_responses_are_never_reported_as_shorter() -> None:
    assert drop_bias_of_store(dropped(60, 4.0, 0.5)).others[0].length_ratio is not None
    assert drop_bias_of_store(dropped(60, 4.0, 0.5, FinishReason.UNFINISHED)).others[0].length_ratio is None
    assert drop_bias_of_store(dropped(60, 6.0, 0.5, FinishReason.UNFINISHED)).others[0].length_ratio is not None


def test_truncated_responses_are_compared_with_complete_ones() -> None:
    cut = (Fate.CONSUMED, AbortReason.NONE, 60, 6.0, 0.1, FinishReason.LENGTH)
    report = drop_bias_of_store(Table(CONSUMED, cut))
    assert [kind.name for kind in report.others] == ["truncated"]
    assert report.others[0].length_ratio is None
    assert report.lines[0].startswith(
        "trained on though truncated at rollout.max_new_tokens: 480 of 2,080 responses (23%), 0."
    )


def test_many_truncated_responses_are_reported_without_a_difference() -> None:
    like = (Fate.CONSUMED, AbortReason.NONE, 60, 5.0, 0.5, FinishReason.LENGTH)
    (line,) = drop_bias_of_store(Table(CONSUMED, like)).lines
    assert line == "trained on though truncated at rollout.max_new_tokens: 480 of 2,080 responses (23%)"
    few = (Fate.CONSUMED, AbortReason.NONE, 20, 5.0, 0.5, FinishReason.LENGTH)
    assert drop_bias_of_store(Table(CONSUMED, few)).lines == []


@pytest.mark.parametrize(("t", "freedom", "p"), [(2.042, 30, 0.05), (3.646, 30, 0.001), (3.390, 100, 0.001)])
def test_p_values_match_the_t_distribution(monkeypatch: pytest.MonkeyPatch, t: float, freedom: int, p: float) -> None:
    monkeypatch.setattr(drop_bias, "P_LIMIT", 1.0)
    half = freedom // 2 + 1
    values = np.resize([-1.0, 1.0], half)
    gap = t * math.sqrt(2 * float(values.var(ddof=1)) / half)
    monkeypatch.setattr(drop_bias, "MIN_GROUPS", 2)
    result = welch_contrast(values + gap, values)
    assert result is not None and result.p == pytest.approx(p, rel=0.03)


def welch(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> float:
    """Return the two-sided p-value of Welch's t-test by numerical integration."""
    a, b = (float(np.sum((x - x.mean()) ** 2)) / (len(x) - 1) / len(x) for x in (ours, theirs))
    t = abs(float(ours.mean() - theirs.mean())) / math.sqrt(a + b)
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    at = np.arange(t, t + 200.0, 1e-3)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return 2 * scale * float(np.sum((1 + at**2 / freedom) ** (-(freedom + 1) / 2))) * 1e-3


@pytest.mark.parametrize("gap", [-2.5, 1.5, 2.0])
def test_groups_of_unequal_variance_are_compared_by_welchs_test(monkeypatch: pytest.MonkeyPatch, gap: float) -> None:
    monkeypatch.setattr(drop_bias, "P_LIMIT", 1.0)
    rng = np.random.default_rng(1)
    first, second = rng.normal(gap, 1.0, 20), rng.normal(0.0, 3.0, 23)
    for pair in ((first, second), (second, first)):
        result = welch_contrast(*pair)
        assert result is not None
        assert result.effect == pytest.approx(float(pair[0].mean() - pair[1].mean()))
        assert result.p == pytest.approx(welch(*pair), rel=0.01)


def test_samples_without_variance_have_a_p_value_of_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    twos = np.full(drop_bias.MIN_GROUPS, 2.0)
    assert welch_contrast(twos, twos) is None
    assert welch_contrast(twos, twos - 0.5) == Contrast(effect=0.5, p=0.0)
    assert welch_contrast(twos, twos[1:] - 0.5) is None, "one value too few"
    spread = np.resize([1.0, -1.0], drop_bias.MIN_GROUPS)
    found = welch_contrast(twos, spread)
    assert found is not None
    monkeypatch.setattr(drop_bias, "P_LIMIT", found.p)
    assert welch_contrast(twos, spread) is None, "it is as likely as the limit"


def test_reward_difference_of_just_the_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dropped(60, 5.0, 0.5)
    table._columns["reward"] = np.where(table._columns["fate"] == "aborted", 0.75, 0.5)
    for limit, reported in ((0.25, True), (0.2501, False)):
        monkeypatch.setattr(drop_bias, "REWARD_LIMIT", limit)
        assert (drop_bias_of_store(table).others[0].reward_difference is not None) is reported


def test_audit_and_run_page_report_the_drop_bias(tmp_path: Path) -> None:
    run = stored_simulation(tmp_path, "steps=16", "batch.extra_groups=3", "workload.group_correlation=0.9")
    reported_bias = json.loads(command("store", "audit", run, "--json").stdout)["bias"]
    (line,) = [item for item in command("store", "audit", run).stdout.splitlines() if "dropped responses" in item]
    assert line.startswith("  not trained on: dropped responses (")
    assert "times as long (p < .001)" in line
    assert reported_bias["lines"][0] == line.strip()
    assert reported_bias["others"][0]["name"] == "dropped"
    assert reported_bias["never_trained"] > drop_bias.MIN_GROUPS
    page = Page(run)
    assert page.ask("distribution", column="reward", where="reward > 0")["bias"] == reported_bias["lines"], (
        "of the whole run"
    )


def drop_kind(name: str, trajectories: int, **contrasts: Any) -> OutcomeStats:
    return OutcomeStats(
        name=name, trajectories=trajectories, groups=9, response_tokens=5.0, prompt_tokens=5.0, reward=None, **contrasts
    )


def test_a_line_states_each_difference_and_its_direction() -> None:
    little, sure = Contrast(effect=0.25, p=0.0009), Contrast(effect=-1.5, p=1e-9)
    lines = DropBias(
        consumed=drop_kind("consumed", 40),
        others=(
            drop_kind("higher", 10, reward_difference=little),
            drop_kind("lower", 10, reward_difference=sure, prompt_ratio=little),
            drop_kind("alike", 10),
            drop_kind(drop_bias.TRUNCATED, 3),
            drop_kind(drop_bias.TRUNCATED, 3, length_ratio=little, turns_ratio=sure),
            drop_kind(drop_bias.TRUNCATED, 4),
        ),
    ).lines
    cut = "trained on though truncated at rollout.max_new_tokens: "
    assert lines == [
        "not trained on: higher responses (10 of 50) were 0.25 higher in reward (p < .001)",
        "not trained on: lower responses (10 of 50) were 1.5 lower in reward (p < .001), "
        "to prompts 0.25 times as long (p < .001)",
        cut + "3 of 40 responses (8%), 0.25 times as long (p < .001), of -1.5 times as many turns (p < .001)",
        cut + "4 of 40 responses (10%)",
    ]


def test_means_are_per_group_for_any_block_size() -> None:
    rng, rows = np.random.default_rng(3), 300
    ends = [
        (Fate.CONSUMED, AbortReason.NONE, FinishReason.STOP), (Fate.CONSUMED, AbortReason.NONE, FinishReason.LENGTH),
        (Fate.ABORTED, AbortReason.TOO_STALE, FinishReason.UNFINISHED),
        (Fate.FILTERED, AbortReason.NO_SIGNAL, FinishReason.STOP),
        (Fate.ABORTED, AbortReason.RUN_ENDED, FinishReason.UNFINISHED),
    ]  # fmt: skip
    which = rng.integers(0, len(ends), rows)
    table: dict[str, npt.NDArray[Any]] = {
        name: np.array([ends[i][at].value for i in which]) for at, name in enumerate(("fate", "reason", "finish"))
    }
    for name, most in (("group", 40), ("response_tokens", 99), ("prompt_tokens", 99), ("turns", 4), ("loss_mask", 2)):
        table[name] = rng.integers(0, most, rows)
    table |= {"reward": rng.random(rows), "rewarded_s": rng.integers(0, 3, rows) / 2, "tool_s": rng.random(rows)}
    cuts = [0, 1, 120, 121, rows]
    report = compute_drop_bias([{name: v[a:b] for name, v in table.items()} for a, b in itertools.pairwise(cuts)])

    def expected(chosen: list[int], column: str, weighed: bool = False) -> float:
        by_group: dict[int, list[float]] = {}
        for i in chosen:
            failed = table["fate"][i] == Fate.CONSUMED.value and not table["loss_mask"][i]
            if not weighed or (table["rewarded_s"][i] > 0 and not failed):
                by_group.setdefault(int(table["group"][i]), []).append(float(table[column][i]))
        return float(np.mean([np.mean(values) for values in by_group.values()]))

    members = {
        "consumed": {0, 1}, "truncated": {1}, "dropped": {2, 3}, "aborted:too_stale": {2}, "filtered:no_signal": {3},
        "aborted:run_ended": {4},
    }  # fmt: skip
    assert {stats.name for stats in (report.consumed, *report.others)} == set(members)
    for stats in (report.consumed, *report.others):
        chosen = [i for i in range(rows) if which[i] in members[stats.name]]
        assert (stats.trajectories, stats.groups) == (len(chosen), len({int(table["group"][i]) for i in chosen}))
        for column in ("response_tokens", "prompt_tokens", "turns", "tool_s"):
            assert getattr(stats, column) == pytest.approx(expected(chosen, column)), (stats.name, column)
        assert stats.reward == pytest.approx(expected(chosen, "reward", weighed=True)), stats.name
    trained = {int(table["group"][i]) for i in range(rows) if which[i] < 2}
    groups = set(table["group"].tolist())
    assert (report.groups, report.never_trained) == (len(groups), len(groups - trained))
