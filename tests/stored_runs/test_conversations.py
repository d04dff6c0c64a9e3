"""Stored multi-turn trajectories: shown, exported, rescored, and evaluated under other weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from staleflow.cli.show import colour_legend, colour_tokens, print_trajectory
from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.stored_runs import exporting, logprob_recompute, reward_rescoring
from staleflow.pipeline.stored_runs.views import make_views, sorted_ids
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.emulation.workload import Turn
from staleflow.tasks.sources.task_sources import RecordWithOrigin, with_origin
from tests.commands import command
from tests.support.stored_runs import Response, StoredRun

GUESSED = Response(
    text="guess 5",
    reward=1.0,
    versions=(0, 1),
    turns=(("tool", "\nhigher\n", 1.25, "guess 8"), ("user", "\nright\n", 0.5, "done")),
)
MINE = """
def last(answer, record):
    said = [turn["role"] + ":" + turn["content"].strip() for turn in record.get("turns", [])]
    if said and said != ["assistant:guess 5", "tool:higher", "assistant:guess 8", "user:right", "assistant:done"]:
        raise ValueError(said)
    return 2.0 if said and answer == "done" else float(answer == "no idea")
"""


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    """A run of two steps of two responses: one of three turns, the others of one."""
    return small_run(tmp_path, "which of 0?", "which of 1?")


def small_run(tmp_path: Path, *prompts: str) -> StoredRun:
    """Return the run of `run` with the prompts of its steps."""
    (tmp_path / "mine.py").write_text(MINE)
    lines = [json.dumps({"prompt": f"which of {i}?", "answer": "8"}) for i in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    stored = StoredRun(
        tmp_path, steps=2, task={"source": f"jsonl:{tmp_path / 'tasks.jsonl'}", "eval_prompts": 0},
        rollout={"max_new_tokens": 64},
    )  # fmt: skip
    stored.train([(prompts[0], [GUESSED, Response(text="no idea")])])
    stored.train([(prompts[1], [Response(text="8", reward=1.0), Response(text="9")])])
    stored.end()
    return stored


def test_columns_select_by_turns_and_time(run: StoredRun) -> None:
    store = run.store
    assert sorted_ids(store, "best", 9, "turns == 3 and tool_s > 1.7 and given_tokens == 15") == [0]
    assert sorted_ids(store, "longest", 9, "turns == 1 and given_tokens + tool_s == 0") == [1, 2, 3]
    assert sorted_ids(store, "longest", 1, "") == [0]
    assert store.displayed_columns()["response_tokens"].tolist() == [18, 7, 1, 1]


def test_a_conversation_is_shown_with_roles_and_times(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    (one, single) = make_views(run.run_dir, run.store, [TrajectoryId(0), TrajectoryId(1)])
    assert [(p.role, p.sampled, p.stop - p.start, p.seconds) for p in one.message_spans] == [
        ("assistant", True, 7, 0.0), ("tool", False, 8, 1.25), ("assistant", True, 7, 0.0), ("user", False, 7, 0.5),
        ("assistant", True, 4, 0.0),
    ]  # fmt: skip
    assert {name: one.facts[name] for name in ("turns", "given_tokens", "tool_s")} == {
        "turns": 3, "given_tokens": 15, "tool_s": 1.75,
    }  # fmt: skip
    assert "turns" not in single.facts
    assert {(t.version, t.instance, t.logprob) for t in one.tokens[7:15]} == {(-1, "tool", 0.0)}
    assert str(colour_tokens(one)) == one.response == "guess 5\nhigher\nguess 8\nright\ndone"
    assert "v0 4 tokens on rollout-0  v1 14 tokens on rollout-1" in str(colour_legend(one))
    print_trajectory(one)
    shown = capsys.readouterr().out
    assert re.search(r"assistant \(7 tokens\)\nguess 5\ntool \(8 tokens, 1.25 s\)\n\nhigher", shown)


def test_the_show_command_prints_the_conversation(run: StoredRun) -> None:
    shown = command("store", "show", run.run_dir, "--best", 1, "--json")
    (one,) = json.loads(shown.stdout)
    assert [p["role"] for p in one["message_spans"]] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert (one["turns"], one["tool_s"]) == (3, 1.75)


@pytest.mark.parametrize("to", ["parquet", "jsonl", "hf"])
def test_an_export_has_messages_and_a_mask_of_sampled_tokens(run: StoredRun, tmp_path: Path, to: str) -> None:
    from pyarrow import parquet

    file = tmp_path / f"part.{to}"
    store = run.store
    place = (str(run.run_dir), str(store.path), store.snapshot)
    written, errors = exporting.write_part(to, *place, np.arange(4), str(file))
    assert (written, errors) == (4, {})
    if to == "jsonl":
        read = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        read = parquet.read_table(file).to_pylist()
    said = "conversation" if to == "hf" else "messages"
    response = "completion" if to == "hf" else "response"
    assert read[0][said] == [
        {"role": "assistant", "content": "guess 5", "tokens": 7, "seconds": 0.0},
        {"role": "tool", "content": "\nhigher\n", "tokens": 8, "seconds": 1.25},
        {"role": "assistant", "content": "guess 8", "tokens": 7, "seconds": 0.0},
        {"role": "user", "content": "\nright\n", "tokens": 7, "seconds": 0.5},
        {"role": "assistant", "content": "done", "tokens": 4, "seconds": 0.0},
    ]
    assert [m["content"] for m in read[1][said]] == [read[1][response]] == ["no idea"]
    for got, row in zip(read, store.trajectories(), strict=True):
        t = row.trajectory
        assert (got["turns"], got["given_tokens"], got["response_tokens"]) == (len(t.turns), t.num_given, t.num_sampled)
        np.testing.assert_array_equal(got["sampled"], t.sampled)
        np.testing.assert_array_equal(got["versions"], t.versions)
        assert dataframes.plain_row(row)["tool_s"] == got["tool_s"]


def test_a_reward_function_gets_the_last_turn_and_all_turns_in_the_record(run: StoredRun, tmp_path: Path) -> None:
    block = score_rows(run, f"{tmp_path}/mine.py:last")
    assert block.errors == {}
    assert block.rewards.tolist() == [2.0, 1.0, 0.0, 0.0]


def score_rows(run: StoredRun, reward: str, template: str = "{prompt}") -> reward_rescoring.ScoredBlock:
    """Score all rows of a run again, with task.template set."""
    task = dataclasses.replace(run.config.task, template=template)
    config = reward_rescoring._replace_reward(dataclasses.replace(run.config, task=task), reward)
    header = dataclasses.replace(run.store.header, num_held_out=0, max_prompt_tokens=None)
    settings = pickle.dumps((config, {}, header))
    try:
        return reward_rescoring.score_rows(settings, str(run.store.path), run.store.snapshot, 0, 4)[1]
    finally:
        reward_rescoring._per_thread.scorer[1].close()
        del reward_rescoring._per_thread.scorer


def test_a_response_to_a_prompt_that_the_data_lacks_now_is_not_scored(run: StoredRun, tmp_path: Path) -> None:
    rows = tmp_path / "tasks.jsonl"
    first, *others = rows.read_text().splitlines()
    rows.write_text("\n".join([first.replace("8", "7"), *reversed(others)]))
    block = score_rows(run, f"{tmp_path}/mine.py:last")
    error = "the prompt of its task is not the stored one any more: 'which of 3?'..."
    assert block.errors == {2: error, 3: error}
    assert block.valid.tolist() == [True, True, False, False]
    assert block.rewards.tolist() == [2.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("prompts", "is_scored"),
    [(("5 May: which of 0?", "15 May: which of 1?"), True), (("5 May: 1which of 0?",) * 2, False)],
)
def test_the_template_of_a_prompt_may_have_another_date(
    tmp_path: Path, prompts: tuple[str, str], is_scored: bool
) -> None:
    stored = small_run(tmp_path, *prompts)
    block = score_rows(stored, f"{tmp_path}/mine.py:last", template="6 May: {prompt}")
    assert block.valid.tolist() == [is_scored] * 4


def test_rows_without_a_response_are_not_among_the_responses_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows cannot be read, and have no response; two have one."""
    stored = StoredRun(tmp_path, group=4, steps=1)
    stored.train(
        [("which?", [Response(text="8", reward=1.0), Response(text="9"), Response(text=""), Response(text="")])]
    )
    stored.end()
    valid = np.array([True, True, False, False])
    block = reward_rescoring.ScoredBlock(
        rewards=np.array([1, 0, 0, 0], np.float32), valid=valid, errors={2: "is corrupt", 3: "is corrupt"}
    )

    class OneBlock:
        def split_rows(self, count: int) -> list[tuple[int, int]]:
            return [(0, count)]

        def run(self, function: object, calls: object) -> list[tuple[int, reward_rescoring.ScoredBlock]]:
            return [(0, block)]

    pool = contextlib.nullcontext(OneBlock())
    monkeypatch.setattr(reward_rescoring, "open_pool", lambda client, workers: pool)
    result = reward_rescoring.rescore(stored.run_dir, "task", "again")
    assert (result.rows, result.scored, list(result.errors)) == (4, 2, [2, 3])
    valid[:2] = False
    with pytest.raises(
        ConfigError, match="scoring failed on all 2 responses, so nothing is stored; on trajectory 2: is"
    ):
        reward_rescoring.rescore(stored.run_dir, "task", "other")


def test_the_turns_of_a_record_leave_its_task_source(run: StoredRun) -> None:
    prompts = actor_settings.prompt_settings(run.config, num_held_out=0, max_prompt_tokens=None).build()
    trajectory = next(iter(run.store.trajectories())).trajectory
    _, record = reward_rescoring._make_reward_item(prompts, trajectory, with_origin("games", {"answer": "8"}))
    assert isinstance(record, RecordWithOrigin)
    assert (record.origin, record["turns"][-1]["content"]) == ("games", "done")


ENVIRONMENT = """
class Guess:
    def reset(self, seed=None):
        return "which?", {}

    def step(self, text):
        return "", 1.0, True, False, {}
"""


def test_environment_rewards_cannot_be_recomputed(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(ENVIRONMENT)
    task = dataclasses.replace(run.config.task, source=f"{tmp_path}/guess.py:Guess")
    acting = dataclasses.replace(run.config, task=task)
    (run.run_dir / "config.toml").write_text(knob_tree.to_toml(acting))
    with pytest.raises(ConfigError, match=r"rewards its episodes while they are played, .*name a function of your own"):
        reward_rescoring.rescore(run.run_dir, "task", "again")
    with pytest.raises(ConfigError, match="rewards its episodes while they are played"):
        reward_rescoring.rescore(run.run_dir, "", "again", ('reward.parts={a={function="task"}}',))


def test_rewards_of_a_task_with_tools_can_be_recomputed(run: StoredRun) -> None:
    tools = dataclasses.replace(run.config.environment, tools=["calculator"])
    (run.run_dir / "config.toml").write_text(knob_tree.to_toml(dataclasses.replace(run.config, environment=tools)))
    reward_rescoring._changed_job(run.run_dir, "task", ())
    reward_rescoring._changed_job(run.run_dir, "", ("task.answer_pattern=(.)$",))


@pytest.mark.parametrize(
    "change", ['reward.parts={a={function="task"}}', "reward.parts.a.weight=2", "reward.function=task"]
)
def test_another_reward_and_a_key_that_it_replaces_are_refused(run: StoredRun, tmp_path: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=r"^override reward\..* replaces this key; leave one of the two out"):
        reward_rescoring.rescore(run.run_dir, f"{tmp_path}/mine.py:last", "again", (change,))


def test_a_simulation_repeats_the_turns_and_their_times(run: StoredRun) -> None:
    config = loading.load(
        "examples/dryrun.toml", ("workload.kind=recorded", f"workload.run={json.dumps(str(run.run_dir))}")
    )
    workload = actor_settings.make_workload(config)
    assert workload.turns(0, 0) == (Turn(7, 1.25, 8), Turn(7, 0.5, 7), Turn(4))
    assert [workload.turns(g, m) for g, m in ((0, 1), (1, 0), (2, 1))] == [(Turn(7),), (Turn(1),), (Turn(7),)]


def test_logprobs_are_compared_at_sampled_tokens_only(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = list(run.store.trajectories())
    row = stored[0]

    class Model:
        def row_logprobs(self, packed: list[object], chosen: range) -> dict[int, np.ndarray]:
            return {i: r.trajectory.logprobs - np.float32(0.25) for i, r in enumerate(stored[: len(packed)])}

    monkeypatch.setattr(logprob_recompute, "_logprob_model", lambda settings: Model())
    settings = logprob_recompute.LogprobSettings(
        model="x", dtype="float32", device="cpu", temperature=1.0, clip_range=(0.8, 1.2)
    )
    (new,) = logprob_recompute.response_logprobs(settings, [row])
    assert (new[~row.trajectory.sampled] == 0).all()
    result = logprob_recompute.compute_sums_of_block(
        settings, str(run.store.path), run.store.snapshot, 0, 1, np.ones(1, bool), keep_logprobs=True
    )
    sums = result.sums[0]
    assert sums["tokens"] == row.trajectory.num_sampled
    assert sums["abs_log_ratio"] == pytest.approx(0.25 * row.trajectory.num_sampled)
    assert len(result.logprobs[0][1]) == row.trajectory.num_tokens
