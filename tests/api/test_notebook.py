"""The notebooks of examples/, executed cell by cell in separate kernels."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Execute a notebook in a folder; returns what its cells print and show."""
    notebook = nbformat.read(Path("examples") / name, as_version=4)
    monkeypatch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
    monkeypatch.setenv("MPLBACKEND", "agg")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "\n".join(str(output.get("data", {}).get("text/plain", output.get("text", ""))) for output in outputs)
    assert "Traceback" not in text
    return text


@pytest.mark.timeout(900)
class TestNotebooks:
    def test_a_first_run_is_started_stopped_and_audited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = execute("first_run.ipynb", tmp_path, monkeypatch)
        run = tmp_path / "first-run" / "runs" / "notebook"
        assert (run / "store").exists()
        assert "def reward(answer, row)" in "\n".join(path.read_text() for path in (run / "code").glob("*.py"))
        assert "stopped" in text
        assert "holds" in text

    def test_a_stored_run_is_verified_rescored_and_trained_from(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = execute("stored_run.ipynb", tmp_path, monkeypatch)
        assert "verified" in text
        assert (tmp_path / "stored-run" / "offline" / "checkpoints").is_dir()

    # One of the three, a minute of processor time each. By default test_typing.py checks its calls, and other tests run
    # code like it.
    @pytest.mark.slow
    def test_user_code_in_a_notebook_trains_and_is_stored_with_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = execute("own_parts.ipynb", tmp_path, monkeypatch)
        assert "['loss_Discard.py', 'routing_LeastTokens.py', 'task_LongSums.py']" in text
