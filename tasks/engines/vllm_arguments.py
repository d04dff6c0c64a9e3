"""vLLM's engine arguments that follow from an instance's settings. Does not import vLLM."""

from __future__ import annotations

from typing import Any

from staleflow.tasks.engines.context_length import context_length_of
from staleflow.tasks.engines.engine_settings import VllmSettings


def arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's engine arguments for any device, except those for speculation and for loading weights."""
    max_num_seqs = settings.max_running + 1  # and the probe
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": settings.seed % 2**32,  # numpy accepts no larger seed
        "skip_tokenizer_init": True,
        "max_model_len": max_sequence_length(settings),
        "max_num_seqs": max_num_seqs,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": max(settings.max_batch_tokens, max_num_seqs),  # vLLM refuses fewer
        "block_size": settings.page_tokens,
        "num_gpu_blocks_override": -(-settings.kv_tokens // settings.page_tokens) + 1,  # vLLM keeps one for itself
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "tensor_parallel_size": settings.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_sleep_mode": settings.shares_device,
    }


def max_sequence_length(settings: VllmSettings) -> int:
    """Maximum number of tokens of a request: the model's context length, limited by the size of the cache.

    vLLM uses the long factors of a longrope embedding for all positions if this exceeds the limit of the short factors.
    The trainer uses the short ones, because `context_length_of` ends at this limit.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    return min(context_length_of(config.to_dict()), settings.kv_tokens)
