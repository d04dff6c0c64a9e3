"""JSON Schema of job files, with which editors complete and check them. It covers single keys; rules that involve more
than one key (pipeline/config/rules.py) are not in it."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from tasks.knobs import NAME, Knob, default_of, entry_type, spec_of

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
    if spec.choices and spec.own:
        user_code = {"type": kind, "pattern": USER_CODE, "description": "your own code: file.py:NAME or module:NAME"}
        return schema | {"anyOf": [{"enum": list(spec.choices)}, user_code]}
    schema["type"] = kind
    if kind == "array":
        return schema | {"items": {"type": TYPES[typing.get_args(hint)[0]], "enum": list(spec.choices)}}
    if spec.choices:
        schema["enum"] = list(spec.choices)
    limits = (("minimum", spec.low), ("maximum", spec.high), ("exclusiveMinimum", spec.above))
    return schema | {name: limit for name, limit in limits if limit is not None}
