"""Deltas of weights: what is rebuilt of an older version and a delta is the newer one, bit for bit."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_delta, weight_file, weight_hash
from staleflow.stores.weights.weight_delta import ALL, BITS, TensorPiece, indices, places, record
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.stores.weights.weight_hash import TensorStream, fingerprint

KINDS = [getattr(torch, name) for name in weight_file.TYPES]
V0, V1 = PolicyVersion(0), PolicyVersion(1)


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(0, 200_000), max_size=60) | st.sets(st.integers(0, 300), max_size=200),
    st.sampled_from(weight_delta.GAPS),
)
def test_places_are_read_as_they_were_written(found: set[int], width: int) -> None:
    given_ = np.array(sorted(found), np.int64)
    assert indices(places(given_, width), width).tolist() == given_.tolist()


def random_bits(size: int, kind: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits at all: NaNs of all payloads, infinities, zeros of both signs."""
    if kind is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8).view(torch.bool)
    itemsize = torch.empty(0, dtype=kind).element_size()
    return torch.randint(0, 256, (size * itemsize,), generator=generator, dtype=torch.uint8).view(kind)


def changed(old: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Other bits in about this share of the elements."""
    new = random_bits(len(old), old.dtype, generator)
    return torch.where(torch.rand(len(old), generator=generator) < share, new, old)


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.integers(0, 700), st.sampled_from(KINDS)), min_size=1, max_size=5),
    shares=st.lists(st.sampled_from((0.0, 0.003, 0.05, 0.5, 1.0)), min_size=1, max_size=4),
    piece=st.sampled_from((8, 64, 4096)),
    seed=st.integers(0, 2**31),
)
def test_a_chain_of_deltas_gives_the_last_version_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[int, torch.dtype]],
    shares: list[float],
    piece: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    trainers, others = (WeightFolder(tmp_path_factory.mktemp(name)) for name in ("trainer", "other"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_hash, "PIECE_BYTES", piece)
        weights = {f"t{i}": random_bits(size, kind, generator) for i, (size, kind) in enumerate(kinds)}
        trainers.publish(V0, weights, delta=True)
        assert not trainers.delta_path(V0).exists()
        others.path(V0).write_bytes(trainers.path(V0).read_bytes())
        for version, share in enumerate(shares, start=1):
            weights = {name: changed(tensor, share, generator) for name, tensor in weights.items()}
            held = trainers.publish(PolicyVersion(version), weights, delta=True)
            assert held == fingerprint(weights)
            if (delta := trainers.delta_path(PolicyVersion(version))).exists():
                others.delta_path(PolicyVersion(version)).write_bytes(delta.read_bytes())
        last = PolicyVersion(len(shares))
        if all(others.delta_path(PolicyVersion(v)).exists() for v in range(1, last + 1)):
            others.rebuild(last, V0, held)
            assert others.path(last).read_bytes() == trainers.path(last).read_bytes()
    assert not list(trainers.folder.glob(".*part*")) and not list(others.folder.glob(".*part*"))


def of_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.uint16).view(torch.bfloat16)


def test_a_zero_that_changes_its_sign_and_another_payload_of_a_nan_are_changes(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path)
    filler = torch.zeros(1000, dtype=torch.bfloat16)
    for version, bits in enumerate([(0x0000, 0x7FC0, 0x3F80), (0x8000, 0x7FC1, 0x3F80)]):
        held = folder.publish(PolicyVersion(version), {"w": torch.cat([of_bits(*bits), filler])}, delta=True)
    expected = folder.path(V1).read_bytes()
    folder.path(V1).unlink()
    folder.rebuild(V1, V0, held)
    assert folder.path(V1).read_bytes() == expected
    assert folder.size(folder.delta_path(V1)) < 100


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changed_is_nothing_but_a_header_and_everything_changed_is_no_delta(
    tmp_path: Path, kind: torch.dtype
) -> None:
    folder = WeightFolder(tmp_path)
    itemsize = torch.empty(0, dtype=kind).element_size()
    low = torch.zeros(800 * itemsize, dtype=torch.uint8).view(kind)
    high = torch.ones(800 * itemsize, dtype=torch.uint8).view(kind)
    for version, tensor in enumerate((low, low, high)):
        folder.publish(PolicyVersion(version), {"w": tensor}, delta=True)
    assert folder.size(folder.delta_path(V1)) < 40
    assert not folder.delta_path(PolicyVersion(2)).exists()


def test_places_are_written_in_the_smallest_way() -> None:
    """A few far apart in wide gaps, many in narrow ones, most in bits, and all without any."""
    old = np.zeros(40_000, np.uint8)
    ways = {}
    for every in (10_000, 700, 20, 4, 1):
        new = old.copy().view("<u2")
        new[::every] = 7
        ways[every] = record(TensorPiece(begin=0, num_bytes=40_000, itemsize=2), old, new.view(np.uint8))[0]
    assert ways == {10_000: 2, 700: 2, 20: 1, 4: BITS, 1: ALL}
    assert record(TensorPiece(begin=0, num_bytes=40_000, itemsize=2), old, old) == b""


def test_the_delta_is_the_same_however_many_threads_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may fetch parts of it from several others."""
    monkeypatch.setattr(weight_hash, "PIECE_BYTES", 64)
    generator = torch.Generator().manual_seed(1)
    old = {f"t{i}": random_bits(300, torch.bfloat16, generator) for i in range(12)}
    new = {name: changed(tensor, 0.02, generator) for name, tensor in old.items()}
    results = set()
    for threads in (1, 2, 4):
        monkeypatch.setattr(weight_hash, "MAX_THREADS", threads)
        folder = WeightFolder(tmp_path / str(threads))
        folder.publish(V0, old)
        folder.publish(V1, new, delta=True)
        results.add(folder.delta_path(V1).read_bytes())
    assert len(results) == 1


def test_there_is_no_delta_to_other_tensors_or_to_a_version_that_is_not_here(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path)
    folder.publish(V0, {"w": torch.zeros(100)})
    folder.publish(V1, {"w": torch.zeros(101)}, delta=True)
    folder.publish(PolicyVersion(3), {"w": torch.zeros(101)}, delta=True)
    assert not list(folder.folder.glob("*.delta"))


def test_memory_that_is_full_costs_the_delta_and_not_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WeightFolder(tmp_path)
    folder.publish(V0, {"w": torch.zeros(1000)})

    class Full:
        def write(self, data: bytes) -> int:
            if len(data) > 30:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(data)

        def close(self) -> None: ...

    opened = Path.open

    def without_space(path: Path, mode: str = "r", *args: int, **kwargs: int) -> object:
        return Full() if path.suffix == ".delta" else opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", without_space)
    new = torch.zeros(1000)
    new[3] = 1.0
    assert folder.publish(V1, {"w": new}, delta=True) == fingerprint({"w": new})
    assert folder.versions() == [0, 1]
    assert not list(folder.folder.glob("*.delta"))


def _altered(data: bytes, at: int, byte: int) -> bytes:
    """A delta file with another byte in its first record."""
    at += data.index(b"}") + 1
    return data[:at] + bytes([byte]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"x" + data[1:], "unknown format"),
        (lambda data: data[:-3], "it is cut off"),
        (lambda data: data.replace(b'"base": 0', b'"base": 7'), "they are against version 7"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "version 1, made of version 0 .* is another one"),
        (lambda data: data[:-3], "cut off"),
        (lambda data: b"", "no changes against version 0"),
        (lambda data: data.replace(b'{"base": 0}', b'["base", 0]'), "they are against version None"),
        (lambda data: _altered(data, 0, 77), "a record is none"),
        (lambda data: _altered(data, 1, 96), "a record is none"),
    ],
)
def test_a_damaged_delta_gives_no_version(tmp_path: Path, damage: object, said: str) -> None:
    assert callable(damage)
    folder = WeightFolder(tmp_path)
    new = torch.zeros(1000, dtype=torch.bfloat16)
    folder.publish(V0, {"w": new})
    new[500] = 1.0
    held = folder.publish(V1, {"w": new}, delta=True)
    folder.path(V1).unlink()
    folder.delta_path(V1).write_bytes(damage(folder.delta_path(V1).read_bytes()))
    with pytest.raises(StoreError, match=said):
        folder.rebuild(V1, V0, held)
    assert folder.versions() == [0]


def test_deltas_are_kept_for_those_that_have_an_older_version(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path)
    for version in range(6):
        folder.publish(
            PolicyVersion(version),
            {"w": torch.full((100,), 1.0).index_fill_(0, torch.tensor([version]), 2)},
            delta=True,
        )
    folder.prune([PolicyVersion(3)])
    assert folder.versions() == [3, 5]
    assert sorted(p.stem for p in folder.folder.glob("*.delta")) == ["v00000004", "v00000005"]
    folder.prune([])
    assert folder.versions() == [5] and not list(folder.folder.glob("*.delta"))


def test_weights_that_come_one_by_one_have_a_delta_too(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path)
    for version in range(2):
        tensors = {f"t{i}": torch.full((64,), float(i)) for i in range(3)}
        tensors["t1"][7] = version

        def come(tensors: dict[str, torch.Tensor] = tensors) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

        held = folder.publish(PolicyVersion(version), TensorStream(tensors, come()), delta=True)
    expected = folder.path(V1).read_bytes()
    folder.path(V1).unlink()
    folder.rebuild(V1, V0, held)
    assert folder.path(V1).read_bytes() == expected
