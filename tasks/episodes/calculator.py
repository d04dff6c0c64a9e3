"""The calculator tool: arithmetic of limited size, parsed and never executed as code.

>>> calculate("(1 + 2) * 4 / 8")
'1.5'
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

MAX_CHARS = 1000
"""Characters of an expression."""
MAX_BITS = 4096
"""Bits of a whole number, about 1,200 digits: what is larger takes ever longer to compute, and to read."""
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
"""Signs that people and models write, and Python's."""

Number = int | float


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression. Returns its value as text, or a line that begins with `error:`.

    Knows + - * / // % ** (also written ^), parentheses, abs, round, sqrt, min and max."""
    text = expression.strip().translate(SIGNS).replace(",", "").removesuffix("=").strip()
    if "," in expression and "(" in expression:
        text = expression.strip().translate(SIGNS).removesuffix("=").strip()  # commas between arguments
    if not text:
        return "error: the expression is empty"
    if len(text) > MAX_CHARS:
        return f"error: the expression has {len(text)} characters; at most {MAX_CHARS} are read"
    try:
        return _shown(_value(ast.parse(text, mode="eval").body))
    except (_Refused, ZeroDivisionError) as error:
        return f"error: {error}"
    except OverflowError:
        return "error: the result is too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an arithmetic expression"


class _Refused(Exception):
    """An expression that is not computed. The message says why."""


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        name = node.func.id
        if name not in _FUNCTIONS:
            raise _Refused(f"unknown function {name}; there are {', '.join(_FUNCTIONS)}")
        function, min_args, max_args = _FUNCTIONS[name]
        if not min_args <= len(node.args) <= max_args:
            raise _Refused(f"{name} does not take {len(node.args)} numbers")
        return _bounded(function(*map(_value, node.args)))
    raise _Refused("only numbers, + - * / // % **, parentheses and " + ", ".join(_FUNCTIONS) + " are known")


def _bounded(number: Number) -> Number:
    """Return a number, unless it is too large or not finite."""
    if isinstance(number, int):
        if number.bit_length() > MAX_BITS:
            raise OverflowError
    elif isinstance(number, complex) or not math.isfinite(number):
        raise _Refused("the result is not a finite real number")
    return number


def _multiplied(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > MAX_BITS + 1:
        raise OverflowError
    return a * b


def _divided(a: Number, b: Number) -> Number:
    return a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        if abs(a) > 1 and (abs(a).bit_length() - 1) * b > MAX_BITS:
            raise OverflowError
        return int(a**b)
    result: Number = a**b
    return result


def _rounded(a: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise _Refused("round takes a whole number of digits")
    return round(a, digits) if digits else round(a)


_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiplied,
    ast.Div: _divided,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, tuple[Callable[..., Number], int, int]] = {
    "abs": (abs, 1, 1),
    "round": (_rounded, 1, 2),
    "sqrt": (math.sqrt, 1, 1),
    "min": (min, 2, 100),
    "max": (max, 2, 100),
}
"""Functions, with the fewest and the most numbers that they take."""


def _shown(number: Number) -> str:
    """Format a number; fractions with twelve digits, so that 0.1 + 0.2 is 0.3."""
    if isinstance(number, int):
        return str(number)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else f"{number:.12g}"
