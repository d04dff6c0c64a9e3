"""Explaining a tree of knobs, writing it as TOML, and overriding its values from the command line."""

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
from staleflow.tasks.settings.knobs import Knob, default_of, spec_of, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One line of `config explain`."""

    key: str
    value: Any
    default: Any
    limits: str
    doc: str


def merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` updated with the values of `over`, table by table."""
    result = dict(tree)
    for key, value in over.items():
        below = result.get(key, {})
        result[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def explained(tree: Any) -> list[Explained]:
    """Every value of the tree with its meaning and limits, in field order."""
    return [
        Explained(key=key, value=value, default=default_of(declared), limits=spec.limits, doc=spec.doc)
        for key, declared, spec, value in _leaves(tree, "")
    ]


def to_toml(tree: Any) -> str:
    """The whole tree as TOML; reading it back gives an equal config."""
    scalars, tables = [], []

    def emit(node: Any, prefix: str) -> None:
        lines, below = [], []
        for f in dataclasses.fields(node):
            value, spec = getattr(node, f.name), spec_of(f)
            if dataclasses.is_dataclass(value):
                below.append((value, f"{prefix}.{f.name}" if prefix else f.name))
            elif spec is not None and (spec.shown or value != default_of(f)):
                lines.append(f"{f.name} = {toml_value(value)}")
        if prefix:
            tables.append("\n".join([f"[{prefix}]", *lines]))
        else:
            scalars.extend(lines)
        for child, name in below:
            emit(child, name)

    emit(tree, "")
    return "\n".join(scalars) + "\n\n" + "\n\n".join(tables) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON does not escape
    if dataclasses.is_dataclass(value):
        value = values(value)  # an entry of a table of named tables
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    return repr(value)


def _below(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else [value]


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any], Knob, Any]]:
    for declared in dataclasses.fields(node):
        value, spec = getattr(node, declared.name), spec_of(declared)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{declared.name}.")
        elif value and all(dataclasses.is_dataclass(entry) for entry in _below(value)):
            for name, entry in value.items():
                yield from _leaves(entry, f"{prefix}{declared.name}.{name}.")
        elif spec is not None and (spec.shown or value != default_of(declared)):
            yield f"{prefix}{declared.name}", declared, spec, value


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key=value` in a tree of plain values; a bare word is a string. Raises ConfigError."""
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--set {override}: not UTF-8 text") from None
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {override}: expected key=value, such as training.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):  # also a number of too many digits; the key's type is checked later
        value = text
    node: Any = tree
    *parents, leaf = key.split(".")
    if not all((*parents, leaf)):
        raise ConfigError(f"--set {override}: the key has an empty part; expected key=value, such as task.chat=true")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {parent} is a value, not a table")
    node[leaf] = value
