"""Wheel and sdist contain one import name and regular files, and do not conflict with other packages."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, Distributions, build

PACKAGES = ("cli", "pipeline", "tasks", "stores")


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel by path, without its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_a_wheel_built_from_the_sdist_equals_that_of_the_checkout(distributions: Distributions) -> None:
    assert contents(distributions.rebuilt) == contents(distributions.wheel)


def test_the_wheel_has_every_file_of_the_packages_under_one_name(distributions: Distributions) -> None:
    expected = {"staleflow/__init__.py", "staleflow/py.typed"}
    for package in PACKAGES:
        files = (path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".pyc")
        expected |= {f"staleflow/{path.relative_to(ROOT)}" for path in files}
    installed = {name for name in contents(distributions.wheel) if ".dist-info/" not in name}
    assert installed == expected
    assert any(name.endswith(".html") for name in installed), "the run page"
    with zipfile.ZipFile(distributions.wheel) as archive:
        for entry in archive.infolist():
            assert entry.external_attr >> 28 in (0, 0o10), f"{entry.filename} is not a regular file"


def test_the_sdist_has_regular_files_only(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        entries = archive.getmembers()
    assert all(entry.isfile() or entry.isdir() for entry in entries)
    tops = {Path(entry.name).parts[1] for entry in entries if len(Path(entry.name).parts) > 1}
    assert tops == {
        "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "staleflow", "staleflow.egg-info",
    }  # fmt: skip


def test_the_version_is_that_of_the_project(distributions: Distributions) -> None:
    (metadata,) = (text for name, text in contents(distributions.wheel).items() if name.endswith("/METADATA"))
    assert Parser().parsestr(metadata.decode())["Version"] in distributions.wheel.name


OTHER = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "other"
version = "1"
[tool.setuptools]
packages = ["cli", "tasks"]
"""


@pytest.fixture(scope="module")
def other_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of another project with packages named `cli` and `tasks`."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "pyproject.toml").write_text(OTHER)
    for name in ("cli", "tasks"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"owner = {name!r}\n")
    return build("wheel", folder, folder)


def pip(environment: Path, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(environment), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def installed_files(environment: Path) -> dict[str, bytes]:
    """Return the installed package files by path, without bytecode."""
    (packages,) = environment.glob("lib/python*/site-packages")
    files = (path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(packages)): path.read_bytes() for path in files}


def test_installing_and_removing_leaves_other_packages_unchanged(
    distributions: Distributions, other_wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    install = ("install", "--no-deps", "--no-index", "--no-compile")
    pip(environment, *install, distributions.wheel)
    alone = installed_files(environment)
    pip(environment, *install, other_wheel)
    both = installed_files(environment)
    assert alone.items() < both.items()
    pip(environment, "uninstall", "--yes", "staleflow")
    assert installed_files(environment) == {name: both[name] for name in both.keys() - alone.keys()}
