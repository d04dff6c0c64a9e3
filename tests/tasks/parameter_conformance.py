"""The conformance suite of parameter servers, in virtual time. Subclass, and provide `host`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import StaleflowError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.actors.parameter_server import FetchProgress, Source

NUM_BYTES = 70
CALL_S = 60.0
"""Deadline of calls, seconds."""


class ParameterHost:
    """A host with its parameter server. server: as others call it. publish: makes a version appear on this host, as
    its trainer does. versions: those that are here."""

    server: Any

    def publish(self, version: int) -> None:
        raise NotImplementedError

    def versions(self) -> list[int]:
        raise NotImplementedError

    async def ensure(self, version: int, *sources: ParameterHost) -> FetchProgress:
        """Ask until the version is here, as the driver does."""
        named = tuple(Source(f"parameters-{i}", source.server) for i, source in enumerate(sources))
        while not (result := await self.server.ensure(PolicyVersion(version), NUM_BYTES, named)).path:
            pass
        fetched: FetchProgress = result
        return fetched


class ParameterServerTests:
    """The suite."""

    def host(self, folder: Path, name: str) -> ParameterHost:
        raise NotImplementedError

    async def test_a_version_that_is_here_needs_no_source(self, tmp_path: Path) -> None:
        here = self.host(tmp_path, "a")
        here.publish(3)
        result = await here.ensure(3)
        assert result.num_bytes == NUM_BYTES

    async def test_a_version_comes_from_a_host_that_has_it_and_stays(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        source.publish(3)
        result = await target.ensure(3, source)
        assert result.num_bytes == NUM_BYTES
        assert (source.versions(), target.versions()) == ([3], [3])
        assert await target.ensure(3) == result

    async def test_a_version_that_appears_at_its_source_a_moment_later_is_waited_for(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        fetching = asyncio.ensure_future(target.ensure(3, source))
        await asyncio.sleep(1.0)
        assert not fetching.done() and target.versions() == []
        source.publish(3)
        await fetching
        assert target.versions() == [3]

    async def test_a_version_that_is_nowhere_is_an_error_and_not_here(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        source.publish(2)
        with pytest.raises(StaleflowError, match="version 3"):
            await target.ensure(3, source)
        assert target.versions() == []

    async def test_what_is_not_here_and_does_not_come_cannot_be_read(self, tmp_path: Path) -> None:
        here = self.host(tmp_path, "a")
        here.publish(2)
        with pytest.raises(StaleflowError):
            await here.server.read_piece(PolicyVersion(3), 0, 1)

    @pytest.mark.parametrize(
        ("used", "newest", "kept"),
        [
            ((), 6, [6]),
            ((3,), 6, [3, 6]),
            ((), 4, [4, 5, 6]),  # 5 and 6 came after that was decided: somebody may be reading them
            ((3,), 5, [3, 5, 6]),
            ((), 9, [6]),  # 9 is not here yet; the newest of those that are stays
            ((9,), 9, [6]),
        ],
    )
    async def test_versions_in_use_and_the_newest_and_those_that_came_later_are_kept(
        self, tmp_path: Path, used: tuple[int, ...], newest: int, kept: list[int]
    ) -> None:
        here = self.host(tmp_path, "a")
        for version in (3, 4, 5, 6):
            here.publish(version)
        for _ in range(2):  # safe to ask twice
            await here.server.prune(tuple(map(PolicyVersion, used)), PolicyVersion(newest))
            assert here.versions() == kept

    async def test_a_version_that_was_removed_is_fetched_again(self, tmp_path: Path) -> None:
        source, target = self.host(tmp_path, "a"), self.host(tmp_path, "b")
        for version in (3, 4):
            source.publish(version)
            await target.ensure(version, source)
        await target.server.prune((), PolicyVersion(4))
        assert (source.versions(), target.versions()) == ([3, 4], [4])
        await target.ensure(3, source)
        assert target.versions() == [3, 4]
