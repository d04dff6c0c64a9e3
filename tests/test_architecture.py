"""The structure of the code: no import cycles, unique names, pure core modules, fast help."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from docs import architecture
from docs.architecture import FOLDERS, imported, read_modules

EVERYWHERE = {"threading", "time", "random"}
"""Modules that numpy and the standard library load; only the import contracts can forbid them."""


MODULES = read_modules()


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return a cycle of modules with its first repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_cycles_exist() -> None:
    """Neither directly nor in a cycle, lazily or under TYPE_CHECKING: modules that need each other are one module."""
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert find_cycle({name: imported(tree, MODULES) - {name} for name, tree in MODULES.items()}) == []


def test_import_cycles_are_found_through_lazy_imports_and_type_checking() -> None:
    lazy = (
        "def f():\n    from staleflow.stores import metrics\n    importlib.import_module('staleflow.stores.files')\n\n"
        "if TYPE_CHECKING:\n    from staleflow.stores.errors import StoreError\n\n"
        "class Settings:\n    module: ClassVar[str] = 'staleflow.stores.trajectory'\n\n"
        "TABLE = {'a': 'staleflow.stores.id_sets:IdSet'}\nPROGRAM = ['python', '-m', 'staleflow.cli.main']\n"
    )
    names = ("metrics", "files", "errors", "trajectory", "id_sets")
    assert imported(ast.parse(lazy), MODULES) == {f"staleflow.stores.{name}" for name in names}


def test_the_package_diagram_is_current() -> None:
    graph = architecture.package_graph(MODULES)
    assert graph["cli"] >= {"pipeline.config", "stores"}
    picture = Path("docs/architecture.svg").read_text()
    assert picture == architecture.draw(graph) + "\n", "run `make generated`"


def test_a_package_is_drawn_above_its_imports() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert architecture.rows_of(graph) == [["a"], ["b"], ["c"]]
    assert architecture.direct(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_module_names_are_unique() -> None:
    names = [name.rpartition(".")[2] for name in MODULES]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def names_defined(tree: ast.Module) -> set[str]:
    """Return top-level names of a module and private methods of its classes, without functions that a decorator call
    registers."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not any(is_registered(item) for item in node.decorator_list):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name[0] == "_"}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("__")}


def is_registered(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr in ("register", "command")
    )


def names_used(tree: ast.Module) -> set[str]:
    """Return names that are read, and words of short strings, since the command line names its commands so."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            used |= set(re.findall(r"\w+", node.value))
    return used


def test_every_name_is_used() -> None:
    defined = {name: names_defined(tree) for name, tree in MODULES.items()}
    unused = set().union(*defined.values()) - set().union(*map(names_used, MODULES.values()))
    for path in (path for folder in ("tests", "examples", "benchmarks") for path in Path(folder).rglob("*.py")):
        text = path.read_text()
        if not unused.isdisjoint(re.findall(r"\w+", text)):  # to parse all of them takes ten seconds
            unused -= names_used(ast.parse(text))
    assert {name: sorted(names & unused) for name, names in defined.items() if names & unused} == {}


def contract(name: str) -> tuple[list[str], set[str]]:
    """Return the modules of an import contract of pyproject.toml, including those in packages, and the forbidden
    imports."""
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    entry = next(c for c in contracts if c["name"] == name)
    sources = tuple(entry["source_modules"])
    modules = [m for m in MODULES if m in sources or m.startswith(tuple(f"{s}." for s in sources))]
    return modules, set(entry["forbidden_modules"]) - EVERYWHERE


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint(' '.join(sorted(m.partition('.')[0] for m in sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


IMPORT_EACH = """
import importlib, sys
for name in {modules}:
    before = set(sys.modules)
    importlib.import_module(name)
    for loaded in sorted({{m.partition(".")[0] for m in set(sys.modules) - before}} & {forbidden}):
        print(name, "loads", loaded)
"""


@pytest.mark.parametrize("name", ["What decides is pure", "The store's contract and its model need no storage library"])
def test_pure_modules_import_no_heavy_package(name: str) -> None:
    """Imported in one fresh interpreter, because the contracts do not see imports by libraries or package __init__
    files."""
    modules, forbidden = contract(name)
    assert modules
    assert {"dask", "torch", "zarr"} <= forbidden
    script = IMPORT_EACH.format(modules=modules, forbidden=forbidden)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == []


def test_a_heavy_import_is_named_with_its_module() -> None:
    script = IMPORT_EACH.format(
        modules=["staleflow.stores.errors", "staleflow.stores.trajectories.versioned"], forbidden={"zarr", "icechunk"}
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "staleflow.stores.trajectories.versioned loads icechunk",
        "staleflow.stores.trajectories.versioned loads zarr",
    ]


def test_help_and_loading_a_job_import_no_heavy_package() -> None:
    heavy = contract("What decides is pure")[1] - {"asyncio"}
    ask_help = "from click.testing import CliRunner\nfrom staleflow.cli.main import cli\nCliRunner().invoke(cli)"
    assert not loaded_by(ask_help) & heavy
    assert (
        not loaded_by("import staleflow.pipeline.config.loading as loading\nloading.load('examples/demo.toml')") & heavy
    )


def test_a_submission_and_the_server_of_the_run_page_import_no_heavy_package() -> None:
    """These imports take seconds and hundreds of MiB."""
    heavy = {"torch", "transformers", "bokeh", "matplotlib"}
    submission = loaded_by("import staleflow.cli.cluster_jobs, staleflow.pipeline.jobs.job_driver")
    assert "distributed" in submission and not submission & (heavy | {"zarr", "icechunk"})
    assert not loaded_by("import staleflow.pipeline.run_page.page_server") & (heavy | {"dask", "distributed"})


def test_a_process_of_environments_reads_no_package_metadata() -> None:
    """It takes a fifth of the start of such a process. `importlib.metadata` imports `email`."""
    load = "from staleflow.tasks.environments.fork_server import open_environment as load"
    assert not loaded_by(f"{load}\nload('examples/agent_game.py:HigherOrLower', {{}})") & {"email", "numpy"}


def test_package_names_clash_with_no_installed_package() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in FOLDERS:
        assert set(owners.get(name, [])) <= {"staleflow"}


def test_texts_are_read_and_written_as_utf_8() -> None:
    """Not in the encoding of the locale."""
    num_arguments = {"read_text": 1, "write_text": 2}
    calls = [
        (name, node.lineno, len(node.args), num_arguments[node.func.attr])
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in num_arguments
    ]
    assert len(calls) > 20
    assert [call for call in calls if call[2] < call[3]] == []


def test_deadlines_are_asyncio_timeouts() -> None:
    """asyncio.wait_for of Python 3.11 swallows a cancellation that arrives together with the result."""
    used = {
        name: node.lineno
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    }
    assert used == {}


def test_package_inits_hold_a_docstring_only() -> None:
    for path in (p for top in FOLDERS for p in Path(top).rglob("__init__.py")):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) == 1, path
        assert lines[0].startswith('"""'), path
