"""Weight files: written in pieces, readable by safetensors, with the reported fingerprint."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_file, weight_hash
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.stores.weights.weight_hash import TensorStream, fingerprint

KINDS = [getattr(torch, name) for name in weight_file.TYPES]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def filled_tensor(shape: list[int], kind: torch.dtype, seed: int) -> torch.Tensor:
    numbers = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(kind)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(KINDS)), max_size=6), st.integers(1, 20))
def test_written_tensors_are_read_back_with_their_fingerprint(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[list[int], torch.dtype]], piece: int
) -> None:
    path = tmp_path_factory.mktemp("weights") / "file"
    tensors = {f"layer.{i}": filled_tensor(shape, kind, i) for i, (shape, kind) in enumerate(kinds)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_hash, "HASH_PIECE_BYTES", piece)
        fingerprint_of_file = weight_file.write(path, tensors)
        assert fingerprint_of_file == fingerprint(tensors) == fingerprint(load_file(path))
    read = load_file(path)
    assert {n: (t.dtype, t.shape) for n, t in read.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(read[name].to(torch.float64), tensor.to(torch.float64))
        assert read[name].data_ptr() % tensor.element_size() == 0, "aligned"


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_are_released_while_an_iterator_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Each tensor is freed soon after it is written; file and fingerprint are those of all tensors."""
    tensors = {f"layer.{i:02}": torch.full((16,), float(i)) for i in range(60)}
    monkeypatch.setattr(weight_hash, "HASH_PIECE_BYTES", 64)
    monkeypatch.setattr(weight_hash, "MAX_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    there: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def come() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in sorted(tensors):
            tensor = tensors[name].clone()
            there.add(tensor)
            most = max(most, len(there))
            yield name, tensor
            del tensor

    described = {name: torch.empty(16, device="meta") for name in tensors}
    fingerprint_of_file = weight_file.write(tmp_path / "file", TensorStream(described, come()))
    assert fingerprint_of_file == fingerprint(tensors) == fingerprint(load_file(tmp_path / "file"))
    assert most <= weight_hash.QUEUED_PIECES_PER_THREAD * threads + 3


def test_non_contiguous_tensors_are_written_in_logical_order(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(6.0).reshape(2, 3).T, "part": torch.arange(9)[::2]}
    weight_file.write(tmp_path / "file", tensors)
    with safe_open(tmp_path / "file", "pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in ("t", "part")} == {
            name: tensor.tolist() for name, tensor in tensors.items()
        }


def test_an_unsupported_dtype_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"w: tensors of type complex64 cannot be published; types are bool, "):
        weight_file.write(tmp_path / "file", {"w": torch.zeros(2, dtype=torch.complex64)})


def test_a_full_disk_gives_a_one_line_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any thread."""
    write = os.pwrite

    def full(held: int, data: bytes, offset: int) -> int:
        if offset > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(held, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(weight_hash, "HASH_PIECE_BYTES", 64)
    folder = WeightFolder(tmp_path / "w")
    with pytest.raises(StoreError, match="cannot be written: No space left on device; free memory, or set cluster"):
        folder.publish(PolicyVersion(1), {"w": torch.zeros(500)})
    assert [p.name for p in folder.folder.iterdir()] == [".owner"]
