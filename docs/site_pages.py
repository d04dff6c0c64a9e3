"""Generated parts of the documentation site: Python API, job file, options of commands, and the navigation.

They need nothing but the package and the job file's schema; docs/conf.py passes them to Sphinx.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import staleflow

API_GROUPS = {
    "Stored runs": (
        "staleflow.pipeline.api.stored_run",
        "staleflow.pipeline.stored_runs",
        "staleflow.pipeline.jobs.replaying",
        "staleflow.stores",
    ),
    "Jobs": (
        "staleflow.pipeline.api",
        "staleflow.pipeline.config",
        "staleflow.pipeline.runtime",
        "staleflow.pipeline.simulator",
    ),
    "Your own code": ("staleflow.tasks", "staleflow.pipeline.strategies", "staleflow.pipeline.jobs.tracking"),
}
"""Sections of the page on the Python API, with how the full names of their members begin: the first that fits. Those
of exceptions are in a section of their own."""
ORDER = ("Jobs", "Stored runs", "Your own code", "Errors")

GENERATED = {
    "generated/python-api.md": ("Python API", "every public name"),
    "generated/job-file.md": ("Job file", "every key, with its default and limits"),
    "generated/options.md": ("Options of commands", "what `staleflow COMMAND -h` prints"),
}
"""Titles of the generated pages, and what they hold."""


def reference_pages(schema: Mapping[str, Any]) -> dict[str, str]:
    """The generated pages of reference by name, in Markdown. schema: docs/job.schema.json."""
    return {"python-api": python_api_page(), "job-file": job_file_page(schema), "options": options_page()}


def api_groups() -> dict[str, list[str]]:
    """The public names by section of the page. Raises ValueError for a name that no section takes."""
    groups: dict[str, list[str]] = {title: [] for title in ORDER}
    for name in staleflow.__all__:
        if name.startswith("__"):
            continue
        value = getattr(staleflow, name)
        full = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__qualname__}"
        title = next((t for t, starts in API_GROUPS.items() if full.startswith(starts)), "")
        if inspect.isclass(value) and issubclass(value, BaseException):
            title = "Errors"
        if not title:
            raise ValueError(f"staleflow.{name}: no section of the API page takes {full}; add it to API_GROUPS")
        groups[title].append(name)
    return groups


def python_api_page() -> str:
    """Autodoc's directives for every public name: functions first, then classes, by section."""
    lines = ["# Python API", "", f"{inspect.getdoc(staleflow)!s}".partition("\n")[0]]
    for title, names in api_groups().items():
        lines += ["", f"## {title}"]
        for name in sorted(names, key=lambda n: (inspect.isclass(getattr(staleflow, n)), n.lower())):
            lines += ["", "```{eval-rst}", *directive(name), "```"]
    return "\n".join(lines) + "\n"


def directive(name: str) -> list[str]:
    """Autodoc's directive for one public name."""
    value = getattr(staleflow, name)
    if inspect.ismodule(value):
        return [f".. automodule:: {value.__name__}", "   :members:"]
    if not inspect.isclass(value):
        return [f".. autofunction:: staleflow.{name}"]
    if issubclass(value, BaseException):
        return [f".. autoexception:: staleflow.{name}", "   :show-inheritance:"]
    return [f".. autoclass:: staleflow.{name}", "   :members:"]


def options_page() -> str:
    """sphinx-click's directive for the command and all of its subcommands."""
    click = [".. click:: staleflow.cli.main:cli", "   :prog: staleflow", "   :nested: full"]
    return "\n".join(["# Options of commands", "", "```{eval-rst}", *click, "```", ""])


def job_file_page(schema: Mapping[str, Any]) -> str:
    """Every key of a job file with type, default, limits and meaning, a section for each table."""
    intro = "A job is one TOML file; all keys have defaults. `staleflow config explain job.toml` prints yours."
    keys = {n: v for n, v in schema["properties"].items() if not is_table(v)}
    lines = ["# Job file", "", intro, "", "## Top level", "", *key_lines(keys)]
    for name, table in schema["properties"].items():
        if is_table(table):
            lines += table_lines(name, table, depth=2)
    return "\n".join(lines) + "\n"


def is_table(value: Mapping[str, Any]) -> bool:
    """Whether a key is a table with keys of its own, one of several such tables, or a list of them."""
    entries = value.get("additionalProperties")
    several = "oneOf" in value or any("properties" in form for form in value.get("anyOf", []))
    return "properties" in value or several or (isinstance(entries, dict) and "properties" in entries)


def table_lines(name: str, table: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The section of one table, and those of the tables in it. depth: of its heading."""
    entries = table.get("additionalProperties")
    if isinstance(entries, dict):
        both = f"{sentence(table['description'])} {entries['description']}"
        yield from table_lines(f"{name}.NAME", {**entries, "description": both}, depth)
        return
    if "anyOf" in table:
        yield from table_or_list_lines(name, table, depth)
        return
    yield from ("", f"{'#' * min(depth, 4)} [{name}]", "", sentence(table["description"]))
    if "oneOf" in table:
        yield from choice_lines(name, table, depth)
        return
    keys = table["properties"]
    yield from ("", *key_lines({key: value for key, value in keys.items() if not is_table(value)}))
    for key, value in keys.items():
        if is_table(value):
            yield from table_lines(f"{name}.{key}", value, depth + 1)


def table_or_list_lines(name: str, table: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The section of a table, and one of what its entries have besides if a job has several of them."""
    single, several = table["anyOf"]
    entry = several["items"]
    yield from table_lines(name, {**single, "description": table["description"]}, depth)
    further = {key: value for key, value in entry["properties"].items() if key not in single["properties"]}
    yield from ("", f"{'#' * min(depth, 4)} [[{name}]]", "", sentence(entry["description"]))
    yield from ("", f"Each has the keys of [{name}], and these:", "", *key_lines(further))


def choice_lines(name: str, table: Mapping[str, Any], depth: int) -> Iterator[str]:
    """What `name` may select, each with its own keys."""
    default = table["default"]
    default = default["name"] if isinstance(default, dict) else default
    own = any("pattern" in form for form in table["oneOf"])
    yield from ("", f"Selected by `name`; default `{default}`{'; or your own code, `file.py:NAME`' if own else ''}.")
    tables: dict[str, Any] = {}
    for form in table["oneOf"]:
        properties = dict(form.get("properties", {}))
        if "const" in (choice := properties.pop("name", {})):
            tables |= {key: value for key, value in properties.items() if is_table(value)}
            keys = {key: value for key, value in properties.items() if not is_table(value)}
            yield from ("", f'**`name = "{choice["const"]}"`**: {sentence(form["description"])}', "", *key_lines(keys))
    for key, value in tables.items():
        yield from table_lines(f"{name}.{key}", value, depth + 1)


def key_lines(keys: Mapping[str, Any]) -> Iterator[str]:
    """A list of keys with type, default and limits, and their meaning."""
    for name, value in keys.items():
        yield from (f"`{name}` ({limits(value)})", f": {escaped(value['description'])}", "")


def limits(value: Mapping[str, Any]) -> str:
    """Type, default and limits of a key, in words."""
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    choices = value.get("enum") or [choice for form in value.get("anyOf", []) for choice in form.get("enum", [])]
    parts = ["one of " + " ".join(f"`{toml(choice)}`" for choice in choices) if choices else str(value["type"])]
    parts += ["or your own code"] * any("pattern" in form for form in value.get("anyOf", []))
    parts += [f"{word} {value[limit]:,}" for limit, word in words.items() if limit in value]
    return ", ".join([*parts, f"default `{toml(value['default'])}`" if "default" in value else "required"])


def toml(value: Any) -> str:
    """A value as a job file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def escaped(text: str) -> str:
    """A description as Markdown: what would be markup outside of code is text."""
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<\[])", r"\\\1", p) for p in re.split(r"(`[^`]*`)", text))


def with_navigation(index: str) -> str:
    """docs/index.md with a toctree for each of its sections, and with the generated pages in its reference.

    A page that several sections mention is placed where it is mentioned last.
    """
    head, *sections = re.split(r"^## ", index, flags=re.MULTILINE)
    generated = "\n".join(f"- [{title}]({page}): {text}" for page, (title, text) in GENERATED.items())
    sections = [s.replace("Reference\n", f"Reference\n{generated}\n", 1) for s in sections]
    places: dict[str, tuple[int, str]] = {}
    for number, section in enumerate(sections):
        for title, page in re.findall(r"\[([^\]]+)\]\(([^)#]+\.(?:md|ipynb))\)", section):
            places.pop(page, None)
            words = " ".join(title.split())  # a link may be broken into lines, an entry may not
            places[page] = number, words[:1].upper() + words[1:]
    trees = []
    for number, section in enumerate(sections):
        entries = [f"{title} <{page}>" for page, (place, title) in places.items() if place == number]
        caption = section.partition("\n")[0]
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""]))
    return "\n".join([head, *(f"## {section}" for section in sections), *trees])
