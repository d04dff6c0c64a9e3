"""The embedded engine samples from every supported model family with the logprobs of one full forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.models.model_families import FAMILIES, make_family_model
from staleflow.pipeline.config.model_files import check_attention
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.engines.base import SampledTokens
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.transformers import TransformersEngine, forward_logprobs, load_model
from tests.tasks.engine_conformance import collect, logprobs_of, model_settings, request, tokens_of

QUICK = ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_5_text", "nemotron_h", "falcon_h1",
         "mamba2")  # fmt: skip
"""One family for each kind of layer: windows, sinks, latent attention, chunks, states, and hybrid layers."""
REFUSED = {
    "deepseek_v32": "attends to what an index of its own selects",
    "reformer": "does not compute attention by transformers' interface",
    "minimax": "computes with a cache of its own",
    "recurrent_gemma": "computes with a cache of its own",
}


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v32", "reformer"])
def test_check_attention_rejects_unsupported_model_families(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    if family not in REFUSED:
        check_attention(tmp_path, "model.path = 'm'")
        return
    with pytest.raises(
        ConfigError, match=rf"^model.path = 'm': a model of model_type = '{family}' .*{REFUSED[family]}"
    ):
        check_attention(tmp_path, "model.path = 'm'")


@pytest.mark.parametrize(
    "family",
    [pytest.param(item, marks=() if item in QUICK else pytest.mark.slow) for item in FAMILIES if item not in REFUSED],
)
def test_logprobs_match_a_full_forward_pass(family: str, tmp_path: Path) -> None:
    """Requests of different lengths join and leave; a group shares a prompt; one request has a second turn."""
    torch.set_num_threads(1)
    make_family_model(family, tmp_path)
    changes = {"eos": (), "max_running": 5, "max_batch_tokens": 32, "page_tokens": 8}
    engine = TransformersEngine(TransformersSettings(**(model_settings(tmp_path) | changes)), InstanceId("i"))
    plain = load_model(str(tmp_path), "float32", "cpu", "eager")
    prompts = {i: tuple(4 + (7 * i + j * j) % 25 for j in range(3 + (11 * i) % 45)) for i in range(8)}
    prompts |= {20 + i: tuple(5 + i * i % 25 for i in range(25)) for i in range(4)}

    def check(context: tuple[int, ...], ended: SampledTokens) -> None:
        expected = forward_logprobs(plain, [*context, *tokens_of(ended)])[len(context) - 1 :]
        np.testing.assert_allclose(logprobs_of(ended), expected, atol=1e-5)

    try:
        engine.submit(
            [request(i, prompt, max_new_tokens=8 + 3 * (i % 4), keep_kv=i < 3) for i, prompt in prompts.items()]
        )
        first = collect(engine, len(prompts))
        for i, prompt in prompts.items():
            check(prompt, first[TrajectoryId(i)])
        cached = engine.load_statistics().cached_tokens
        assert cached == 3 * 24  # the group's prompt was computed once, but for its last token
        contexts = {i: (*prompts[i], *tokens_of(first[TrajectoryId(i)]), 7, 8, 9, 10, 11) for i in range(3)}
        engine.submit([request(i, context, route_number=2, max_new_tokens=8) for i, context in contexts.items()])
        second = collect(engine, 3)
        for i, context in contexts.items():
            check(context, second[TrajectoryId(i)])
        assert engine.load_statistics().cached_tokens - cached == sum(len(item) - 6 for item in contexts.values())
        assert engine.score([prompts[20]])[0].logprobs == pytest.approx(forward_logprobs(plain, prompts[20]), abs=1e-5)
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1", "mamba2", "lfm2"])
def test_recurrent_layers_compute_prompts_of_equal_length_in_one_pass(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_family_model(family, tmp_path)
    engine = TransformersEngine(TransformersSettings(**model_settings(tmp_path) | {"eos": ()}), InstanceId("i"))
    plain = load_model(str(tmp_path), "float32", "cpu", "eager")
    shapes: list[tuple[int, ...]] = []
    engine._model.register_forward_pre_hook(lambda *call: shapes.append(call[2]["input_ids"].shape), with_kwargs=True)
    contexts = {i: tuple(4 + (3 * i + j * j) % 25 for j in range(12 if i < 4 else 9)) for i in range(5)}
    try:
        for turn in (1, 2):
            requests = [request(i, context, route_number=turn, max_new_tokens=4, keep_kv=True)
                        for i, context in contexts.items()]  # fmt: skip
            engine.submit(requests)
            for i, ended in collect(engine, len(contexts)).items():
                sampled = tokens_of(ended)
                expected = forward_logprobs(plain, [*contexts[i], *sampled])[len(contexts[i]) - 1 :]
                np.testing.assert_allclose(logprobs_of(ended), expected, atol=1e-5)
                contexts[i] = (*contexts[i], *sampled, 7, 8)
    finally:
        engine.close()
    # The second turn's new tokens are equally many for all; some families compute them one by one.
    num_new = 3 if engine._row_model.cache.can_split_input else 1
    assert shapes[:2] == [(4, 12), (1, 9)]
    assert set(shapes[2:]) == {(5, 1), (5, num_new)}


def test_contexts_with_states_are_kept_for_as_many_trajectories_as_may_run(tmp_path: Path) -> None:
    """No page counts the states. Those of a context must not keep those of the rows beside it in memory."""
    torch.set_num_threads(1)
    make_family_model("falcon_h1", tmp_path)
    settings = TransformersSettings(**model_settings(tmp_path) | {"eos": (), "max_running": 3})
    engine = TransformersEngine(settings, InstanceId("i"))
    try:
        engine.submit([request(i, max_new_tokens=4, keep_kv=True) for i in range(8)])
        collect(engine, 8)
        kept = engine._scheduler._cached_contexts
        assert list(kept) == [5, 6, 7]
        states = [
            state
            for context in kept.values()
            for layer in context.saved_row.state_layers
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
        ]
        assert states and all(state.untyped_storage().nbytes() == state.nbytes for state in states)
    finally:
        engine.close()


def test_an_unsupported_attention_setting_falls_back_to_the_model_default(tmp_path: Path) -> None:
    make_family_model("gpt_oss", tmp_path)
    assert load_model(str(tmp_path), "float32", "cpu", "sdpa").config._attn_implementation == "eager"
