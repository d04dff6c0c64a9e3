"""Datasets as JSON lines, parquet files or `datasets` folders: prompts, columns, splits and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.task_source import TaskSource, distinct_held_out
from staleflow.tasks.settings.dataset_columns import Columns, DataUse
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.task_sources import SourceSettings, make_source

ROWS = [{"question": f"{i} + {i}", "label": {"value": str(2 * i)}, "level": i % 3} for i in range(20)]
COLUMNS = Columns(prompt="question", answer="label.value")
Write = Callable[[Path, Sequence[Mapping[str, Any]]], str]


def as_jsonl(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{folder}/rows.jsonl"


def as_parquet(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / "rows.parquet")
    return f"parquet:{folder}/rows.parquet"


def as_datasets(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder / "saved"))
    return f"datasets:{folder}/saved"


@pytest.fixture(params=[as_jsonl, as_parquet, as_datasets], ids=lambda f: f.__name__[3:])
def write(request: pytest.FixtureRequest) -> Write:
    made: Write = request.param
    return made


def source_of(named: str, columns: Columns = COLUMNS, **options: Any) -> TaskSource:
    return make_source(named, options, 0, columns)


def prompts(source: TaskSource, count: int) -> list[object]:
    return [source.task(i).prompt for i in range(count)]


def test_every_file_format_gives_the_same_prompts_and_records(write: Write, tmp_path: Path) -> None:
    source = source_of(write(tmp_path, ROWS))
    assert prompts(source, 19) == [*(f"{i} + {i}" for i in range(18)), "0 + 0"]
    assert [t.prompt for t in distinct_held_out(source, 200)] == ["18 + 18", "19 + 19"]
    record = source.task(3).record
    assert record == {**ROWS[3], "prompt": "3 + 3", "answer": "6"}
    assert (source.score(" 6\n", record), source.score("7", record)) == (1.0, 0.0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_takes_no_options(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a file has no options; remove split$"):
        make_source(f"{kind}:{tmp_path}/rows", {"split": "test"}, 0, COLUMNS)


def test_repeated_prompts_are_excluded_in_every_file_format(write: Write, tmp_path: Path) -> None:
    rows = [*ROWS[:2], ROWS[19], *ROWS[2:]]
    source = source_of(write(tmp_path, rows))
    excluding_held_out = source.excluding_held_out(1)
    assert prompts(excluding_held_out, 18) == [f"{i} + {i}" for i in range(18)]
    assert prompts(excluding_held_out.excluding_held_out(1), 18) == prompts(excluding_held_out, 18)
    assert excluding_held_out.held_out_notice.startswith("1 of 21 rows of ")


def test_a_missing_column_error_lists_the_columns(write: Write, tmp_path: Path) -> None:
    named = write(tmp_path, ROWS)
    with pytest.raises(ConfigError, match=r"no 'prompt'; set task\.columns\.prompt, to one of question, label, level$"):
        source_of(named, Columns())
    with pytest.raises(ConfigError, match=r"no 'label.gold'; set task\.columns\.answer"):
        source_of(named, Columns(prompt="question", answer="label.gold"))
    with pytest.raises(ConfigError, match=r"(line 1|row 0): level must be a text or a list of messages, not 0$"):
        source_of(named, Columns(prompt="level", answer="level"))


def test_a_row_without_an_answer_is_named(write: Write, tmp_path: Path) -> None:
    named = write(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    with pytest.raises(ConfigError, match=r"(line 2|row 1): no 'answer', which other rows have; add it to this one$"):
        source_of(named, Columns())


def test_scoring_without_an_answer_column_needs_a_reward_function(write: Write, tmp_path: Path) -> None:
    source = source_of(write(tmp_path, ROWS), Columns(prompt="question", answer=""))
    record = source.task(1).record
    assert "answer" not in record
    with pytest.raises(ConfigError, match=r"^no answer to compare with; set task\.columns\.answer, or reward\.f"):
        source.score("2", record)


MESSAGES = [
    [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i} + {i}"}] for i in range(4)
]  # fmt: skip


def test_prompts_may_be_messages(write: Write, tmp_path: Path) -> None:
    rows = [{"prompt": messages, "answer": "?"} for messages in [*MESSAGES, MESSAGES[3], *MESSAGES[:2]]]
    source = source_of(write(tmp_path, rows), Columns())
    assert source.task(0).prompt == (("system", "Add."), ("user", "0 + 0"))
    assert source.excluding_held_out(9).held_out_notice.startswith("1 of 7 rows of ")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"must be a text or a list of messages, not \[\]"),
        ([{"role": "user"}], "has a message 1 without `role` and `content` as texts"),
        ([{"role": "user", "content": "a"}, "b"], "has a message 2 without `role` and `content` as texts: 'b'"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with a message of the assi"),
        (7, "must be a text or a list of messages, not 7"),
        ("", "is empty; a prompt must have a text that the model answers"),
        (" \n", "is empty; a prompt must have a text that the model answers"),
        ("q\ud83d", "is not valid Unicode: surrogates not allowed at character 2"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": " "}], "is empty; a prompt must have a text"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_messages_gives_a_one_line_error(
    tmp_path: Path, prompt: Any, message: str
) -> None:
    named = as_jsonl(tmp_path, [{"prompt": "fine", "answer": ""}, {"prompt": prompt, "answer": ""}])
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: prompt {message}") as caught:
        source_of(named, Columns())
    assert "\n" not in str(caught.value)


def test_json_lines_may_contain_unicode_line_separators(tmp_path: Path) -> None:
    """JSON allows U+2028 and U+2029 inside strings, and files from Windows may begin with a byte order mark."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c", "answer": 1}\r\n\r\n{"prompt": "d", "answer": 2}\r\n'.encode())
    assert prompts(source_of(f"jsonl:{path}", Columns()), 1) == ["a\u2028b\x85c"]


def test_evaluation_prompts_are_all_rows_of_their_source(write: Write, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    evaluation = write(tmp_path / "test", [ROWS[4], {**ROWS[0], "question": "new"}, ROWS[4]])
    task = TaskConfig(source=write(tmp_path, ROWS), columns=COLUMNS, eval_source=evaluation)
    settings = SourceSettings(task=task, seed=0)
    source = settings.build()
    assert prompts(source, 21) == [*(f"{i} + {i}" for i in range(20)), "0 + 0"]
    assert [t.prompt for t in distinct_held_out(source, 200)] == ["4 + 4", "new"]
    excluding_held_out = source.excluding_held_out(1)
    assert prompts(excluding_held_out, 20) == [*(f"{i} + {i}" for i in range(20) if i != 4), "0 + 0"]
    assert excluding_held_out.held_out_notice.endswith("are not trained on: they repeat prompts of task.eval_source")
    same = SourceSettings(task=replace(task, source=evaluation), seed=0).build()
    with pytest.raises(ConfigError, match=r"each training row has the prompt of task\.eval_source; add rows with"):
        same.excluding_held_out(0)


def test_generated_prompts_exclude_the_evaluation_set(tmp_path: Path) -> None:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    first = make_source("reasoning_gym:chain_sum", options, 4).task(0)
    evaluation = as_jsonl(tmp_path, [{"prompt": first.prompt, "answer": "seven"}])
    task_config = TaskConfig(source="reasoning_gym:chain_sum", options=options, eval_source=evaluation)
    settings = SourceSettings(task=task_config, seed=4)
    source = settings.build().excluding_held_out(50)
    assert first.prompt not in prompts(source, 50)
    assert source.held_out_notice.endswith("of 50 prompts drawn for training were held out, and replaced")
    (held_out,) = distinct_held_out(source, 50)
    assert source.score("seven", held_out.record) == 1.0
    task = source.task(7)
    assert source.score(task.record["answer"], task.record) == 1.0


def test_an_invalid_evaluation_source_is_named_by_its_key(tmp_path: Path) -> None:
    for named in (f"jsonl:{tmp_path}/none.jsonl", "nonsense", "none.py:Sums", "reasoning_gym:nonsense"):
        with pytest.raises(ConfigError, match=r"^task\.eval_source = "):
            make_source(named, {}, 0, COLUMNS, DataUse.EVALUATION)


def test_dataset_split_is_selected_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    splits = {"train": ROWS, "test": ROWS[:3], "a-few": ROWS[:2]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    named = f"datasets:{tmp_path}/saved"
    assert distinct_held_out(source_of(named), 9)[-1].prompt == "19 + 19"
    assert distinct_held_out(source_of(named, split="test"), 9)[-1].prompt == "2 + 2"
    with pytest.raises(ConfigError, match="no split 'validation'; set the option split to train or test or a-few"):
        source_of(named, split="validation")
    several = datasets.DatasetDict({name: saved[name] for name in ("test", "a-few")})
    several.save_to_disk(str(tmp_path / "several"))
    with pytest.raises(ConfigError, match="no split 'train'; set the option split to test or a-few"):
        source_of(f"datasets:{tmp_path}/several")
    saved["test"].save_to_disk(str(tmp_path / "single"))
    assert prompts(source_of(f"datasets:{tmp_path}/single"), 1) == ["0 + 0"]
    with pytest.raises(ConfigError, match="the folder holds a single data set; remove the option split"):
        source_of(f"datasets:{tmp_path}/single", split="test")
    with pytest.raises(ConfigError, match="a saved folder has no option name, only split"):
        source_of(named, name="main")
    (tmp_path / "plain").mkdir()
    as_jsonl(tmp_path / "plain", ROWS)  # load_dataset reads plain files, too
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path, "~"):
        assert prompts(source_of(f"datasets:{folder}/plain"), 2) == ["0 + 0", "1 + 1"]
    assert prompts(source_of("jsonl:~/plain/rows.jsonl"), 2) == ["0 + 0", "1 + 1"]


def test_a_missing_dataset_gives_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"^task\.source = 'parquet:.*rows\.parquet': cannot be read: ") as caught:
        source_of(f"parquet:{tmp_path}/rows.parquet")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: "):
        source_of(f"parquet:{tmp_path}/none.parquet")
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"^task\.source = 'datasets:\./none': no such folder$"):
        source_of("datasets:./none")


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_a_missing_package_is_named_with_the_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)  # the result of an import of a missing package
    with pytest.raises(ConfigError, match=r"needs the package \w+; pip install 'staleflow\[datasets\]'$"):
        source_of(f"{kind}:anything")
