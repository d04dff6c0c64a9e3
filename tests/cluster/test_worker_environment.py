"""The environment variables for starting worker processes are restored, also with concurrent starts."""

from __future__ import annotations

import os
import threading
from multiprocessing import forkserver

import pytest

from staleflow.pipeline.processes import local_cluster


def test_concurrent_starts_restore_all_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONSAFEPATH was left set, and child processes could not import modules of their folder."""
    before = dict(os.environ)
    first, second = threading.Event(), threading.Event()

    def overlapping() -> None:
        first.set()
        second.wait(0.2)  # for another one to come in, which it must not

    monkeypatch.setattr(forkserver, "ensure_running", overlapping)
    threads = [threading.Thread(target=local_cluster.start_fork_server, args=(1, ())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.is_set()
    assert dict(os.environ) == before
