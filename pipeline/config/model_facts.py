"""Facts about a run's model that are needed before any actor loads it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.schema import RunConfig
from stores.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a run's model. context: tokens the model can attend to. eos: ids that end a response. nonce: random,
    distinguishes runs of the same name."""

    context: int
    eos: tuple[int, ...]
    nonce: str


def inspect_model(config: RunConfig) -> ModelFacts:
    """Read the model's configuration and tokenizer, not its weights. Raises ConfigError."""
    if config.emulated:
        if config.workload.kind == "agentic":
            raise ConfigError('workload.kind = "agentic": only `staleflow simulate` has tool calls; choose another')
        return ModelFacts(context=2**31, eos=(), nonce=secrets.token_hex(4))
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    path = config.model.path
    looks_local = path.startswith((".", "/", "~")) or Path(path).parts[0] in ("runs", "models") or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise ConfigError(f"model.path = {path!r}: no such folder; for the demo, `make demo` creates it")
    try:
        architecture = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path = {path!r}: cannot be loaded: {reason}") from error
    ends: set[int] = set()
    try:
        declared = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        declared = architecture.eos_token_id
    ends |= {declared} if isinstance(declared, int) else set(declared or ())
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    context = int(getattr(architecture, "max_position_embeddings", 0) or 2**31)
    if config.rollout.max_new_tokens >= context:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt: "
            f"the model's context is {context} tokens"
        )
    if (
        config.rollout.engine.kv_tokens < context
        and config.rollout.engine.kv_tokens < 2 * config.rollout.max_new_tokens
    ):
        raise ConfigError(
            f"rollout.engine.kv_tokens = {config.rollout.engine.kv_tokens} is too small for a prompt and a response of "
            f"{config.rollout.max_new_tokens} tokens; set it to at least {2 * config.rollout.max_new_tokens}"
        )
    return ModelFacts(context=context, eos=tuple(sorted(ends)), nonce=secrets.token_hex(4))
