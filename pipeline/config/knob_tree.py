"""Explains a config, writes it as TOML, and applies overrides from the command line to a tree of plain values."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import PARAMETER, Knob, default_of, keys_of, spec_of, values
from staleflow.tasks.settings.registry import Choice, RegistryEntry, UserCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedValue:
    """One line of `config explain`."""

    key: str
    value: Any
    default: Any
    limits: str
    doc: str


Value = tuple[str, Knob, Any, Any]
"""Name, knob, value and default of a value in a table."""


def merge_trees(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` updated with the values of `over`, table by table."""
    result = dict(tree)
    for key, value in over.items():
        below = result.get(key, {})
        result[key] = merge_trees(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def explain_values(config: Any) -> list[ExplainedValue]:
    """All values of a config with their meaning and limits, in the order of `to_toml`."""
    return list(_explained(config, ""))


def to_toml(config: Any) -> str:
    """A config as TOML; reading it back gives an equal one."""
    return "\n".join(_tables(config, "")).lstrip("\n")


def _explained(node: Any, prefix: str, choice: Choice | None = None) -> Iterator[ExplainedValue]:
    values, tables = _split(node, choice)
    for name, knob, value, default in values:
        if value and isinstance(value, Mapping) and all(map(dataclasses.is_dataclass, value.values())):
            for entry, below in value.items():
                yield from _explained(below, f"{prefix}{name}.{entry}.")
        else:
            yield ExplainedValue(key=f"{prefix}{name}", value=value, default=default, limits=knob.limits, doc=knob.doc)
    for name, (below, choice_below) in tables.items():
        yield from _explained(below, f"{prefix}{name}.", choice_below)


def _tables(node: Any, key: str, choice: Choice | None = None) -> Iterator[str]:
    values, tables = _split(node, choice)
    lines = [f"{_toml_key(name)} = {toml_value(value)}\n" for name, _, value, _ in values]
    yield "".join([f"[{key}]\n" if key else "", *lines])
    for name, (below, choice_below) in tables.items():
        yield from _tables(below, f"{key}.{name}".lstrip("."), choice_below)


def _split(
    node: Any, choice: Choice | None
) -> tuple[list[tuple[str, Knob, Any, Any]], dict[str, tuple[Any, Choice | None]]]:
    """Split a table into its values and the tables below it.

    Each table below comes with the knob that selected its class, None if none did. choice: the same of this table.
    """
    values: list[Value] = []
    tables: dict[str, tuple[Any, Choice | None]] = {}
    if choice is not None:
        values.append(("name", choice, node.name, choice.default))
    if isinstance(node, UserCode):
        return values + [(name, Knob(doc=f"of {node.name}"), value, None) for name, value in node.knobs.items()], tables
    for declared in dataclasses.fields(node):
        value, spec = getattr(node, declared.name), spec_of(declared)
        if dataclasses.is_dataclass(value) and PARAMETER not in declared.metadata:
            tables[declared.name] = (value, spec if isinstance(spec, Choice) else None)
        elif spec is not None:
            values.append((declared.name, spec, value, default_of(declared)))
    return values, tables


def toml_value(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON does not escape
    if isinstance(value, UserCode):
        value = {"name": value.name, **value.knobs}
    elif isinstance(value, RegistryEntry):
        value = {"name": value.name, **{name: getattr(value, name) for name in keys_of(type(value))}}
    elif dataclasses.is_dataclass(value):
        value = values(value)  # an entry of a table of named tables
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    return repr(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key=value` in a tree of plain values; text that is no TOML value is a string. Raises ConfigError."""
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"override {override}: not UTF-8 text") from None
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override}: expected key=value, such as training.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):  # also a number of too many digits; the key's type is checked later
        value = text
    node: Any = tree
    *parents, leaf = key.split(".")
    if not all((*parents, leaf)):
        raise ConfigError(f"override {override}: the key has an empty part; expected key=value, such as task.chat=true")
    for parent in parents:
        if isinstance(node.get(parent), str):  # short for a table with that name
            node[parent] = {"name": node[parent]}
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override}: {parent} is a value, not a table")
    node[leaf] = value


Overrides = Mapping[str, object] | Iterable[str]
"""Values by dotted key, such as {"training.learning_rate": 1e-4}, or "key=value" strings as `--set` takes them."""


def override_lines(overrides: Overrides | None) -> tuple[str, ...]:
    """Convert changes of a job to "key=value" strings. Raises ConfigError for a single string, which would be iterated
    character by character.

    >>> override_lines({"training.learning_rate": 1e-4, "reward.function": "task"})
    ('training.learning_rate=0.0001', 'reward.function="task"')
    """
    if overrides is None:
        return ()
    if isinstance(overrides, str):
        raise ConfigError(f"overrides = {overrides!r}: pass a mapping or a list of key=value strings")
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={toml_value(value)}" for key, value in overrides.items())
    return tuple(overrides)
