"""Stores whose data are in a bucket, on a server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from staleflow.stores.auditing.audit import audit
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.s3_url import parsed
from staleflow.stores.trajectories.records import TrajectoryStore
from staleflow.stores.trajectories.repository import check_bucket
from staleflow.stores.trajectories.storage import bucket_storage
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.stores.store_conformance import HEADER, TrajectoryStoreTests, ended, record
from tests.support.bucket import BUCKET, served


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with served() as environment:
        yield environment


@pytest.fixture(autouse=True)
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A place of the test's own in the bucket."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/runs/{request.node.name}"


@pytest.fixture
def rng() -> Any:
    return np.random.default_rng(0)


class TestBucketStore(TrajectoryStoreTests):
    @pytest.fixture(autouse=True)
    def _place(self, url: str) -> None:
        self.url = url

    def make(self, folder: Path) -> TrajectoryStore:
        return VersionedStore.create(folder, replace(HEADER, url=self.url))


def test_its_path_leads_to_it_and_only_a_small_file_is_there(tmp_path: Path, rng: Any, url: str) -> None:
    path = tmp_path / "store"
    store = VersionedStore.create(path, replace(HEADER, url=url))
    store.commit(record(0), [ended(rng, i, 0) for i in range(4)])
    assert path.read_text() == f"{url}\n"
    again = VersionedStore.open(path)
    again.commit(record(1), [ended(rng, 4 + i, 1) for i in range(4)])
    assert [e.trajectory.id for e in VersionedStore.pinned(path).ended()] == list(range(8))
    assert audit(VersionedStore.open(path)).num_steps == 2
    with pytest.raises(StoreError, match="another process has committed since"):
        store.commit(record(1), [ended(rng, 9, 1)])
    assert VersionedStore.rewind(path, 1) == 1
    assert [e.trajectory.id for e in VersionedStore.open(path).ended()] == list(range(4))


def test_two_committers_on_two_hosts_cannot_both_win(tmp_path: Path, rng: Any, url: str) -> None:
    """No lock of a file system is between them: the bucket refuses the second."""
    VersionedStore.create(tmp_path / "store", replace(HEADER, url=url))
    repository = icechunk.Repository.open(bucket_storage(url))
    one, two = (repository.writable_session("main") for _ in range(2))
    for session in (one, two):
        zarr.open_group(session.store, mode="r+").attrs["by"] = str(id(session))
    one.commit("one")
    with pytest.raises(icechunk.ConflictError):
        two.commit("two")


def test_one_that_was_not_finished_is_made_again_and_one_in_use_is_refused(tmp_path: Path, rng: Any, url: str) -> None:
    header = replace(HEADER, url=url)
    VersionedStore.create(tmp_path / "store", header)
    (tmp_path / "store").unlink()  # as after a kill before the path led to it
    check_bucket(url, new=True)
    store = VersionedStore.create(tmp_path / "store", header)
    store.commit(record(0), [ended(rng, i, 0) for i in range(4)])
    check_bucket(url, new=False)
    with pytest.raises(ConfigError, match="there is a run's store already; choose another name"):
        check_bucket(url, new=True)
    with pytest.raises(ConfigError, match="there is a run's store already"):
        VersionedStore.create(tmp_path / "other", header)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_used_is_said_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the bucket cannot be used: The specified bucket does not exist; check the"):
        check_bucket("s3://nobodys-bucket/run", new=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"cannot be used: \[Errno 111\] Connection refused; check .*AWS_ENDPOINT_URL"
    ):
        check_bucket(url, new=True)
    for wrong in ("s3://bucket", "s3://bucket/", "s3:///prefix", "gs://bucket/prefix", "runs"):
        with pytest.raises(ConfigError, match="name one as s3://BUCKET/PREFIX"):
            parsed(wrong)
