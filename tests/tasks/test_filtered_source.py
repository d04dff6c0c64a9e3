"""Prompts that are too long are rejected with length, limit and remedy, or replaced by other prompts of the source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import tokenizers

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from staleflow.tasks.rendering.file_tokenizer import FileTokenizer
from staleflow.tasks.rendering.task_source import Message, Task, TaskSource
from staleflow.tasks.settings.task_config import EvaluationSetConfig, TaskConfig
from staleflow.tasks.sources.evaluation_items import GREEDY, EvaluationItems
from staleflow.tasks.sources.evaluation_sets import EvaluationSet
from staleflow.tasks.sources.prompts import FilteredSource, PromptSettings, TokenizedPrompts, without_prompts
from staleflow.tasks.sources.task_sources import SourceSettings, make_source

LONG = (3, 7, 8, 28)
"""Rows with prompts that are too long; the last one is held out."""


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> PromptSettings:
    """Thirty rows, three of them held out."""
    rows = [{"prompt": f"{i} + 1 =" + " 1 +" * (60 if i in LONG else 0), "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSettings(
        tokenizer=str(tiny_model),
        source=SourceSettings(task=TaskConfig(source=f"jsonl:{tmp_path / 'rows.jsonl'}"), seed=0),
        max_new_tokens=64, context_length=128, kv_tokens=512, num_held_out=3,
    )  # fmt: skip


def test_a_prompt_that_is_too_long_is_rejected_with_length_limit_and_remedy(settings: PromptSettings) -> None:
    prompts = TokenizedPrompts(settings)
    assert prompts.encode(prompts.task(2))
    with pytest.raises(ConfigError, match=r"has \d{3} tokens; it must have 1 to 64, .*; task.skip_long = true skips"):
        prompts.encode(prompts.task(3))


def test_prompts_that_are_too_long_are_replaced_deterministically(settings: PromptSettings) -> None:
    prompts, again = (TokenizedPrompts(replace(settings, max_prompt_tokens=64)) for _ in range(2))
    plain = TokenizedPrompts(settings)
    drawn = [prompts.task(i) for i in range(27)]
    assert all(len(prompts.encode(task)) <= 64 for task in drawn)
    assert [i for i in range(27) if drawn[i] != plain.task(i)] == [3, 7, 8]
    assert prompts.held_out_notice == "3 of 27 prompts drawn were too long, and replaced (task.skip_long)"
    # In any order, and in a later process, a group's id stands for the same prompt.
    assert [again.task(i) for i in reversed(range(27))] == drawn[::-1]
    assert len(prompts.held_out(3)) == 2
    assert not {task.prompt for task in drawn} & {task.prompt for task in prompts.held_out(3)}


class SeededTasks:
    """Tasks of an environment whose first observation is always the same."""

    def task(self, index: int, *, held_out: bool = False) -> Task:
        return Task(prompt="rules", record={}, seed=index)


def test_tasks_of_an_environment_are_not_excluded_by_their_first_observation() -> None:
    source = without_prompts(cast(TaskSource, SeededTasks()), frozenset({"rules"}))
    assert [source.task(index).seed for index in range(3)] == [0, 1, 2]


def test_prompts_of_an_evaluation_set_must_fit_its_own_limit_or_are_left_out(
    settings: PromptSettings, tmp_path: Path
) -> None:
    """Row 3 has 65 to 127 tokens: too long for a response of 64 tokens, not for one of 1."""
    (tmp_path / "set.jsonl").write_text("".join((tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)[2:4]))

    def num_items(limit: int, max_prompt_tokens: int | None = None) -> int:
        config = EvaluationSetConfig(
            source=f"jsonl:{tmp_path / 'set.jsonl'}", prompts=2, greedy=False, max_new_tokens=limit
        )
        prompts = TokenizedPrompts(replace(settings, max_prompt_tokens=max_prompt_tokens))
        return len(EvaluationItems(prompts, [EvaluationSet(name="hard", config=config)]).all())

    assert num_items(1) == 2
    with pytest.raises(ConfigError, match=r"1 to 64, .* less max_new_tokens = 64: .*; task.skip_long = true skips"):
        num_items(64)
    assert num_items(64, max_prompt_tokens=64) == 1


def test_a_prompt_of_an_evaluation_is_encoded_once(settings: PromptSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Task] = []
    encode = TokenizedPrompts.encode

    def count_and_encode(self: TokenizedPrompts, task: Task, max_new_tokens: int = 0) -> tuple[int, ...]:
        encoded.append(task)
        return encode(self, task, max_new_tokens)

    monkeypatch.setattr(TokenizedPrompts, "encode", count_and_encode)
    config = EvaluationSetConfig(prompts=2, samples=3, max_new_tokens=1)
    items = EvaluationItems(TokenizedPrompts(settings), [EvaluationSet(name="set", config=config)]).all()
    assert [(i.prompt_number, i.sample_number) for i in items] == [(p, s) for p in (0, 1) for s in (0, 1, 2, GREEDY)]
    assert len(encoded) == 2


@pytest.mark.parametrize("count", [5, 10_007, 10_009])
def test_a_replacement_prompt_is_found_for_any_number_of_rows(tmp_path: Path, count: int) -> None:
    """A tenth of the rows is short enough, all at one end of the file."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": ""}}\n' for i in range(count)))
    source = make_source(f"jsonl:{tmp_path}/rows.jsonl", {}, 0)
    fitting = FilteredSource(source, lambda task: int(str(task.prompt)) <= count // 10)
    assert {int(str(fitting.task(i).prompt)) <= count // 10 for i in range(0, count, 97 if count > 97 else 1)} == {True}


def test_a_source_without_a_short_enough_prompt_gives_a_one_line_error(settings: PromptSettings) -> None:
    with pytest.raises(ConfigError, match="1000 prompts in a row are too long; lower"):
        TokenizedPrompts(replace(settings, max_prompt_tokens=1)).task(0)


def test_file_tokenizer_matches_the_full_tokenizer(tiny_model: Path) -> None:
    light, full = ChatTokenizer(FileTokenizer(tiny_model)), load_chat_tokenizer(str(tiny_model))
    for text in ("1 + 2 =", " so 3.", "", "12 + 345"):
        assert light.ids(text) == full.ids(text)


def test_limits_stored_with_a_tokenizer_are_ignored(tiny_model: Path, tmp_path: Path) -> None:
    """Prompts were truncated to the length that the tokenizer's own training had used."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(4)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    light, full = ChatTokenizer(FileTokenizer(tmp_path)), load_chat_tokenizer(str(tmp_path))
    for text in ("1", "12 + 345 = 357, so 12 + 345 = 357."):
        assert light.ids(text) == full.ids(text) == ChatTokenizer(FileTokenizer(tiny_model)).ids(text)


def test_file_tokenizer_chat_template_matches_the_full_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    each = "{% for m in messages %}{{ eos_token }}{{ m['content'] }}{% endfor %}"
    template = each + "{% if add_generation_prompt %}={% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    light, full = ChatTokenizer(FileTokenizer(tmp_path)), load_chat_tokenizer(str(tmp_path))
    turn = [Message("user", "1 + 2")]
    assert light.chat_ids(turn) == full.chat_ids(turn) != full.ids("1 + 2")
