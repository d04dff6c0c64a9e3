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
"""Maximum characters of an expression."""
MAX_BITS = 4096
"""Maximum bits of a whole number, about 1,200 digits. Larger numbers take long to compute."""
OPERATOR_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
"""Operator signs of other notations, and Python's."""

Number = int | float


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression. Returns its value as text, or a line that begins with `error:`.

    Supports + - * / // % ** (also written ^), parentheses, abs, round, sqrt, min and max."""
    text = expression.strip().translate(OPERATOR_SIGNS).replace(",", "").removesuffix("=").strip()
    if "," in expression and "(" in expression:
        text = expression.strip().translate(OPERATOR_SIGNS).removesuffix("=").strip()  # commas between arguments
    if not text:
        return "error: the expression is empty"
    if len(text) > MAX_CHARS:
        return f"error: the expression has {len(text)} characters; at most {MAX_CHARS} are read"
    try:
        return _format(_evaluate(ast.parse(text, mode="eval").body))
    except (_Unsupported, ZeroDivisionError) as error:
        return f"error: {error}"
    except OverflowError:
        return "error: the result is too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an arithmetic expression"


class _Unsupported(Exception):
    """An expression that the calculator does not compute. The message is the reason."""


def _evaluate(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _check_size(_BINARY[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        name = node.func.id
        if name not in _FUNCTIONS:
            raise _Unsupported(f"unknown function {name}; there are {', '.join(_FUNCTIONS)}")
        function, min_args, max_args = _FUNCTIONS[name]
        if not min_args <= len(node.args) <= max_args:
            raise _Unsupported(f"{name} does not take {len(node.args)} numbers")
        return _check_size(function(*map(_evaluate, node.args)))
    raise _Unsupported("only numbers, + - * / // % **, parentheses and " + ", ".join(_FUNCTIONS) + " are supported")


def _check_size(number: Number) -> Number:
    """Return a number. Raises OverflowError if it is too large, and _Unsupported if it is not finite or not real."""
    if isinstance(number, int):
        if number.bit_length() > MAX_BITS:
            raise OverflowError
    elif isinstance(number, complex) or not math.isfinite(number):
        raise _Unsupported("the result is not a finite real number")
    return number


def _multiply(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > MAX_BITS + 1:
        raise OverflowError
    return a * b


def _divide(a: Number, b: Number) -> Number:
    return a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        if abs(a) > 1 and (abs(a).bit_length() - 1) * b > MAX_BITS:
            raise OverflowError
        return int(a**b)
    result: Number = a**b
    return result


def _round(a: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise _Unsupported("round takes a whole number of digits")
    return round(a, digits) if digits else round(a)


_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, tuple[Callable[..., Number], int, int]] = {
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "sqrt": (math.sqrt, 1, 1),
    "min": (min, 2, 100),
    "max": (max, 2, 100),
}
"""Functions by name, with the minimum and maximum number of arguments."""


def _format(number: Number) -> str:
    """Format a number; fractions with twelve digits, so that 0.1 + 0.2 is 0.3."""
    if isinstance(number, int):
        return str(number)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else f"{number:.12g}"
