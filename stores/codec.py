"""The project's dataclasses as plain values, for JSON and msgpack, and back.

Fields stand by name, in their order; enums by value; keys of dicts as strings. `decode` takes nothing on trust: a
number is never read from a string, and what has no default must be there. Values with a tag carry the name of their
class in front, so that a union of classes is read back as the right one, and leave out fields that have their default:

>>> @dataclasses.dataclass(frozen=True)
... class Moved:
...     tokens: int
...     why: str = ""
>>> codec = Codec(tagged=(Moved,))
>>> codec.encode(Moved(tokens=3))
{'type': 'Moved', 'tokens': 3}
>>> codec.decode({"type": "Moved", "tokens": 3, "why": "slow"}, Moved)
Moved(tokens=3, why='slow')
>>> codec.decode({"type": "Moved", "tokens": "3"}, Moved)
Traceback (most recent call last):
ValueError: tokens: '3' is no int
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from cattrs import Converter, ForbiddenExtraKeysError, transform_error
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

T = TypeVar("T")
Plain = Any
"""None, bool, int, float, str, and lists and dicts of them."""
TAG = "type"
SMALL = 2**64
"""Whole numbers are below: msgpack has no larger ones."""


class Codec:
    """One way from values to plain ones and back. tagged: classes whose values carry their class's name."""

    def __init__(self, tagged: tuple[type, ...] = ()) -> None:
        self._converter = converter = Converter()
        for plain in (int, float, str, bool):
            converter.register_structure_hook(plain, _exactly(plain))
        tuples = converter.get_structure_hook(tuple)
        converter.register_structure_hook_func(_is_tuple, lambda value, kind: tuples(_listed(value), kind))
        converter.register_structure_hook_factory(dataclasses.is_dataclass, self._fields)
        converter.register_structure_hook_factory(
            lambda kind: isinstance(kind, UnionType) and {*get_args(kind)} <= {*tagged},
            lambda union: self._by_tag(get_args(union)),
        )
        converter.register_unstructure_hook_factory(_is_dict, self._with_words_for_keys)
        converter.register_structure_hook_factory(_is_dict, self._from_words_for_keys)
        # Factories, as they are asked in the order of need: what a class holds is made before the class itself.
        converter.register_unstructure_hook_factory(lambda kind: kind in tagged, self._with_tag)
        converter.register_structure_hook_factory(lambda kind: kind in tagged, lambda kind: self._by_tag((kind,)))

    def encode(self, value: Any) -> Plain:
        """Plain values for a dataclass."""
        return self._converter.unstructure(value)

    def decode(self, value: Plain, kind: type[T]) -> T:
        """The inverse of `encode`. Raises ValueError: what is wrong first, and where."""
        try:
            return self._converter.structure(value, kind)
        except Exception as error:  # cattrs groups what hooks and constructors raise
            raise ValueError(_first(error)) from error

    def _fields(self, kind: type[Any]) -> Callable[[Any, Any], Any]:
        """Reads a dataclass without a tag. Fields it does not know are a later version's; those with a default may be
        missing, as an earlier version did not have them."""
        read = make_dict_structure_fn(kind, self._converter)

        def structure(value: Any, _: Any) -> Any:
            _be_dict(value)
            return read(value, kind)

        return structure

    def _with_tag(self, kind: type[Any]) -> Callable[[Any], dict[str, Any]]:
        fields = make_dict_unstructure_fn(kind, self._converter, _cattrs_omit_if_default=True)
        name = kind.__name__
        return lambda value: {TAG: name, **fields(value)}

    def _by_tag(self, kinds: tuple[type[Any], ...]) -> Callable[[Any, Any], Any]:
        """Reads one of these; unknown fields are an error: left out, they would take their default."""
        known = {
            kind.__name__: make_dict_structure_fn(kind, self._converter, _cattrs_forbid_extra_keys=True)
            for kind in kinds
        }

        def structure(value: Any, kind: Any) -> Any:
            _be_dict(value)
            fields = dict(value)
            read = known.get(tag := fields.pop(TAG, None))
            if read is None:
                raise ValueError(f"{tag!r} is no {' or '.join(known) if len(known) < 4 else 'type known here'}")
            return read(fields, kind)

        return structure

    def _with_words_for_keys(self, kind: Any) -> Callable[[Mapping[Any, Any]], dict[str, Any]]:
        """JSON and msgpack have no other keys."""
        values = self._converter.get_unstructure_hook(get_args(kind)[1])
        return lambda value: {str(k): values(v) for k, v in value.items()}

    def _from_words_for_keys(self, kind: Any) -> Callable[[Any, Any], dict[Any, Any]]:
        key, held = get_args(kind)
        keys = _number_in_words if key is int else self._converter.get_structure_hook(key)
        values = self._converter.get_structure_hook(held)

        def structure(value: Any, _: Any) -> dict[Any, Any]:
            _be_dict(value)
            return {keys(k, key): values(v, held) for k, v in value.items()}

        return structure


def _is_dict(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is dict


def _is_tuple(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is tuple


def _listed(value: Any) -> Any:
    """The value, a list or a tuple: strings and dicts can be iterated, too."""
    if type(value) not in (list, tuple):
        raise ValueError(f"{value!r} is no list")
    return value


def _number_in_words(key: Any, _: Any) -> int:
    """Reads a key that is a number, as digits only: int() also takes "1_0" and " 10"."""
    if type(key) is not str or not re.fullmatch("-?[0-9]+", key):
        raise ValueError(f"{key!r} is no int")
    return int(key)


def _be_dict(value: Any) -> None:
    if type(value) is not dict:
        raise ValueError(f"{value!r} is no dict")


def _exactly(kind: type[Any]) -> Callable[[Any, Any], Any]:
    """Reads a number or a string as it is; an int will do for a float."""
    takes = (int, float) if kind is float else (kind,)

    def structure(value: Any, _: Any) -> Any:
        if type(value) not in takes:
            raise ValueError(f"{value!r} is no {kind.__name__}")
        if type(value) is int and not -SMALL <= value < SMALL:  # no float may hold it
            raise ValueError(f"a number of {len(str(abs(value)))} digits is out of range")
        return value

    return structure


def _first(error: Exception) -> str:
    """The first of what is wrong, in a line: "field.field: what"."""

    def told(one: BaseException, _: Any) -> str:
        if isinstance(one, KeyError):
            return "missing"
        if isinstance(one, ForbiddenExtraKeysError):
            return f"no field is called {' or '.join(sorted(map(repr, one.extra_fields)))}"
        return str(one) or type(one).__name__

    what, _, where = transform_error(error, path="", format_exception=told)[0].rpartition(" @ ")
    what, where = what.splitlines()[0], where.removeprefix(".")
    return f"{where}: {what}" if where else what
