"""Files that arrive in split_into_pieces."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.weight_folder import PartialFile, Piece, WeightFolder, split_into_pieces


@given(num_bytes=st.integers(0, 1000), piece_bytes=st.integers(1, 70))
def test_pieces_cover_each_byte_once(num_bytes: int, piece_bytes: int) -> None:
    result = split_into_pieces(num_bytes, piece_bytes)
    assert [b for p in result for b in range(p.offset, p.offset + p.size)] == list(range(num_bytes))
    assert all(p.size == piece_bytes for p in result[:-1])


@settings(max_examples=50)
@given(data=st.binary(max_size=200), piece_bytes=st.integers(1, 70), order=st.randoms(use_true_random=False))
def test_pieces_written_in_any_order_make_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, piece_bytes: int, order: Random
) -> None:
    path = tmp_path_factory.mktemp("incoming") / "part"
    path.touch()
    incoming = PartialFile(path, len(data), piece_bytes)
    arriving = list(incoming.missing_pieces.values())
    order.shuffle(arriving)
    arrived: set[int] = set()
    for piece in arriving:
        assert not incoming.has(*piece)
        incoming.write(piece, data[piece.offset : piece.offset + piece.size])
        arrived |= set(range(piece.offset, piece.offset + piece.size))
        assert incoming.bytes_arrived == len(arrived)
        assert incoming.read(*piece) == data[piece.offset : piece.offset + piece.size]
        for begin in range(len(data)):
            assert incoming.has(begin, 2) == (set(range(begin, min(begin + 2, len(data)))) <= arrived)
    assert not incoming.missing_pieces
    assert path.read_bytes() == data


def test_a_version_is_listed_only_after_all_its_pieces_arrived(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    path = folder.path(PolicyVersion(3))
    with folder.receive(folder.path(PolicyVersion(3)), 3) as incoming:
        assert folder.versions() == []
        incoming.write(Piece(0, 3), b"abc")
        assert folder.versions() == []
    assert path.read_bytes() == b"abc"
    folder.remove()


def test_an_incomplete_version_leaves_no_file(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    with (
        pytest.raises(StoreError, match=r"v00000003\.safetensors: 1 pieces have not arrived"),
        folder.receive(folder.path(PolicyVersion(3)), 3),
    ):
        pass
    with pytest.raises(ZeroDivisionError), folder.receive(folder.path(PolicyVersion(3)), 3):
        raise ZeroDivisionError
    assert os.listdir(folder.folder) == [".owner"]


def test_a_version_without_bytes_is_complete_at_once(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    with folder.receive(folder.path(PolicyVersion(3)), 0):
        pass
    assert folder.versions() == [3]
