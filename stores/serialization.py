"""Conversion of dataclasses to plain values, for JSON and msgpack, and back.

Fields are stored by name, in order; enums by value; dict keys as strings. `decode` is strict: a number is never read
from a string, and a field without a default must be present. Values of a tagged class begin with its name, so that a
union of classes is read back as the right one, and omit fields that have their default:

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
ValueError: tokens: expected int, got '3'
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from cattrs import Converter, ForbiddenExtraKeysError, transform_error
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

T = TypeVar("T")
Plain = Any
"""None, bool, int, float, str, and lists and dicts of them."""
TAG = "type"
SMALL = 2**64
"""Whole numbers are below: msgpack has no larger ones."""


def parse_json(text: str | bytes) -> Plain:
    """Parse JSON of unknown origin. Raises ValueError, also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


class Codec:
    """Encodes dataclasses as plain values, and decodes them.

    Args:
        tagged: Classes whose values include the class name.
        sparse: Fields of other classes that are omitted when they have their default.
        removed: Fields of earlier versions of tagged classes, which are ignored.
    """

    def __init__(
        self,
        tagged: tuple[type, ...] = (),
        sparse: Mapping[type, tuple[str, ...]] = MappingProxyType({}),
        removed: Mapping[type, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._removed = {kind.__name__: names for kind, names in removed.items()}
        self._converter = converter = Converter()
        for plain in (int, float, str, bool):
            converter.register_structure_hook(plain, _exact(plain))
        tuples = converter.get_structure_hook(tuple)
        converter.register_structure_hook_func(_is_tuple, lambda value, kind: tuples(_require_list(value), kind))
        converter.register_structure_hook_factory(dataclasses.is_dataclass, self._fields)
        converter.register_structure_hook_factory(
            lambda kind: isinstance(kind, UnionType) and {*get_args(kind)} <= {*tagged},
            lambda union: self._by_tag(get_args(union)),
        )
        converter.register_unstructure_hook_factory(_is_dict, self._dict_encoder)
        converter.register_structure_hook_factory(_is_dict, self._dict_decoder)
        # Factories run on demand, so the hooks of a class's fields are made before the hook of the class.
        converter.register_unstructure_hook_factory(lambda kind: kind in tagged, self._with_tag)
        converter.register_structure_hook_factory(lambda kind: kind in tagged, lambda kind: self._by_tag((kind,)))
        converter.register_unstructure_hook_factory(
            lambda kind: kind in sparse, lambda kind: self._without(kind, sparse[kind])
        )

    def encode(self, value: Any) -> Plain:
        """Convert a dataclass to plain values."""
        return self._converter.unstructure(value)

    def decode(self, value: Plain, kind: type[T]) -> T:
        """Decode plain values. Raises ValueError, which names the first fault and its position."""
        try:
            return self._converter.structure(value, kind)
        except Exception as error:  # cattrs groups what hooks and constructors raise
            raise ValueError(_first(error)) from error

    def _fields(self, kind: type[Any]) -> Callable[[Any, Any], Any]:
        """Decoder of an untagged dataclass. Unknown fields are ignored: a later version wrote them. Fields with a
        default may be missing: an earlier version did not have them."""
        read = make_dict_structure_fn(kind, self._converter)

        def structure(value: Any, _: Any) -> Any:
            _require_dict(value)
            return read(value, kind)

        return structure

    def _without(self, kind: type[Any], names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
        """Encoder of a class that omits these fields while they have their default."""
        omitted: Any = {name: override(omit_if_default=True) for name in names}
        encode: Callable[[Any], dict[str, Any]] = make_dict_unstructure_fn(kind, self._converter, **omitted)
        return encode

    def _with_tag(self, kind: type[Any]) -> Callable[[Any], dict[str, Any]]:
        fields = make_dict_unstructure_fn(kind, self._converter, _cattrs_omit_if_default=True)
        name = kind.__name__
        return lambda value: {TAG: name, **fields(value)}

    def _by_tag(self, kinds: tuple[type[Any], ...]) -> Callable[[Any, Any], Any]:
        """Decoder of tagged classes. Unknown fields are errors: a renamed one would silently take its default."""
        known = {
            kind.__name__: make_dict_structure_fn(kind, self._converter, _cattrs_forbid_extra_keys=True)
            for kind in kinds
        }

        def structure(value: Any, kind: Any) -> Any:
            _require_dict(value)
            fields = dict(value)
            read = known.get(tag := fields.pop(TAG, None))
            for name in self._removed.get(tag, ()):
                fields.pop(name, None)
            if read is None:
                expected = f"; expected {' or '.join(known)}" if len(known) < 4 else ""
                raise ValueError(f"unknown type {tag!r}{expected}")
            return read(fields, kind)

        return structure

    def _dict_encoder(self, kind: Any) -> Callable[[Mapping[Any, Any]], dict[str, Any]]:
        """Encoder of a dict with its keys as strings: JSON has no others."""
        values = self._converter.get_unstructure_hook(get_args(kind)[1])
        return lambda value: {str(k): values(v) for k, v in value.items()}

    def _dict_decoder(self, kind: Any) -> Callable[[Any, Any], dict[Any, Any]]:
        key, value_type = get_args(kind)
        keys = _int_key if key is int else self._converter.get_structure_hook(key)
        values = self._converter.get_structure_hook(value_type)

        def structure(value: Any, _: Any) -> dict[Any, Any]:
            _require_dict(value)
            return {keys(k, key): values(v, value_type) for k, v in value.items()}

        return structure


def _is_dict(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is dict


def _is_tuple(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is tuple


def _require_list(value: Any) -> Any:
    """The value, a list or a tuple: strings and dicts can be iterated, too."""
    if type(value) not in (list, tuple):
        raise ValueError(f"expected list, got {value!r}")
    return value


def _int_key(key: Any, _: Any) -> int:
    """Decode a key that is a number, as digits only: int() also takes "1_0" and " 10"."""
    if type(key) is not str or not re.fullmatch("-?[0-9]+", key):
        raise ValueError(f"expected int, got {key!r}")
    return int(key)


def _require_dict(value: Any) -> None:
    if type(value) is not dict:
        raise ValueError(f"expected dict, got {value!r}")


def _exact(kind: type[Any]) -> Callable[[Any, Any], Any]:
    """Decoder that accepts values of this type only; for a float also an int."""
    takes = (int, float) if kind is float else (kind,)

    def structure(value: Any, _: Any) -> Any:
        if type(value) not in takes:
            raise ValueError(f"expected {kind.__name__}, got {value!r}")
        if type(value) is int and not -SMALL <= value < SMALL:  # no float may hold it
            raise ValueError(f"a number of {len(str(abs(value)))} digits is out of range")
        return value

    return structure


def _first(error: Exception) -> str:
    """The first fault, in one line: "field.field: what"."""

    def described(error: BaseException, _: Any) -> str:
        if isinstance(error, KeyError):
            return "missing"
        if isinstance(error, ForbiddenExtraKeysError):
            return f"unknown field {', '.join(sorted(map(repr, error.extra_fields)))}"
        return str(error) or type(error).__name__

    message, _, where = transform_error(error, path="", format_exception=described)[0].rpartition(" @ ")
    message, where = message.splitlines()[0], where.removeprefix(".")
    return f"{where}: {message}" if where else message
