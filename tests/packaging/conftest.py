"""Wheel and sdist of the checkout, built once without a network through the hooks that pip and `build` call."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "staleflow", "cli", "pipeline", "tasks", "stores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """Paths of the built distributions. rebuilt: the wheel built from the sdist."""

    sdist: Path
    wheel: Path
    rebuilt: Path


def build(kind: str, project: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a project into a folder. kind: `wheel` or `sdist`."""
    code = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", code, str(out)]
    built = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out / built.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Built in a copy of the checkout."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, source / name)
    sdist, wheel = build("sdist", source, folder), build("wheel", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    (folder / "rebuilt").mkdir()
    return Distributions(sdist=sdist, wheel=wheel, rebuilt=build("wheel", unpacked, folder / "rebuilt"))
