"""The notebooks of examples/, executed cell by cell in separate kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

SHORT = "from staleflow.pipeline.config import first_job; first_job.PRETRAINING_STEPS = 20"
"""A first cell: the model of a first job learns little more than the form of an answer, in seconds."""


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, shorter: Mapping[str, str]) -> str:
    """Execute a notebook in a folder; returns what its cells print and show. `make docs` executes it as it is.

    shorter: code of the notebook, and what is executed instead so that the test takes less time.
    """
    notebook = nbformat.read(Path("examples") / name, as_version=4)
    for long, short in shorter.items():
        (cell,) = (cell for cell in notebook.cells if long in cell.source)
        cell.source = cell.source.replace(long, short)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SHORT))
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
        shorter = {"status()).step < 8": "status()).step < 2", '"steps": 200': '"steps": 200, "task.eval_prompts": 20'}
        text = execute("first_run.ipynb", tmp_path, monkeypatch, shorter)
        run = tmp_path / "first-run" / "runs" / "notebook"
        assert (run / "store").exists()
        assert "def reward(answer, row)" in "\n".join(path.read_text() for path in (run / "code").glob("*.py"))
        assert "stopped" in text
        assert "holds" in text

    def test_a_stored_run_is_verified_rescored_and_trained_from(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shorter = {'"steps": 8': '"steps": 4, "task.eval_prompts": 20'}
        text = execute("stored_run.ipynb", tmp_path, monkeypatch, shorter)
        assert "verified" in text
        assert (tmp_path / "stored-run" / "offline" / "checkpoints").is_dir()

    # A minute of processor time. By default test_typing.py checks its calls, and other tests run code like it.
    @pytest.mark.slow
    def test_user_code_in_a_notebook_trains_and_is_stored_with_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = execute("own_parts.ipynb", tmp_path, monkeypatch, {})
        assert "['loss_Discard.py', 'routing_LeastTokens.py', 'task_LongSums.py']" in text
