"""Knobs: dataclass fields that a job file sets, with their meaning, limits and defaults.

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

NAME_FORM = r"^[A-Za-z][A-Za-z0-9_-]*$"
"""Regular expression of the names in a table of named tables. They have no dots, because dots join keys."""
METADATA, PARAMETER = "knob", "parameter"
"""Keys of a dataclass field's metadata: its Knob, and the mark of a field that the program fills in."""
MAX_INT = 2**63 - 1
"""The largest integer of TOML files, stores and seeds."""
MAX_SHOWN_CHARS = 60
"""Maximum characters of a value in an error message."""

T = TypeVar("T")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Meaning and limits of a field, or of each item of a list.

    low <= value <= high, above < value < below, or one of `choices`. user_code: it may also name user code,
    file.py:NAME or module:NAME.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    user_code: bool = False

    @property
    def limits(self) -> str:
        """The limits as text, such as `>= 0, <= 1`; empty if there are none."""
        if self.choices:
            return " | ".join(self.choices)
        bounds = ((">", self.above), (">=", self.low), ("<=", self.high), ("<", self.below))
        return ", ".join(f"{sign} {_format_number(bound)}" for sign, bound in bounds if bound is not None)

    def error(self, value: object) -> str:
        """Return an error text for a value of the right type, to follow its key in a message; empty if the value is
        within the limits."""
        if isinstance(value, list):
            return next((f": each {error}" for item in value if (error := self.error(item))), "")
        if self.choices and value not in self.choices and not (self.user_code and names_user_code(value)):
            return unknown_choice_error(value, self.choices, user_code=self.user_code)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if isinstance(value, int) and abs(value) > MAX_INT:
                return f"= {shorten(value)} is out of range; it must be at most {MAX_INT}, in 64 bits"
            if not math.isfinite(value):
                return f"= {value!r} must be finite"
            is_too_low = self.low is not None and value < self.low
            is_too_low |= self.above is not None and value <= self.above
            is_too_high = self.high is not None and value > self.high
            is_too_high |= self.below is not None and value >= self.below
            if is_too_low or is_too_high:
                return f"= {value!r} is out of range; it must be {self.limits}"
        return ""

    def read(self, value: object, hint: Any, source: str, key: str, root: type[Any]) -> Any:
        """Check a value from a job file and return it. Raises ConfigError. hint: its type. key: its dotted key. source,
        root: see the function `read`."""
        if entry_class := entry_type(hint):
            tables = _entries(value, f"{source}: {key}")
            return {
                name: entry_class(**read(entry_class, v, source, f"{key}.{name}.", root)) for name, v in tables.items()
            }
        return _check_value(value, hint, self, f"{source}: {key}")

    def keys(self, key: str) -> Iterator[str]:
        """Yield the dotted keys of the field `key`: itself, and those of the entries it may hold."""
        yield key


def shorten(value: object) -> str:
    """Shorten a value for an error message: one line of at most MAX_SHOWN_CHARS characters, and the length of a longer
    one."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer with more digits than Python converts
        text = hex(value) if isinstance(value, int) else type(value).__name__
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


def unknown_choice_error(value: object, choices: Sequence[str], *, user_code: bool, suggestion: str = "") -> str:
    """Return an error text for a value that is not among the choices, to follow its key in a message. suggestion: the
    setting to suggest; by default a similar choice."""
    matches = [suggestion] if suggestion else [repr(c) for c in difflib.get_close_matches(str(value), choices, n=1)]
    hint = f"; did you mean {matches[0]}?" if matches else ""
    user_code_hint = ", or your own, file.py:NAME" if user_code else ""
    return f"must be one of {', '.join(choices)}{user_code_hint}, not {shorten(value)}{hint}"


def names_user_code(value: object) -> bool:
    """Whether a value has the form file.py:NAME or module:NAME."""
    location, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(location and colon) and name.isidentifier()


@overload
def knob(default: bool, doc: str) -> bool: ...
@overload
def knob(
    default: Number,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Number: ...
@overload
def knob(default: str, doc: str, *, choices: Sequence[str] = (), user_code: bool = False) -> str: ...
@overload
def knob(default: dict[str, T], doc: str) -> dict[str, T]: ...
@overload
def knob(default: list[T], doc: str, *, choices: Sequence[str] = (), user_code: bool = False) -> list[T]: ...
def knob(
    default: object,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    user_code: bool = False,
) -> object:
    """Declare a dataclass field with its meaning and limits. Raises ValueError if the default violates the limits."""
    spec = Knob(doc=doc, low=low, high=high, above=above, below=below, choices=tuple(choices), user_code=user_code)
    if error := spec.error(default):
        raise ValueError(f"a knob's default breaks its own limits ({spec.doc!r}): {error}")
    metadata = {METADATA: spec}
    if isinstance(default, (dict, list)):
        default_copy = copy.copy(default)
        return field(default_factory=lambda: copy.copy(default_copy), metadata=metadata)
    return field(default=default, metadata=metadata)


def parameter(default: Any = None) -> Any:
    """Declare a dataclass field that no job file sets, and that `Registry.make` fills in."""
    return field(default=default, metadata={PARAMETER: True})


def spec_of(field: dataclasses.Field[Any]) -> Knob | None:
    """Return the Knob of a dataclass field; None if it is not a knob."""
    return field.metadata.get(METADATA)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def knobs(cls: object) -> dict[str, dataclasses.Field[Any]]:
    """Return the knobs of a class by name; empty if it is not a dataclass."""
    return {f.name: f for f in dataclasses.fields(cls) if spec_of(f)} if dataclasses.is_dataclass(cls) else {}


def values(section: Any) -> dict[str, Any]:
    """Return the field values of a dataclass instance by name, not copied."""
    return {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}


def build(cls: type[T], tree: object, source: str, prefix: str = "") -> T:
    """Create an instance of `cls` from nested plain values. Raises ConfigError as `read` does."""
    return cls(**read(cls, tree, source, prefix))


def read(cls: type[Any], tree: object, source: str, prefix: str = "", root: type[Any] | None = None) -> dict[str, Any]:
    """Read nested plain values and check them against the knobs of a class and of its nested dataclasses.

    Unset keys are left out. A key in its class's REFUSED is rejected with the reason given there.

    Args:
        cls: The class of the table.
        tree: The values.
        source: Name of the file or setting that the values come from, for messages.
        prefix: Dotted key of the table, with a dot at the end; empty for the whole tree.
        root: The class of the whole tree, which is searched for keys similar to an unknown one.

    Raises:
        ConfigError: A key or value is wrong.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{source}: {prefix.rstrip('.')} must be a table, not {shorten(tree)}")
    root, knobs = root or cls, keys_of(cls)
    read_values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if reason := getattr(cls, "REFUSED", {}).get(name):
            raise ConfigError(f"{source}: {key} is not supported: {reason}")
        if name not in knobs:
            raise ConfigError(f"{source}: unknown key {shorten(key)[1:-1]}; {_suggest(str(name), knobs, prefix, root)}")
        hint, spec = knobs[name]
        if spec is None:
            read_values[name] = hint(**read(hint, value, source, f"{key}.", root))
        else:
            read_values[name] = spec.read(value, hint, source, key, root)
    return read_values


def keys_of(cls: type[Any]) -> dict[str, tuple[Any, Knob | None]]:
    """Return the keys of a dataclass that a job file may set: by name, the type and the Knob; None for a table."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    hints = typing.get_type_hints(cls) if fields else {}
    tables = {f.name for f in fields if dataclasses.is_dataclass(hints[f.name]) and PARAMETER not in f.metadata}
    return {f.name: (hints[f.name], spec_of(f)) for f in fields if spec_of(f) or f.name in tables}


def _suggest(name: str, knobs: Mapping[str, Any], prefix: str, root: type[Any]) -> str:
    """Suggest a replacement for an unknown key: a similar key of the same table, or the same name in another table."""
    if matches := difflib.get_close_matches(name, knobs, n=1):
        return f"did you mean {prefix}{matches[0]}?"
    if elsewhere := dict.fromkeys(key for key in all_keys(root, "") if key.rpartition(".")[2] == name):
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known here: {', '.join(knobs) or 'none'}"


def all_keys(cls: type[Any], prefix: str) -> Iterator[str]:
    """Yield all dotted keys of a tree of dataclasses."""
    for name, (hint, spec) in keys_of(cls).items():
        yield from all_keys(hint, f"{prefix}{name}.") if spec is None else spec.keys(f"{prefix}{name}")


def entry_type(hint: Any) -> type[Any] | None:
    """Return X for a table of named tables, dict[str, X] with a dataclass X; None for any other type."""
    value_type = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
    return value_type if isinstance(value_type, type) and dataclasses.is_dataclass(value_type) else None


def _entries(tree: object, label: str) -> Mapping[str, Any]:
    """Check the names in a table of named tables, and return the table. Raises ConfigError."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{label} must be a table of named tables, not {shorten(tree)}")
    for name in tree:
        if not re.search(NAME_FORM, name):
            raise ConfigError(f"{label}: {name!r} is not a valid name; use letters, digits, - and _, a letter first")
    return tree


def _check_value(value: Any, hint: Any, spec: Knob, label: str) -> Any:
    type_ = typing.get_origin(hint) or hint
    if type_ is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT:
        value = float(value)
    elif type_ is float and isinstance(value, int) and not isinstance(value, bool):
        raise ConfigError(f"{label} {spec.error(value)}")
    if isinstance(value, Mapping) and type_ is dict:
        refuse_large(value, label)
    if (
        isinstance(type_, types.UnionType)
        or not isinstance(value, type_)
        or (isinstance(value, bool) and type_ is not bool)
    ):
        raise ConfigError(f"{label} must be {_describe_type(type_.__name__)}, not {shorten(value)}")
    if type_ is list:
        (item_hint,) = typing.get_args(hint)
        return [_check_value(item, item_hint, spec, f"{label}: each") for item in value]
    if error := spec.error(value):
        raise ConfigError(f"{label} {error}")
    return value


def refuse_large(value: object, label: str) -> None:
    """Raise ConfigError for an integer in a free-form table that is too large for TOML and stores."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            refuse_large(entry, f"{label}.{key}")
    elif isinstance(value, list):
        for entry in value:
            refuse_large(entry, label)
    elif isinstance(value, int) and abs(value) > MAX_INT:
        raise ConfigError(f"{label} = {shorten(value)} is out of range; it must be at most {MAX_INT}, in 64 bits")


def _describe_type(type_name: str) -> str:
    names = {
        "int": "a whole number",
        "float": "a number",
        "str": "a string",
        "bool": "true or false",
        "dict": "a table",
        "list": "a list",
    }
    return names.get(type_name, type_name)


def _format_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
