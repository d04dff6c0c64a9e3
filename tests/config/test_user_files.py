"""Data and code that a job names by file: found from anywhere, and code of one name from two folders kept apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import loading, user_files
from pipeline.config.schema import RunConfig


def job(*overrides: str) -> RunConfig:
    return loading.load("examples/demo.toml", overrides)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("rows.jsonl", "a/mine.py", "b/mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    examples = Path("examples").resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(examples)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("jsonl:rows.jsonl", "jsonl:{here}/rows.jsonl"),
        ("parquet:none.parquet", "parquet:{here}/none.parquet"),
        ("datasets:a", "datasets:{here}/a"),
        ("datasets:openai/gsm8k", "datasets:openai/gsm8k"),
        ("a/mine.py:Sums", "{here}/a/mine.py:Sums"),
        ("reasoning_gym:chain_sum", "reasoning_gym:chain_sum"),
    ],
)
@pytest.mark.parametrize("key", ["task.source", "task.eval_source"])
def test_a_data_set_is_found_from_any_folder(here: Path, key: str, source: str, found: str) -> None:
    task = user_files.located(job(f"{key}={source}")).task
    assert (task.source if key == "task.source" else task.eval_source) == found.format(here=here)


def test_files_of_one_name_are_sent_apart(here: Path) -> None:
    config, code = user_files.with_code(job("task.source=a/mine.py:One", "task.eval_source=b/mine.py:Two"))
    assert sorted(code.values()) == ["# a/mine.py\n", "# b/mine.py\n"]
    assert code[config.task.source.partition(":")[0]] == "# a/mine.py\n"
    assert code[config.task.eval_source.partition(":")[0]] == "# b/mine.py\n"
    again, same = user_files.with_code(job("task.source=a/mine.py:One", "task.eval_source=a/mine.py:Two"))
    assert (list(same), again.task.eval_source) == (["task_mine.py"], "task_mine.py:Two")
