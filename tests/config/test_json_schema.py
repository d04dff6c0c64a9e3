"""The JSON Schema of job files: up to date, and in agreement with the parser about every key."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from staleflow.cli.config import command
from staleflow.pipeline.config.json_schema import json_schema
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import build, spec_of

SCHEMA = json_schema(RunConfig)
STORED = Path("docs/job.schema.json")
EXAMPLES = sorted(Path("examples").glob("*.toml"))
KINDS = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "object": dict, "array": list}
KEYWORDS = {
    "type", "items", "properties", "additionalProperties", "propertyNames",
    "enum", "anyOf", "pattern", "minimum", "maximum", "exclusiveMinimum",
}  # fmt: skip
SAYS_NOTHING = {"$schema", "title", "description", "default"}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is valid, by the keywords that the schema uses."""
    assert schema.keys() <= KEYWORDS | SAYS_NOTHING, "teach this test the new keyword"
    kind = schema.get("type")
    if kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if "items" in schema and not all(accepts(schema["items"], item) for item in value):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(accepts(one, value) for one in schema["anyOf"]):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if "minimum" in schema and value < schema["minimum"]:
        return False
    if "maximum" in schema and value > schema["maximum"]:
        return False
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return False
    if "properties" in schema:
        known = schema["properties"]
        return all(key in known and accepts(known[key], below) for key, below in value.items())
    if "propertyNames" in schema:
        names, below = schema["propertyNames"], schema["additionalProperties"]
        return all(accepts(names, name) and accepts(below, entry) for name, entry in value.items())
    return True


def test_the_stored_schema_is_current() -> None:
    printed = CliRunner().invoke(command, ["schema"]).output
    assert STORED.read_text() == printed, "run `staleflow config schema > docs/job.schema.json`"
    assert json.loads(printed) == SCHEMA


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_name_the_schema_and_keep_it(path: Path) -> None:
    first, text = path.read_text().split("\n", 1)
    assert (path.parent / first.removeprefix("#:schema ")).resolve() == STORED.resolve()
    tree = tomllib.loads(text)
    assert accepts(SCHEMA, tree)
    assert not accepts(SCHEMA, tree | {"stpes": 3})
    assert not accepts(SCHEMA, tree | {"rollout": {"top_p": 0.9}})


def leaves(cls: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for declared in dataclasses.fields(cls):
        here = (*path, declared.name)
        if spec_of(declared) is None:
            yield from leaves(declared.default, here)
        else:
            yield here, declared


def tried(spec: Any) -> list[Any]:
    """Values at and beyond the limits, and of every type."""
    values: list[Any] = [True, -1, 0, 1, 2.5, 10**12, "", "nonsense", "mine.py:Name", "module:Name", ":x", {}, {"a": 1}]
    values += [[], [3], [[]], ["nonsense"], list(spec.choices)]
    for limit in (spec.low, spec.high, spec.above):
        if limit is not None:
            values += [limit, limit - 1e-6, limit + 1e-6, int(limit), int(limit) - 1, int(limit) + 1]
    return values + list(spec.choices)


@pytest.mark.parametrize(
    ("path", "declared"), tuple(leaves(RunConfig)), ids=lambda p: ".".join(p) if type(p) is tuple else ""
)
def test_schema_and_reader_agree_on_every_key(path: tuple[str, ...], declared: Any) -> None:
    agreed = set()
    for value in tried(spec_of(declared)):
        if isinstance(value, float) and value.is_integer():
            continue  # 2.0 is an integer to JSON, and not to TOML
        tree: Any = value
        for name in reversed(path):
            tree = {name: tree}
        try:
            build(RunConfig, tree, "job")
            read = True
        except ConfigError:
            read = False
        assert accepts(SCHEMA, tree) is read, value
        agreed.add(read)
    assert agreed == {True, False}
