"""Texts for display: decoding by the tokenizer file alone, and fallbacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.stored_runs.response_texts import make_display_detokenizer
from staleflow.tasks.rendering.chat_tokenizer import (
    ChatTokenizer,
    FileDetokenizer,
    IdDetokenizer,
    load_chat_tokenizer,
    load_detokenizer,
    split_by_token,
)
from tests.support.stored_runs import byte_tokenizer

TEXTS = ("4+5=9;so9.", "  two  spaces , and a comma .", "שלום \u200b \x1b[31m", "👨‍👩‍👧 你好", "")


def test_the_detokenizer_of_the_file_matches_transformers(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "bytes")
    for folder, lists in (
        (tmp_path / "bytes", [tokenizer.encode(text).ids for text in TEXTS]),
        (tiny_model, [[0, 1, 2, 3], [5, 9, 1], list(range(20)), []]),
    ):
        alone, whole = load_detokenizer(folder), load_chat_tokenizer(str(folder))
        assert isinstance(alone, FileDetokenizer)
        for ids in lists:
            for special in (True, False):
                assert alone.text(ids, keep_special=special) == whole.text(ids, keep_special=special)
            assert split_by_token(alone, ids) == split_by_token(whole, ids)


@pytest.mark.parametrize(
    "settings",
    [{"clean_up_tokenization_spaces": True}, {"added_tokens_decoder": {"999": {"content": "<more>"}}}],
    ids=["spaces", "added"],
)
def test_tokenizers_that_the_file_would_decode_wrongly_are_not_loaded(tmp_path: Path, settings: object) -> None:
    byte_tokenizer(tmp_path)
    assert load_detokenizer(tmp_path) is not None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_detokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}', "\x00"])
def test_an_invalid_tokenizer_file_is_not_loaded(tmp_path: Path, content: str) -> None:
    assert load_detokenizer(tmp_path) is None
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    assert load_detokenizer(tmp_path) is None


def test_token_ids_are_shown_where_there_is_no_text(tmp_path: Path) -> None:
    gone = loading.from_tree({"model": {"path": str(tmp_path / "gone")}})
    assert isinstance(make_display_detokenizer(gone), IdDetokenizer)
    drawn = loading.from_tree({"rollout": {"engine": {"name": "emulated"}}})
    assert isinstance(make_display_detokenizer(drawn), IdDetokenizer)
    byte_tokenizer(tmp_path / "there")
    there = loading.from_tree({"model": {"path": str(tmp_path / "there")}})
    assert isinstance(make_display_detokenizer(there), FileDetokenizer)
    assert not isinstance(make_display_detokenizer(there), ChatTokenizer)
