"""The house keeps its shape: the core is pure, help is instant, names clash with nothing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ("dask", "distributed", "torch", "transformers", "vllm", "zarr", "icechunk", "asyncio")


def deciding_core() -> list[str]:
    """The modules that pyproject.toml's import contract keeps pure."""
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = next(c["source_modules"] for c in contracts if c["name"] == "What decides is pure")
    packages = [m for m in named if Path(m.replace(".", "/")).is_dir()]
    inside = [
        str(p.with_suffix("")).replace("/", ".") for m in packages for p in Path(m.replace(".", "/")).glob("*.py")
    ]
    return sorted({*named, *inside} - {*packages, *(f"{m}.__init__" for m in packages)})


def loaded_by(code: str) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint(' '.join(sorted(m.partition('.')[0] for m in sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", deciding_core())
def test_the_deciding_core_loads_nothing_heavy(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_help_and_checking_a_job_load_nothing_heavy() -> None:
    heavy = set(HEAVY) - {"asyncio"}
    assert (
        not loaded_by("from click.testing import CliRunner\nfrom cli.main import cli\nCliRunner().invoke(cli)") & heavy
    )
    assert not loaded_by("import pipeline.config.loading\npipeline.config.loading.load('examples/demo.toml')") & heavy


def test_our_package_names_clash_with_nothing_installed() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in ("cli", "pipeline", "tasks", "stores"):
        assert set(owners.get(name, [])) <= {"staleflow"}


def test_package_inits_hold_a_docstring_only() -> None:
    for path in (p for top in ("cli", "pipeline", "tasks", "stores") for p in Path(top).rglob("__init__.py")):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) == 1, path
        assert lines[0].startswith('"""'), path
