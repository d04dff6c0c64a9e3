"""Pages of documentation: links lead somewhere, the index lists every page, and the version is stated once."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PAGES = sorted([*Path().glob("*.md"), *Path("docs").glob("*.md")])


def links(page: Path) -> list[str]:
    """The files and anchors that a page links to, without those of other sites."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page() -> None:
    listed = {Path("docs", link.partition("#")[0]).resolve() for link in links(Path("docs/index.md"))}
    pages = {path.resolve() for path in Path("docs").glob("*.md") if path.name != "index.md"}
    assert pages <= listed


def test_the_version_is_stated_in_pyproject_and_heads_the_changelog_once_released() -> None:
    version = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    released = re.findall(r"^## \[(\d\S*)\]", Path("CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[:1] in ([], [version])
    files = [path for top in ("staleflow", "cli", "pipeline", "tasks", "stores") for path in Path(top).glob("**/*.py")]
    stated = [str(path) for path in (*files, *PAGES) if path.name != "CHANGELOG.md" and version in path.read_text()]
    assert stated == []
