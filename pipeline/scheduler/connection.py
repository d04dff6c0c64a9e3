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
"""Exceptions raised when no scheduler can be reached; RuntimeError if only the client uses TLS."""
CONNECT_S = 10.0
"""Seconds to wait for a scheduler."""


FILE_POLL_S = 0.1
"""Seconds between two looks for a scheduler file that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A Dask cluster, as the command line or a job file names it: by address, by scheduler file, or by Dask's
    configuration. security: Dask's, for a cluster with TLS."""

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
        use it from now on. file_within_s: how long a scheduler file may take to appear. Raises ConfigError with a
        one-line message if no scheduler can be reached."""
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
        """`client` for the duration of a block, without becoming the default client of this process."""
        client = await self.client(as_default=False)
        try:
            yield client
        finally:
            await client.close()

    @contextlib.contextmanager
    def blocking(self) -> Iterator[Any]:
        """A synchronous client for the duration of a block. Raises ConfigError like `client`."""
        try:
            client = Client(**self._target())
        except UNREACHABLE as error:
            raise self._unreachable(error) from error
        with client:
            client.sync(ensure, client)
            yield client

    def _target(self) -> dict[str, Any]:
        """Arguments for a client, checked first so that mistakes give a one-line message. Raises ConfigError."""
        if not self.named:
            raise ConfigError("no cluster given; name it with --scheduler, --scheduler-file or DASK_SCHEDULER_ADDRESS")
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
    """Dask's security from PEM files; None without any, in which case Dask's own configuration applies."""
    if not (ca_file or cert or key):
        return None
    for option, path in (("--tls-ca-file", ca_file), ("--tls-cert", cert), ("--tls-key", key)):
        if not Path(path).is_file():
            raise ConfigError(f"{option} {path}: no such file; with TLS all three are needed")
    return Security(tls_ca_file=ca_file, tls_client_cert=cert, tls_client_key=key, require_encryption=True)


def client_security(security: Any) -> Any:
    """A worker's security for use by a client: a worker started with --tls-cert has a certificate for workers only."""
    if security is None or not security.tls_worker_cert or security.tls_client_cert:
        return security
    return Security(
        tls_ca_file=security.tls_ca_file,
        tls_client_cert=security.tls_worker_cert,
        tls_client_key=security.tls_worker_key,
        require_encryption=security.require_encryption,
    )
