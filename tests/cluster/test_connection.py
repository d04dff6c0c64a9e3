"""Wrong cluster addresses give a one-line error within ten seconds, whatever listens there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Scheduler, Security, Worker

from staleflow.pipeline.cluster import connection, port_probe
from staleflow.pipeline.cluster.connection import CONNECT_S, ClusterAddress
from staleflow.stores.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Freeze the objects of imported modules, which take a second to collect."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _probe_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_AFTER_S", 0.2)


def connection_error(cluster: ClusterAddress, within_s: float = CONNECT_S, most_s: float = CONNECT_S + 1.5) -> str:
    """Return the error of connecting to a wrong cluster; it has one line and comes within `most_s`."""
    begin = time.monotonic()

    async def connect() -> None:
        async with cluster.open_client(within_s=within_s):
            pytest.fail("it connected")

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # Dask leaves the socket of an abandoned handshake to the garbage collector
        with pytest.raises(ConfigError) as caught:
            asyncio.run(connect())
        took_s = time.monotonic() - begin
        gc.collect()
    assert took_s < most_s
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def listener(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Return the port of a server that calls a function with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()
        open_now = []

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    item, _ = server.accept()
                    open_now.append(item)
                    with contextlib.suppress(OSError):
                        behave(item)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        over.set()
        thread.join()
        for item in open_now:
            item.close()


def test_the_port_of_the_dashboard_is_recognized() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever).start()
    port = server.server_address[1]
    try:
        assert connection_error(ClusterAddress(address=f"tcp://127.0.0.1:{port}"), most_s=5) == (
            f"no scheduler at tcp://127.0.0.1:{port}: an HTTP server answers there, such as Dask's dashboard; the "
            "scheduler's port is usually 8786"
        )
        with (
            pytest.raises(ConfigError, match="an HTTP server answers there"),
            ClusterAddress(address=f"127.0.0.1:{port}").open_blocking_client(),
        ):
            pytest.fail("it connected")
    finally:
        server.shutdown()
        server.server_close()


def test_server_that_accepts_but_never_replies_times_out() -> None:
    with listener(lambda connected: None) as port:
        assert connection_error(ClusterAddress(address=f"tcp://127.0.0.1:{port}"), 1.0) == (
            f"no scheduler at tcp://127.0.0.1:{port}: the server there does not reply; it may be busy, or not "
            "a scheduler (waited 1 s)"
        )


def test_another_protocol_is_shown_in_the_error() -> None:
    with listener(lambda connected: connected.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as port:
        message = connection_error(ClusterAddress(address=f"tcp://127.0.0.1:{port}"))
    assert message.endswith(r"another server answers there: b'SSH-2.0-OpenSSH_9.2\r\n'")


def test_server_that_closes_each_connection_is_no_scheduler() -> None:
    with listener(lambda connected: connected.close()) as port:
        assert "no scheduler at" in connection_error(ClusterAddress(address=f"tcp://127.0.0.1:{port}"))


def test_a_closed_port_gives_a_one_line_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert connection_error(ClusterAddress(address=f"127.0.0.1:{port}"), 1.0) == (
        f"no scheduler at tcp://127.0.0.1:{port}: it cannot be reached: Connection refused (waited 1 s)"
    )


def test_a_host_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = connection_error(ClusterAddress(address="tcp://no-such-host.invalid:8786"))
    assert "the host name no-such-host.invalid" in message
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: over.wait(30))
    message = asyncio.run(port_probe.resolution_error("slow.invalid", 0.2))
    assert message == "the host name slow.invalid is not resolved within 0.2 s"
    over.set()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://localhost:8787/status", "the address of a web page.*tcp://HOST:8786"),
        ("localhost", "is not a scheduler.s address .*missing port.*; use tcp://HOST:8786"),
        ("tcp://localhost:http", "is not a scheduler.s address"),
        ("tcp://localhost:99999", "there is no port 99999"),
        ("smtp://localhost:25", "unknown protocol smtp"),
        ("tcp://", "is not a scheduler.s address"),
        ("8786", "is not a scheduler.s address"),
        ("tls://127.0.0.1:8786", "requires TLS; pass --tls-ca-file, --tls-cert and --tls-key"),
    ],
)
def test_an_invalid_address_is_rejected_at_once(address: str, message: str) -> None:
    assert re.search(message, connection_error(ClusterAddress(address=address), most_s=CONNECT_S / 2)), (
        "waiting takes all of CONNECT_S"
    )


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"address": ""}', '{"address": 7}', "\0\xff", "null"])
def test_an_invalid_scheduler_file_falls_back_to_no_other_cluster(content: str, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(content, encoding="latin-1")
    with dask.config.set({"scheduler-address": "tcp://127.0.0.1:9"}):
        assert (
            connection_error(ClusterAddress(scheduler_file=str(file)))
            == f"scheduler file {file}: not written by a scheduler"
        )
        missing = connection_error(ClusterAddress(scheduler_file=str(tmp_path / "none.json")))
        assert missing.endswith("No such file or directory; `dask scheduler --scheduler-file` writes one")
        assert "Is a directory" in connection_error(ClusterAddress(scheduler_file=str(tmp_path)))
        with (
            pytest.raises(ConfigError, match="not written by a scheduler"),
            ClusterAddress(scheduler_file=str(file)).open_blocking_client(),
        ):
            pytest.fail("it connected")
    file.write_text(json.dumps({"address": "tcp://127.0.0.1:9"}))
    assert "both" in connection_error(ClusterAddress(address="tcp://127.0.0.1:8786", scheduler_file=str(file)))


TLS = str(Path(__file__).parent / "tls.pem")
"""A certificate for 127.0.0.1 and its key, generated for these tests."""


def tls() -> Security:
    names = ("tls_ca_file", "tls_client_cert", "tls_client_key", "tls_scheduler_cert", "tls_scheduler_key")
    return Security(require_encryption=True, **dict.fromkeys(names, TLS))


def with_scheduler(security: Any, look: Callable[[str], str]) -> str:
    """Call `look` with the address of a running scheduler in a separate thread."""

    async def work() -> str:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0", security=security) as scheduler:
            return await asyncio.to_thread(look, scheduler.address)

    return asyncio.run(work())


def test_schedulers_with_and_without_tls_are_distinguished() -> None:
    address = ""

    def without(its: str) -> str:
        nonlocal address
        address = its
        return connection_error(ClusterAddress(address=its.replace("tls://", "tcp://")))

    message = with_scheduler(tls(), without)
    assert message.endswith(f": it requires TLS; use {address} with --tls-ca-file, --tls-cert and --tls-key")

    def with_tls(its: str) -> str:
        nonlocal address
        address = its
        return connection_error(ClusterAddress(address=its.replace("tcp://", "tls://"), security=tls()))

    assert with_scheduler(None, with_tls).endswith(f": it does not use TLS; use {address}")


def answers(cluster: ClusterAddress, within_s: float = CONNECT_S) -> str:
    async def connect() -> str:
        async with cluster.open_client(within_s=within_s) as client:
            return str(client.status)

    return asyncio.run(connect())


def test_valid_addresses_connect() -> None:
    assert with_scheduler(tls(), lambda its: answers(ClusterAddress(address=its, security=tls()))) == "running"
    assert with_scheduler(None, lambda its: answers(ClusterAddress(address=its.removeprefix("tcp://")))) == "running"
    name = with_scheduler(None, lambda its: answers(ClusterAddress(address=its.replace("127.0.0.1", "localhost"))))
    assert name == "running"


def test_a_scheduler_that_greets_late_receives_only_a_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "GREETING_S", 0.1)
    heard: list[bytes] = []

    def greet_late(connected: socket.socket) -> None:
        connected.settimeout(5)
        heard.append(connected.recv(4096))
        connected.sendall(port_probe._greeting())

    async def look(port: int) -> port_probe.PortState:
        return await port_probe.probe_port("127.0.0.1", port, tls=False)

    with listener(greet_late) as port:
        result = asyncio.run(look(port))
    assert (result.error, result.is_dask) == ("", True)
    assert heard == [port_probe._greeting()]


def test_the_address_of_a_worker_is_rejected() -> None:
    async def work() -> str:
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler,
            Worker(scheduler.address, dashboard_address=":0") as worker,
        ):
            return await asyncio.to_thread(connection_error, ClusterAddress(address=worker.address))

    assert "no scheduler at" in asyncio.run(work())


def test_a_busy_scheduler_is_waited_for() -> None:
    async def work() -> str:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            identity, begin = scheduler.handlers["identity"], time.monotonic()

            async def busy(**arguments: Any) -> Any:
                await asyncio.sleep(max(0.0, begin + 2.0 - time.monotonic()))
                return identity(**arguments)

            scheduler.handlers["identity"] = busy
            greeting = port_probe._greeting()
            connected = await asyncio.open_connection("127.0.0.1", int(scheduler.address.rpartition(":")[2]))
            connected[1].write(greeting)  # as if it had not greeted in time
            state = await asyncio.to_thread(answers, ClusterAddress(address=scheduler.address), 1.0)
            connected[1].close()
            return state

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(work()) == "running"


def test_a_busy_scheduler_is_waited_for_by_a_synchronous_client_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.3)

    def connect(address: str) -> str:
        with ClusterAddress(address=address).open_blocking_client() as client:
            return str(client.status)

    async def work() -> str:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            identity = scheduler.handlers["identity"]

            async def busy(**arguments: Any) -> Any:
                await asyncio.sleep(1.0)
                return identity(**arguments)

            scheduler.handlers["identity"] = busy
            return await asyncio.to_thread(connect, scheduler.address)

    assert asyncio.run(work()) == "running"


def test_a_scheduler_lost_before_the_second_connection_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: ClusterAddress) -> None:
        pass

    def time_out(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(ClusterAddress, "_require_answer", answer)
    monkeypatch.setattr(connection, "Client", time_out)
    with (
        pytest.raises(ConfigError, match=r"^no scheduler at tcp://127\.0\.0\.1:9: TimeoutError$"),
        ClusterAddress(address="127.0.0.1:9").open_blocking_client(),
    ):
        pytest.fail("it connected")


def test_the_error_of_a_busy_scheduler_states_the_whole_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_SCHEDULER_S", 0.5)
    with listener(lambda connected: connected.sendall(port_probe._greeting())) as port:
        message = connection_error(ClusterAddress(address=f"tcp://127.0.0.1:{port}"), 1.0)
    assert message == f"no scheduler at tcp://127.0.0.1:{port}: it is too busy to reply (waited 1.5 s)"


def test_a_scheduler_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.touch()

    async def work() -> str:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            content = json.dumps({"address": scheduler.address})
            asyncio.get_running_loop().call_later(0.3, file.write_text, content)
            async with ClusterAddress(scheduler_file=str(file)).open_client(file_timeout_s=60, within_s=60) as client:
                return str(client.status)

    assert asyncio.run(work()) == "running"
