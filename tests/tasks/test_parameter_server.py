"""Parameter servers without a cluster, in virtual time: transfers between hosts with every kind of source failure."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.stores.errors import StoreError, TransferFailed
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.weight_folder import LOCK_FILE, PartialFile, WeightFolder
from staleflow.tasks.actors.parameter_server import (
    MAX_PIECES_IN_MEMORY,
    FetchProgress,
    ParameterServer,
    WeightSource,
    mean_absolute_difference,
)
from tests.support import virtual_time
from tests.support.scripted import PlayedParameterServer, World
from tests.tasks.parameter_conformance import NUM_BYTES, ParameterHost, ParameterServerTests

RUN = virtual_time.run

V4 = PolicyVersion(4)
CALL_S = 60.0
PIECE = 7


class RealHost(ParameterHost):
    """A host with its own weight folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = WeightFolder(folder)
        self.server = ParameterServer(str(folder), CALL_S, PIECE)

    def publish(self, version: int) -> None:
        path = self._folder.path(PolicyVersion(version))
        with self._folder.receive(path, NUM_BYTES) as incoming:
            for piece in list(incoming.missing_pieces.values()):
                incoming.write(piece, data_of(NUM_BYTES)[piece.offset : piece.offset + piece.size])

    def versions(self) -> list[int]:
        return list(self._folder.versions())


def test_a_parameter_server_removes_the_folders_of_killed_runs_on_its_host(tmp_path: Path) -> None:
    """The trainer removes only those on its own host."""
    killed, living = tmp_path / "staleflow-killed", WeightFolder(tmp_path / "staleflow-living")
    killed.mkdir()
    (killed / LOCK_FILE).touch()
    ParameterServer(str(tmp_path / "staleflow-new"), CALL_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["staleflow-living", "staleflow-new"]
    living.remove()


def test_a_parameter_server_keeps_the_versions_of_the_one_it_replaces(tmp_path: Path) -> None:
    """Without the trainer on its host, nobody else has locked the run's folder."""
    folder = tmp_path / "staleflow-run"
    lost = RealHost(folder)
    lost.publish(4)
    for user in (lost._folder, lost.server._folder):
        user._release()  # as at the end of its process
    ParameterServer(str(folder), CALL_S)
    assert lost.versions() == [4]


class PlayedHost(ParameterHost):
    """A host of a scripted world, as in the tests of the runtime."""

    def __init__(self, world: World, name: str) -> None:
        self._here = world.weights.setdefault(name, set())
        self.server = PlayedParameterServer(world, name, "", CALL_S)

    def publish(self, version: int) -> None:
        self._here.add(version)

    def versions(self) -> list[int]:
        return sorted(self._here)


class TestParameterServer(ParameterServerTests):
    def host(self, folder: Path, name: str) -> ParameterHost:
        return RealHost(folder / name)


class TestPlayedParameterServer(ParameterServerTests):
    @pytest.fixture(autouse=True)
    def world(self) -> None:
        self._world = World()

    def host(self, folder: Path, name: str) -> ParameterHost:
        return PlayedHost(self._world, name)


def data_of(size: int) -> bytes:
    return bytes(i * 31 % 251 for i in range(size))


class Host:
    """The parameter server of a host, as seen by other hosts. fault: replaces its `read_piece`, given the real one."""

    def __init__(self, folder: Path, data: bytes | None = None) -> None:
        self.folder = WeightFolder(folder)
        if data is not None:
            with self.folder.receive(self.folder.path(V4), len(data)) as incoming:
                for piece in list(incoming.missing_pieces.values()):
                    incoming.write(piece, data[piece.offset : piece.offset + piece.size])
        self.server = ParameterServer(str(folder), CALL_S, PIECE)
        self.num_reads = 0
        self.at_once = self.most_at_once = 0
        self.fault: Callable[[int, Callable[[], Awaitable[bytes | None]]], Awaitable[bytes | None]] | None = None

    async def read_piece(self, version: PolicyVersion, offset: int, size: int) -> bytes | None:
        number, self.num_reads = self.num_reads, self.num_reads + 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.001)

            async def well() -> bytes | None:
                return await self.server.read_piece(version, offset, size)

            return await (well() if self.fault is None else self.fault(number, well))
        finally:
            self.at_once -= 1

    async def fetch(self, num_bytes: int, *sources: Host) -> bytes:
        """Call `ensure_version` until the version is on this host, as the driver does."""
        named = tuple(WeightSource(f"parameters-{i}", source) for i, source in enumerate(sources))
        while not (fetched := await self.server.ensure_version(V4, num_bytes, named)).path:
            pass
        return Path(fetched.path).read_bytes()


@pytest.mark.parametrize("verb", ["prune", "ensure_version"])
async def test_replies_of_the_server_describe_files_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A version has a path once its last byte is written; prune returns after old versions are removed."""
    source, target = RealHost(tmp_path / "a"), RealHost(tmp_path / "b")
    source.publish(4)
    for version in (2, 3):
        target.publish(version)
    opened = asyncio.Event()
    prune, write = WeightFolder.prune, PartialFile.write

    async def pruned(*args: Any) -> Any:  # a thread that waits, to a loop in virtual time
        await opened.wait()
        return prune(*args)

    async def written(*args: Any) -> None:
        await opened.wait()
        write(*args)

    monkeypatch.setattr(WeightFolder, "prune", pruned)
    monkeypatch.setattr(PartialFile, "write", written)
    asked = target.server.prune((), PolicyVersion(3)) if verb == "prune" else target.ensure_version(4, source)
    answer = asyncio.ensure_future(asked)
    await asyncio.wait({answer}, timeout=5 * CALL_S)
    assert not answer.done() and target.versions() == [2, 3]
    opened.set()
    await answer
    assert target.versions() == ([3] if verb == "prune" else [2, 3, 4])
    await target.server.close()


Fault = Callable[[int, Callable[[], Awaitable[bytes | None]]], Awaitable[bytes | None]]


async def source_dies(number: int, well: Any) -> bytes | None:
    raise OSError("connection closed")


async def source_is_silent(number: int, well: Any) -> bytes | None:
    await asyncio.Event().wait()
    return b""


async def source_is_torn(number: int, well: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
    data = await well()
    return data[:-1] if data else data


async def source_refuses(number: int, well: Any) -> bytes | None:
    raise StoreError("no such version here")


async def source_fails(number: int, well: Any) -> bytes | None:
    raise RuntimeError("the worker holding this actor was lost")


async def source_has_no_version(number: int, well: Any) -> bytes | None:
    await asyncio.sleep(2.0)
    return None


FAULTS: tuple[Fault, ...] = (
    source_dies,
    source_is_silent,
    source_is_torn,
    source_refuses,
    source_fails,
    source_has_no_version,
)


def fault_after(count: int, fault: Fault) -> Fault:
    """Return `fault`, applied from read number `count` on."""

    async def sometimes(number: int, well: Any) -> bytes | None:
        return await (fault(number, well) if number >= count else well())

    return sometimes


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 100, 10 * PIECE])
async def test_concurrent_fetches_of_a_version_read_it_once(tmp_path: Path, size: int) -> None:
    source, target = Host(tmp_path / "a", data_of(size)), Host(tmp_path / "b")
    result = await asyncio.gather(*(target.fetch(size, source) for _ in range(3)))
    assert result == [data_of(size)] * 3
    assert await source.server.bytes_read() == size
    assert source.most_at_once == min(MAX_PIECES_IN_MEMORY, -(-size // PIECE))
    assert target.folder.versions() == [4]
    assert await target.fetch(size, source) == data_of(size)
    assert await source.server.bytes_read() == size
    await target.server.close()
    assert not (tmp_path / "b").exists()


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 90), count=st.integers(0, 14), fault=st.sampled_from(FAULTS), again=st.booleans())
def test_a_fetch_continues_from_another_source_after_a_failure(
    tmp_path_factory: pytest.TempPathFactory, size: int, count: int, fault: Fault, again: bool
) -> None:
    """Received pieces are kept: the sources send each byte once, except pieces in transit."""
    folder = tmp_path_factory.mktemp("hosts")

    async def scenario() -> None:
        data = data_of(size)
        failing, good, target = Host(folder / "a", data), Host(folder / "b", data), Host(folder / "c")
        failing.fault = fault_after(count, fault)
        assert await target.fetch(size, failing, good) == data
        read = await failing.server.bytes_read() + await good.server.bytes_read()
        assert size <= read <= size + (MAX_PIECES_IN_MEMORY + (fault is source_is_torn) * MAX_PIECES_IN_MEMORY) * PIECE
        if again:
            await target.server.prune((), V4)
            assert await target.fetch(size, failing, good) == data

    virtual_time.run(scenario())


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_source_that_recovers_before_the_timeout_is_read_again(tmp_path: Path, fault: Fault) -> None:
    source, target = Host(tmp_path / "a", data_of(50)), Host(tmp_path / "b")
    source.fault = fault

    async def recover() -> None:
        await asyncio.sleep(CALL_S / 2)
        source.fault = None

    recovering = asyncio.ensure_future(recover())
    assert await target.fetch(50, source) == data_of(50)
    await recovering


async def test_a_source_is_left_when_one_of_its_reads_fails(tmp_path: Path) -> None:
    failing, good, target = Host(tmp_path / "a", data_of(50)), Host(tmp_path / "b", data_of(50)), Host(tmp_path / "c")
    failing.fault = lambda number, well: (source_is_silent if number else source_dies)(number, well)
    assert await target.fetch(50, failing, good) == data_of(50)
    assert asyncio.get_running_loop().time() < 1.0


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failed_fetch_names_its_sources_and_leaves_no_file(tmp_path: Path, fault: Fault) -> None:
    one, two, target = Host(tmp_path / "a", data_of(50)), Host(tmp_path / "b", data_of(50)), Host(tmp_path / "c")
    one.fault = two.fault = fault_after(2, fault)
    with pytest.raises(TransferFailed, match=r"version 4 cannot be fetched: parameters-0 .*; parameters-1 "):
        await target.fetch(50, one, two)
    assert CALL_S < asyncio.get_running_loop().time() < 3 * CALL_S
    assert [p.name for p in target.folder.folder.iterdir()] == [".owner"]
    one.fault = two.fault = None
    assert await target.fetch(50, one, two) == data_of(50)


async def test_a_host_serves_received_pieces_before_its_fetch_completes(tmp_path: Path) -> None:
    source, between, last = Host(tmp_path / "a", data_of(70)), Host(tmp_path / "b"), Host(tmp_path / "c")

    async def slowly(number: int, well: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        await asyncio.sleep(1.0)
        return await well()

    source.fault = slowly
    two = asyncio.ensure_future(between.fetch(70, source))
    three = asyncio.ensure_future(last.fetch(70, between, source))
    await asyncio.sleep(1.5)
    assert not two.done()
    assert await between.server.bytes_read() > 0
    assert await two == await three == data_of(70)
    assert await source.server.bytes_read() == 70
    assert await between.server.bytes_read() == 70


async def test_hosts_behind_a_dead_host_resume_from_their_received_pieces(tmp_path: Path) -> None:
    source, between, last = Host(tmp_path / "a", data_of(70)), Host(tmp_path / "b"), Host(tmp_path / "c")
    source.fault = fault_after(6, source_has_no_version)
    between.fault = fault_after(5, source_dies)
    two = asyncio.ensure_future(between.fetch(70, source))
    three = asyncio.ensure_future(last.fetch(70, between, source))
    await asyncio.sleep(5.0)
    source.fault = None
    assert await three == data_of(70)
    assert await two == data_of(70)


async def test_without_a_source_a_fetch_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match="version 4 cannot be fetched: no source"):
        await Host(tmp_path / "a").server.ensure_version(V4, 70, ())
    assert asyncio.get_running_loop().time() == 0


async def test_the_error_of_an_abandoned_fetch_is_not_logged(tmp_path: Path) -> None:
    """Neither of a failed nor of a cancelled fetch; the next call fetches again."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    source, target = Host(tmp_path / "a", data_of(70)), Host(tmp_path / "b")
    source.fault = source_dies
    await target.server.ensure_version(V4, 70, (WeightSource("one", source),))
    await asyncio.sleep(2 * CALL_S)
    assert not target.server._fetch_tasks
    await target.server.ensure_version(V4, 70, (WeightSource("one", source),))
    await target.server.close()
    gc.collect()
    assert reported == []


async def test_fetch_progress_is_returned_while_a_version_arrives(tmp_path: Path) -> None:
    source, target = Host(tmp_path / "a", data_of(70)), Host(tmp_path / "b")
    source.fault = fault_after(6, source_is_silent)
    answer = await target.server.ensure_version(V4, 70, (WeightSource("one", source),))
    assert answer == FetchProgress(path="", num_bytes=42)
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)
    await target.server.close()


async def test_a_full_disk_is_a_local_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Host(tmp_path / "a", data_of(70)), Host(tmp_path / "b")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("staleflow.stores.weights.weight_folder.PartialFile.write", full)
    with pytest.raises(StoreError, match=r"cannot be written: No space left on device; free memory"):
        await target.fetch(70, source)
    assert [p.name for p in target.folder.folder.iterdir()] == [".owner"]


@pytest.mark.parametrize(("engine", "mean"), [((), 0.0), ((-1.5,), 0.5), ((-1.5, -1.0, 1.0), (0.5 + 0.0 + 2.0) / 3)])
def test_the_drift_is_the_mean_difference_of_the_logprobs(engine: tuple[float, ...], mean: float) -> None:
    assert mean_absolute_difference((-1.0,) * len(engine), engine) == mean
