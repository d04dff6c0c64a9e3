"""Logprobs computed in chunks: equal values and gradients without all logits in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from staleflow.tasks.training import lm_head
from staleflow.tasks.training.blocks import enable_recomputation
from staleflow.tasks.training.logprobs import LogprobModel
from staleflow.tasks.training.microbatches import EMPTY_MICROBATCH, MicroBatch, microbatches
from tests.tasks.test_ranks import ragged_rows

TEMPERATURE = 1.3


def micro_batch() -> MicroBatch:
    rows = ragged_rows(9, np.random.default_rng(3))
    (batch,) = microbatches(rows, range(9), np.ones(9, np.float32), 10_000)
    return batch


def model_at(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def logprob_model(model: Any) -> LogprobModel:
    return LogprobModel(model=model, device="cpu", uses_bfloat16=False, temperature=TEMPERATURE, token_budget=10_000)


def plain_logprobs(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies computed from all logits at once."""
    ids, attention = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, batch.response_start : -1]
    logits = (logits.float() / TEMPERATURE).log_softmax(-1)
    logprobs = logits.gather(2, torch.from_numpy(np.ascontiguousarray(batch.targets))[..., None]).squeeze(2)
    others = torch.from_numpy(batch.mask == 0)
    return logprobs.masked_fill(others, 0), -(logits.exp() * logits).sum(-1).masked_fill(others, 0)


def outcome(model: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
    """Return logprobs, entropies, and the gradients of a function of them."""
    model.zero_grad()
    is_tokenwise = torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)
    (is_tokenwise * logprobs + is_tokenwise.flip(1) * entropy).sum().backward()
    return [logprobs.detach(), entropy.detach(), *(p.grad.clone() for p in model.parameters())]


def counted_logits(under: LogprobModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each computation of logits appends its number of tokens."""
    sizes, logits = list[int](), under.lm_head._logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(under.lm_head, "_logits", counted)
    return sizes


@pytest.mark.parametrize("tokens", [1, 7, 10_000])
def test_chunked_logprobs_have_equal_values_and_gradients(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    model, batch = model_at(tiny_model), micro_batch()
    expected = outcome(model, *plain_logprobs(model, batch))
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", tokens * 4 * model.config.vocab_size)
    under = logprob_model(model)
    assert under.lm_head.can_replace_logits
    for found, wanted in zip(
        outcome(model, *under._compute(batch, with_entropy=True).unbind(-1)), expected, strict=True
    ):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(under.logprobs(batch).double(), expected[0].double(), rtol=1e-5, atol=1e-6)


def test_logits_in_memory_never_exceed_one_chunk(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of sampled tokens are computed once forward and once for the gradient."""
    model, batch = model_at(tiny_model), micro_batch()
    under = logprob_model(model)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 5 * 4 * model.config.vocab_size)
    sizes = counted_logits(under, monkeypatch)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 2 and len(tensor) <= 5 and tensor.shape[1] == model.config.vocab_size:
            kept.append(len(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = under.logprobs(batch)
    assert kept == []
    assert max(sizes) == 5
    assert sum(sizes) == batch.mask.sum()
    logprobs.sum().backward()
    assert sum(sizes) == 2 * batch.mask.sum()


def is_tokenwise(batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    """A loss with one term per token."""
    assert entropy is not None
    weight = torch.from_numpy(batch.behaviour)
    return (weight * (logprobs.exp() + entropy)).masked_fill(torch.from_numpy(batch.mask == 0), 0).sum()


def by_row(batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    """A loss of whole rows."""
    assert entropy is not None
    return (torch.from_numpy(batch.token_weight[:, 0]) * logprobs.sum(1) ** 2 + entropy.sum(1)).sum() / 1000


@pytest.mark.parametrize("tokens", [1, 7, 10_000])
@pytest.mark.parametrize("loss", [is_tokenwise, by_row])
@pytest.mark.parametrize("packed", [True, False])
def test_loss_in_chunks_has_the_gradients_of_the_full_loss(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, loss: Any, tokens: int, packed: bool
) -> None:
    model, batch = model_at(tiny_model), micro_batch()
    expected = plain_logprobs(model, batch)
    loss(batch, *expected).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", tokens * 4 * model.config.vocab_size)
    under = logprob_model(model)
    assert under.packs_rows
    object.__setattr__(under, "padding_reason", "" if packed else "of the test")
    model.zero_grad()
    result = under.backward(batch, loss, with_entropy=True, is_tokenwise=loss is is_tokenwise)
    torch.testing.assert_close(result.double(), expected[0].double(), rtol=1e-5, atol=1e-6)
    for parameter, wanted in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


def test_logits_of_a_loss_by_token_are_computed_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of one chunk are freed before those of the next are computed."""
    model, batch, sizes = model_at(tiny_model), micro_batch(), list[int]()
    under = logprob_model(model)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 5 * 4 * model.config.vocab_size)
    logits = under.lm_head._logits
    order = list[str]()

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        result = logits(hidden)
        order.append("logits")
        result.register_hook(lambda _: order.append("gradient"))
        return result

    monkeypatch.setattr(under.lm_head, "_logits", counted)
    under.backward(batch, is_tokenwise, with_entropy=True, is_tokenwise=True)
    assert sum(sizes) == batch.mask.sum()
    assert max(sizes) == 5
    assert order == ["logits", "gradient"] * len(sizes)


def test_a_row_longer_than_a_chunk_is_recomputed_for_a_sequence_loss(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = model_at(tiny_model), micro_batch()
    under = logprob_model(model)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 7 * 4 * model.config.vocab_size)
    sizes = counted_logits(under, monkeypatch)
    under.backward(batch, by_row, with_entropy=True, is_tokenwise=False)
    counts = (batch.mask > 0).sum(1)
    assert sum(sizes) == counts.sum() + counts[counts > 7].sum()
    assert max(sizes) == 7


def test_a_rank_without_rows_has_zero_gradients(tiny_model: Path) -> None:
    model = model_at(tiny_model)
    logprobs = logprob_model(model).logprobs(EMPTY_MICROBATCH)
    assert logprobs.tolist() == [[0.0]]
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad(set_to_none=True)
    assert logprob_model(model).backward(EMPTY_MICROBATCH, by_row, with_entropy=True, is_tokenwise=False).tolist() == [
        [0.0]
    ]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_model_that_transforms_its_logits_computes_them_itself(tiny_model: Path) -> None:
    """For example a model that caps or scales its logits."""
    model, batch = model_at(tiny_model), micro_batch()
    whole = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    model.forward = capped
    expected = outcome(model, *plain_logprobs(model, batch))
    under = logprob_model(model)
    assert not under.lm_head.can_replace_logits
    for found, wanted in zip(
        outcome(model, *under._compute(batch, with_entropy=True).unbind(-1)), expected, strict=True
    ):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)


def test_a_model_may_be_shared_by_several_logprob_models(tiny_model: Path) -> None:
    """Offline work uses several at once; the model still returns logits to other callers."""
    model, batch = model_at(tiny_model), micro_batch()
    first = logprob_model(model)
    second = replace(first, temperature=2.0)
    assert second.lm_head.can_replace_logits
    torch.testing.assert_close(
        first.logprobs(batch).double(), plain_logprobs(model, batch)[0].double(), rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(first.logprobs(batch), second.logprobs(batch))
    assert model(input_ids=torch.arange(3)[None]).logits.shape == (1, 3, model.config.vocab_size)


def test_recomputed_blocks_have_equal_gradients_and_use_less_memory(tiny_model: Path) -> None:
    batch, kept = micro_batch(), dict[bool, int]()
    results = {}
    for again in (False, True):
        model = model_at(tiny_model)
        if again:
            enable_recomputation(model)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            under = logprob_model(model)._compute(batch, with_entropy=True).unbind(-1)
        kept[again] = sum(sizes)
        results[again] = outcome(model, *under)
    for first, second in zip(results[False], results[True], strict=True):
        assert torch.equal(first, second)
    assert kept[True] < 0.5 * kept[False]
