"""Tables of a run with prompts and responses as text."""

from __future__ import annotations

import json

import pytest

from staleflow.pipeline.stored_runs import tables
from staleflow.pipeline.stored_runs.tables import dask_table
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectories.dataframes import RowTexts
from tests.support.stored_runs import Response, StoredRun

GUESSED = Response(
    text="guess 5", reward=1.0, versions=(0, 1), turns=(("tool", "\nhigher\n", 1.25, "guess 8"),),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"prompt": f"which of {i}?", "answer": "8"}) for i in range(4)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    task = {"source": f"jsonl:{folder / 'tasks.jsonl'}", "eval_prompts": 0}
    stored = StoredRun(folder, steps=2, task=task, rollout={"max_new_tokens": 64})
    stored.train([("which?", [GUESSED, Response(text="no idea")])])
    stored.train([("and now?", [Response(text="8", reward=1.0, versions=(1,)), Response(text="9", versions=(1,))])])
    stored.end()
    return stored


def test_dask_table_has_prompts_and_responses_of_the_selected_trajectories(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "TABLE_ROWS", 2)
    lazy = dask_table(run.run_dir, run.store, "trajectory != 1")
    assert lazy.npartitions == 2
    frame = lazy.compute(scheduler="sync")
    assert (frame.dtypes == lazy.dtypes).all()
    assert frame.prompt.tolist() == ["which?", "and now?", "and now?"]
    assert frame.response.tolist() == ["guess 5\nhigher\nguess 8", "8", "9"]
    assert [message["role"] for message in frame.messages.iloc[0]] == ["assistant", "tool", "assistant"]
    assert (frame.v_min.tolist(), frame.v_max.tolist()) == ([0, 1, 1], [1, 1, 1])


def test_without_texts_the_columns_are_those_of_the_store(run: StoredRun) -> None:
    frame = dask_table(run.run_dir, run.store, "v_max == 1 and reward > 0", texts=False).compute(scheduler="sync")
    assert frame.trajectory.tolist() == [0, 2]
    assert list(frame.columns) == list(dataframes.to_pandas([]).columns)
    with pytest.raises(ConfigError, match="did you mean 'v_max'"):
        dask_table(run.run_dir, run.store, "v_mx == 1")


def test_exported_tables_have_the_same_columns(run: StoredRun) -> None:
    rows = list(run.store.trajectories())
    names = {name: name for name in dataframes.TEXT_COLUMNS}
    texts = [RowTexts("p", "r", []) for _ in rows]
    table = dataframes.arrow_table(rows, names, texts)
    frame = dataframes.to_pandas(rows, lambda _: texts)
    assert {*frame.columns, "reward_parts"} == {*table.column_names}
    for name in ("v_min", "v_max", "dataset_row", "prompt", "response"):
        assert table.column(name).to_pylist() == frame[name].tolist()
