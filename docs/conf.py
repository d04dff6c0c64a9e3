"""Sphinx's configuration of the site: the repository's own Markdown, and pages generated from code and schema.

The source folder is the repository, so that links between pages are the same here as on GitHub.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs import site_pages  # noqa: E402  of this checkout

project = "staleflow"
copyright = "the staleflow authors"
release = version_of("staleflow")
html_title = f"staleflow {release}"
root_doc = "docs/index"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
include_patterns = ["*.md", "docs/*.md", "docs/generated/*.md", "examples/*.ipynb"]
exclude_patterns = [".*", "build", "runs", "staleflow", "cli", "pipeline", "tasks", "stores", "tests", "benchmarks"]

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = [
    "misc.highlighting_failure",  # blocks with "..." where a reader's values go
]
nb_execution_mode = os.environ.get("NOTEBOOKS", "cache")
nb_execution_cache_path = str(ROOT / "build" / "notebooks")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600

default_role = "code"  # docstrings write code in single backticks
napoleon_numpy_docstring = False
smartquotes = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


def write_pages(app: Sphinx) -> None:
    """Write the generated pages of reference before Sphinx reads the folder."""
    folder = ROOT / "docs" / "generated"
    folder.mkdir(exist_ok=True)
    schema = json.loads((ROOT / "docs" / "job.schema.json").read_text())
    for name, text in site_pages.reference_pages(schema).items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn the lists of docs/index.md into the site's navigation."""
    if page == root_doc:
        source[0] = site_pages.with_navigation(source[0])


def keep_colons(app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking what precedes a colon in an attribute's docstring for its type."""
    if kind in ("attribute", "property", "data") and lines:
        lines[0] = f": {lines[0]}"


def redirect_from_the_top(app: Sphinx, error: Exception | None) -> None:
    """Let the site's top folder lead to its first page."""
    if error is None and app.builder.name == "html":
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>staleflow</title>\n'
        Path(app.outdir, "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx's events."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("build-finished", redirect_from_the_top)
