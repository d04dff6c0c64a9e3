"""`make bench` runs every benchmark, each in its quick form."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import agentic
from benchmarks.__main__ import COMMANDS
from benchmarks.simulated import tables

SCRIPTS = sorted(p for p in Path("benchmarks").glob("*.py") if not p.name.startswith("__"))


def test_all_are_run() -> None:
    assert {p.stem for p in SCRIPTS} == set(COMMANDS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_each_has_a_quick_form(script: Path) -> None:
    assert '"--quick"' in script.read_text()


@pytest.mark.parametrize("name", ["ledger", "coordinator", "board", "long_store", "transfer"])
def test_the_small_ones_work(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_agents_in_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentic", "--quick", "--out", str(tmp_path)])
    agentic.main()
    assert capsys.readouterr().out.startswith((tmp_path / "agentic.md").read_text())
    found = json.loads((tmp_path / "agentic.json").read_text())
    assert {r["part"] for r in found} == {
        "lock_step", "redundancy", "asynchronous", "prefix", "queue", "replication",
    }  # fmt: skip
    assert all(r["bound_kept"] for r in found if r["part"] == "asynchronous")
    assert all(r["ratio"] > 1 for r in found if r["part"] == "lock_step")


def test_the_pages_of_stored_results_can_be_written_again() -> None:
    assert agentic.page(json.loads(Path("docs/agentic.json").read_text())) == Path("docs/agentic.md").read_text()
    assert "Ahead of every baseline that keeps the bound" in tables(json.loads(Path("docs/simulated.json").read_text()))
