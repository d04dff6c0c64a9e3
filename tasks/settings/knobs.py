"""Knobs: fields of a frozen dataclass that carry their meaning, limits and default.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Pull:
        share: float = knob(0.5, "share of an instance's capacity that must be free", low=0, high=1)

Values from outside are checked once, in `read`; messages name the key, the limit and the closest known name. A default
outside its limits fails where it is declared.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from staleflow.stores.errors import ConfigError

NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"
"""What the names of a table of tables look like; keys are joined by dots."""
METADATA = "knob"
"""The key of a field's metadata that holds its Knob."""
LARGEST = 2**63 - 1
"""The largest whole number of a TOML file, and of what stores and seeds keep."""
SHOWN = 60
"""Most characters of a value that a message repeats."""

T = TypeVar("T")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Meaning and limits of a field, or of each item of a list. low <= value <= high, value > above, or one of
    `choices`.

    own: it may also name user code, file.py:NAME or module:NAME. shown: listed even while it has its default.
    unlisted: further choices, of runs of before. removed: choices of before that are refused, each with the reason.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    own: bool = False
    shown: bool = True
    unlisted: tuple[str, ...] = ()
    removed: Mapping[str, str] = field(default_factory=dict)

    @property
    def limits(self) -> str:
        """The limits as text, such as `>= 0, <= 1`; empty if there are none."""
        if self.choices:
            return " | ".join(self.choices)
        bounds = ((">", self.above), (">=", self.low), ("<=", self.high))
        return ", ".join(f"{sign} {_number(bound)}" for sign, bound in bounds if bound is not None)

    def fault(self, value: object) -> str:
        """What is wrong with a value of the right type, worded to follow its key; empty if it is within the limits."""
        if isinstance(value, list):
            return next((f": each {fault}" for item in value if (fault := self.fault(item))), "")
        if isinstance(value, str) and value in self.removed:
            return f"= {value!r} is no more: {self.removed[value]}"
        known = (*self.choices, *self.unlisted)
        if self.choices and value not in known and not (self.own and names_user_code(value)):
            near = difflib.get_close_matches(str(value), self.choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            own = ", or your own, file.py:NAME" if self.own else ""
            return f"must be one of {', '.join(self.choices)}{own}, not {shown(value)}{hint}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if isinstance(value, int) and abs(value) > LARGEST:
                return f"= {shown(value)} is out of range; it must be at most {LARGEST}, in 64 bits"
            if not math.isfinite(value):
                return f"= {value!r} must be finite"
            below = self.low is not None and value < self.low
            beyond = self.high is not None and value > self.high
            if below or beyond or (self.above is not None and value <= self.above):
                return f"= {value!r} is out of range; it must be {self.limits}"
        return ""


def shown(value: object) -> str:
    """A value as a message repeats it: on one line, and not too long."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        text = hex(value) if isinstance(value, int) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def names_user_code(value: object) -> bool:
    """Whether a value has the form file.py:NAME or module:NAME."""
    where, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(where and colon) and name.isidentifier()


@overload
def knob(default: bool, doc: str) -> bool: ...
@overload
def knob(
    default: Number, doc: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Number: ...
@overload
def knob(default: str, doc: str, *, choices: Sequence[str] = (), own: bool = False) -> str: ...
@overload
def knob(default: dict[str, T], doc: str, *, shown: bool = True) -> dict[str, T]: ...
@overload
def knob(default: list[T], doc: str, *, choices: Sequence[str] = (), own: bool = False) -> list[T]: ...
def knob(
    default: object,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    own: bool = False,
    shown: bool = True,
) -> object:
    """A dataclass field with its meaning and limits. Raises ValueError if the default violates them."""
    spec = Knob(doc=doc, low=low, high=high, above=above, choices=tuple(choices), own=own, shown=shown)
    return knob_field(default, spec)


def knob_field(default: object, spec: Knob, **more: object) -> Any:
    """A dataclass field for this knob. more: further metadata entries."""
    if fault := spec.fault(default):
        raise ValueError(f"a knob's default breaks its own limits ({spec.doc!r}): {fault}")
    metadata = {METADATA: spec, **more}
    if isinstance(default, (dict, list)):
        kept = copy.copy(default)
        return field(default_factory=lambda: copy.copy(kept), metadata=metadata)
    return field(default=default, metadata=metadata)


def spec_of(declared: dataclasses.Field[Any]) -> Knob | None:
    """A field's Knob; None if it is not a knob."""
    return declared.metadata.get(METADATA)


def default_of(declared: dataclasses.Field[Any]) -> Any:
    """A knob's default value."""
    made = declared.default_factory
    return declared.default if made is dataclasses.MISSING else made()


def knobs(cls: object) -> dict[str, dataclasses.Field[Any]]:
    """The knobs of a class by name; empty if it is not a dataclass."""
    return {f.name: f for f in dataclasses.fields(cls) if spec_of(f)} if dataclasses.is_dataclass(cls) else {}


def values(section: Any) -> dict[str, Any]:
    """The field values of a dataclass instance by name, not copied."""
    return {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}


def build(cls: type[T], tree: object, where: str, prefix: str = "") -> T:
    """An instance of `cls` from nested plain values. Raises ConfigError as `read`."""
    return cls(**read(cls, tree, where, prefix))


def read(cls: type[Any], tree: object, where: str, prefix: str = "", root: type[Any] | None = None) -> dict[str, Any]:
    """Nested plain values, checked against the knobs of `cls` and its nested dataclasses; unset keys are left out.

    where: the source, for messages. root: the class of the whole tree, where the right place of a wrong key is looked
    for. A key in its class's REFUSED is rejected with the reason given there. Raises ConfigError."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: {prefix.rstrip('.')} must be a table, not {shown(tree)}")
    root = root or cls
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    known = {f.name: f for f in fields if spec_of(f) or dataclasses.is_dataclass(hints[f.name])}
    read_values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if why := getattr(cls, "REFUSED", {}).get(name):
            raise ConfigError(f"{where}: {key} is not supported: {why}")
        if name not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)[1:-1]}; {_nearest(str(name), known, prefix, root)}")
        spec = spec_of(known[name])
        if entries := entry_type(hints[name]):
            named = _entries(value, f"{where}: {key}")
            read_values[name] = {
                entry: entries(**read(entries, v, where, f"{key}.{entry}.", root)) for entry, v in named.items()
            }
        elif spec is None:
            read_values[name] = hints[name](**read(hints[name], value, where, f"{key}.", root))
        else:
            read_values[name] = _checked(value, hints[name], spec, f"{where}: {key}")
    return read_values


def _nearest(name: str, known: Mapping[str, Any], prefix: str, root: type[Any]) -> str:
    """What may have been meant by an unknown key: a similar one of the same table, or its own name in another."""
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {prefix}{near[0]}?"
    if elsewhere := [key for key in _keys(root, "") if key.rpartition(".")[2] == name]:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known here: {', '.join(known) or 'none'}"


def _keys(cls: type[Any], prefix: str) -> Iterator[str]:
    """The keys of a tree of dataclasses, dotted."""
    hints = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    for declared in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if spec_of(declared) is not None:
            yield f"{prefix}{declared.name}"
        elif dataclasses.is_dataclass(hints[declared.name]):
            yield from _keys(hints[declared.name], f"{prefix}{declared.name}.")


def entry_type(hint: Any) -> type[Any] | None:
    """The dataclass of a table of named tables, dict[str, X]; None for any other type."""
    found = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _entries(tree: object, where: str) -> Mapping[str, Any]:
    """The entries of a table of named tables. Raises ConfigError."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} must be a table of named tables, not {shown(tree)}")
    for name in tree:
        if not re.search(NAME, name):
            raise ConfigError(f"{where}: {name!r} is no name; use letters, digits, - and _, a letter first")
    return tree


def _checked(value: Any, hint: Any, spec: Knob, where: str) -> Any:
    kind = typing.get_origin(hint) or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        value = float(value)
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        raise ConfigError(f"{where} {spec.fault(value)}")
    if isinstance(value, Mapping) and kind is dict:
        _refuse_large(value, where)
    if (
        isinstance(kind, types.UnionType)
        or not isinstance(value, kind)
        or (isinstance(value, bool) and kind is not bool)
    ):
        raise ConfigError(f"{where} must be {_article(kind.__name__)}, not {shown(value)}")
    if kind is list:
        (each,) = typing.get_args(hint)
        return [_checked(item, each, spec, f"{where}: each") for item in value]
    if fault := spec.fault(value):
        raise ConfigError(f"{where} {fault}")
    return value


def _refuse_large(value: object, where: str) -> None:
    """Raise ConfigError for a whole number in a free-form table that TOML and stores cannot hold."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            _refuse_large(below, f"{where}.{key}")
    elif isinstance(value, list):
        for below in value:
            _refuse_large(below, where)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{where} = {shown(value)} is out of range; it must be at most {LARGEST}, in 64 bits")


def _article(kind: str) -> str:
    names = {
        "int": "a whole number",
        "float": "a number",
        "str": "a string",
        "bool": "true or false",
        "dict": "a table",
        "list": "a list",
    }
    return names.get(kind, kind)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
