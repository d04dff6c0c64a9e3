"""The Icechunk repository of a store: where its data are, opening, branches, snapshots, and the lock for commits.

The data are in the folder at the store's path, or in an S3 bucket named by a file at that path. Endpoint and
credentials of a bucket are those of the environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, or a profile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import icechunk

from staleflow.stores.errors import ConfigError, StaleflowError, StoreError, StoreUnavailable, raised_as
from staleflow.stores.files import flush_and_rename, replace_text
from staleflow.stores.s3_url import split_url
from staleflow.stores.trajectories.records import RESUME_CHANGEABLE_KEYS

if "ICECHUNK_LOG" not in os.environ:
    # At each opening it warns that several committers on a local disk lose commits; a run has only one.
    icechunk.set_logs_filter("error")

MAIN = "main"
"""The branch that a run commits to."""
CREATED = "created"
"""Kind of the commit that a store begins with."""
TEMPORARY_PREFIX = "part-"
"""Prefix of the names of temporary branches, which are never listed. The time of their creation follows."""
ABANDONED_S = 24 * 3600.0
"""Age in seconds after which a temporary branch is removed."""
MANIFEST_CHUNKS = 64
"""Chunks per manifest: without a limit each commit would rewrite a manifest that grows with the run."""


def repository_at(path: Path) -> Any:
    """Open the Icechunk repository of an existing store. Raises StoreError."""
    with raised_as_store_error(path, "the store cannot be opened"):
        return open_repository(path)


def open_repository(path: Path) -> Any:
    """As `repository_at`, but raises Icechunk's own errors."""
    storage = storage_at(path)
    if url := url_of(path):
        icechunk.Repository.fetch_config(storage)  # a bucket refuses this with a reason, but not what `open` asks first
    return icechunk.Repository.open(storage, config=_config(url))


@contextlib.contextmanager
def creating_repository(path: Path, url: str = "", job: str = "") -> Iterator[Any]:
    """Context manager: create a repository, which `path` names once the block ends without an error. If the process is
    killed before, a folder of another name is left, or in a bucket a repository without commits, which the next attempt
    uses. url, job: of a store in a bucket, as in RunHeader. Raises Icechunk's errors, OSError, ConfigError,
    StoreError."""
    if url:
        yield _unused_repository(url, job)
        write_url_file(path, url)
        return
    tmp_path = path.with_name(f".{path.name}.part")
    if tmp_path.exists():
        shutil.rmtree(tmp_path)
    yield icechunk.Repository.create(storage_at(tmp_path), config=_config(url))
    flush_and_rename(tmp_path, path)


def check_bucket(url: str, new_job: str | None) -> None:
    """Raise ConfigError if a store's bucket does not answer, or if a store of `new_job` cannot be created at the URL.
    new_job: as RunHeader.job; None: the store exists."""
    problem, remedy = (
        f"store = {url!r}: the bucket cannot be used",
        "check the name, AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID",
    )
    with raised_as(ConfigError, problem, icechunk.IcechunkError, OSError, remedy=remedy, describe=one_line):
        check_endpoint()
        if icechunk.Repository.exists(bucket_storage(url)) and new_job is not None:
            _unused_repository(url, new_job)


def _unused_repository(url: str, job: str) -> Any:
    """Open the repository at a URL, or create it if it is not there. Raises ConfigError if anything but the creation of
    a store was committed to it, or if the run of another job has created its store there. job: as RunHeader.job."""
    storage = bucket_storage(url)
    if not icechunk.Repository.exists(storage):
        return icechunk.Repository.create(storage, config=_config(url))
    repository = icechunk.Repository.open(storage, config=_config(url))
    commits = [snapshot for snapshot in repository.ancestry(branch=MAIN) if snapshot.parent_id is not None]
    is_new = all(snapshot.metadata.get("kind") == CREATED for snapshot in commits)
    if not is_new or repository.list_branches() != {MAIN}:  # undone steps are on other branches
        raise ConfigError(f"{url}: there is a run's store or other data already; choose another name, or another store")
    if commits:
        import zarr

        attributes: Any = zarr.open_group(repository.readonly_session(MAIN).store, mode="r").attrs
        stored_job = attributes["header"].get("job", "")
        if _fixed_values(tomllib.loads(stored_job)) != _fixed_values(tomllib.loads(job)):
            raise ConfigError(
                f"{url}: another job has created its store there, without trajectories so far; choose another name, or "
                "delete what is there if no run needs it"
            )
    return repository


def _fixed_values(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a job by dotted key, without those that may change between two starts of a run."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            values |= _fixed_values(value, f"{prefix}{name}.")
        elif not f"{prefix}{name}".startswith(RESUME_CHANGEABLE_KEYS):
            values[f"{prefix}{name}"] = value
    return values


def branch_names(repository: Any) -> set[str]:
    """Names of the complete branches."""
    return {name for name in repository.list_branches() if not name.startswith(TEMPORARY_PREFIX)}


@contextlib.contextmanager
def temporary_branch(repository: Any, snapshot: str) -> Iterator[str]:
    """Context manager: a branch at a snapshot, for commits that become visible under another name. Yields its name, and
    removes it at the end, with those that killed processes left a day ago or earlier. What cannot be removed then is
    left for a later call."""
    abandoned_branches = [branch for branch in repository.list_branches() if _is_abandoned(branch)]
    name = f"{TEMPORARY_PREFIX}{int(time.time())}-{secrets.token_hex(4)}"
    repository.create_branch(name, snapshot)
    try:
        yield name
    finally:
        for branch in (name, *abandoned_branches):
            with contextlib.suppress(icechunk.IcechunkError):  # another process may have removed it
                repository.delete_branch(branch)


def _is_abandoned(branch: str) -> bool:
    """Whether a branch is temporary, and too old for a process that still works on it."""
    if not branch.startswith(TEMPORARY_PREFIX):
        return False
    created = branch.removeprefix(TEMPORARY_PREFIX).partition("-")[0]
    return not created.isdecimal() or time.time() - int(created) > ABANDONED_S


def step_snapshot(repository: Any, step: int, path: Path) -> str:
    """The snapshot that training step `step` committed. Raises ConfigError."""
    steps = []
    for snapshot in repository.ancestry(branch=MAIN):
        if snapshot.metadata.get("kind") == "step":
            steps.append(snapshot.metadata.get("step"))
            if steps[-1] == step:
                return str(snapshot.id)
    stored = f"steps {steps[-1]} to {steps[0]} are stored" if steps else "none is stored yet"
    raise ConfigError(f"{path}: no commit of step {step}; {stored}")


@contextlib.contextmanager
def lock_head(path: Path) -> Iterator[None]:
    """Context manager: lock the head of a store, so that one process at a time moves it. Held while a commit is
    written. The lock ends with the process."""
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def one_line(error: BaseException) -> str:
    r"""The message of an error in one line: of Icechunk's, the innermost cause; of others, the first line.

    >>> one_line(ValueError("x refused\n |-> service error\n `-> Error { message: \"no such bucket\", id: 7 }"))
    'no such bucket'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.partition("-> ")[2] for line in lines if line.startswith(("|-> ", "`-> "))]
    if not causes:
        return lines[0].removeprefix("x ") if lines else type(error).__name__
    match = re.search(r'message: "([^"]+)"', causes[-1])
    if causes[-1] == "Error":  # the answer to a HEAD, which has no text
        return "refused without a reason"
    return match[1].rstrip(".") if match else causes[-1]


def bucket_fails(path: Path, error: BaseException) -> bool:
    """Whether an error of the store at `path` is a temporary failure of its bucket, which does not answer or refuses a
    request. A missing object is damage, and a store in a folder has no such failures. A missing snapshot may be a
    failure: Icechunk reports one if listing the snapshots was refused."""
    text = str(error)
    return bool(url_of(path)) and (("object store" in text and "NoSuchKey" not in text) or "snapshot not found" in text)


def store_error(path: Path, problem: str, error: BaseException) -> StoreError:
    """Build a one-line error about the store at `path`: what cannot be done, and why."""
    if bucket_fails(path, error):
        return StoreUnavailable(f"{path}: {problem}: {url_of(path)} does not take requests: {one_line(error)}")
    return StoreError(f"{path}: {problem}: {one_line(error)}")


@contextlib.contextmanager
def raised_as_store_error(path: Path, problem: str) -> Iterator[None]:
    """Context manager that raises errors of Icechunk, zarr and the file system as a `store_error`, and errors of our
    own as they are."""
    try:
        yield
    except StaleflowError:
        raise
    except (icechunk.IcechunkError, OSError, LookupError, ValueError) as error:
        raise store_error(path, problem, error) from error


def _config(url: str) -> Any:
    """Icechunk's settings of a store. url: of its bucket; empty for a folder."""
    splitting = icechunk.ManifestSplittingConfig.from_dict(
        {icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Any(): MANIFEST_CHUNKS}}
    )
    # None of our arrays is one that Icechunk loads in advance, but looking for them takes each session 20 CPU ms. In a
    # bucket, it repeats a first request that fails.
    preload = icechunk.ManifestPreloadConfig(max_total_refs=None if url else 0)
    return icechunk.RepositoryConfig(manifest=icechunk.ManifestConfig(splitting=splitting, preload=preload))


ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name another server than Amazon's; the first that is set counts."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds within which a server that is not Amazon's must take a connection."""
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def url_of(path: Path) -> str:
    """The URL of a store's data; empty if the data are in the folder at its path."""
    return path.read_text("utf-8").strip() if path.is_file() else ""


def write_url_file(path: Path, url: str) -> None:
    """Write the file at a path that names the URL of a store. Raises StoreError."""
    replace_text(path, f"{url}\n", "free space or move runs_dir")


def storage_at(path: Path) -> Any:
    """Icechunk storage of the store at a path. Raises ConfigError, OSError."""
    return bucket_storage(url) if (url := url_of(path)) else icechunk.local_filesystem_storage(str(path))


def check_endpoint() -> None:
    """Raise OSError if nothing listens at the S3 endpoint in the environment variables, since Icechunk would retry for
    half a minute; ConfigError if the endpoint is not a URL. Does not connect to Amazon's own servers."""
    endpoint = _endpoint()
    if endpoint:
        try:
            url = urlsplit(endpoint)
            host, port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        except ValueError:
            host, port = None, 0
        if not host:
            raise ConfigError(f"{endpoint!r} is no endpoint of a bucket; set AWS_ENDPOINT_URL like http://host:9000")
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()


def bucket_storage(url: str) -> Any:
    """Icechunk storage of a URL in a bucket. Raises ConfigError."""
    bucket, prefix = split_url(url)
    endpoint = _endpoint()
    region = next((os.environ[name] for name in REGIONS if os.environ.get(name)), None)
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix,
        region=region or ("us-east-1" if endpoint else None),  # another server has no regions, but must be given one
        endpoint_url=endpoint or None,
        allow_http=endpoint.startswith("http://"),
        force_path_style=bool(endpoint),
        from_env=True,
    )


def _endpoint() -> str:
    return next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "")
