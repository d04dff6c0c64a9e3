"""The command `staleflow view`: imports, output, errors and exit."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.pipeline.run_page.page_server import listen
from tests.commands import error_line
from tests.support.stored_runs import Response, StoredRun

VIEW = [sys.executable, "-m", "staleflow.cli.main", "view"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    stored = StoredRun(tmp_path)
    stored.train([("one plus one", [Response("two", 1.0), Response("three", 0.0)])])
    return stored.run_dir


@pytest.fixture
def used_port() -> Iterator[int]:
    """A port of this machine that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_view_serves_until_it_is_interrupted(run: Path) -> None:
    with subprocess.Popen(
        [*VIEW, run, "--port", "0", "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith(f"{run}: http://127.0.0.1:"), process.stderr
        address = line.split()[1]
        with urllib.request.urlopen(f"{address}api/overview", timeout=60) as answer:
            assert b'"name":"page"' in answer.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == (b"", b"")


def test_a_port_in_use_gives_a_one_line_error(run: Path, used_port: int) -> None:
    assert error_line("view", run, "--port", used_port, "--no-browser") == (
        f"staleflow: --host 127.0.0.1, --port {used_port}: cannot be listened on: Address already in use\n"
    )


def test_a_default_port_in_use_is_replaced_by_another(used_port: int) -> None:
    with listen("127.0.0.1", used_port, exactly=False) as listening:
        assert listening.getsockname()[1] not in (0, used_port)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nowhere",), "nowhere: no such run; `staleflow store ls` lists runs"),
        (("{run}", "--host", "no-such-host.invalid"), "no-such-host.invalid, --port 8799: cannot be listened on"),
        (("{run}", "--host", "192.0.2.1"), "cannot be listened on"),
    ],
)
def test_runs_that_cannot_be_served_give_a_one_line_error(run: Path, arguments: tuple[str, ...], line: str) -> None:
    assert line in error_line("view", *(word.format(run=run) for word in arguments), "--no-browser")


def test_no_browser_is_opened_without_a_display(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from staleflow.cli import view

    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not view._has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert view._has_display()
