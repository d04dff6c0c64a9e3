"""A tree of frozen dataclasses that is read from TOML: every field carries its meaning, its limits and its default, and
every value is checked against them once, with the key, the limit and the nearest name in the message."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stores.errors import ConfigError


def knob(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field with its meaning and its limits: low <= value <= high, value > above, or one of `choices`."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "choices": tuple(choices)}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One line of `config explain`."""

    key: str
    value: Any
    default: Any
    limits: str
    doc: str


def build(cls: type[Any], tree: Any, where: str, prefix: str = "") -> Any:
    """An instance of `cls` from nested plain values. where: names the source in messages. A key in the REFUSED of its
    class is answered with the reason given there. Raises ConfigError."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: {prefix.rstrip('.')} must be a table, not {tree!r}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in tree:
        if why := getattr(cls, "REFUSED", {}).get(key):
            raise ConfigError(f"{where}: {prefix}{key} is not offered: {why}")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {prefix}{key}; {hint}")
    values = {}
    for name, value in tree.items():
        key, hint = f"{prefix}{name}", hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = build(typing.cast(type[Any], hint), value, where, f"{key}.")
        else:
            values[name] = _checked(value, hint, known[name].metadata, f"{where}: {key}")
    return cls(**values)


def merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `over` in it, table by table."""
    result = dict(tree)
    for key, value in over.items():
        below = result.get(key, {})
        result[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def explained(tree: Any) -> list[Explained]:
    """Every value of the tree with its meaning and limits, in the order of the fields."""
    return [
        Explained(key=key, value=value, default=_default(f), limits=_limits(f.metadata), doc=f.metadata["doc"])
        for key, f, value in _leaves(tree, "")
    ]


def _default(known: dataclasses.Field[Any]) -> Any:
    """A knob's default; that of a table or a list is made anew for every tree."""
    return known.default if known.default_factory is dataclasses.MISSING else known.default_factory()


def _checked(value: Any, hint: Any, metadata: Mapping[str, Any], where: str) -> Any:
    kind = typing.get_origin(hint) or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (
        isinstance(kind, types.UnionType)
        or not isinstance(value, kind)
        or (isinstance(value, bool) and kind is not bool)
    ):
        raise ConfigError(f"{where} must be {_article(kind.__name__)}, not {value!r}")
    if metadata["choices"] and value not in metadata["choices"]:
        near = difflib.get_close_matches(str(value), metadata["choices"], n=1)
        hint_text = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where} must be one of {', '.join(metadata['choices'])}, not {value!r}{hint_text}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{where} = {value!r} must be finite")
        low, high, above = metadata["low"], metadata["high"], metadata["above"]
        bad = (low is not None and value < low) or (high is not None and value > high)
        if bad or (above is not None and value <= above):
            raise ConfigError(f"{where} = {value!r} is out of range; it must be {_limits(metadata)}")
    return value


def _article(kind: str) -> str:
    names = {
        "int": "a whole number",
        "float": "a number",
        "str": "a string",
        "bool": "true or false",
        "dict": "a table",
    }
    return names.get(kind, kind)


def to_toml(tree: Any) -> str:
    """The whole tree as TOML; reading it back gives an equal config."""
    scalars, tables = [], []

    def emit(node: Any, prefix: str) -> None:
        lines, below = [], []
        for f in dataclasses.fields(node):
            value = getattr(node, f.name)
            if dataclasses.is_dataclass(value):
                below.append((value, f"{prefix}.{f.name}" if prefix else f.name))
            else:
                lines.append(f"{f.name} = {_toml(value)}")
        if prefix:
            tables.append("\n".join([f"[{prefix}]", *lines]))
        else:
            scalars.extend(lines)
        for child, name in below:
            emit(child, name)

    emit(tree, "")
    return "\n".join(scalars) + "\n\n" + "\n\n".join(tables) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, value


def _limits(metadata: Mapping[str, Any]) -> str:
    if metadata["choices"]:
        return " | ".join(metadata["choices"])
    parts = []
    if metadata["above"] is not None:
        parts.append(f"> {_number(metadata['above'])}")
    if metadata["low"] is not None:
        parts.append(f">= {_number(metadata['low'])}")
    if metadata["high"] is not None:
        parts.append(f"<= {_number(metadata['high'])}")
    return ", ".join(parts)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key=value` in a tree of plain values; a bare word is a string. Raises ConfigError."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {override}: expected key=value, such as training.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {parent} is a value, not a table")
    node[leaf] = value
