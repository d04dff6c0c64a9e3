"""Jobs on a Dask cluster, as those see them who submit, watch and stop them. Their driver is in pipeline/driving.py.

The run's folder (runs_dir) must be the same for the driver, the trainer and the trajectory server: on one machine, or
on a file system they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, Security, fire_and_forget

from pipeline import board, knobs
from pipeline import config as configuration
from pipeline.config import RunConfig
from stores.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.offline.pool import Pool

POLL_S = 0.5
"""How often a followed log is looked at."""
UNREACHABLE = (OSError, TimeoutError, ValueError, RuntimeError)
"""What a client raises that finds no scheduler; RuntimeError where it has TLS and the scheduler has none."""
CONNECT_S = 5.0
"""Longest to wait for a scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What travels: the resolved job as TOML, and the user's own code by file name. resume: a run that is there
    already."""

    id: str
    job: str
    code: dict[str, str] = field(default_factory=dict)
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A Dask cluster, as the command line names it: an address, a scheduler file, or what Dask is configured for."""

    address: str = ""
    scheduler_file: str = ""
    security: Any = None

    @property
    def named(self) -> bool:
        return bool(self.address or self.scheduler_file)

    @contextlib.contextmanager
    def pool(self, count: int) -> Iterator[Pool]:
        """Workers for plain tasks: of the cluster that is named, or so many local processes. ConfigError if there are
        none."""
        import dask

        from pipeline.offline.pool import Pool, local_pool

        if not self.named and not dask.config.get("scheduler-address", None):
            with local_pool(count) as pool:
                yield pool
            return
        target = {"scheduler_file": self.scheduler_file} if self.scheduler_file else {}
        target |= {"address": self.address} if self.address else {}
        self._check()
        try:
            client = Client(**target, timeout=CONNECT_S, security=self.security)
        except UNREACHABLE as error:
            raise self._unreachable(error) from error
        with client:
            client.sync(board.ensure, client)
            pool = Pool(client, shared=True)
            pool.free()
            yield pool

    def _check(self) -> None:
        """What a client would only find out in a traceback. Raises ConfigError."""
        import dask

        address = self.address
        if self.scheduler_file:
            try:
                address = str(json.loads(Path(self.scheduler_file).read_text())["address"])
            except OSError as error:
                raise ConfigError(
                    f"--scheduler-file {self.scheduler_file}: no such file; `dask scheduler` writes one"
                ) from error
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"--scheduler-file {self.scheduler_file}: not written by a scheduler") from error
        if (
            address.startswith("tls://")
            and self.security is None
            and not dask.config.get("distributed.comm.tls.ca-file")
        ):
            raise ConfigError(f"{address} wants TLS; name the files with --tls-ca-file, --tls-cert and --tls-key")

    def _unreachable(self, error: BaseException) -> ConfigError:
        target = self.address or self.scheduler_file or "the scheduler Dask is configured for"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConfigError(f"no scheduler at {target}: {reason}")

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """A client with the board on its scheduler. ConfigError, in one line, if there is none."""
        if not self.address and not self.scheduler_file:
            import dask

            if not dask.config.get("scheduler-address", None):
                raise ConfigError("which cluster? name it with --scheduler, --scheduler-file or DASK_SCHEDULER_ADDRESS")
        self._check()
        named: dict[str, Any] = {"address": self.address} if self.address else {}
        if self.scheduler_file:
            named = {"scheduler_file": self.scheduler_file}
        try:
            client = await Client(**named, asynchronous=True, timeout=CONNECT_S, security=self.security)
        except UNREACHABLE as error:
            raise self._unreachable(error) from error
        try:
            await board.ensure(client)
            yield client
        finally:
            await client.close()


async def submit(config: RunConfig, where: Where, *, resume: bool = False) -> str:
    """Hand a job to a cluster; returns its id as soon as the scheduler has it."""
    from pipeline.driving import drive

    id = f"{config.name}-{secrets.token_hex(3)}"
    config, code = with_code(configuration.located(config))
    submission = Submission(id=id, job=knobs.to_toml(config), code=code, resume=resume)
    async with where.connected() as client:
        await board.ask(client, "submit", id=id, name=config.name, run_dir=str(config.run_dir), steps=config.steps)
        workers = (await client.scheduler.identity(n_workers=-1))["workers"]
        roles = any("driver" in w["resources"] for w in workers.values())
        key = board.KEY + id
        future = client.submit(drive, submission, key=key, pure=False, resources={"driver": 1} if roles else None)
        fire_and_forget(future)
        while not await board.ask(client, "known", key=key):
            await asyncio.sleep(0.02)
    return id


CODE = (("task", "source"), ("reward", "function"), ("tracking", "tracker"))
"""Where a job may name code of its user's own by file."""


def with_code(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """The job with its own code named by file name only, and that code by file name. Raises ConfigError if it cannot be
    read."""
    code: dict[str, str] = {}
    for table, key in CODE:
        section = getattr(config, table)
        file, _, name = getattr(section, key).rpartition(":")
        if file.endswith(".py"):
            travels = f"{table}_{Path(file).name}"
            try:
                code[travels] = Path(file).read_text()
            except OSError as error:
                raise ConfigError(f"{table}.{key} = {getattr(section, key)!r}: cannot be read: {error}") from error
            config = dataclasses.replace(config, **{table: dataclasses.replace(section, **{key: f"{travels}:{name}"})})
    return config, code


async def find(client: Any, id: str) -> dict[str, Any]:
    """A job by its id, or by the beginning of one. Raises ConfigError."""
    jobs = await board.ask(client, "jobs")
    found = [j for j in jobs if j["id"] == id] or [j for j in jobs if j["id"].startswith(id)]
    if len(found) != 1:
        many = f"means {len(found)} jobs" if found else "is no job of this cluster"
        raise ConfigError(f"{id!r} {many}; `staleflow jobs` lists them")
    job: dict[str, Any] = found[0]
    return job


async def follow(client: Any, id: str, *, after: int = 0, forever: bool = False) -> AsyncIterator[str]:
    """A job's log lines; with `forever` until it has ended."""
    while True:
        state = (await find(client, id))["state"]
        after, lines = await board.ask(client, "lines", id=id, after=after)
        for line in lines:
            yield line
        if not forever or state in board.ENDED:
            return
        await asyncio.sleep(POLL_S)


def security_of(ca_file: str, cert: str, key: str) -> Any:
    """Dask's security from files of PEM; None without any: then Dask's own configuration counts."""
    if not (ca_file or cert or key):
        return None
    for option, path in (("--tls-ca-file", ca_file), ("--tls-cert", cert), ("--tls-key", key)):
        if not Path(path).is_file():
            raise ConfigError(f"{option} {path}: no such file; with TLS all three are needed")
    return Security(tls_ca_file=ca_file, tls_client_cert=cert, tls_client_key=key, require_encryption=True)


def client_security(security: Any) -> Any:
    """Of a worker, as a client of the same cluster needs it: started with --tls-cert, it has one for workers only."""
    if security is None or not security.tls_worker_cert or security.tls_client_cert:
        return security
    return Security(
        tls_ca_file=security.tls_ca_file,
        tls_client_cert=security.tls_worker_cert,
        tls_client_key=security.tls_worker_key,
        require_encryption=security.require_encryption,
    )
