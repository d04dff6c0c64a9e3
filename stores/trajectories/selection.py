"""Selects stored trajectories by an expression over their columns, such as `staleness <= 1 and reward > 0`. Pure.

Expressions are a subset of Python's: comparisons, `and`, `or`, `not`, `in` and arithmetic. Nothing is called and no
attribute is accessed, so untrusted expressions are safe.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError

ColumnValues = npt.NDArray[Any]
MAX_SHOWN_CHARACTERS = 200
"""Characters of an expression, or of a part of one, that a message repeats."""

MAX_INTEGER = 2.0**62
"""Largest result of integer arithmetic. numpy's overflows silently above 2**63; the rest is for rounding."""


def _is_member(left: Any, right: list[Any]) -> Any:
    """Whether each value equals one of `right`, as by `==`; np.isin would compare float32 as float64."""
    none = np.zeros(np.shape(left), bool)[()]
    return functools.reduce(np.logical_or, (left == value for value in right), none)


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.In: _is_member,
    ast.NotIn: lambda left, right: ~_is_member(left, right),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selection:
    """An expression that selects rows; an empty one selects all. It is checked when it is applied."""

    text: str = ""

    def mask(self, columns: Mapping[str, ColumnValues]) -> npt.NDArray[np.bool_]:
        """[R] bool, whether each row is selected. columns: [R] arrays by name. Raises ConfigError, which names the
        fault.

        >>> Selection("reward > 0 and fate == 'consumed'").mask(
        ...     {"reward": np.array([0.0, 1.0, 1.0]), "fate": np.array(["consumed", "consumed", "aborted"])}
        ... ).tolist()
        [False, True, False]
        """
        count = len(next(iter(columns.values()))) if columns else 0
        if not self.text.strip():
            return np.ones(count, bool)
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise self._error("cannot be read; write it like reward > 0 and v_min == 3") from error
        except (RecursionError, MemoryError) as error:
            raise self._error("is nested too deeply; split it into several") from error
        try:
            with np.errstate(all="ignore"):
                result = self._value(tree, columns)
        except ArithmeticError as error:
            raise self._error(f"cannot be computed: {error}") from error
        except RecursionError as error:
            raise self._error("is nested too deeply; split it into several") from error
        if not isinstance(result, np.ndarray) or result.dtype != np.bool_:
            raise self._error("is not a condition on trajectories, such as reward > 0")
        return result

    def _value(self, node: ast.expr, columns: Mapping[str, ColumnValues]) -> Any:
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = [self._condition(v, columns) for v in values]
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return join.reduce(parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._condition(operand, columns)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, columns)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare([left, *comparators], ops, columns)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _compute(_ARITHMETIC[type(op)], self._number(left, columns), self._number(right, columns))
            case ast.Name(id=name):
                if name not in columns:
                    near = difflib.get_close_matches(name, columns, n=1)
                    raise self._error(
                        f"there is no column {_shortened(name)!r}; "
                        + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(columns)}")
                    )
                return columns[name]
            case ast.Constant(value=bool() | int() | float() | str()):
                return node.value
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                values = [self._value(e, columns) for e in elements]
                if any(isinstance(value, (list, np.ndarray)) for value in values):
                    raise self._error(f"{_shortened(ast.unparse(node))!r} may hold only numbers or only texts")
                return values
            case _:
                raise self._error(
                    f"{_shortened(ast.unparse(node))!r} is not supported; use comparisons, and, or, not, in, + - * / %"
                )

    def _compare(self, operands: list[ast.expr], ops: list[ast.cmpop], columns: Mapping[str, ColumnValues]) -> Any:
        parts = [self._value(operand, columns) for operand in operands]
        conditions = []
        for (left, right), op in zip(itertools.pairwise(parts), ops, strict=True):
            is_membership = isinstance(op, (ast.In, ast.NotIn))
            if type(op) not in _COMPARISONS or isinstance(left, list) or isinstance(right, list) != is_membership:
                raise self._error("compares values that cannot be compared")
            are_texts = [_is_text(x) for x in ([left, *right] if is_membership else [left, right])]
            if any(are_texts) != all(are_texts):
                raise self._error("compares text with numbers; quote text, as in fate == 'consumed'")
            conditions.append(_COMPARISONS[type(op)](left, right))
        return functools.reduce(np.logical_and, conditions)

    def _condition(self, node: ast.expr, columns: Mapping[str, ColumnValues]) -> Any:
        value = self._value(node, columns)
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
            raise self._error(f"{_shortened(ast.unparse(node))!r} is neither true nor false")
        return value

    def _number(self, node: ast.expr, columns: Mapping[str, ColumnValues]) -> Any:
        value = self._value(node, columns)
        if isinstance(value, list) or _is_text(value):
            raise self._error(f"{_shortened(ast.unparse(node))!r} is not a number")
        # numpy's arithmetic of booleans is not Python's, and that of small integers overflows silently
        is_small = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biu"
        return value.astype(np.int64) if is_small else value

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"where {_shortened(self.text)!r}: {problem}")


def _compute(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Compute numbers. Raises ArithmeticError where numpy's integers would be others than Python's."""
    result = operation(left, right)
    if isinstance(result, np.ndarray) and result.dtype.kind == "i":
        size = np.abs(operation(left * 1.0, right * 1.0))
        if not (size <= MAX_INTEGER).all():  # nor NaN
            raise OverflowError("a row has an integer beyond 2**62, or a remainder by 0; multiply a number by 1.0")
    return result


def _shortened(text: str) -> str:
    """The beginning of an expression, or of a part of one, for messages."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype.kind in "UO")
