"""Parameter servers that fetch what has changed since a version they have: less bytes, the same weights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.weight_delta import DeltaFile
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.actors.parameter_server import FetchProgress, ParameterServer, Source
from tests.support import virtual_time

CALL_S = 60.0
PIECE = 256
SIZE = 20_000


class Host:
    """A host with its parameter server. silent: whether that answers nobody."""

    def __init__(self, folder: Path) -> None:
        self.folder = WeightFolder(folder)
        self.server = ParameterServer(str(folder), CALL_S, PIECE)
        self.silent = False
        self.deltas_read: list[int] = []

    async def read_piece(self, version: PolicyVersion, offset: int, size: int, delta: bool = False) -> bytes | None:
        if self.silent:
            await asyncio.Event().wait()
        if delta:
            self.deltas_read.append(version)
        await asyncio.sleep(0.001)
        return await self.server.read_piece(version, offset, size, delta)


class Trainer(Host):
    """The trainer's host, with versions 0 to `last`, of which each differs from the one before in a few elements."""

    def __init__(self, folder: Path, last: int) -> None:
        super().__init__(folder)
        weights = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self.held = []
        for version in range(last + 1):
            weights[version * 10 : version * 10 + 5] += 1.0
            self.held.append(self.folder.publish(PolicyVersion(version), {"w": weights}, delta=True))

    def bytes_of(self, version: int) -> bytes:
        return self.folder.path(PolicyVersion(version)).read_bytes()

    def deltas(self, *versions: int) -> tuple[DeltaFile, ...]:
        named = map(PolicyVersion, versions)
        return tuple(DeltaFile(version, self.folder.size(self.folder.delta_path(version))) for version in named)

    async def to(
        self, host: Host, version: int, *sources: Host, deltas: tuple[int, ...] | None = None
    ) -> FetchProgress:
        """Have a host ask until the version is there, as the driver does. deltas: by default those of the version."""
        named = tuple(Source(f"parameters-{i}", source) for i, source in enumerate(sources or (self,)))
        chain = self.deltas(*((version,) if deltas is None else deltas))
        wanted = PolicyVersion(version)
        num_bytes = len(self.bytes_of(version))
        while not (result := await host.server.ensure(wanted, num_bytes, named, chain, self.held[version])).path:
            pass
        assert Path(result.path).read_bytes() == self.bytes_of(version)
        return result

    async def read(self) -> int:
        return await self.server.bytes_read()


def test_a_host_with_the_version_before_fetches_what_has_changed_since(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer, other = Trainer(tmp_path / "a", 2), Host(tmp_path / "b")
        await trainer.to(other, 1)
        whole = await trainer.read()
        assert whole == len(trainer.bytes_of(1))
        result = await trainer.to(other, 2)
        assert result.without_delta == ""
        assert await trainer.read() - whole == trainer.deltas(2)[0].num_bytes < whole / 100

    virtual_time.run(scenario())


def test_a_host_that_lags_fetches_a_chain_and_a_new_one_the_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer, lagging, new = Trainer(tmp_path / "a", 4), Host(tmp_path / "b"), Host(tmp_path / "c")
        await trainer.to(lagging, 1)
        before = await trainer.read()
        await trainer.to(lagging, 4, deltas=(2, 3, 4))
        assert await trainer.read() - before == sum(d.num_bytes for d in trainer.deltas(2, 3, 4))
        assert lagging.folder.versions() == [1, 4]
        before = await trainer.read()
        await trainer.to(new, 4, deltas=(2, 3, 4))
        assert await trainer.read() - before == len(trainer.bytes_of(4))

    virtual_time.run(scenario())


def test_a_host_that_is_older_than_the_chain_fetches_the_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer, other = Trainer(tmp_path / "a", 4), Host(tmp_path / "b")
        await trainer.to(other, 1)
        before = await trainer.read()
        result = await trainer.to(other, 4, deltas=(3, 4))
        assert (await trainer.read() - before, result.without_delta) == (len(trainer.bytes_of(4)), "")

    virtual_time.run(scenario())


def test_a_host_hands_on_the_delta_and_what_it_has_made_of_it(tmp_path: Path) -> None:
    """To one with the version before, the delta; to a new one, the version, as soon as that is made."""

    async def scenario() -> None:
        trainer, between = Trainer(tmp_path / "a", 1), Host(tmp_path / "b")
        last, new = Host(tmp_path / "c"), Host(tmp_path / "d")
        for host in (between, last):
            await trainer.to(host, 0)
        before = await trainer.read()
        await asyncio.gather(
            trainer.to(between, 1),
            trainer.to(last, 1, between, trainer),
            trainer.to(new, 1, between, trainer),
        )
        assert await trainer.read() - before == trainer.deltas(1)[0].num_bytes
        assert between.deltas_read == [1] * -(-trainer.deltas(1)[0].num_bytes // PIECE)

    virtual_time.run(scenario())


def test_those_without_a_delta_to_hand_on_say_so_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer, whole, last = Trainer(tmp_path / "a", 1), Host(tmp_path / "b"), Host(tmp_path / "c")
        await trainer.to(whole, 1)
        await trainer.to(last, 0)
        begin = asyncio.get_running_loop().time()
        result = await trainer.to(last, 1, whole, trainer)
        assert result.without_delta == "" and asyncio.get_running_loop().time() - begin < 1.0

    virtual_time.run(scenario())


def garbled(trainer: Trainer, other: Host) -> None:
    path = trainer.folder.delta_path(PolicyVersion(1))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def gone(trainer: Trainer, other: Host) -> None:
    trainer.folder.delta_path(PolicyVersion(1)).unlink()


def other_base(trainer: Trainer, other: Host) -> None:
    """Such as after a run that was resumed from an earlier version."""
    other.folder.publish(PolicyVersion(0), {"w": torch.zeros(SIZE, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (garbled, "version 1, made of version 0 and what has changed, is another one"),
        (gone, "parameters-0 does not hand it on: .*no such version here"),
        (other_base, "version 1, made of version 0 and what has changed, is another one"),
    ],
)
def test_where_deltas_do_not_give_the_version_it_is_fetched_and_that_is_told_once(
    tmp_path: Path, damage: Callable[[Trainer, Host], None], said: str
) -> None:
    async def scenario() -> None:
        trainer, other = Trainer(tmp_path / "a", 1), Host(tmp_path / "b")
        await trainer.to(other, 0)
        chain = trainer.deltas(1)
        damage(trainer, other)
        trainer.deltas = lambda *versions: chain  # type: ignore[method-assign]  # as they were published
        result = await trainer.to(other, 1)
        assert re.search(said, result.without_delta)
        assert (await trainer.to(other, 1)).without_delta == ""
        assert not list(other.folder.folder.glob(".*part*"))

    virtual_time.run(scenario())


def test_a_source_that_is_silent_is_left_for_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer, stopped, other = Trainer(tmp_path / "a", 1), Host(tmp_path / "b"), Host(tmp_path / "c")
        await trainer.to(other, 0)
        stopped.silent = True
        before = await trainer.read()
        assert (await trainer.to(other, 1, stopped, trainer)).without_delta == ""
        assert await trainer.read() - before == trainer.deltas(1)[0].num_bytes

    virtual_time.run(scenario())


def test_two_versions_at_once_fetch_their_common_delta_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer, other = Trainer(tmp_path / "a", 2), Host(tmp_path / "b")
        await trainer.to(other, 0)
        before = await trainer.read()
        await asyncio.gather(trainer.to(other, 1), trainer.to(other, 2, deltas=(1, 2)))
        assert await trainer.read() - before == sum(d.num_bytes for d in trainer.deltas(1, 2))

    virtual_time.run(scenario())
