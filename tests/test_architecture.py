"""The house keeps its shape: the core is pure, help is instant, names clash with nothing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("dask", "distributed", "torch", "transformers", "vllm", "zarr", "icechunk", "asyncio")
CORE = (
    "stores.errors",
    "stores.trajectory",
    "stores.staleness",
    "pipeline.events",
    "pipeline.commands",
    "pipeline.snapshot",
    "pipeline.state",
    "pipeline.fleet",
    "pipeline.waiting",
    "pipeline.history",
    "pipeline.forecast",
    "pipeline.pace",
    "pipeline.beliefs",
    "pipeline.moves",
    "pipeline.fit",
    "tasks.workload",
    "tasks.engines.decoding",
    "stores.cost",
    "pipeline.strategies.routing",
    "pipeline.strategies.synchronization",
    "pipeline.strategies.admission",
    "pipeline.strategies.filtering",
    "pipeline.strategies.migration",
    "pipeline.coordinator",
)


def loaded_by(code: str) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint(' '.join(sorted(m.partition('.')[0] for m in sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", CORE)
def test_the_deciding_core_loads_nothing_heavy(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_help_and_checking_a_job_load_nothing_heavy() -> None:
    heavy = set(HEAVY) - {"asyncio"}
    assert (
        not loaded_by("from click.testing import CliRunner\nfrom cli.main import cli\nCliRunner().invoke(cli)") & heavy
    )
    assert not loaded_by("import pipeline.config\npipeline.config.load('examples/demo.toml')") & heavy


def test_our_package_names_clash_with_nothing_installed() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in ("cli", "pipeline", "tasks", "stores"):
        assert set(owners.get(name, [])) <= {"staleflow"}


def test_package_inits_hold_a_docstring_only() -> None:
    for path in (p for top in ("cli", "pipeline", "tasks", "stores") for p in Path(top).rglob("__init__.py")):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) == 1, path
        assert lines[0].startswith('"""'), path
