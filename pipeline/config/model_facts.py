"""Facts about a run's model that are needed before any actor loads it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staleflow.pipeline.config.model_files import (
    find_model_folder,
    format_context_length,
    read_architecture,
    vocabulary_size_of,
)
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.context_length import context_length_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a run's model, with a nonce of the run.

    context_length: tokens that the model can attend to. eos: ids of the tokens that end a response; none for an
    emulated engine. nonce: random text that distinguishes runs of the same name.
    """

    context_length: int
    eos: tuple[int, ...]
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))


def inspect_model(config: RunConfig, key: str = "model.path") -> ModelFacts:
    """Read a model's configuration and tokenizer, not its weights, and check that the job's lengths fit the model.

    A job with an emulated engine and without texts needs no model: nothing is read, and the context is unlimited. key:
    the setting or option that names the model, for messages. Raises ConfigError, for instance if the model cannot be
    loaded, or if rollout.max_new_tokens or rollout.engine.kv_tokens does not fit its context.
    """
    if not config.has_texts:
        return ModelFacts(context_length=2**31, eos=())
    subject, folder = f"{key} = {config.model.path!r}", find_model_folder(config.model.path, key)
    eos: tuple[int, ...] = ()
    if config.emulated and folder is not None:
        architecture = read_architecture(folder, subject)
    else:
        architecture, eos = _load_configuration(str(folder or config.model.path), subject)
    check_lengths(config, architecture)
    return ModelFacts(context_length=context_length_of(architecture), eos=() if config.emulated else eos)


def check_teacher_models(config: RunConfig) -> None:
    """Read the configurations of the policy and the reference model, and check them as `check_teacher_fits` does.
    Raises ConfigError. The machine that submits a job may have neither model."""
    names = {"model.path": config.model.path}
    if config.training.kl.reference:
        names["training.kl.reference"] = config.training.kl.reference
    folders = [find_model_folder(name, key) or name for key, name in names.items()]
    architectures = [_load_configuration(str(f), f"{key} = {f!r}")[0] for key, f in zip(names, folders, strict=True)]
    check_teacher_fits(config, architectures[0], architectures[-1])


def check_lengths(config: RunConfig, architecture: Mapping[str, Any]) -> None:
    """Check that the lengths of a job fit the context of a model. Raises ConfigError. architecture: its config.json."""
    context, max_new_tokens, kv_tokens = (
        context_length_of(architecture), config.rollout.max_new_tokens, config.rollout.engine.kv_tokens,
    )  # fmt: skip
    if max_new_tokens >= context:
        raise ConfigError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt: "
            f"the model's context is {format_context_length(architecture)}"
        )
    if kv_tokens < context and kv_tokens < 2 * max_new_tokens:
        raise ConfigError(
            f"rollout.engine.kv_tokens = {kv_tokens} is too small for a prompt and a response of {max_new_tokens} "
            f"tokens; set it to at least {2 * max_new_tokens}"
        )


def check_teacher_fits(config: RunConfig, policy_json: Mapping[str, Any], reference_json: Mapping[str, Any]) -> None:
    """Check that a teacher can compute each trajectory of a job. Raises ConfigError. policy_json, reference_json: the
    config.json of both models."""
    max_tokens = min(context_length_of(policy_json), config.rollout.engine.kv_tokens)
    key = "training.kl.reference" if config.training.kl.reference else "model.path"
    context, kv_tokens = context_length_of(reference_json), config.teacher.engine.kv_tokens
    usable = context - (config.teacher.engine.name == "vllm")  # its request needs room for one more token
    if usable < max_tokens:
        raise ConfigError(
            f"{key}: its context is {format_context_length(reference_json)}, and a trajectory may have "
            f"{max_tokens} tokens; with a teacher on {config.teacher.engine.name}, set rollout.engine.kv_tokens to at "
            f"most {usable}"
        )
    if kv_tokens < max_tokens:
        raise ConfigError(
            f"teacher.engine.kv_tokens = {kv_tokens} is too small: a trajectory may have {max_tokens} tokens "
            "(rollout.engine.kv_tokens, or the model's context); raise it to that"
        )
    rows, policy_rows = vocabulary_size_of(reference_json), vocabulary_size_of(policy_json)
    if rows < policy_rows:
        raise ConfigError(
            f"training.kl.reference: its embeddings have {rows} rows, fewer than the policy's {policy_rows}, which may "
            "sample any of them; name a model with as many"
        )


def _load_configuration(path: str, subject: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Load a model's configuration and the ids of the tokens that end a response. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        configuration = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{subject}: cannot be loaded: {reason}") from error
    try:
        eos_token_id = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos_token_id = getattr(configuration, "eos_token_id", None)
    eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    if tokenizer.eos_token_id is not None:
        eos.add(int(tokenizer.eos_token_id))
    return configuration.to_dict(), tuple(sorted(eos))
