"""Finds and checks the files of a job's model, in milliseconds and without importing torch."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.context_length import context_length_of, text_config_of

HUB_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
"""A model's name on the hub: NAME or OWNER/NAME."""
EXAMPLE_MODELS = {
    "runs/base/running-sums": "running-sums-model",
    "runs/base/careless-player": "careless-player-model",
    "runs/base/smollm2-135m": "smollm2-model",
}
"""Models of the examples: the Makefile's target that creates the model, by its folder."""
HUB_TIMEOUT_S = 5.0
"""Seconds the hub may take to answer whether it has a model."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip
"""A tokenizer has at least one of these files."""
SHARD_INDEX = "model.safetensors.index.json"
EMBEDDING_NAME_ENDS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Name endings of the embedding tensor, which has one row per token."""
MODEL_LIST_FILES = ("auto_mappings.py", "configuration_auto.py")
"""Files of transformers that list the model types it knows."""
ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name of the table of attention functions that a model's code in transformers uses if its attention can be
replaced."""
OWN_CACHE_TYPES = ("minimax", "recurrent_gemma")
"""Model types that work only with a cache class of their own."""
RECURRENT_STATE_CALL = "update_recurrent_state("
"""A call in the code of models with recurrent layers, whose states are in transformers' own cache."""
INDEXED_ATTENTION_CALLS = ("update_indexer(", "compressed_sparse_attention")
"""Calls in the code of models that attend only to tokens selected by an index (sparse attention)."""
HEADER_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100 * 2**20
"""Maximum bytes of a safetensors header, as when the file is loaded."""


def find_model_folder(path: str, key: str = "model.path") -> Path | None:
    """The folder with a model's files; None if they must be downloaded from the hub. The hub is asked only about names
    that are not on this machine. Raises ConfigError. key: key in the job file, or option, for messages."""
    if Path(path).is_dir():
        return Path(path)
    subject = f"{key} = {path!r}"
    if Path(path).exists():
        raise ConfigError(f"{subject}: a file; name the folder of a model with its config.json")
    if not HUB_NAME.fullmatch(path) or ".." in path or Path(path).parts[0] in ("runs", "models"):
        home = "; ~ is not replaced here, write the whole path" if path.startswith("~") else ""
        raise ConfigError(f"{subject}: no such folder{home or _describe_neighbours(Path(path))}")
    if "/" in path and Path(path).parent.is_dir():
        raise ConfigError(f"{subject}: no such folder{_describe_neighbours(Path(path))}")
    folder = find_local_model(path)
    if folder is not None and _has_all_files(folder, subject):
        return folder
    if "/" not in path:
        raise ConfigError(f"{subject}: no such folder; a model of the hub is OWNER/NAME")
    _require_on_hub(path, subject)
    return None


def find_local_model(path: str) -> Path | None:
    """The folder with a model's config.json if it is on this machine; of a hub's model, other files may have yet to be
    fetched. Uses no network."""
    if Path(path).is_dir():
        return Path(path)
    if not HUB_NAME.fullmatch(path):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached_file = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached_file).parent if isinstance(cached_file, str) else None


def _describe_neighbours(path: Path) -> str:
    """The end of a message about a missing folder: the existing folders beside it."""
    if str(path) in EXAMPLE_MODELS:
        return f"; `make {EXAMPLE_MODELS[str(path)]}` creates it"
    if not path.parent.is_dir() or path.parent == path:
        return ""
    folders = sorted(p.name for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    return f"; folders in {path.parent}: {', '.join(folders[-8:])}" if folders else f"; {path.parent} is empty"


def _require_on_hub(name: str, subject: str) -> None:
    """Raise ConfigError unless the hub has this model."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{subject}: no such folder, and not a name that a model of the hub has: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{subject}: no such folder, and not among the models fetched before (HF_HUB_OFFLINE is set)")
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise ConfigError(f"{subject}: no such folder, and the hub has no such model, or not for you") from None
    except Exception as error:  # its clients raise their own kinds for every kind of network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{subject}: no such folder, and the hub ({constants.ENDPOINT}) cannot be asked for it: {reason}"
        ) from error


def read_architecture(folder: Path, subject: str) -> dict[str, Any]:
    """Read a model's config.json. Raises ConfigError. subject: names the model in messages."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text("utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        raise ConfigError(f"{subject}: no config.json in it; name the folder of a Hugging Face causal LM") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{subject}: its config.json cannot be read: {error}; copy the model again") from error
    return settings


def read_context_length(folder: Path, subject: str) -> int:
    """The context length of a model in tokens, from its config.json; practically unlimited if that states none. Raises
    ConfigError. subject: names the model in messages."""
    return context_length_of(read_architecture(folder, subject))


def format_context_length(architecture: Mapping[str, Any]) -> str:
    """Format a model's context length for messages, with the reason if it is less than the configuration states.

    >>> format_context_length({"max_position_embeddings": 4096})
    '4096 tokens'
    """
    context = context_length_of(architecture)
    declared_context = text_config_of(architecture).get("max_position_embeddings")
    if context == declared_context:
        return f"{context} tokens"
    reason = "beyond, longrope would make a row's logprobs depend on its micro-batch"
    return f"{context} tokens, not {declared_context}: {reason}"


def read_vocabulary_size(path: str) -> int:
    """Vocabulary size of a model on this machine; 0 if unknown. Raises ConfigError."""
    folder = find_local_model(path)
    if folder is None or not (folder / "config.json").is_file():
        return 0
    return vocabulary_size_of(read_architecture(folder, path))


def vocabulary_size_of(architecture: Mapping[str, Any]) -> int:
    """Vocabulary size of a model, from its config.json; 0 if unknown."""
    size = text_config_of(architecture).get("vocab_size")
    return size if isinstance(size, int) else 0


def check_model_files(folder: Path, subject: str) -> None:
    """Raise ConfigError if transformers does not know a model's type, or its weights or tokenizer are missing or
    incomplete. Reads only headers."""
    architecture = read_architecture(folder, subject)
    model_type = architecture.get("model_type")
    if isinstance(model_type, str) and not _is_known_type(model_type):
        raise ConfigError(
            f"{subject}: its config.json says model_type = {model_type!r}, which the installed transformers does not "
            "know"
        )
    if not _has_tokenizer(folder):
        raise ConfigError(f"{subject}: no tokenizer in it; copy tokenizer.json and tokenizer_config.json there")
    shards = list(_shards(folder, subject))
    if not shards and not any(folder.glob("*.bin")):
        raise ConfigError(f"{subject}: no weights in it, such as model.safetensors; copy the model again")
    for path in shards:
        _check_weights(path, subject, architecture.get("vocab_size"))


def _has_all_files(folder: Path, subject: str) -> bool:
    """Whether a model's tokenizer and all its files of weights are in a folder. Raises ConfigError."""
    shards = list(_shards(folder, subject))
    has_weights = all(path.is_file() for path in shards) if shards else any(folder.glob("*.bin"))
    return has_weights and _has_tokenizer(folder)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_attention(folder: Path, subject: str) -> None:
    """Raise ConfigError if the transformers engine cannot batch a model. Its code in transformers, which is searched as
    text, must compute attention through the attention interface over the whole cache, or have no attention.
    subject: names the model in messages."""
    model_type = read_architecture(folder, subject).get("model_type")
    code = _modeling_code(model_type) if isinstance(model_type, str) else ""
    why = ""
    if code and ATTENTION_INTERFACE not in code and RECURRENT_STATE_CALL not in code:
        why = "does not compute attention by transformers' interface"
    elif model_type in OWN_CACHE_TYPES:
        why = "computes with a cache of its own"
    elif any(call in code for call in INDEXED_ATTENTION_CALLS):
        why = "attends to what an index of its own selects"
    if why:
        raise ConfigError(
            f"{subject}: a model of model_type = {model_type!r} {why}, so the transformers engine cannot batch it; set "
            'rollout.engine.name = "vllm", or choose another model'
        )


def _modeling_code(model_type: str) -> str:
    """The code of this model type in transformers; empty if it is not found."""
    names = (model_type.replace("-", "_"), *re.findall(rf'\("{re.escape(model_type)}", "(\w+)"\)', _model_lists()))
    files = (_transformers_folder() / "models" / name / f"modeling_{name}.py" for name in names)
    return next((path.read_text("utf-8") for path in files if path.is_file()), "")


def _is_known_type(model_type: str) -> bool:
    """Whether transformers has a configuration for this type of model; True if its list is not found. The list is
    searched as text, because importing it takes seconds."""
    text = _model_lists()
    return f'"{model_type}"' in text or '"llama"' not in text


def _model_lists() -> str:
    """Text of the files that list the kinds of models that transformers knows."""
    paths = (_transformers_folder() / "models" / "auto" / name for name in MODEL_LIST_FILES)
    return "".join(path.read_text("utf-8") for path in paths if path.is_file())


def _transformers_folder() -> Path:
    """The folder of the installed transformers."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else Path("none")


def _shards(folder: Path, subject: str) -> Iterator[Path]:
    if (folder / SHARD_INDEX).is_file():
        try:
            names = set(json.loads((folder / SHARD_INDEX).read_text("utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{subject}: its {SHARD_INDEX} cannot be read: {error}; copy the model again") from error
        yield from (folder / name for name in sorted(names))
    elif (folder / "model.safetensors").is_file():
        yield folder / "model.safetensors"


def _check_weights(path: Path, subject: str, vocabulary_size: object) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
            header = json.loads(file.read(length)) if length <= min(size, MAX_HEADER_BYTES) else {}
        ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__" and isinstance(v, Mapping)]
        file_bytes = HEADER_LENGTH.size + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{subject}: {path.name} cannot be read: {error}; copy the model again") from error
    num_rows = (v["shape"][0] for k, v in header.items() if k.endswith(EMBEDDING_NAME_ENDS))
    rows = vocabulary_size and next(num_rows, vocabulary_size)
    if rows != vocabulary_size:
        raise ConfigError(
            f"{subject}: {path.name} has embeddings of {rows} tokens, config.json says vocab_size = {vocabulary_size}; "
            "copy the model again"
        )
    if size < file_bytes:
        raise ConfigError(f"{subject}: {path.name} is truncated: {size} of {file_bytes} bytes; copy the model again")
