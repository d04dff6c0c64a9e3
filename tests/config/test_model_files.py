"""What the files of a job's model say, and whether they are all on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.pipeline.config import model_files, preflight
from staleflow.pipeline.config.model_files import find_model_folder, read_context_length, read_vocabulary_size
from staleflow.stores.errors import ConfigError

NAME = "owner/name"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a model in the hub's cache, with its config.json. The hub has the model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(model_files, "_require_on_hub", lambda name, subject: None)
    model = tmp_path / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    folder = model / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32, "max_position_embeddings": 64}))
    return folder


def test_a_model_of_the_hub_without_its_weights_has_yet_to_be_fetched(snapshot: Path) -> None:
    """A driver fetches only the configuration and the tokenizer."""
    (snapshot / "tokenizer.json").write_text("{}")
    notes: list[str] = []
    assert preflight._find_model("model.path", NAME, notes, runs_here=True) is None
    assert notes == ["not checked: model.path = 'owner/name' has yet to be fetched from the hub"]
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(shards))
    for i in (1, 2):
        assert find_model_folder(NAME) is None
        (snapshot / f"model-{i}.safetensors").touch()
    assert find_model_folder(NAME) == snapshot


@pytest.mark.parametrize("name", ["owner/name.git", "foo--bar/x", "owner/x-"])
def test_a_name_that_the_hub_does_not_allow_gives_a_one_line_error(name: str) -> None:
    assert model_files.find_local_model(name) is None
    with pytest.raises(
        ConfigError, match=rf"^model.path = '{name}': no such folder, and not a name that a model of the hub has: "
    ) as error:
        find_model_folder(name)
    assert "\n" not in str(error.value)


def test_sizes_are_read_from_the_hubs_cache_and_from_a_nested_configuration(snapshot: Path, tmp_path: Path) -> None:
    assert read_vocabulary_size(NAME) == 32
    text_config = {"max_position_embeddings": 128, "vocab_size": None}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 48, "text_config": text_config}))
    assert read_vocabulary_size(str(tmp_path)) == 48
    assert read_context_length(tmp_path, "it") == 128
    text_config["vocab_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text_config}))
    assert read_vocabulary_size(str(tmp_path)) == 16
    assert model_files.format_context_length({"text_config": text_config}) == "128 tokens"
