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
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import numpy as np
from cattrs import Converter, ForbiddenExtraKeysError, transform_error
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

T = TypeVar("T")
PlainValue = Any
"""None, bool, int, float, str, and lists and dicts of them."""
TAG = "type"
INT_LIMIT = 2**64
"""Limit of the absolute value of integers, because msgpack has no larger ones."""
RUN_LIMIT = 2**24
"""Limit of the length of a run, so that a damaged one does not fill the memory."""


def parse_json(text: str | bytes) -> PlainValue:
    """Parse JSON of unknown origin. Raises ValueError, also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


class Codec:
    """Encodes dataclasses as plain values, and decodes them.

    Args:
        tagged: Classes whose values include the class name.
        omit_defaults: Fields of other classes that are omitted when they have their default.
        stored_names: Of other classes, the names that fields are stored under, if they are others than the fields'.
        runs: Fields of integers that are stored as runs, with the step of the runs: see `encode_runs`.
    """

    def __init__(
        self,
        tagged: tuple[type, ...] = (),
        omit_defaults: Mapping[type, tuple[str, ...]] = MappingProxyType({}),
        stored_names: Mapping[type, Mapping[str, str]] = MappingProxyType({}),
        runs: Mapping[type, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        self._overrides: dict[type, Any] = {
            cls: {name: override(omit_if_default=True) for name in names} for cls, names in omit_defaults.items()
        }
        for cls, names in stored_names.items():
            self._overrides.setdefault(cls, {}).update({name: override(rename=names[name]) for name in names})
        for cls, steps in runs.items():
            self._overrides.setdefault(cls, {}).update({name: _runs_override(step) for name, step in steps.items()})
        self._converter = converter = Converter()
        for builtin_type in (int, float, str, bool):
            converter.register_structure_hook(builtin_type, _exact_decoder(builtin_type))
        decode_tuple = converter.get_structure_hook(tuple)
        converter.register_structure_hook_func(_is_tuple, lambda value, cls: decode_tuple(_require_list(value), cls))
        converter.register_structure_hook_factory(dataclasses.is_dataclass, self._untagged_decoder)
        converter.register_structure_hook_factory(
            lambda cls: isinstance(cls, UnionType) and {*get_args(cls)} <= {*tagged},
            lambda union: self._tagged_decoder(get_args(union)),
        )
        converter.register_unstructure_hook_factory(_is_dict, self._dict_encoder)
        converter.register_structure_hook_factory(_is_dict, self._dict_decoder)
        converter.register_unstructure_hook_factory(
            lambda cls: cls in self._overrides,
            lambda cls: make_dict_unstructure_fn(cls, converter, **self._overrides[cls]),
        )
        # Factories run on demand, so the hooks of a class's fields are made before the hook of the class.
        converter.register_unstructure_hook_factory(lambda cls: cls in tagged, self._tagged_encoder)
        converter.register_structure_hook_factory(lambda cls: cls in tagged, lambda cls: self._tagged_decoder((cls,)))

    def encode(self, value: Any) -> PlainValue:
        """Convert a dataclass to plain values."""
        return self._converter.unstructure(value)

    def decode(self, value: PlainValue, cls: type[T]) -> T:
        """Decode plain values. Raises ValueError with the first error and the field that has it."""
        try:
            return self._converter.structure(value, cls)
        except Exception as error:  # cattrs wraps the errors of hooks and constructors in groups
            raise ValueError(_format_first_error(error)) from error

    def _untagged_decoder(self, cls: type[Any]) -> Callable[[Any, Any], Any]:
        """Make the decoder of an untagged dataclass. Unknown fields are ignored, because a later version wrote them.
        Fields with a default may be missing, because an earlier version did not have them."""
        decode_fields = make_dict_structure_fn(cls, self._converter, **self._overrides.get(cls, {}))

        def structure(value: Any, _: Any) -> Any:
            _require_dict(value)
            return decode_fields(value, cls)

        return structure

    def _tagged_encoder(self, cls: type[Any]) -> Callable[[Any], dict[str, Any]]:
        overrides = self._overrides.get(cls, {})
        encode_fields = make_dict_unstructure_fn(cls, self._converter, _cattrs_omit_if_default=True, **overrides)
        name = cls.__name__
        return lambda value: {TAG: name, **encode_fields(value)}

    def _tagged_decoder(self, classes: tuple[type[Any], ...]) -> Callable[[Any, Any], Any]:
        """Make the decoder of tagged classes. Unknown fields are errors, because a renamed field would silently get its
        default."""
        decoders = {
            cls.__name__: make_dict_structure_fn(
                cls, self._converter, _cattrs_forbid_extra_keys=True, **self._overrides.get(cls, {})
            )
            for cls in classes
        }

        def structure(value: Any, cls: Any) -> Any:
            _require_dict(value)
            fields = dict(value)
            tag = fields.pop(TAG, None)
            decode_fields = decoders.get(tag)
            if decode_fields is None:
                expected = f"; expected {' or '.join(decoders)}" if len(decoders) < 4 else ""
                raise ValueError(f"unknown type {tag!r}{expected}")
            return decode_fields(fields, cls)

        return structure

    def _dict_encoder(self, cls: Any) -> Callable[[Mapping[Any, Any]], dict[str, Any]]:
        """Make the encoder of a dict, with its keys as strings, because JSON has no others."""
        encode_value = self._converter.get_unstructure_hook(get_args(cls)[1])
        return lambda value: {str(k): encode_value(v) for k, v in value.items()}

    def _dict_decoder(self, cls: Any) -> Callable[[Any, Any], dict[Any, Any]]:
        key, value_type = get_args(cls)
        decode_key = _decode_int_key if key is int else self._converter.get_structure_hook(key)
        decode_value = self._converter.get_structure_hook(value_type)

        def structure(value: Any, _: Any) -> dict[Any, Any]:
            _require_dict(value)
            return {decode_key(k, key): decode_value(v, value_type) for k, v in value.items()}

        return structure


def encode_runs(values: Sequence[int], step: int) -> list[list[int]]:
    """Encode integers as runs: [first, count] of as many as each differ from the one before by `step`.

    >>> encode_runs((4, 5, 6, 9), step=1), encode_runs((2, 2, 3), step=0)
    ([[4, 3], [9, 1]], [[2, 2], [3, 1]])
    """
    array = np.fromiter(values, np.int64, len(values))
    starts = np.flatnonzero(np.diff(array, prepend=array[:1] - step - 1) != step)
    runs: list[list[int]] = np.stack([array[starts], np.diff(starts, append=len(array))], axis=1).tolist()
    return runs


def decode_runs(value: PlainValue, step: int) -> tuple[int, ...]:
    """Decode the integers that `encode_runs` has encoded, or a list of them, as earlier versions have stored them.

    >>> decode_runs([[4, 3], [9, 1]], step=1), decode_runs([9, 4], step=1)
    ((4, 5, 6, 9), (9, 4))
    """
    integers: list[int] = []
    for item in _require_list(value):
        first, count = _require_list(item) if type(item) is not int else (item, 1)
        if type(first) is not int or type(count) is not int or not 0 < count <= RUN_LIMIT or abs(first) >= INT_LIMIT:
            raise ValueError(f"expected integers or [first, count], got {item!r}"[:100])
        integers += range(first, first + count) if step else [first] * count
    return tuple(integers)


def _runs_override(step: int) -> Any:
    return override(
        unstruct_hook=lambda values: encode_runs(values, step), struct_hook=lambda value, _: decode_runs(value, step)
    )


def _is_dict(cls: Any) -> bool:
    origin: Any = get_origin(cls)
    return origin is dict


def _is_tuple(cls: Any) -> bool:
    origin: Any = get_origin(cls)
    return origin is tuple


def _require_list(value: Any) -> Any:
    """Return the value if it is a list or a tuple. Raises ValueError for others, such as strings, which can be
    iterated, too."""
    if type(value) not in (list, tuple):
        raise ValueError(f"expected list, got {value!r}")
    return value


def _decode_int_key(key: Any, _: Any) -> int:
    """Decode the digits of an integer key. int() would also accept "1_0" and " 10"."""
    if type(key) is not str or not re.fullmatch("-?[0-9]+", key):
        raise ValueError(f"expected int, got {key!r}")
    return int(key)


def _require_dict(value: Any) -> None:
    if type(value) is not dict:
        raise ValueError(f"expected dict, got {value!r}")


def _exact_decoder(cls: type[Any]) -> Callable[[Any, Any], Any]:
    """Make a decoder that accepts only values of this type; for float also int."""
    accepted_types = (int, float) if cls is float else (cls,)

    def structure(value: Any, _: Any) -> Any:
        if type(value) not in accepted_types:
            raise ValueError(f"expected {cls.__name__}, got {value!r}")
        if type(value) is int and not -INT_LIMIT <= value < INT_LIMIT:  # a float may not represent it exactly
            raise ValueError(f"a number of {len(str(abs(value)))} digits is out of range")
        return value

    return structure


def _format_first_error(error: Exception) -> str:
    """Format the first of an error's causes as one line: "field.field: message"."""

    def describe(error: BaseException, _: Any) -> str:
        if isinstance(error, KeyError):
            return "missing"
        if isinstance(error, ForbiddenExtraKeysError):
            return f"unknown field {', '.join(sorted(map(repr, error.extra_fields)))}"
        return str(error) or type(error).__name__

    message, _, path = transform_error(error, path="", format_exception=describe)[0].rpartition(" @ ")
    message, path = message.splitlines()[0], path.removeprefix(".")
    return f"{path}: {message}" if path else message
