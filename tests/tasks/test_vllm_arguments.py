"""vLLM's engine arguments, where vllm is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Phi3Config

from staleflow.tasks.engines import vllm_arguments
from staleflow.tasks.engines.engine_settings import VllmSettings
from tests.tasks.engine_conformance import model_settings


def vllm_settings(folder: Path, **changes: Any) -> VllmSettings:
    return VllmSettings(**(model_settings(folder) | changes))


def test_a_pass_has_room_for_a_token_of_each_request_and_of_the_probe(tmp_path: Path) -> None:
    """vLLM refuses less."""
    LlamaConfig().save_pretrained(tmp_path)
    arguments = vllm_arguments.arguments(vllm_settings(tmp_path, max_running=64, max_batch_tokens=64))
    assert arguments["max_num_batched_tokens"] >= arguments["max_num_seqs"] == 65


def test_options_of_a_job_change_no_argument_that_follows_from_its_other_keys(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    arguments = vllm_arguments.arguments(vllm_settings(tmp_path))
    assert set(arguments) - set(VllmSettings.REFUSED_OPTIONS) == {"disable_log_stats", "enable_prefix_caching"}


@pytest.mark.parametrize(("kv_tokens", "limit"), [(4096, 80), (64, 64)])
def test_a_model_never_computes_with_the_long_factors_of_longrope(kv_tokens: int, limit: int, tmp_path: Path) -> None:
    """vLLM would for all positions, if its limit were above 80; the trainer does for none."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [5.0] * 48}
    Phi3Config(original_max_position_embeddings=80, max_position_embeddings=160, pad_token_id=0,
               rope_parameters=factors).save_pretrained(tmp_path)  # fmt: skip
    assert vllm_arguments.arguments(vllm_settings(tmp_path, kv_tokens=kv_tokens))["max_model_len"] == limit
