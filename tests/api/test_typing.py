"""The public API is typed: a script that uses all of it passes mypy --strict, and one with mistakes does not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import staleflow

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SCRIPT = Path(__file__).with_name("user_script.py")
MISTAKES = """
import staleflow

run = staleflow.openrun("runs/demo")
staleflow.open_run("runs/demo").steps(3)
staleflow.open_run("runs/demo").steps()[0].metric
staleflow.open_run("runs/demo").sorted_ids("last", 3)
"""


def test_a_script_that_uses_the_whole_api_passes_mypy_and_mistakes_are_found(tmp_path: Path) -> None:
    """The cells of the notebooks also pass, without annotations of their functions."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    for notebook in NOTEBOOKS:
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] for cell in cells), "outputs are not committed"
        source = "\n".join("".join(cell["source"]) for cell in cells)
        (tmp_path / f"{notebook.stem}.py").write_text(f"# mypy: allow-untyped-defs, allow-untyped-calls\n{source}")
    result = subprocess.run(
        [sys.executable, "-m", "mypy", SCRIPT, *sorted(tmp_path.glob("*.py"))],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    errors = [line.rpartition("[")[2].rstrip("]") for line in result.stdout.splitlines() if ": error: " in line]
    assert errors == ["attr-defined", "call-arg", "attr-defined", "arg-type"], result.stdout + result.stderr
    assert "user_script" not in result.stdout


def test_the_script_uses_every_public_name_of_run() -> None:
    named = {node.attr for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Attribute)}
    public = {name for name in dir(staleflow.Run) if not name.startswith("_")}
    assert public - named == set()
