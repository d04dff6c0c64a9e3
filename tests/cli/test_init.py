"""`staleflow init` writes a complete, valid and commented job, overwrites nothing and leaves no partial files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from staleflow.cli.init import command
from staleflow.pipeline.config import first_job, loading, user_files
from staleflow.pipeline.config.preflight import check_job
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.sources.task_sources import make_reward, make_source
from tests.runtime.test_run import staleflow
from tests.support import forking

ROWS = [{"question": f"What is {i} + {i}?", "solution": f"Twice {i}.\n#### {2 * i}"} for i in range(12)]


def init(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_created_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(folder)
    return loading.load("job.toml")


def test_init_without_options_creates_all_files(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_job, "PRETRAINING_STEPS", 2)
    shown = init("mine")
    assert shown.exit_code == 0
    assert sorted(p.name for p in (working_folder / "mine").iterdir()) == [
        "job.toml",
        "model",
        "reward.py",
        "sums.jsonl",
    ]
    for line in ("cd mine", "staleflow run job.toml", "first prompt, "):
        assert line in shown.output
    rows = [json.loads(line) for line in (working_folder / "mine" / "sums.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == first_job.NUM_SUMS
    for row in rows:
        assert eval(row["prompt"].removesuffix("=")) == int(row["answer"])
    config = load_created_job(working_folder / "mine", monkeypatch)
    reward = make_reward(config.reward.function, make_source(config.task.source, {}, config.seed, config.task.columns))
    assert (reward("-3", {"answer": "-3"}), reward("", {"answer": "-3"})) == (1.0, 0.0)
    comments = [line for line in (working_folder / "mine" / "job.toml").read_text().splitlines() if "#" in line]
    assert len(comments) > 20


def test_given_data_model_and_reward_are_checked(
    working_folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(working_folder / "rows.jsonl", ROWS)
    shown = init("mine", "--data", "rows.jsonl", "--model", str(tiny_model))
    assert sorted(p.name for p in (working_folder / "mine").iterdir()) == ["job.toml", "reward.py"]
    assert "first prompt, " in shown.output
    config = load_created_job(working_folder / "mine", monkeypatch)
    assert config.task.source == "jsonl:../rows.jsonl", "as it was named: relative"
    assert (config.task.columns.prompt, config.task.columns.answer) == ("question", "solution")
    assert (config.model.path, config.rollout.max_new_tokens) == (str(tiny_model), 64)
    assert config.training.learning_rate == 3e-4, "of a small model"
    assert re.search(r"\d+ of them stand for what the model's tokenizer does not know", shown.output)
    check_job(config)
    reward = make_reward(config.reward.function, make_source(config.task.source, {}, config.seed, config.task.columns))
    assert (reward("6", ROWS[3] | {"answer": ROWS[3]["solution"]}), reward("Twice 3.", {"answer": "#### 6"})) == (1, 0)


GAME = """
class Count:
    def reset(self, seed):
        self.said = 0
        return "1=", {}

    def step(self, action):
        self.said += 1
        return "2=", 1.0, self.said == 2, False, {}
"""


def test_an_environment_gives_a_job_with_turns(
    working_folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_folder / "count.py").write_text(GAME)
    init("mine", "--data", "count.py:Count", "--model", str(tiny_model))
    config = load_created_job(working_folder / "mine", monkeypatch)
    text = (working_folder / "mine" / "job.toml").read_text()
    assert user_files.with_multi_turn(config).has_environment
    assert 'function = "task"  # the environment gives the reward' in text
    assert "max_turns = 16" in text
    assert 0 < config.rollout.turn_tokens < config.rollout.max_new_tokens
    assert not (working_folder / "mine" / "reward.py").exists()


def test_data_in_the_folder_is_named_relative_to_it(
    working_folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_folder / "mine").mkdir()
    write(working_folder / "mine" / "rows.jsonl", [{"q": f"{i}", "a": "some words"} for i in range(4)])
    init("mine", "--data", "mine/rows.jsonl", "--model", str(tiny_model), "--prompt-column", "q",
         "--answer-column", "a", "--reward", "exact")  # fmt: skip
    config = load_created_job(working_folder / "mine", monkeypatch)
    assert (config.task.source, config.reward.function) == ("jsonl:rows.jsonl", "task")
    assert config.task.template.endswith("Answer: ...")
    assert not (working_folder / "mine" / "reward.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "rows.jsonl"), r"the tiny model knows nothing but sums; bring a model for your data: --model"),
        (("--data", "none.jsonl", "--model", "{model}"), r"none\.jsonl: cannot be read: No such file or directory$"),
        (("--data", "rows.jsonl", "--model", "{model}", "--prompt-column", "questoin"),
         r"--prompt-column questoin: --data rows\.jsonl has only question, solution; did you mean question\?$"),
        (("--data", "odd.jsonl", "--model", "{model}"), r"which column is the prompt\? --prompt-column a or b"),
        (("--data", "sol.jsonl", "--model", "{model}", "--reward", "exact"),
         r"sol\.jsonl: --reward exact compares with an answer; which column is it\? --answer-column sol or id$"),
        (("--data", "sol.jsonl", "--model", "{model}", "--reward", "math_verify"), r"--answer-column sol or id$"),
        (("--data", "rows.csv", "--model", "{model}"), r"--data rows\.csv: unknown kind of file; bring one of \.jso"),
        (("--data", "talk.jsonl", "--model", "{model}"), r"prompts are messages, and .* has no chat template"),
        (("--model", "./none"), r"^--model = '\./none': no such folder"),
        (("--model", "nomodel"), r"^--model = 'nomodel': no such folder; a model of the hub is OWNER/NAME$"),
        (("--reward", "best",), r"--reward must be one of task, math_verify, or your own, file\.py:NAME, not .best"),
        (("--data", "none.csv", "--model", "{model}"), r"^--data none\.csv: no such file$"),
        (("--data", "count.py:Count", "--model", "{model}", "--reward", "math_verify"),
         r"^--reward math_verify: count\.py:Count rewards its episodes itself; leave --reward out$"),
        (("--option", "split=train"), r"^--option split: the made-up sums have no options; add --data$"),
        (("--prompt-column", "a"), r"^--prompt-column a: only for --data with rows in columns$"),
        (("--data", "reasoning_gym:chess", "--model", "{model}", "--answer-column", "a"), r"^--answer-column a: only"),
        (("--reward", "none.py:f"), r"--reward = 'none\.py:f': cannot be loaded"),
    ],
)  # fmt: skip
def test_each_mistake_gives_a_one_line_error_and_leaves_no_file(
    working_folder: Path, tiny_model: Path, arguments: tuple[str, ...], message: str
) -> None:
    write(working_folder / "rows.jsonl", ROWS)
    write(working_folder / "odd.jsonl", [{"a": "1", "b": "2"}] * 2)
    write(working_folder / "sol.jsonl", [{"question": "1", "sol": "2", "id": 3}] * 2)
    write(working_folder / "talk.jsonl", [{"messages": [{"role": "user", "content": "1"}], "answer": "1"}] * 2)
    (working_folder / "rows.csv").write_text("a,b\n")
    (working_folder / "count.py").write_text(GAME)
    with pytest.raises(ConfigError, match=message) as caught:
        init("mine", *(a.format(model=tiny_model) for a in arguments))
    assert "\n" not in str(caught.value)
    assert not (working_folder / "mine").exists()


def test_a_job_whose_first_prompt_fails_leaves_no_file(working_folder: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_task"):
        init("mine", "--data", "reasoning_gym:no_such_task", "--model", str(tiny_model))
    assert list((working_folder / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("data", "source"),
    [("agent:talk.py:run", "agent:../talk.py:run"), ("talk.py:run", "../talk.py:run"), ("agent:command",) * 2],
)
def test_user_code_is_named_relative_to_the_folder(working_folder: Path, data: str, source: str) -> None:
    (working_folder / "talk.py").write_text("async def run(base_url, key, task):\n    return 1.0\n")
    inputs = first_job.InitInputs(data=data, model="model")
    assert first_job._inspect_data(working_folder / "mine", inputs).source == source


def test_an_option_without_a_value_names_the_option() -> None:
    shown = init("--option", "split")
    assert (shown.exit_code, shown.output.splitlines()[-1]) == (
        2, "Error: --option split: expected KEY=VALUE, such as split=train",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["job.toml", "reward.py", "sums.jsonl", "model"])
def test_existing_files_are_not_overwritten(working_folder: Path, name: str) -> None:
    (working_folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"{name} exists and is not overwritten; name another folder"):
        init()
    assert [(p.name, p.read_text()) for p in working_folder.iterdir()] == [(name, "mine")]


def test_an_interrupted_init_leaves_no_file(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first_job, "_pretrain", interrupted)
    assert CliRunner().invoke(command, ["mine"]).exit_code == 1
    assert list((working_folder / "mine").iterdir()) == []


def test_a_terminated_init_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "staleflow.cli.main", "init", "mine", "--yes"]
    with forking.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("mine/.init-*/job.toml")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(300) == 143
    assert list((tmp_path / "mine").iterdir()) == []


def test_message_lists_need_a_model_with_a_chat_template(
    working_folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    model = working_folder / "chat"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    (model / "tokenizer_config.json").unlink()
    tokenizer.save_pretrained(working_folder / "tokenizer")
    for file in (working_folder / "tokenizer").iterdir():
        (model / file.name).unlink(missing_ok=True)
        (model / file.name).write_bytes(file.read_bytes())
    talks = [{"messages": [{"role": "user", "content": f"{i}"}], "answer": f"{i}"} for i in range(3)]
    write(working_folder / "talk.jsonl", talks)
    shown = init("mine", "--data", "talk.jsonl", "--model", "chat")
    assert "first prompt, 2 tokens: '0='" in shown.output
    job = tomllib.loads((working_folder / "mine" / "job.toml").read_text())
    assert (job["task"]["chat"], job["task"]["columns"]["prompt"]) == (True, "messages")


@pytest.mark.slow
def test_the_created_job_learns(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reward at least doubles, from random answers to correct sums."""
    assert staleflow("init", "mine").returncode == 0
    monkeypatch.chdir(working_folder / "mine")
    assert staleflow("run", "job.toml").returncode == 0
    first, last = json.loads((working_folder / "mine" / "runs" / "first" / "summary.json").read_text())["evaluations"]
    assert first["sampled"] < 0.4
    assert last["sampled"] > max(0.6, 2 * first["sampled"])
