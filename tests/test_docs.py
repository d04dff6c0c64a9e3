"""Documentation pages: links have targets, the index lists every page, and the version is stated once."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import staleflow
from docs import site_pages

PAGES = sorted([*Path().glob("*.md"), *Path("docs").glob("*.md")])


def links(page: Path) -> list[str]:
    """Return the files and anchors that a page links to, without other sites."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub creates them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_have_existing_targets(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page() -> None:
    listed = {Path("docs", link.partition("#")[0]).resolve() for link in links(Path("docs/index.md"))}
    pages = {path.resolve() for path in Path("docs").glob("*.md") if path.name != "index.md"}
    assert pages <= listed


def test_modules_named_on_the_architecture_page_exist() -> None:
    names = re.findall(r"`((?:cli|pipeline|tasks|stores)/[\w/]+(?:\.py)?)`", Path("docs/architecture.md").read_text())
    assert len(names) > 30
    assert [name for name in names if not Path(name).exists()] == []


def job_keys(schema: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the keys of a job file and of its tables, such as `rollout.engine`, from its JSON Schema."""
    keys: set[str] = set()
    forms = [schema, *schema.get("anyOf", []), *schema.get("oneOf", [])]
    for part in (*forms, *(form["items"] for form in forms if "items" in form)):
        for name, value in part.get("properties", {}).items():
            keys |= {prefix + name, *job_keys(value, f"{prefix}{name}.")}
    return keys


def test_pages_name_only_existing_job_keys() -> None:
    keys = job_keys(json.loads(Path("docs/job.schema.json").read_text()))
    tables = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key} - {"task"}))
    example = "rollout.engine.echoes"  # of the engine that CONTRIBUTING.md adds
    named = {
        (str(page), name)
        for page in PAGES
        for name in re.findall(rf"`((?:{tables})(?:\.[a-z_]+)+)(?![\w./])", page.read_text())
        if not name.endswith(".json")
    }
    assert len(named) > 100
    assert [where for where in sorted(named) if where[1] not in keys | {example}] == []


def test_the_job_file_page_describes_every_key() -> None:
    schema = json.loads(Path("docs/job.schema.json").read_text())
    tables: dict[str, list[str]] = {}
    for section in site_pages.job_file_page(schema).split("\n##")[1:]:
        title = section.strip("# ").partition("\n")[0].strip("[]")
        tables.setdefault(title, []).extend(re.findall(r"^`(\w+)` \(", section, flags=re.MULTILINE))
    described = {*tables.pop("Top level"), *(f"{table}.{key}" for table, keys in tables.items() for key in keys)}
    described |= {*tables, *(f"{table}.name" for table in tables), *(table.removesuffix(".NAME") for table in tables)}
    assert len(job_keys(schema)) > 200
    assert job_keys(schema) - described == set()


def test_the_navigation_has_every_page_once_in_the_order_of_the_index() -> None:
    index = site_pages.with_navigation(Path("docs/index.md").read_text())
    trees = re.findall(r"```\{toctree\}\n:hidden:\n:caption: ([^\n]+)\n\n(.*?)\n```", index, flags=re.DOTALL)
    assert [caption for caption, _ in trees] == ["Tutorials", "How to", "Reference", "Explanation", "Results"]
    lines = [line for _, tree in trees for line in tree.splitlines()]
    matches = [re.fullmatch(r"[^<>]+ <(.+)>", line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if match is None] == []
    entries = [match[1] for match in matches if match]
    assert len(entries) == len(set(entries))
    pages = {Path("docs", entry).resolve() for entry in entries if not entry.startswith("generated/")}
    assert pages == {path.resolve() for path in (*PAGES, *Path("examples").glob("*.ipynb"))} - {
        Path("docs/index.md").resolve()
    }


def test_the_version_is_stated_in_pyproject_and_heads_the_changelog_once_released() -> None:
    version = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    released = re.findall(r"^## \[(\d\S*)\]", Path("CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[:1] in ([], [version])
    files = [path for top in ("staleflow", "cli", "pipeline", "tasks", "stores") for path in Path(top).glob("**/*.py")]
    stated = [str(path) for path in (*files, *PAGES) if path.name != "CHANGELOG.md" and version in path.read_text()]
    assert stated == []


def sources() -> dict[str, str]:
    """Return Python code for users by location: examples, notebook cells and code blocks of pages."""
    code = {str(path): path.read_text() for path in sorted(Path("examples").glob("*.py"))}
    for path in sorted(Path("examples").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        code |= {f"{path}, cell {i}": "".join(cell["source"]) for i, cell in enumerate(cells)}
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
        code |= {f"{page}, block {i}": block for i, block in enumerate(blocks)}
    return code


def private_names(code: str) -> list[str]:
    """What code imports or uses of staleflow besides its public names.

    >>> private_names("import staleflow\\nfrom staleflow.stores import errors\\nstaleflow.open_run\\nstaleflow.openrun")
    ['staleflow.stores', 'staleflow.openrun']
    """
    private = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            private += [alias.name for alias in node.names if alias.name.startswith("staleflow.")]
        elif isinstance(node, ast.ImportFrom) and node.module == "staleflow":
            private += [f"staleflow.{a.name}" for a in node.names if a.name not in staleflow.__all__]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("staleflow."):
            private.append(str(node.module))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "staleflow":
            private += [] if node.attr in staleflow.__all__ else [f"staleflow.{node.attr}"]
    return private


def test_examples_and_pages_use_public_names_only() -> None:
    code = sources()
    assert sum("staleflow" in text for text in code.values()) > 5
    assert {place: names for place, text in code.items() if (names := private_names(text))} == {}
    assert private_names("from staleflow.stores import errors") == ["staleflow.stores"]
    assert private_names("import staleflow\nstaleflow.openrun") == ["staleflow.openrun"]
