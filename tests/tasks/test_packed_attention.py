"""Packed rows have the logprobs of padded rows, or the model gets padded rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.models.model_families import make_family_model
from staleflow.pipeline.config.model_files import format_context_length, read_context_length
from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.context_length import context_length_of, max_rotation_length
from staleflow.tasks.engines.transformers import load_model
from staleflow.tasks.training import packed_attention
from staleflow.tasks.training.blocks import one_block_per_kind
from staleflow.tasks.training.logprobs import LogprobModel
from staleflow.tasks.training.microbatches import Row, microbatches
from staleflow.tasks.training.packed_attention import (
    ATTENTION_NAME,
    PackedRowLengths,
    PackingUnsupported,
    enable_packing,
)
from staleflow.tasks.training.shared_prompts import PromptBlock
from tests.tasks.test_numerics import trainer
from tests.tasks.test_ranks import ragged_rows

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def model(kind: str, config: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES | changes)
    return getattr(transformers, kind)._from_config(made, dtype=torch.float32).eval()


def logprobs_and_gradients(policy_model: Any, *, packed: bool) -> list[torch.Tensor]:
    """Return logprobs and gradients of a ragged batch."""
    under = LogprobModel(model=policy_model, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=10_000)
    if not packed:
        object.__setattr__(under, "padding_reason", "of the test")
    rows = ragged_rows(9, np.random.default_rng(3))
    (batch,) = microbatches(rows, range(9), np.ones(9, np.float32), 10_000)
    policy_model.zero_grad()
    logprobs = under.logprobs(batch)
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)).sum().backward()
    return [logprobs.detach(), *(p.grad.clone() for p in policy_model.parameters())]


@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {}),
        ("Qwen2ForCausalLM", "Qwen2Config", {}),
        ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_packed_rows_have_the_logprobs_of_padded_rows(kind: str, config: str, changes: dict[str, Any]) -> None:
    if kind.startswith("GPT2"):
        changes = {**changes, "attn_pdrop": 0.0}
    result = model(kind, config, **changes)
    padded = logprobs_and_gradients(model(kind, config, **changes), packed=False)
    for first, second in zip(logprobs_and_gradients(result, packed=True), padded, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_common_models_use_packed_rows(kind: str) -> None:
    result = model(f"{kind}ForCausalLM", f"{kind}Config")
    assert not enable_packing(result, "cpu", 1000)
    assert result.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("family", ["mistral", "ministral", "gemma3_text", "olmo3", "exaone4", "mixtral", "qwen2_moe"])
def test_packed_rows_longer_than_a_window_match_the_attention_of_the_model(family: str, tmp_path: Path) -> None:
    """Single rows, packed rows and rows with a shared prompt. qwen2_moe creates a mask with a window of 0 that no layer
    uses."""
    make_family_model(family, tmp_path)
    own, packed = (load_model(str(tmp_path), "float32", "cpu", attention="sdpa") for _ in range(2))
    rows = [replace(row_of(tokens), prompt=row_of(60).response[:25]) for tokens in (30, 47, 12, 21)]
    rows.append(row_of(70))
    expected = LogprobModel(model=own, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=10_000)
    object.__setattr__(expected, "padding_reason", "of the test")
    own.set_attn_implementation("sdpa")
    under = LogprobModel(model=packed, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=10_000)
    assert under.packs_rows, under.padding_reason
    together, alone = under.row_logprobs(rows, range(5)), under.row_logprobs(rows, [4])
    for i, logprobs in expected.row_logprobs(rows, range(5)).items():
        np.testing.assert_allclose(together[i], logprobs, atol=2e-5)
    np.testing.assert_allclose(alone[4], together[4], atol=2e-5)


def plain_varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn` by its definition: the last query of each part has its last key."""
    outputs = []
    queries, keys = (starts.diff().tolist() for starts in (query_starts, key_starts))
    assert (max(queries), max(keys)) == (max_queries, max_keys) and window_size[1] == 0
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    for part in parts:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in part)
        num_earlier = k.shape[2] - q.shape[2]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(num_earlier)
        if window_size[0] >= 0:
            mask = mask.triu(num_earlier - window_size[0])
        attention = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(attention[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma3_text", "qwen3_moe"])
def test_one_kernel_for_all_rows_matches_a_call_for_each(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs and gradients, with shared prompts, single rows and windows. The kernel is of GPUs: here it is computed
    by its definition."""
    make_family_model(family, tmp_path)
    rows = [replace(row_of(tokens), prompt=row_of(60).response[:25]) for tokens in (30, 47, 12, 21)]
    rows += [row_of(70), row_of(9)]
    (batch,) = microbatches(rows, range(6), np.ones(6, np.float32), 10_000, is_packed=True)

    def logprobs_and_gradient() -> list[torch.Tensor]:
        loaded = load_model(str(tmp_path), "float32", "cpu", attention="sdpa")
        under = LogprobModel(model=loaded, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=10_000)
        assert under.packs_rows, under.padding_reason
        logprobs = under.logprobs(batch)
        (logprobs * torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)).sum().backward()
        return [logprobs.detach(), *(p.grad.clone() for p in loaded.parameters() if p.grad is not None)]

    expected = logprobs_and_gradient()
    monkeypatch.setattr(packed_attention, "_has_varlen_kernel", lambda query: True)
    monkeypatch.setattr(packed_attention, "_varlen_kernel", lambda: plain_varlen_attention)
    for measured, tensor in zip(logprobs_and_gradient(), expected, strict=True):
        torch.testing.assert_close(measured, tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama4_text", "layers attend to no more than 16 tokens"),
        ("gpt_oss", "GptOssAttention has s_aux"),
        ("gemma2", "the model changes the logits of its output layer"),
    ],
)
def test_models_with_chunked_attention_or_sinks_keep_their_attention(family: str, reason: str, tmp_path: Path) -> None:
    make_family_model(family, tmp_path)
    kept = load_model(str(tmp_path), "float32", "cpu", attention="sdpa")
    before = kept.config._attn_implementation
    under = LogprobModel(model=kept, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=1000)
    assert under.padding_reason == reason
    assert kept.config._attn_implementation == before


def test_a_model_that_mixes_tokens_outside_attention_gets_padded_rows() -> None:
    torch.manual_seed(0)
    result = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), dtype=torch.float32).eval()
    layer = result.model.layers[1].mlp
    whole = layer.forward
    layer.forward = lambda hidden: whole(hidden.cumsum(1))
    assert "the logits of a row differ" in enable_packing(result, "cpu", 1000)


CHUNKED: dict[str, Any] = {
    "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 20,
    "attn_temperature_tuning": False, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("no_rope_layers", [[1, 1], [0, 1]])
@pytest.mark.parametrize("tokens", [0, 1000])
def test_a_model_with_chunked_layers_gets_padded_rows_of_any_length(no_rope_layers: list[int], tokens: int) -> None:
    """Packed without the chunk mask, logprobs beyond a chunk were off by 1.1 nats; short rows showed no difference."""
    result = model("Llama4ForCausalLM", "Llama4TextConfig", **CHUNKED, no_rope_layers=no_rope_layers)
    before = result.config._attn_implementation
    assert enable_packing(result, "cpu", tokens) == "layers attend to no more than 20 tokens"
    assert result.config._attn_implementation == before
    ids = torch.arange(60)[None] % 7
    with torch.no_grad():
        whole, changed = (
            result(input_ids=given).logits[0, -1] for given in (ids, torch.cat([ids[:, :1] + 9, ids[:, 1:]], 1))
        )
    assert torch.equal(whole, changed) == (0 not in no_rope_layers), "the first token is seen by layers without chunks"


class GrowingScale(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Scales its input by position from token 100 on, as some models scale queries."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + torch.arange(hidden.shape[1])[:, None] // 100)


def test_differences_in_long_sequences_only_are_detected() -> None:
    result = model("LlamaForCausalLM", "LlamaConfig")
    for layer in result.model.layers:
        layer.mlp = torch.nn.Sequential(GrowingScale(), layer.mlp)
    assert "in a sequence of 1000 tokens the logits of a row differ" in enable_packing(result, "cpu", 1000)
    assert not enable_packing(result, "cpu", 90)


def test_the_packing_check_runs_one_layer_of_each_kind_and_restores_the_model() -> None:
    result = model("Qwen3ForCausalLM", "Qwen3Config", num_hidden_layers=5, head_dim=16)
    ids = torch.arange(9)[None]
    before = result(input_ids=ids).logits
    computed = list[int]()
    for number, layer in enumerate(result.model.layers):
        layer.mlp.register_forward_hook(lambda *args, number=number: computed.append(number))
    assert not enable_packing(result, "cpu", 1000)
    assert len(computed) == 5 * 5 + 5, "the short trial's five passes, and those of the long one through one layer"
    assert set(computed[25:]) == {0}
    torch.testing.assert_close(result(input_ids=ids).logits, before)
    assert not any("forward" in vars(layer) for layer in result.model.layers)


def test_layers_of_different_settings_are_different_kinds() -> None:
    config = {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 0, 1, 1, 0]}
    result = model("Llama4ForCausalLM", "Llama4TextConfig", **CHUNKED | config)
    with one_block_per_kind(result):
        passed = ["skip_block" in vars(layer)["forward"].__name__ for layer in result.model.layers]
    assert passed == [False, True, False, True, True, True]


def test_an_inconsistent_attention_mask_raises() -> None:
    """It is an internal error and must not give wrong logprobs."""
    result = model("LlamaForCausalLM", "LlamaConfig")
    assert not enable_packing(result, "cpu", 90)
    ids, mask = torch.arange(6)[None], torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    for rows, mixed in (
        (PackedRowLengths((PromptBlock(0, (3, 3)),)), True),
        (PackedRowLengths((PromptBlock(0, (6,)),)), False),
    ):
        with (
            pytest.raises(PackingUnsupported, match="LlamaAttention has a mask of its own") if mixed else nullcontext()
        ):
            result(input_ids=ids, attention_mask=mask, position_ids=rows.positions("cpu"), row_lengths=rows)


LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 80, "max_position_embeddings": 160, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [5.0, 6.0, 7.0, 8.0]},
}  # fmt: skip


def test_the_context_ends_where_longrope_depends_on_the_microbatch(tmp_path: Path) -> None:
    """With the long form of Phi-3, a row was off by 0.4 nats beside a row longer than the limit."""
    result = model("Phi3ForCausalLM", "Phi3Config", **LONGROPE)
    result.save_pretrained(tmp_path)
    context = read_context_length(tmp_path, "of the test")
    assert context == context_length_of(result.config.to_dict()) == 80
    assert format_context_length(result.config.to_dict()) == (
        "80 tokens, not 160: beyond, longrope would make a row's logprobs depend on its micro-batch"
    )
    short, whole, longer = (row_of(count) for count in (12, context, context + 1))
    under = LogprobModel(model=result, device="cpu", uses_bfloat16=False, temperature=1.0, token_budget=10_000)
    assert not under.padding_reason
    assert under.max_row_length == context
    with pytest.raises(ConfigError, match=r"have 81 tokens: beyond 80 .* lower rollout\.max_new_tokens, or leave such"):
        under.row_logprobs([short, longer], [0, 1])
    object.__setattr__(under, "max_row_length", None)
    for padded in ("", "of the test"):
        object.__setattr__(under, "padding_reason", padded)
        alone = under.row_logprobs([short], [0])[0]
        np.testing.assert_allclose(under.row_logprobs([short, whole], [0, 1])[0], alone, atol=1e-5)
        assert np.abs(under.row_logprobs([short, longer], [0, 1])[0] - alone).max() > 1e-4


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
    ],
)
def test_longest_row_is_the_length_where_rope_depends_on_the_microbatch(
    rope: dict[str, Any], expected: int | None
) -> None:
    result = model("LlamaForCausalLM", "LlamaConfig", max_position_embeddings=128, rope_parameters=rope)
    assert max_rotation_length(result.config.to_dict()) == expected
    ids = torch.arange(256) % 32

    def logits_beside(length: int) -> torch.Tensor:
        rows = torch.stack([ids[:length], torch.nn.functional.pad(ids[:20], (0, length - 20))])
        with torch.no_grad():
            logits: torch.Tensor = result(rows).logits[1, :20]
        return logits

    alone = logits_beside(20)
    assert torch.allclose(logits_beside(128), alone, atol=1e-5)
    assert torch.allclose(logits_beside(256), alone, atol=1e-5) == (expected is None)


def row_of(tokens: int) -> Row:
    """Return a row of this many tokens, five of them prompt."""
    ids = np.random.default_rng(tokens).integers(1, 32, tokens).astype(np.int32)
    count = tokens - 5
    return Row(
        prompt=ids[:5], response=ids[5:], behaviour=np.zeros(count, np.float32), sampled=np.ones(count, bool),
        advantage=1.0, staleness=0,
    )  # fmt: skip


def test_the_trainer_logs_once_why_rows_are_padded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    make_family_model("llama4_text", tmp_path)
    trainer(tmp_path)
    assert [record.message for record in caplog.records if record.name.endswith("policy_trainer")] == [
        "micro-batches are not packed: layers attend to no more than 16 tokens"
    ]


def test_a_saved_config_does_not_name_the_packed_attention(tmp_path: Path) -> None:
    result = model("LlamaForCausalLM", "LlamaConfig")
    assert not enable_packing(result, "cpu", 1000)
    result.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()
