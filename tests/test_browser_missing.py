"""Without Chromium the browser tests are skipped, and the last line says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_last_line_names_the_skipped_browser_tests(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/run_page/test_browser.py"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "passed" not in run.stdout
    last = run.stdout.splitlines()[-1]
    assert last.endswith("tests of pages were left out: Chromium not found on this machine"), run.stdout
    assert int(last.split()[0]) > 3
