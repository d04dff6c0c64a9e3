"""The installed command in a folder whose modules have the names of our packages and of libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest

from tests.packaging.conftest import Distributions
from tests.packaging.test_distributions import pip

IN_THE_WAY = ("tasks.py", "stores.py", "cli/__init__.py", "pipeline/__init__.py", "random.py", "click.py", "dask.py")
"""Modules in the folder of a user; importing any of them raises."""
MAX_S = 240.0


class Installed:
    """The wheel in a new environment that shares the libraries of the test environment."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.environment, self.folder = environment, folder
        self._variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._variables.pop("PYTHONPATH", None)

    def start(self, program: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.environment / "bin" / program, *arguments], cwd=self.folder, env=self._variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run a program, which must succeed; returns its output."""
        with self.start(program, *arguments) as process:
            out, err = process.communicate(timeout=MAX_S)
        assert process.returncode == 0, out + err
        return out

    def staleflow(self, *arguments: str | Path) -> str:
        return self.run("staleflow", *arguments)


@pytest.fixture(scope="module")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("project")
    venv.create(environment, with_pip=False)
    pip(environment, "install", "--no-deps", "--no-index", distributions.wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Only its folder: its own .pth files, such as an editable installation's, do not count here.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    for name in IN_THE_WAY:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise ImportError('a module of the user')\n")
    return Installed(environment, folder)


@pytest.fixture(scope="module")
def job(installed: Installed, tiny_model: Path) -> Path:
    """A job written by `staleflow init`, with its run of two steps."""
    shutil.copytree(tiny_model, installed.folder / "tiny")
    rows = "".join(json.dumps({"prompt": f"{i % 10} + 1 =", "answer": str(i % 10 + 1)}) + "\n" for i in range(40))
    (installed.folder / "rows.jsonl").write_text(rows)
    result = installed.staleflow("init", ".", "--data", "rows.jsonl", "--model", "tiny")
    assert "staleflow run job.toml" in result
    small = (
        "steps=2",
        "task.eval_prompts=4",
        "batch.groups_per_step=2",
        "batch.group_size=2",
        "cluster.dashboard=false",
    )
    overrides = [word for setting in small for word in ("--set", setting)]
    # Without the model, which would load torch in each process.
    emulated = ("--set", "rollout.engine.name=emulated", "--set", "workload.prompts=task")
    installed.staleflow("run", "job.toml", *overrides, "--set", "rollout.max_new_tokens=8", *emulated)
    return installed.folder / "job.toml"


def test_a_script_imports_both_local_and_staleflow_modules(installed: Installed, tmp_path: Path) -> None:
    for name in ("tasks.py", "stores.py", "cli/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("owner = 'user'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import cli, stores, tasks\nimport staleflow.cli.main, staleflow.pipeline.config.schema as ours\n"
        "print(cli.owner, stores.owner, tasks.owner, ours.__file__)\n"
    )
    *owners, path = installed.run("python", script).split()
    assert owners == ["user"] * 3
    assert Path(path).is_relative_to(installed.environment)


def test_init_and_run(installed: Installed, job: Path) -> None:
    summary = json.loads((installed.folder / "runs" / "first" / "summary.json").read_text())
    assert summary["steps"] == 2


def test_store_audit(installed: Installed, job: Path) -> None:
    assert "2 steps" in installed.staleflow("store", "audit", "runs/first")


def test_view_serves_the_page_and_its_files_until_it_is_stopped(installed: Installed, job: Path) -> None:
    with installed.start("staleflow", "view", "runs/first", "--port", "0", "--no-browser") as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+/", line := process.stdout.readline())
        assert address, line
        with urllib.request.urlopen(address[0]) as answer:
            page = answer.read().decode()
        files = re.findall(r'(?:src|href)="([^"#:]+\.(?:js|css))"', page)
        assert files
        for name in files:
            with urllib.request.urlopen(address[0] + name.lstrip("/")) as answer:
                assert answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(MAX_S) in (0, 130)


def test_a_missing_repository_file_gives_a_one_line_error_with_a_remedy(installed: Installed) -> None:
    with installed.start("staleflow", "run", "examples/demo.toml") as process:
        _, error = process.communicate(timeout=MAX_S)
    remedy = "`staleflow init FOLDER` writes a first one"
    assert (process.returncode, error) == (2, f"staleflow: examples/demo.toml: no such job file; {remedy}\n")
