"""`import staleflow`: what it exports, lazily and typed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import staleflow
from docs import site_pages
from tests.test_architecture import contract, loaded_by

HEAVY = contract("What decides is pure")[1] - {"asyncio"} | {"numpy", "pandas"}


def imports_for_type_checkers() -> dict[str, str]:
    """Return the names that `staleflow/__init__.py` imports under TYPE_CHECKING, with their modules."""
    tree = ast.parse(Path(str(staleflow.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {str(alias.asname): str(node.module) for node in imports for alias in node.names}


def test_importing_staleflow_imports_no_heavy_package() -> None:
    assert {"torch", "zarr", "dask", "distributed", "numpy"} <= HEAVY
    assert not loaded_by("import staleflow\ndir(staleflow)\nstaleflow.__version__") & HEAVY


def test_names_for_type_checkers_equal_the_lazily_imported_names() -> None:
    assert imports_for_type_checkers() == staleflow._MODULE_BY_NAME


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    for name in staleflow.__all__:
        assert getattr(staleflow, name) is getattr(staleflow, name)
    assert set(staleflow.__all__) <= set(dir(staleflow))


def test_public_names_are_documented() -> None:
    for name in staleflow._MODULE_BY_NAME:
        assert getattr(staleflow, name).__doc__, name


def test_the_api_page_has_every_public_name_once() -> None:
    listed = [name for names in site_pages.api_groups().values() for name in names]
    assert sorted(listed) == sorted(staleflow._MODULE_BY_NAME)
    assert all(f"staleflow.{name}\n" in site_pages.python_api_page() for name in listed if name != "tiny_model")


def test_an_unknown_name_gives_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'staleflow' has no attribute 'openrun'; did you mean open_run\?$"
    ):
        getattr(staleflow, "openrun")  # noqa: B009  mypy knows that it does not exist
    with pytest.raises(AttributeError, match=r"has no attribute 'xyzzy'$"):
        getattr(staleflow, "xyzzy")  # noqa: B009
    assert not hasattr(staleflow, "__wrapped__")


def test_repr_of_a_job_is_one_line() -> None:
    job = staleflow.load_job("examples/demo.toml", {"steps": 7})
    assert repr(job) == "<Job demo: 7 steps, eta 1, runs/base/running-sums, reasoning_gym:chain_sum>"
