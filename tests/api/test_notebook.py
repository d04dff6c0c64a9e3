"""The notebook of examples/, executed as a person does: cell by cell, in a kernel of its own."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path("examples/first_run.ipynb")


@pytest.mark.slow  # by default test_typing.py checks its calls, and others what these do
@pytest.mark.timeout(900)
def test_the_notebook_starts_a_run_stops_it_and_trains_from_what_it_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
    monkeypatch.setenv("MPLBACKEND", "agg")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {
        cell.id: "".join(str(out.get("data", {}).get("text/plain", out.get("text", ""))) for out in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    text = "\n".join(shown.values())
    run = tmp_path / "first-run" / "runs" / "notebook"
    assert (run / "store").exists()
    assert "def reward(answer, row)" in "\n".join(path.read_text() for path in (run / "code").glob("*.py"))
    assert "Traceback" not in text
    assert "stopped" in text
    assert (tmp_path / "first-run" / "offline" / "checkpoints").is_dir()
