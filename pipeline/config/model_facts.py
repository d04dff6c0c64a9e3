"""Facts about a run's model that are needed before any actor loads it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from staleflow.pipeline.config.model_files import context_of, find_model, format_context, read_context
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a run's model, with a nonce of the run.

    context_length: tokens that the model can attend to. eos: ids of the tokens that end a response; none for an
    emulated engine. nonce: random text that distinguishes runs of the same name.
    """

    context_length: int
    eos: tuple[int, ...]
    nonce: str


def inspect_model(config: RunConfig, key: str = "model.path") -> ModelFacts:
    """Read a model's configuration and tokenizer, not its weights, and check that the job's lengths fit the model.

    A job with an emulated engine and without texts needs no model: nothing is read, and the context is unlimited. key:
    the setting or option that names the model, for messages. Raises ConfigError, for instance if the model cannot be
    loaded, or if rollout.max_new_tokens or rollout.engine.kv_tokens does not fit its context.
    """
    if config.emulated:
        if config.workload.kind == "agentic" and not config.has_environment:
            raise ConfigError(
                'workload.kind = "agentic": without environments only `staleflow simulate` has tool calls; set '
                'task.multi_turn = "yes", or choose another'
            )
        if not config.has_texts:
            return ModelFacts(context_length=2**31, eos=(), nonce=secrets.token_hex(4))
    folder = find_model(config.model.path, key)
    if config.emulated and folder is not None:
        return ModelFacts(context_length=read_context(folder, config.model.path), eos=(), nonce=secrets.token_hex(4))
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    path = str(folder or config.model.path)
    try:
        architecture = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{key} = {config.model.path!r}: cannot be loaded: {reason}") from error
    eos_ids: set[int] = set()
    try:
        eos_token_id = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos_token_id = architecture.eos_token_id
    eos_ids |= {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    if tokenizer.eos_token_id is not None:
        eos_ids.add(int(tokenizer.eos_token_id))
    context = context_of(architecture.to_dict())
    if config.rollout.max_new_tokens >= context:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt: "
            f"the model's context is {format_context(architecture.to_dict())}"
        )
    if (
        config.rollout.engine.kv_tokens < context
        and config.rollout.engine.kv_tokens < 2 * config.rollout.max_new_tokens
    ):
        raise ConfigError(
            f"rollout.engine.kv_tokens = {config.rollout.engine.kv_tokens} is too small for a prompt and a response of "
            f"{config.rollout.max_new_tokens} tokens; set it to at least {2 * config.rollout.max_new_tokens}"
        )
    return ModelFacts(context_length=context, eos=tuple(sorted(eos_ids)), nonce=secrets.token_hex(4))
