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
from distributed.comm.addressing import normalize_address, parse_address, parse_host_port

from staleflow.pipeline.cluster.plugin import ensure_job_registry
from staleflow.pipeline.cluster.port_probe import SCHEDULER_PORT, PortState, probe_port, resolution_error
from staleflow.stores.errors import ConfigError

CONNECT_ERRORS = (OSError, ValueError, RuntimeError, MemoryError)
"""Exceptions raised if no scheduler replies: OSError includes TimeoutError, RuntimeError if only the client uses TLS,
MemoryError if the reply is not a Dask message."""
CONNECT_S = 7.0
"""Seconds within which a scheduler must reply."""
BUSY_SCHEDULER_S = 60.0
"""Additional seconds for a scheduler that exists and may be busy."""
PROBE_AFTER_S = 1.5
"""Seconds without a reply after which the port is probed, because another server may listen there."""
CLOSE_LIMIT_S = 1.0
"""Seconds that a client may take to close after a failed connection."""
FILE_POLL_S = 0.1
"""Seconds between two checks for a scheduler file that is not complete yet."""
SCHEMES = ("tcp", "tls", "ws", "wss", "inproc", "ucx")
HOST_AND_PORT_SCHEMES = ("tcp", "tls")
"""Those of `SCHEMES` whose addresses have a host and a port that can be probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """Where the scheduler of a Dask cluster is, according to a command or job file: at an address, or at that in a
    scheduler file, or, if both are empty, at that of Dask's configuration. security: Dask's security object for TLS;
    None: Dask's configuration."""

    address: str = ""
    scheduler_file: str = ""
    security: Any = None

    @classmethod
    def of_client(cls, client: Any) -> ClusterAddress:
        """Return the cluster of a Dask client. Raises ConfigError if the object is not a connected client, or the
        workers are no processes."""
        address = getattr(getattr(client, "scheduler", None), "address", "")
        if not address:
            raise ConfigError(f"client: a {type(client).__name__}; expected a distributed.Client that is connected")
        if address.startswith("inproc"):
            raise ConfigError(
                f"client: the workers at {address} are threads of this process, and each actor needs a process; use "
                "LocalCluster(processes=True, threads_per_worker=1)"
            )
        return cls(address=str(address), security=client.security)

    @property
    def is_named(self) -> bool:
        """Whether any cluster is named, here or in Dask's own configuration."""
        return bool(self.address or self.scheduler_file or dask.config.get("scheduler-address", None))

    async def connect(
        self,
        *,
        direct_to_workers: bool = False,
        file_timeout_s: float = 0.0,
        within_s: float | None = None,
    ) -> Any:
        """Connect an asynchronous client, and register the job registry on its scheduler. It does not become the
        default client of this process. Raises ConfigError with a one-line message if the scheduler does not answer.

        Args:
            file_timeout_s: Seconds for a scheduler file to appear and have an address.
            within_s: Seconds for the scheduler to answer, `BUSY_SCHEDULER_S` more if it is busy; `CONNECT_S` if None.
        """
        if self.scheduler_file:
            await _wait_for_address(self.scheduler_file, file_timeout_s)
        address = self._address()
        options = {"direct_to_workers": direct_to_workers, "set_as_default": False, "security": self.security}
        with _raised_as_config_error(address):
            return await _connect(address, CONNECT_S if within_s is None else within_s, options)

    @contextlib.asynccontextmanager
    async def open_client(self, *, file_timeout_s: float = 0.0, within_s: float | None = None) -> AsyncIterator[Any]:
        """Context manager: yields the client of `connect`, and closes it at the end."""
        client = await self.connect(file_timeout_s=file_timeout_s, within_s=within_s)
        try:
            yield client
        finally:
            await client.close()

    @contextlib.contextmanager
    def open_blocking_client(self) -> Iterator[Any]:
        """Context manager: yields a synchronous client. Raises ConfigError as `connect` does."""
        asyncio.run(self._require_answer())  # a synchronous client does not find out what else listens there
        address = self._address()
        with _raised_as_config_error(address):
            client = Client(address, timeout=CONNECT_S + BUSY_SCHEDULER_S, security=self.security)
        with client:
            yield client

    async def _require_answer(self) -> None:
        """Raise ConfigError unless a scheduler answers."""
        async with self.open_client():
            pass

    def _address(self) -> str:
        """Return the scheduler's address. Raises ConfigError if it is named not at all or twice, its file cannot be
        used, the address is not valid, or TLS has no certificate."""
        if not self.is_named:
            raise ConfigError("no cluster given; name it with --scheduler, --scheduler-file or DASK_SCHEDULER_ADDRESS")
        address = self.address
        if self.scheduler_file:
            if address:
                raise ConfigError("both --scheduler and --scheduler-file are given; name the cluster by one of them")
            address = _read_address(self.scheduler_file)
        address = str(normalize_address(str(address or dask.config.get("scheduler-address"))))
        scheme = address.partition("://")[0]
        if scheme in ("http", "https"):
            raise ConfigError(
                f"no scheduler at {address}: this is the address of a web page, such as Dask's dashboard; a "
                f"scheduler's is tcp://HOST:{SCHEDULER_PORT}"
            )
        try:
            if scheme not in SCHEMES:
                raise ValueError(f"unknown protocol {scheme}")
            port = parse_host_port(address)[1] if scheme in HOST_AND_PORT_SCHEMES else SCHEDULER_PORT
            if not 0 < port < 2**16:
                raise ValueError(f"there is no port {port}")
        except ValueError as error:
            raise ConfigError(
                f"{address!r} is not a scheduler's address ({error}); use tcp://HOST:{SCHEDULER_PORT}"
            ) from error
        has_tls = self.security is not None or dask.config.get("distributed.comm.tls.ca-file")
        if scheme == "tls" and not has_tls:
            raise ConfigError(f"{address} requires TLS; pass --tls-ca-file, --tls-cert and --tls-key")
        return address


@contextlib.contextmanager
def _raised_as_config_error(address: str) -> Iterator[None]:
    """Context manager: raises Dask's errors of a connection as ConfigError with one line."""
    try:
        yield
    except ConfigError:
        raise
    except CONNECT_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"no scheduler at {address}: {reason}") from error


async def _connect(address: str, within_s: float, options: dict[str, Any]) -> Any:
    """Connect a client to the scheduler at an address. Without a quick reply, probes the port; a busy scheduler gets
    `BUSY_SCHEDULER_S` more. Raises ConfigError and Dask's errors."""
    scheme, _ = parse_address(address)
    host, port = parse_host_port(address) if scheme in HOST_AND_PORT_SCHEMES else ("", 0)
    started_s = asyncio.get_running_loop().time()
    if host and (reason := await resolution_error(host)):
        raise ConfigError(f"no scheduler at {address}: {reason}")
    client = Client(address, asynchronous=True, timeout=within_s + BUSY_SCHEDULER_S, **options)
    start_task = asyncio.ensure_future(_wait_for_start(client, address))
    port_state = PortState()
    try:
        await asyncio.wait({start_task}, timeout=PROBE_AFTER_S)
        if host and (not start_task.done() or start_task.exception() is not None):
            port_state = await probe_port(host, port, tls=scheme == "tls")
            if port_state.error:
                raise ConfigError(f"no scheduler at {address}: {port_state.error}")
        if port_state.is_dask:
            within_s += BUSY_SCHEDULER_S
        async with asyncio.timeout_at(started_s + within_s):
            return await start_task
    except BaseException as error:
        start_task.cancel()
        await asyncio.wait({start_task, asyncio.ensure_future(client.close())}, timeout=CLOSE_LIMIT_S)
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"no scheduler at {address}: {port_state.no_reply_reason} (waited {within_s:g} s)"
            ) from error
        raise


async def _wait_for_start(client: Any, address: str) -> Any:
    """Wait until a client is connected, and register the job registry on its scheduler. Raises ConfigError if another
    Dask process than a scheduler of a compatible version answers, and Dask's errors."""
    try:
        await client
    except (TypeError, AttributeError, KeyError, AssertionError) as error:
        raise ConfigError(
            f"no scheduler at {address}: another Dask process listens there, such as a worker, or a scheduler of an "
            f"incompatible version ({error})"
        ) from error
    await ensure_job_registry(client)
    return client


async def _wait_for_address(scheduler_file: str, timeout_s: float) -> None:
    """Wait until a scheduler file has an address, which its scheduler may be writing, or until the time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        with contextlib.suppress(ConfigError):
            _read_address(scheduler_file)
            return
        await asyncio.sleep(FILE_POLL_S)


def _read_address(scheduler_file: str) -> str:
    """Read the address in a scheduler file. Raises ConfigError."""
    try:
        content = json.loads(Path(scheduler_file).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"scheduler file {scheduler_file}: {error.strerror}; `dask scheduler --scheduler-file` writes one"
        ) from error
    except ValueError:
        content = None
    address = content.get("address") if isinstance(content, dict) else None
    if not address or not isinstance(address, str):
        raise ConfigError(f"scheduler file {scheduler_file}: not written by a scheduler")
    return address


def make_security(ca_file: str, cert: str, key: str) -> Any:
    """Create Dask's security object from PEM files; None without files, so that Dask's configuration applies. Raises
    ConfigError."""
    if not (ca_file or cert or key):
        return None
    for option, path in (("--tls-ca-file", ca_file), ("--tls-cert", cert), ("--tls-key", key)):
        if not Path(path).is_file():
            raise ConfigError(f"{option} {path}: no such file; with TLS all three are needed")
    return Security(tls_ca_file=ca_file, tls_client_cert=cert, tls_client_key=key, require_encryption=True)


def client_security(worker_security: Any) -> Any:
    """Convert a worker's security for use by a client. A worker started with --tls-cert has a certificate for workers
    only."""
    if worker_security is None or not worker_security.tls_worker_cert or worker_security.tls_client_cert:
        return worker_security
    return Security(
        tls_ca_file=worker_security.tls_ca_file,
        tls_client_cert=worker_security.tls_worker_cert,
        tls_client_key=worker_security.tls_worker_key,
        require_encryption=worker_security.require_encryption,
    )
