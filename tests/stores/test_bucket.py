"""Stores in a bucket on a real S3 server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from benchmarks.soaking.bucket import BUCKET, FailingProxy, served
from staleflow.stores.auditing.audit import audit
from staleflow.stores.errors import ConfigError, StoreError, StoreUnavailable
from staleflow.stores.s3_url import split_url
from staleflow.stores.trajectories import derived_branches
from staleflow.stores.trajectories.repository import bucket_storage, check_bucket
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory
from tests.stores.store_conformance import HEADER, TrajectoryStoreTests, ended, record
from tests.support.examples import num_examples
from tests.support.memory_store import TrajectoryStore


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with served() as environment:
        yield environment


@pytest.fixture(autouse=True)
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix in the bucket for one test."""
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


def test_a_local_file_has_the_url_of_the_store(tmp_path: Path, rng: Any, url: str) -> None:
    path = tmp_path / "store"
    store = VersionedStore.create(path, replace(HEADER, url=url))
    store.commit(record(0), [ended(rng, i, 0) for i in range(4)])
    assert path.read_text() == f"{url}\n"
    reopened = VersionedStore.open(path)
    reopened.commit(record(1), [ended(rng, 4 + i, 1) for i in range(4)])
    assert [e.trajectory.id for e in VersionedStore.open_pinned(path).trajectories()] == list(range(8))
    assert audit(VersionedStore.open(path)).num_steps == 2
    doubled = derived_branches.BranchRewards(
        rewards=np.full(8, 2.0, np.float32), advantages=np.zeros(8, np.float32), loss_mask=np.ones(8, bool), errors={}
    )
    derived_branches.derive_rewards(VersionedStore.open_pinned(path), path, "doubled", doubled, {})
    assert {e.trajectory.reward for e in VersionedStore.open(path, branch="doubled").trajectories()} == {2.0}
    with pytest.raises(StoreError, match="another process has committed since"):
        store.commit(record(1), [ended(rng, 9, 1)])
    assert VersionedStore.rewind(path, 1) == 1
    assert [e.trajectory.id for e in VersionedStore.open(path).trajectories()] == list(range(4))


def test_concurrent_commits_from_two_hosts_conflict(tmp_path: Path, rng: Any, url: str) -> None:
    """No file lock exists between them: the bucket rejects the second commit."""
    VersionedStore.create(tmp_path / "store", replace(HEADER, url=url))
    repository = icechunk.Repository.open(bucket_storage(url))
    first, second = (repository.writable_session("main") for _ in range(2))
    for session in (first, second):
        zarr.open_group(session.store, mode="r+").attrs["by"] = str(id(session))
    first.commit("one")
    with pytest.raises(icechunk.ConflictError):
        second.commit("two")


def test_an_unfinished_store_is_created_again_and_an_existing_one_is_rejected(
    tmp_path: Path, rng: Any, url: str
) -> None:
    header = replace(HEADER, url=url)
    VersionedStore.create(tmp_path / "store", header)
    (tmp_path / "store").unlink()  # as after a kill before the path led to it
    resumed = 'steps = 9\n[cluster]\nkind = "file"'
    check_bucket(url, resumed)
    another = "steps = 9\n[training]\nlearning_rate = 0.1"
    for create in (check_bucket, lambda _, job: VersionedStore.create(tmp_path / "other", replace(header, job=job))):
        with pytest.raises(ConfigError, match="another job has created its store there, without trajectories so far;"):
            create(url, another)
    store = VersionedStore.create(tmp_path / "store", replace(header, job=resumed))
    assert store.header.job == resumed
    store.commit(record(0), [ended(rng, i, 0) for i in range(4)])
    check_bucket(url, None)
    with pytest.raises(ConfigError, match="there is a run's store or other data already; choose another name"):
        check_bucket(url, "")
    with pytest.raises(ConfigError, match="there is a run's store or other data already"):
        VersionedStore.create(tmp_path / "other", header)
    assert not (tmp_path / "other").exists()
    VersionedStore.rewind(tmp_path / "store", 0)
    with pytest.raises(ConfigError, match="there is a run's store or other data already"):
        VersionedStore.create(tmp_path / "other", header)


def test_a_store_is_not_created_over_the_data_of_another_program(tmp_path: Path, url: str) -> None:
    repository = icechunk.Repository.create(bucket_storage(url))
    session = repository.writable_session("main")
    zarr.open_group(session.store, mode="w").create_array("climate", shape=(4,), dtype="float32")
    session.commit("of another program")
    with pytest.raises(ConfigError, match="there is a run's store or other data already"):
        check_bucket(url, "")
    with pytest.raises(ConfigError, match="there is a run's store or other data already"):
        VersionedStore.create(tmp_path / "store", replace(HEADER, url=url))
    group = zarr.open_group(repository.readonly_session("main").store, mode="r")
    assert list(group.array_keys()) == ["climate"]


def test_an_unusable_bucket_gives_a_one_line_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the bucket cannot be used: The specified bucket does not exist; check the"):
        check_bucket("s3://nobodys-bucket/run", "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"cannot be used: \[Errno 111\] Connection refused; check .*AWS_ENDPOINT_URL"
    ):
        check_bucket(url, "")
    for endpoint in ("http://h:abc", "http://[h", "h:9000"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(ConfigError, match="is no endpoint of a bucket; set AWS_ENDPOINT_URL like http"):
            check_bucket(url, "")
    for wrong in ("s3://bucket", "s3://bucket/", "s3:///prefix", "gs://bucket/prefix", "runs"):
        with pytest.raises(ConfigError, match="name one as s3://BUCKET/PREFIX"):
            split_url(wrong)


@pytest.fixture
def proxy(server: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingProxy]:
    """A proxy between the test and the bucket."""
    with FailingProxy(server["AWS_ENDPOINT_URL"]) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


def two_steps(path: Path, rng: Any) -> list[list[EndedTrajectory]]:
    """Return the rows of two steps, the first of which is committed to a new store."""
    rows = [[ended(rng, 4 * step + i, step) for i in range(4)] for step in range(2)]
    store = VersionedStore.create(path, replace(HEADER, url=f"s3://{BUCKET}/runs/{path.parent.name}"))
    store.commit(record(0), rows[0])
    return rows


def check_causes(causes: list[str]) -> None:
    """Check the errors of failed requests: each is one line, and that of the first request names the cause."""
    assert len(causes) > 5
    assert "The provided token has expired" in causes[0]
    assert all(f"s3://{BUCKET}/" in cause and "\n" not in cause for cause in causes)


def ids(path: Path) -> list[int]:
    return [int(e.trajectory.id) for e in VersionedStore.open(path).trajectories()]


def test_a_commit_that_fails_at_any_request_can_be_retried(tmp_path: Path, rng: Any, proxy: FailingProxy) -> None:
    """Credentials expire at its first request, at its tenth, and so on, until there are no more."""
    rows = two_steps(tmp_path / "store", rng)
    store = VersionedStore.open(tmp_path / "store")
    causes: list[str] = []
    for number in itertools.count(step=1 if num_examples() > 1000 else 9):
        proxy.expired, proxy.requests_before = "tests", number
        try:
            store.commit(record(1), rows[1])
            break
        except StoreUnavailable as error:
            causes.append(str(error))
    proxy.expired = ""
    check_causes(causes)
    assert ids(tmp_path / "store") == list(range(8))
    assert [r.step for r in VersionedStore.open(tmp_path / "store").commits()] == [0, 1]


def test_a_commit_with_a_lost_reply_is_not_applied_twice(tmp_path: Path, rng: Any, proxy: FailingProxy) -> None:
    rows = two_steps(tmp_path / "store", rng)
    store = VersionedStore.open(tmp_path / "store")
    proxy.lost_answers = 1
    with pytest.raises(StoreUnavailable, match="does not take it: Failed to commit, expected parent"):
        store.commit(record(1), rows[1])
    store.commit(record(1), rows[1])
    store.commit(record(2), [ended(rng, 8, 2)])
    assert ids(tmp_path / "store") == list(range(9))
    assert [r.step for r in VersionedStore.open(tmp_path / "store").commits()] == [0, 1, 2]


def test_a_commit_of_another_process_is_not_taken_for_a_lost_reply(
    tmp_path: Path, rng: Any, proxy: FailingProxy
) -> None:
    rows = two_steps(tmp_path / "store", rng)
    store = VersionedStore.open(tmp_path / "store")
    proxy.expired = "tests"
    with pytest.raises(StoreUnavailable):
        store.commit(record(1), rows[1])
    proxy.expired = ""
    VersionedStore.open(tmp_path / "store").commit(record(1), [ended(rng, 7, 1)])
    with pytest.raises(StoreError, match="another process has committed since"):
        store.commit(record(1), rows[1])


def test_expired_credentials_are_read_again(
    tmp_path: Path, rng: Any, proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    profile.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = tests\n")
    rows = two_steps(tmp_path / "store", rng)
    store = VersionedStore.open(tmp_path / "store")
    proxy.expired = "old"
    with pytest.raises(StoreUnavailable):
        store.commit(record(1), rows[1])
    profile.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = tests\n")
    store.commit(record(1), rows[1])
    assert ids(tmp_path / "store") == list(range(8))


def test_a_bucket_failure_is_not_reported_as_corruption(tmp_path: Path, rng: Any, proxy: FailingProxy) -> None:
    two_steps(tmp_path / "store", rng)
    causes: list[str] = []
    for number in itertools.count(step=1 if num_examples() > 1000 else 5):
        proxy.expired = ""
        store = VersionedStore.open_pinned(tmp_path / "store")
        proxy.expired, proxy.requests_before = "tests", number
        try:
            assert list(store.damaged_chunks()) == []
            break
        except StoreUnavailable as error:
            causes.append(str(error))
    check_causes(causes)


class BrieflyFailingProxy(FailingProxy):
    """A proxy that rejects one request."""

    def count(self) -> None:
        self.expired = ""
        super().count()


def test_an_audit_during_a_brief_bucket_failure_has_no_findings(
    tmp_path: Path, rng: Any, server: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a failure of any request. When the audit looks for corruption, the store is readable again, so it raises. For
    a request that opens a repository, Icechunk may name another cause."""
    header = replace(HEADER, url=f"s3://{BUCKET}/runs/{tmp_path.name}")
    many = [ended(rng, i, 0) for i in range(100)]  # chunks of few bytes would be in the snapshot itself
    VersionedStore.create(tmp_path / "store", header).commit(record(0), many)
    findings = audit(VersionedStore.open_pinned(tmp_path / "store")).findings
    with BrieflyFailingProxy(server["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        causes: list[str] = []
        for number in itertools.count(step=1 if num_examples() > 1000 else 7):
            store = VersionedStore.open_pinned(tmp_path / "store")
            proxy.requests_before, proxy.expired = number, "tests"
            try:
                assert audit(store).findings == findings
            except StoreError as error:
                causes.append(str(error))
            if proxy.expired:  # no request was left to be refused
                break
    assert sum("The provided token has expired" in cause for cause in causes) >= 3
