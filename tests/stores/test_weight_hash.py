"""Fingerprints of weights: what changes them, any number of threads, and compatibility with earlier versions."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.weights import weight_hash
from staleflow.stores.weights.weight_hash import fingerprint


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(7, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def test_fingerprint_depends_on_values_names_shapes_and_types() -> None:
    base = tensors()
    changed = {**base, "b": base["b"].clone().index_fill_(0, torch.tensor([4]), 1.0)}
    renamed = {"a.weight": base["a.weight"], "c": base["b"]}
    reshaped = {"a.weight": base["a.weight"].reshape(3, 7), "b": base["b"]}
    retyped = {**base, "b": base["b"].view(torch.int32)}
    assert len({fingerprint(x) for x in (base, changed, renamed, reshaped, retyped)}) == 5
    assert fingerprint(dict(reversed(base.items()))) == fingerprint(base)
    assert fingerprint({**base, "a.weight": base["a.weight"].T.contiguous().T}) == fingerprint(base)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=5), threads=st.integers(1, 4), piece=st.integers(1, 16))
def test_fingerprint_is_equal_for_any_thread_count_and_covers_every_byte(
    sizes: list[int], threads: int, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_hash, "HASH_PIECE_BYTES", piece)
        values = {f"t{i}": torch.arange(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
        whole = fingerprint(values, threads)
        assert whole == fingerprint(values, 1)
        for name, tensor in values.items():
            for at in range(len(tensor)):
                other = tensor.clone()
                other[at] += 1
                assert fingerprint({**values, name: other}, threads) != whole


def test_pieces_are_hashed_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece of a tensor finishes only after the second has started."""
    monkeypatch.setattr(weight_hash, "HASH_PIECE_BYTES", 4)
    together = threading.Barrier(2, timeout=30)
    fingerprint_of_file = fingerprint({"t": torch.zeros(8, dtype=torch.uint8)}, 2, lambda *_: together.wait())
    assert fingerprint_of_file.startswith("sha256-tree:")


def test_empty_and_zero_dimensional_tensors_have_a_fingerprint() -> None:
    assert len({fingerprint(x) for x in ({}, {"t": torch.zeros(0)}, {"t": torch.tensor(1.0)})}) == 3
