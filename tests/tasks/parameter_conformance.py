"""Conformance suite of parameter servers in virtual time. Subclass it and provide `host`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import StaleflowError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.actors.parameter_server import FetchProgress, WeightSource

NUM_BYTES = 70
CALL_S = 60.0
"""Deadline of calls, seconds."""


class ParameterHost:
    """A host with its parameter server. server: its actor interface. publish: adds a version to this host as the
    trainer does. versions: the versions on this host."""

    server: Any

    def publish(self, version: int) -> None:
        raise NotImplementedError

    def versions(self) -> list[int]:
        raise NotImplementedError

    async def ensure_version(self, version: int, *sources: ParameterHost) -> FetchProgress:
        """Call `ensure_version` until the version is on this host, as the driver does."""
        named = tuple(WeightSource(f"parameters-{i}", source.server) for i, source in enumerate(sources))
        while not (result := await self.server.ensure_version(PolicyVersion(version), NUM_BYTES, named)).path:
            pass
        fetched: FetchProgress = result
        return fetched


class ParameterServerTests:
    """The conformance suite."""

    def host(self, folder: Path, name: str) -> ParameterHost:
        raise NotImplementedError

    async def test_ensure_without_a_source_returns_a_local_version(self, tmp_path: Path) -> None:
        here = self.host(tmp_path, "a")
        here.publish(3)
        result = await here.ensure_version(3)
        assert result.num_bytes == NUM_BYTES

    async def test_ensure_copies_a_version_from_the_source_host(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        source.publish(3)
        result = await target.ensure_version(3, source)
        assert result.num_bytes == NUM_BYTES
        assert (source.versions(), target.versions()) == ([3], [3])
        assert await target.ensure_version(3) == result

    async def test_ensure_waits_until_the_source_publishes_the_version(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        fetching = asyncio.ensure_future(target.ensure_version(3, source))
        await asyncio.sleep(1.0)
        assert not fetching.done() and target.versions() == []
        source.publish(3)
        await fetching
        assert target.versions() == [3]

    async def test_ensure_of_an_unpublished_version_raises(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        source.publish(2)
        with pytest.raises(StaleflowError, match="version 3"):
            await target.ensure_version(3, source)
        assert target.versions() == []

    async def test_read_piece_of_a_missing_version_raises(self, tmp_path: Path) -> None:
        here = self.host(tmp_path, "a")
        here.publish(2)
        with pytest.raises(StaleflowError):
            await here.server.read_piece(PolicyVersion(3), 0, 1)

    @pytest.mark.parametrize(
        ("used", "newest", "expected"),
        [
            ((), 6, [6]),
            ((3,), 6, [3, 6]),
            ((), 4, [4, 5, 6]),  # 5 and 6 arrived after that decision and may be in use
            ((3,), 5, [3, 5, 6]),
            ((), 9, [6]),  # 9 is not here yet; the newest of those that are stays
            ((9,), 9, [6]),
        ],
    )
    async def test_prune_removes_only_old_versions_that_are_not_in_use(
        self, tmp_path: Path, used: tuple[int, ...], newest: int, expected: list[int]
    ) -> None:
        here = self.host(tmp_path, "a")
        for version in (3, 4, 5, 6):
            here.publish(version)
        for _ in range(2):  # safe to ask twice
            await here.server.prune(tuple(map(PolicyVersion, used)), PolicyVersion(newest))
            assert here.versions() == expected

    async def test_ensure_fetches_a_pruned_version_again(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        for version in (3, 4):
            source.publish(version)
            await target.ensure_version(version, source)
        await target.server.prune((), PolicyVersion(4))
        assert (source.versions(), target.versions()) == ([3, 4], [4])
        await target.ensure_version(3, source)
        assert target.versions() == [3, 4]
