"""Prompts as token ids: texts, messages, system prompts, templates and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.recovery import source_fingerprints
from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.sources.prompts import Prompts, TokenizedPrompts
from tests.tasks.test_dataset_rows import MESSAGES

TEMPLATE = """{% for m in messages %}{% if m.role == "odd" %}{{ raise_exception("no such role") }}{% endif %}\
{{ {"system": "+", "user": "-", "assistant": "="}[m.role] }}{{ m.content }};{% endfor %}\
{% if add_generation_prompt %}={% endif %}"""


@pytest.fixture
def chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every tokenizer a chat template."""

    def load(model: str) -> ChatTokenizer:
        texts = load_chat_tokenizer(model)
        texts._tokenizer.chat_template = TEMPLATE
        return texts

    monkeypatch.setattr("staleflow.tasks.sources.prompts.load_chat_tokenizer", load)


def prompts_of(job: Path, prompts: list[Any], *overrides: str) -> Prompts:
    path = job.parent / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "0"}) + "\n" for p in [*prompts, "0"]))
    config = loading.load(job, (f"task.source=jsonl:{path}", "task.options={}", *overrides))
    return TokenizedPrompts(actor_settings.prompt_settings(config, num_held_out=8, max_prompt_tokens=None))


def rendered(prompts: Prompts, index: int = 0) -> str:
    return prompts.text(prompts.encode(prompts.task(index)))


def test_texts_are_templated_and_tokenized(job: Path) -> None:
    assert rendered(prompts_of(job, ["1+2"])) == "1+2"
    assert rendered(prompts_of(job, ["1+2"], "task.template=so {prompt} =")) == "so1+2="


@pytest.mark.usefixtures("chat_template")
def test_texts_and_messages_are_rendered_by_the_chat_template(job: Path) -> None:
    conversation = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
                    {"role": "user", "content": "3"}]  # fmt: skip
    own = [{"role": "system", "content": "4"}, {"role": "user", "content": "5"}]
    prompts = prompts_of(job, ["1+2", conversation, own], "task.chat=true")
    assert [rendered(prompts, i) for i in range(3)] == ["-1+2;=", "-1;=2;-3;=", "+4;-5;="]
    around = ("task.chat=true", "task.system='9'", "task.template=0{prompt}0")
    system = prompts_of(job, ["1+2", conversation, own], *around)
    assert [rendered(system, i) for i in range(3)] == ["+9;-01+20;=", "+9;-1;=2;-030;=", "+4;-050;="]


@pytest.mark.usefixtures("chat_template")
def test_each_source_is_rendered_with_its_settings(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "0"}) + "\n" for p in "1234"))
    sources = {
        "plain": {"source": f"jsonl:{path}", "template": "so {prompt}", "eval_prompts": 0},
        "chat": {"source": f"jsonl:{path}", "chat": True, "eval_prompts": 0},
    }
    config = loading.from_tree({"model": {"path": str(tiny_model)}, "task": {"sources": sources}})
    prompts = actor_settings.prompt_settings(config, num_held_out=0, max_prompt_tokens=None).build()
    tasks = [prompts.tasks([1], source)[0] for source in (0, 1)]
    assert [prompts.text(prompts.encode(task)) for task in tasks] == ["so2", "-2;="]
    said = [Message("user", "3")]
    between = [prompts.text(prompts.bridge_tokens([], [], said, source)) for source in (0, 1)]
    assert between[0] != between[1]
    assert [prompts.text(prompts.render(said, source)) for source in (0, 1)] == [between[0], "-3;="]


@pytest.mark.usefixtures("chat_template")
def test_prompts_that_cannot_be_rendered_give_a_one_line_error(job: Path) -> None:
    prompts = prompts_of(job, [MESSAGES[0]])
    with pytest.raises(ConfigError, match=r"^a prompt is a list of messages; set task\.chat = true: '0 \+ 0'\.\.\.$"):
        prompts.encode(prompts.task(0))
    with pytest.raises(ConfigError, match=r"^task\.system: only a chat template has a place for it; set task\.chat"):
        prompts_of(job, ["1"], "task.system=be brief")
    odd = prompts_of(job, [[{"role": "odd", "content": "1"}]], "task.chat=true")
    with pytest.raises(ConfigError, match=r"^task\.chat = true: the chat template fails on messages of odd: no such"):
        odd.encode(odd.task(0))
    long = prompts_of(job, [[{"role": "user", "content": "1" * 3000}]], "task.chat=true")
    with pytest.raises(ConfigError, match=r"a prompt has 300\d tokens; it must have 1 to 2024, rollout\.engine\.kv"):
        long.encode(long.task(0))


def test_a_missing_chat_template_gives_a_one_line_error(job: Path) -> None:
    prompts = prompts_of(job, ["1"], "task.chat=true")
    with pytest.raises(ConfigError, match=r"^task\.chat = true: the chat template fails on messages of user") as caught:
        prompts.encode(prompts.task(0))
    assert "\n" not in str(caught.value)


def test_system_prompt_and_columns_change_the_source_fingerprint(job: Path, tmp_path: Path) -> None:
    rows, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    rows.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    other.write_text('{"prompt": "c", "answer": 1}\n')

    source = f"task.source=jsonl:{rows}"

    def changes(*after: str) -> set[str]:
        before = source_fingerprints.compute(loading.load(job, (source,)))
        lines = source_fingerprints.describe_changes(
            before, source_fingerprints.compute(loading.load(job, (source, *after)))
        )
        return {line.split(" was ")[0].replace(" changed since the run began", "") for line in lines}

    assert changes("task.chat=true", "task.system=Add.") == {
        "template: chat template", "template: task.chat", "template: task.system",
    }  # fmt: skip
    assert changes("task.columns.answer=prompt") == {"data: task.columns"}
    assert changes(f"task.eval_source=jsonl:{other}") >= {"data: evaluation's file", "data: evaluation's source"}
    before = source_fingerprints.compute(loading.load(job, (f"task.eval_source=jsonl:{other}",))).digests()
    other.write_text('{"prompt": "d", "answer": 1}\n')
    after = source_fingerprints.compute(loading.load(job, (f"task.eval_source=jsonl:{other}",))).digests()
    assert {part for part in before if before[part] != after[part]} == {"data"}


def test_a_task_has_the_row_of_its_dataset(job: Path) -> None:
    """Row 2 repeats the held-out row and is excluded; with a length limit, row 1 is replaced."""
    rows = ["1+2", "1+2+3+4", "0", "5+6"]
    prompts = prompts_of(job, rows)
    assert [task.row for task in prompts.tasks(range(4))] == [0, 1, 3, 0]
    settings = prompts._settings  # type: ignore[attr-defined]
    fitting = TokenizedPrompts(dataclasses.replace(settings, max_prompt_tokens=4))
    drawn = fitting.tasks(range(6))
    assert {task.row for task in drawn} == {0, 3}
    assert all(task.prompt == rows[task.row] for task in drawn)
    generated = loading.load(job, ("task.source=reasoning_gym:chain_sum",))
    numbered = TokenizedPrompts(actor_settings.prompt_settings(generated, num_held_out=8, max_prompt_tokens=None))
    assert [task.row for task in numbered.tasks([5, 3])] == [5, 3]
