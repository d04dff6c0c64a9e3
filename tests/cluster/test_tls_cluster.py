"""A cluster that requires TLS certificates, started by one command, and detection of open ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from staleflow.pipeline.cluster import certificates
from staleflow.pipeline.cluster.certificates import create_certificates, read_scheduler_address
from staleflow.pipeline.cluster.open_ports import open_dask_ports
from staleflow.stores.errors import ConfigError
from tests.commands import command, error_line
from tests.support import forking

WAIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def staleflow(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, which reads Dask's configuration when it starts."""
    return forking.run(
        [sys.executable, "-m", "staleflow.cli.main", *words], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


@contextlib.contextmanager
def running_cluster(folder: Path, port: int, workers: int) -> Iterator[subprocess.Popen[str]]:
    """`staleflow cluster`, once it has reported its workers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "staleflow.cli.main", "cluster", str(folder), "--workers", str(workers), "--port",
         str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[1].startswith(f"tls://127.0.0.1:{port}: {workers} workers"), (lines, process.stderr)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def test_a_job_runs_on_a_cluster_that_requires_certificates(tmp_path: Path) -> None:
    folder, port = tmp_path / "certificates", free_port()
    with running_cluster(folder, port, 3) as cluster:
        assert (folder.stat().st_mode & 0o077, (folder / "key.pem").stat().st_mode & 0o077) == (0, 0)
        started = psutil.Process(cluster.pid).children(recursive=True)
        listening = {c.laddr.ip for p in started for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}, "pages over HTTP listen on this machine alone, too"
        holder = {"DASK_CONFIG": str(folder)}
        submitted = staleflow(
            "submit", "examples/dryrun.toml", "--set", f"runs_dir={tmp_path}", "--set", "rollout.instances=1",
            "--set", "steps=2", "--set", "batch.groups_per_step=4", "--set", "rollout.max_new_tokens=100",
            "--set", "simulation.train_s=0.1", "--set", "simulation.report_s=0.1", environment=holder,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
        followed = staleflow("logs", "dryrun", "-f", environment=holder)
        assert followed.returncode == 0, followed.stderr
        audited = command("store", "audit", tmp_path / "dryrun")
        assert "2 steps" in audited.stdout, audited.stdout + audited.stderr
        stranger = staleflow("jobs", "--scheduler", f"tls://127.0.0.1:{port}", environment={})
        assert (stranger.returncode, "requires TLS" in stranger.stderr) == (2, True)
        create_certificates(tmp_path / "other", [], f"tls://127.0.0.1:{port}")
        forged = staleflow("jobs", environment={"DASK_CONFIG": str(tmp_path / "other")})
        assert forged.returncode == 2, "certificates of another authority are rejected"
        cluster.send_signal(signal.SIGINT)
        assert cluster.wait(WAIT_S) == 130
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_cluster_whose_scheduler_dies_reports_it_and_ends_its_workers(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "certificates", free_port(), 1) as cluster:
        started = psutil.Process(cluster.pid).children()
        scheduler = next(process for process in started if "scheduler" in process.cmdline())
        scheduler.kill()
        _, error = cluster.communicate(timeout=WAIT_S)
        assert cluster.returncode == 1
        assert "the scheduler has ended" in error
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_cluster_may_start_without_workers(tmp_path: Path) -> None:
    """It ended at once with a message about missing workers."""
    with running_cluster(tmp_path / "certificates", free_port(), 0) as cluster:
        assert cluster.poll() is None


def test_certificates_are_not_overwritten_or_used_for_another_address(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    create_certificates(folder, ["head"], "tls://head:8786")
    assert read_scheduler_address(folder) == "tls://head:8786"
    with pytest.raises(ConfigError, match="exists already"):
        create_certificates(folder, ["head"], "tls://head:8786")
    other = error_line("cluster", folder, "--port", 8999)
    assert "its certificates are for tls://head:8786, not tls://127.0.0.1:8999" in other


def test_an_expired_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "certificates"
    monkeypatch.setattr(certificates, "VALID_DAYS", 0)
    create_certificates(folder, ["127.0.0.1"], "tls://127.0.0.1:8999")
    assert "cert.pem: expired on 20" in error_line("cluster", folder, "--port", 8999)


@pytest.mark.parametrize(("host", "is_open"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_scheduler_reachable_without_tls_is_reported(tmp_path: Path, host: str, is_open: bool) -> None:
    port = free_port()
    words = [sys.executable, "-m", "dask", "scheduler", "--host", host, "--port", str(port)]
    with (tmp_path / "log").open("w+") as log:
        scheduler = subprocess.Popen(
            [*words, "--dashboard-address", "127.0.0.1:0"], stderr=log,
            env={**os.environ, "DASK_LOGGING__DISTRIBUTED": "info"},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + WAIT_S
            while "Scheduler at" not in (tmp_path / "log").read_text():
                assert scheduler.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert (f"0.0.0.0:{port}" in open_dask_ports()) == is_open
        finally:
            scheduler.kill()
            scheduler.wait()
