"""Connecting to a Dask scheduler: by address, scheduler file or Dask's configuration, with TLS where it is required."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Security

from pipeline.scheduler.plugin import ensure
from stores.errors import ConfigError

UNREACHABLE = (OSError, TimeoutError, ValueError, RuntimeError)
"""What a client raises that finds no scheduler; RuntimeError where it has TLS and the scheduler has none."""


CONNECT_S = 10.0
"""Longest to wait for a scheduler."""


FILE_POLL_S = 0.1
"""Seconds between two looks for a scheduler file that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A Dask cluster, as the command line or a job file names it: by address, by scheduler file, or as Dask is
    configured. security: Dask's, for a cluster with TLS."""

    address: str = ""
    scheduler_file: str = ""
    security: Any = None

    @property
    def named(self) -> bool:
        """Whether any cluster is named, here or in Dask's own configuration."""
        return bool(self.address or self.scheduler_file or dask.config.get("scheduler-address", None))

    async def client(
        self, *, direct_to_workers: bool = False, as_default: bool = True, file_within_s: float = 0.0
    ) -> Any:
        """An asynchronous client with the board on its scheduler. as_default: whether Dask's functions in this process
        use it from now on. file_within_s: how long a scheduler file may take to appear. Raises ConfigError, in one
        line, if no scheduler can be reached."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + file_within_s
        while self.scheduler_file and not Path(self.scheduler_file).is_file() and loop.time() < deadline:
            await asyncio.sleep(FILE_POLL_S)
        options = {"direct_to_workers": direct_to_workers, "set_as_default": as_default}
        try:
            client = await Client(**self._target(), asynchronous=True, **options)
        except UNREACHABLE as error:
            raise self._unreachable(error) from error
        try:
            await ensure(client)
        except BaseException:
            await client.close()
            raise
        return client

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """`client` for the length of a block, beside whatever else this process is a client of."""
        client = await self.client(as_default=False)
        try:
            yield client
        finally:
            await client.close()

    @contextlib.contextmanager
    def blocking(self) -> Iterator[Any]:
        """`client` for synchronous code. Raises ConfigError as it does."""
        try:
            client = Client(**self._target())
        except UNREACHABLE as error:
            raise self._unreachable(error) from error
        with client:
            client.sync(ensure, client)
            yield client

    def _target(self) -> dict[str, Any]:
        """Arguments for a client, checked for what it would only find out in a traceback. Raises ConfigError."""
        if not self.named:
            raise ConfigError("which cluster? name it with --scheduler, --scheduler-file or DASK_SCHEDULER_ADDRESS")
        target: dict[str, Any] = {"address": self.address} if self.address else {}
        address = self.address
        if self.scheduler_file:
            target = {"scheduler_file": self.scheduler_file}
            try:
                address = str(json.loads(Path(self.scheduler_file).read_text())["address"])
            except OSError as error:
                raise ConfigError(
                    f"scheduler file {self.scheduler_file}: no such file; `dask scheduler --scheduler-file` writes one"
                ) from error
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"scheduler file {self.scheduler_file}: not written by a scheduler") from error
        has_tls = self.security is not None or dask.config.get("distributed.comm.tls.ca-file")
        if address.startswith("tls://") and not has_tls:
            raise ConfigError(f"{address} requires TLS; pass --tls-ca-file, --tls-cert and --tls-key")
        return {**target, "timeout": CONNECT_S, "security": self.security}

    def _unreachable(self, error: BaseException) -> ConfigError:
        target = self.address or self.scheduler_file or "the scheduler Dask is configured for"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConfigError(f"no scheduler at {target}: {reason}")


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
