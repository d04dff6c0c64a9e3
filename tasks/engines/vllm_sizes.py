"""Sizes and names with which vLLM is started, from a model's configuration. Allocates no weights."""

from __future__ import annotations

from typing import Any

from staleflow.stores.weights import weight_folder
from staleflow.tasks.engines.engine_settings import VllmSettings


def max_sequence_length(settings: VllmSettings) -> int:
    """Maximum number of tokens of a request: the model's context length, limited by the size of the cache."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    return min(int(getattr(config, "max_position_embeddings", settings.kv_tokens)), settings.kv_tokens)


def cache_bytes(settings: VllmSettings) -> int:
    """Bytes of the KV cache: keys and values of every layer, for kv_tokens rounded up to pages."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * width * getattr(torch, settings.dtype).itemsize
    return int(token_bytes * (settings.kv_tokens + settings.page_tokens))


def checkpoint_shapes(model: str) -> weight_folder.Shapes:
    """Names and shapes of the tensors that a trainer of this model publishes. Allocates nothing."""
    return weight_folder.shapes(dict(meta_model(model).named_parameters()))


def adapted_layers(settings: VllmSettings) -> list[str]:
    """Last name components of the layers with an adapter. Allocates nothing."""
    from staleflow.tasks.engines import served_adapters

    names = served_adapters.adapted_layers(meta_model(settings.model), settings.lora.targets)
    return sorted({name.rpartition(".")[2] for name in names})


def meta_model(model: str) -> Any:
    """A transformers model on the meta device, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
