"""Explains a config, writes it as TOML or as the JSON Schema of job files, and applies overrides to a tree of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any, TypeVar

from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import NAME_FORM, PARAMETER, Knob, default_of, entry_type, keys_of, spec_of, values
from staleflow.tasks.settings.registry import Choice, RegistryEntry, UserCode

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedValue:
    """One line of `config explain`."""

    key: str
    value: Any
    default: Any
    limits: str
    doc: str


TableValue = tuple[str, Knob, Any, Any]
"""Name, knob, value and default of a value in a table."""


def merge_trees(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` updated with the values of `overrides`, table by table."""
    result = dict(tree)
    for key, value in overrides.items():
        subtree = result.get(key, {})
        are_tables = isinstance(value, Mapping) and isinstance(subtree, Mapping)
        result[key] = merge_trees(subtree, value) if are_tables else value
    return result


def value_at(config: Any, key: str) -> Any:
    """Return the value of a config at a key with dots."""
    return functools.reduce(_child, key.split("."), config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with other values at some keys with dots, such as {"model.device": "cpu"}. Checks nothing."""
    for key, value in values.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(node: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    new_fields = {name: _with_value(_child(node, name), rest, value) if rest else value}
    if isinstance(node, list):
        return [new_fields.get(str(i), item) for i, item in enumerate(node)]
    return {**node, **new_fields} if isinstance(node, Mapping) else dataclasses.replace(node, **new_fields)


def _child(node: Any, name: str) -> Any:
    if isinstance(node, list):
        return node[int(name)]
    return node[name] if isinstance(node, Mapping) else getattr(node, name)


def explain_values(config: Any) -> list[ExplainedValue]:
    """All values of a config with their meaning and limits, in the order of `to_toml`."""
    return list(_explain(config, ""))


def to_toml(config: Any) -> str:
    """A config as TOML; reading it back gives an equal one."""
    return "\n".join(_toml_tables(config, "")).lstrip("\n")


def _explain(node: Any, prefix: str, choice: Choice | None = None) -> Iterator[ExplainedValue]:
    values, tables = _values_and_tables(node, choice)
    for name, knob, value, default in values:
        if value and isinstance(value, Mapping) and all(map(dataclasses.is_dataclass, value.values())):
            for entry, subtree in value.items():
                yield from _explain(subtree, f"{prefix}{name}.{entry}.")
        else:
            yield ExplainedValue(key=f"{prefix}{name}", value=value, default=default, limits=knob.limits, doc=knob.doc)
    for name, (subtree, subtree_choice) in tables.items():
        yield from _explain(subtree, f"{prefix}{name}.", subtree_choice)


def _toml_tables(node: Any, key: str, choice: Choice | None = None) -> Iterator[str]:
    values, tables = _values_and_tables(node, choice)
    lines = [f"{_toml_key(name)} = {toml_value(value)}\n" for name, _, value, _ in values]
    yield "".join([f"[{key}]\n" if key else "", *lines])
    for name, (subtree, subtree_choice) in tables.items():
        yield from _toml_tables(subtree, f"{key}.{name}".lstrip("."), subtree_choice)


def _values_and_tables(
    node: Any, choice: Choice | None
) -> tuple[list[tuple[str, Knob, Any, Any]], dict[str, tuple[Any, Choice | None]]]:
    """Split a table into its values and the tables below it.

    Each table below comes with the knob that selected its class, None if none did. choice: the same of this table.
    """
    values: list[TableValue] = []
    tables: dict[str, tuple[Any, Choice | None]] = {}
    if choice is not None:
        values.append(("name", choice, node.name, choice.default))
    if isinstance(node, UserCode):
        return values + [(name, Knob(doc=f"of {node.name}"), value, None) for name, value in node.knobs.items()], tables
    for field in dataclasses.fields(node):
        value, spec = getattr(node, field.name), spec_of(field)
        if dataclasses.is_dataclass(value) and PARAMETER not in field.metadata:
            tables[field.name] = (value, spec if isinstance(spec, Choice) else None)
        elif spec is not None:
            values.append((field.name, spec, value, default_of(field)))
    return values, tables


def toml_value(value: Any) -> str:
    """A value as TOML, on one line."""
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
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
    """Convert changes of a job to "key=value" strings. Raises ConfigError for other values, such as a single string,
    which would be iterated character by character.

    >>> override_lines({"training.learning_rate": 1e-4, "reward.function": "task"})
    ('training.learning_rate=0.0001', 'reward.function="task"')
    """
    if overrides is None:
        return ()
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={toml_value(value)}" for key, value in overrides.items())
    is_list = isinstance(overrides, Iterable) and not isinstance(overrides, str)
    lines = tuple(overrides) if is_list else ()
    if not is_list or not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"overrides = {overrides!r}: pass a mapping or a list of key=value strings")
    return lines


SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
"""JSON Schema's name of each type."""
USER_CODE_SCHEMA = {
    "type": "string", "pattern": r"^.+:[A-Za-z_]\w*$", "description": "your own code: file.py:NAME or module:NAME",
}  # fmt: skip
"""Schema of file.py:NAME and module:NAME."""


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a tree of knobs. Unknown keys are rejected, as when a job file is read."""
    return {"$schema": SCHEMA_DIALECT, "title": "staleflow job", **_table_schema(cls)}


def _table_schema(cls: type[Any]) -> dict[str, Any]:
    defaults = {f.name: default_of(f) for f in dataclasses.fields(cls)}
    properties = {
        name: _table_or_list_schema(hint) if spec is None else _value_schema(hint, spec, defaults[name])
        for name, (hint, spec) in keys_of(cls).items()
    }
    doc = " ".join((cls.__doc__ or "").split())
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


def _table_or_list_schema(cls: type[Any]) -> dict[str, Any]:
    """A table; where a list of tables with names is short for entries of one of its keys, either."""
    table = _table_schema(cls)
    if not (key := getattr(cls, "LIST_KEY", "")):
        return table
    entry = _table_schema(entry_type(keys_of(cls)[key][0]) or cls)
    name = {"description": "a name for it, which its metrics have", "type": "string", "pattern": NAME_FORM}
    entry["properties"] = {"name": name} | entry["properties"]
    return {
        "description": table["description"],
        "anyOf": [table, {"type": "array", "items": entry | {"required": ["name"]}}],
    }


def _choice_schema(spec: Choice) -> dict[str, Any]:
    """A name, or a table with the name and the knobs of that entry."""
    registry = spec.registry
    forms: list[dict[str, Any]] = []
    if not spec.has_common_knobs:
        forms.append({"enum": list(registry.names)})
    if registry.user_code is not None:
        knobs = {"type": "object", "properties": {"name": USER_CODE_SCHEMA}, "required": ["name"]}
        forms += [USER_CODE_SCHEMA, knobs]
    for name in registry.names:
        table = _table_schema(registry.find(name))
        table["properties"] = {"name": {"const": name}} | table["properties"]
        forms.append(table if name == spec.default else table | {"required": ["name"]})
    default = {"name": spec.default} if spec.has_common_knobs else spec.default
    return {"description": spec.doc, "default": default, "oneOf": forms}


def _value_schema(hint: Any, spec: Knob, default: Any) -> dict[str, Any]:
    if isinstance(spec, Choice):
        return _choice_schema(spec)
    schema: dict[str, Any] = {"description": spec.doc, "default": default}
    if entries := entry_type(hint):
        names = {"pattern": NAME_FORM}
        return schema | {"type": "object", "propertyNames": names, "additionalProperties": _table_schema(entries)}
    kind = JSON_TYPES[typing.get_origin(hint) or hint]
    if kind == "array":
        item = JSON_TYPES[typing.get_args(hint)[0]]
        items: dict[str, Any] = {"type": item}
        if spec.user_code:
            items = {"anyOf": [{"enum": list(spec.choices)}, USER_CODE_SCHEMA]}
        elif spec.choices:
            items["enum"] = list(spec.choices)
        return schema | {"type": kind, "items": items}
    if spec.choices and spec.user_code:
        return schema | {"anyOf": [{"enum": list(spec.choices)}, USER_CODE_SCHEMA]}
    schema["type"] = kind
    if spec.choices:
        schema["enum"] = list(spec.choices)
    limits = {"minimum": spec.low, "maximum": spec.high, "exclusiveMinimum": spec.above, "exclusiveMaximum": spec.below}
    return schema | {name: limit for name, limit in limits.items() if limit is not None}
