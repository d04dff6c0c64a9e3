"""JSON Schema of job files, for completion and checks in editors. It covers single keys, not the rules that involve
more than one key (pipeline/config/cross_checks.py)."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from staleflow.tasks.settings.knobs import NAME, Knob, default_of, entry_type, keys_of
from staleflow.tasks.settings.registry import Choice

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
USER_CODE = r"^.+:[A-Za-z_]\w*$"
"""file.py:NAME or module:NAME."""


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a tree of knobs. Unknown keys are rejected, as when a job file is read."""
    return {"$schema": SCHEMA_DIALECT, "title": "staleflow job", **_table(cls)}


def _table(cls: type[Any]) -> dict[str, Any]:
    declared = {f.name: f for f in dataclasses.fields(cls)}
    properties = {
        name: _table_or_list(hint) if spec is None else _value(hint, spec, default_of(declared[name]))
        for name, (hint, spec) in keys_of(cls).items()
    }
    doc = " ".join((cls.__doc__ or "").split())
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


def _table_or_list(cls: type[Any]) -> dict[str, Any]:
    """A table; where a list of tables with names is short for entries of one of its keys, either."""
    table = _table(cls)
    if not (key := getattr(cls, "LIST_KEY", "")):
        return table
    entry = _table(entry_type(keys_of(cls)[key][0]) or cls)
    name = {"description": "a name for it, which its metrics have", "type": "string", "pattern": NAME}
    entry["properties"] = {"name": name} | entry["properties"]
    return {
        "description": table["description"],
        "anyOf": [table, {"type": "array", "items": entry | {"required": ["name"]}}],
    }


def _choice(spec: Choice) -> dict[str, Any]:
    """A name, or a table with the name and the knobs of that entry."""
    registry = spec.registry
    forms: list[dict[str, Any]] = []
    user_code = {"type": "string", "pattern": USER_CODE, "description": "your own code: file.py:NAME or module:NAME"}
    if not spec.has_common_knobs:
        forms.append({"enum": list(registry.names)})
    if registry.user_code is not None:
        knobs = {"type": "object", "properties": {"name": user_code}, "required": ["name"]}
        forms += [user_code, knobs]
    for name in registry.names:
        table = _table(registry.find(name))
        table["properties"] = {"name": {"const": name}} | table["properties"]
        forms.append(table if name == spec.default else table | {"required": ["name"]})
    default = {"name": spec.default} if spec.has_common_knobs else spec.default
    return {"description": spec.doc, "default": default, "oneOf": forms}


def _value(hint: Any, spec: Knob, default: Any) -> dict[str, Any]:
    if isinstance(spec, Choice):
        return _choice(spec)
    schema: dict[str, Any] = {"description": spec.doc, "default": default}
    if entries := entry_type(hint):
        return schema | {"type": "object", "propertyNames": {"pattern": NAME}, "additionalProperties": _table(entries)}
    kind = TYPES[typing.get_origin(hint) or hint]
    if kind == "array":
        item = TYPES[typing.get_args(hint)[0]]
        items: dict[str, Any] = {"type": item}
        if spec.user_code:
            items = {"anyOf": _or_own(item, spec)}
        elif spec.choices:
            items["enum"] = list(spec.choices)
        return schema | {"type": kind, "items": items}
    if spec.choices and spec.user_code:
        return schema | {"anyOf": _or_own(kind, spec)}
    schema["type"] = kind
    if spec.choices:
        schema["enum"] = list(spec.choices)
    limits = (("minimum", spec.low), ("maximum", spec.high), ("exclusiveMinimum", spec.above))
    return schema | {name: limit for name, limit in limits if limit is not None}


def _or_own(kind: str, spec: Knob) -> list[dict[str, Any]]:
    """One of the choices, or user code."""
    user_code = {"type": kind, "pattern": USER_CODE, "description": "your own code: file.py:NAME or module:NAME"}
    return [{"enum": list(spec.choices)}, user_code]
