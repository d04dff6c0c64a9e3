"""The JSON Schema of job files is current and agrees with the parser about every key."""

from __future__ import annotations

import json
import math
import operator
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from staleflow.cli.config import command
from staleflow.pipeline.config.knob_tree import json_schema
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import build, keys_of
from staleflow.tasks.settings.registry import Choice

SCHEMA = json_schema(RunConfig)
STORED = Path("docs/job.schema.json")
EXAMPLES = sorted(Path("examples").glob("*.toml"))
KINDS: dict[str, type | tuple[type, ...]] = {
    "boolean": bool, "integer": int, "number": (int, float), "string": str, "object": dict, "array": list,
}  # fmt: skip
KEYWORDS = {
    "type", "items", "properties", "additionalProperties", "propertyNames",
    "enum", "const", "anyOf", "oneOf", "required", "pattern", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum",
}  # fmt: skip
ALTERNATIVES = {"anyOf": math.inf, "oneOf": 1}
OUTSIDE = {
    "minimum": operator.lt, "maximum": operator.gt, "exclusiveMinimum": operator.le, "exclusiveMaximum": operator.ge,
}  # fmt: skip
SAYS_NOTHING = {"$schema", "title", "description", "default"}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a value is valid, for the keywords that the schema uses."""
    assert schema.keys() <= KEYWORDS | SAYS_NOTHING, "add the new keyword to this test"
    kind = schema.get("type")
    if kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if "items" in schema and not all(accepts(schema["items"], item) for item in value):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    fitting = {
        word: sum(accepts(element, value) for element in schema[word]) for word in ALTERNATIVES if word in schema
    }
    if not all(1 <= count <= ALTERNATIVES[word] for word, count in fitting.items()):
        return False
    if any(name not in value for name in schema.get("required", ())):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if any(violates(value, schema[word]) for word, violates in OUTSIDE.items() if word in schema):
        return False
    if "properties" in schema:
        known = schema["properties"]
        closed = not schema.get("additionalProperties", True)
        return all(accepts(known[k], below) if k in known else not closed for k, below in value.items())
    if "propertyNames" in schema:
        names, below = schema["propertyNames"], schema["additionalProperties"]
        return all(accepts(names, name) and accepts(below, entry) for name, entry in value.items())
    return True


def test_the_stored_schema_is_current() -> None:
    printed = CliRunner().invoke(command, ["schema"]).output
    assert STORED.read_text() == printed, "run `make generated`"
    assert json.loads(printed) == SCHEMA


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_name_the_schema_and_are_valid(path: Path) -> None:
    first, text = path.read_text().split("\n", 1)
    assert (path.parent / first.removeprefix("#:schema ")).resolve() == STORED.resolve()
    tree = tomllib.loads(text)
    assert accepts(SCHEMA, tree)
    assert not accepts(SCHEMA, tree | {"stpes": 3})
    assert not accepts(SCHEMA, tree | {"rollout": {"top_p": 0.9}})


def leaves(cls: Any, path: tuple[str, ...] = (), name: str = "") -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Return (path, knob, name of its registry entry) of every key."""
    for key, (hint, spec) in keys_of(cls).items():
        here = (*path, key)
        if spec is None:
            yield from leaves(hint, here, name)
        else:
            yield here, spec, name
        if isinstance(spec, Choice):
            for entry in spec.registry.names:
                yield from leaves(spec.registry.find(entry), here, entry)


def job_with(path: tuple[str, ...], name: str, value: Any) -> Any:
    """Return a job that sets one key. name: its registry entry or the table above it."""
    tree: Any = value
    for depth, part in reversed(list(enumerate(path))):
        tree = {part: tree}
        if name and depth == CHOSEN_AT.get(path[:depth], -1):
            tree["name"] = name
    return tree


CHOSEN_AT = {path: len(path) for path, spec, _ in leaves(RunConfig) if isinstance(spec, Choice)}


def candidate_values(spec: Any) -> list[Any]:
    """Return values at and beyond the limits and of every type."""
    values: list[Any] = [True, -1, 0, 1, 2.5, 10**12, "", "nonsense", "mine.py:Name", "module:Name", ":x", {}, {"a": 1}]
    values += [[], [3], [[]], ["nonsense"], list(spec.choices), {"name": 3}, {"name": "nonsense"}]
    values += [{"name": "mine.py:Name"}, {"name": "mine.py:Name", "a": 1}, {"name": "x", "a": 1}]
    if isinstance(spec, Choice):
        names = spec.registry.names
        values += [*names, *({"name": name} for name in names), *({"name": name, "a": 1} for name in names)]
    for limit in (spec.low, spec.high, spec.above, spec.below):
        if limit is not None:
            values += [limit, limit - 1e-6, limit + 1e-6, int(limit), int(limit) - 1, int(limit) + 1]
    return values + list(spec.choices)


@pytest.mark.parametrize(
    ("path", "spec", "name"), tuple(leaves(RunConfig)), ids=lambda p: ".".join(p) if type(p) is tuple else f"{p}"[:20]
)
def test_schema_and_reader_agree_on_every_key(path: tuple[str, ...], spec: Any, name: str) -> None:
    agreed = set()
    for value in candidate_values(spec):
        if isinstance(value, float) and value.is_integer():
            continue  # 2.0 is an integer to JSON, and not to TOML
        tree = job_with(path, name, value)
        try:
            build(RunConfig, tree, "job")
            read = True
        except ConfigError:
            read = False
        assert accepts(SCHEMA, tree) is read, value
        agreed.add(read)
    assert agreed == {True, False}
