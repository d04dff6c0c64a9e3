"""JSON Schema of job files, with which editors complete and check them. It covers single keys; rules that involve more
than one key (pipeline/config/cross_checks.py) are not in it."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from staleflow.tasks.settings.knobs import NAME, Knob, default_of, entry_type, spec_of

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
USER_CODE = r"^.+:[A-Za-z_]\w*$"
"""file.py:NAME or module:NAME."""


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """The schema of a tree of knobs. Unknown keys are rejected, as when a job file is read."""
    return {"$schema": DRAFT, "title": "staleflow job", **_table(cls)}


def _table(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    properties = {}
    for declared in dataclasses.fields(cls):
        spec = spec_of(declared)
        hint = hints[declared.name]
        properties[declared.name] = _table(hint) if spec is None else _value(hint, spec, default_of(declared))
    doc = " ".join((cls.__doc__ or "").split())
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


def _value(hint: Any, spec: Knob, default: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": spec.doc, "default": default}
    if entries := entry_type(hint):
        return schema | {"type": "object", "propertyNames": {"pattern": NAME}, "additionalProperties": _table(entries)}
    kind = TYPES[typing.get_origin(hint) or hint]
    if kind == "array":
        item = TYPES[typing.get_args(hint)[0]]
        items: dict[str, Any] = {"type": item}
        if spec.own:
            items = {"anyOf": _or_own(item, spec)}
        elif spec.choices:
            items["enum"] = list(spec.choices)
        return schema | {"type": kind, "items": items}
    if spec.choices and spec.own:
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
