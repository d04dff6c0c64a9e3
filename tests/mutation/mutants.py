"""Mutations: each changes one node of a module's syntax tree inside a function.

Besides the usual ones (comparisons, booleans, arithmetic, constants, returns) there are removed statements and removed
awaits. Messages, logs, annotations, docstrings, assertions and zip's `strict` are not mutated.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
"""Replacement of each comparison."""
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip
"""Replacement of each operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mutation. function: its qualified name. first, last: lines of its statement, one of which a detecting test
    executes. begin, end: bytes of the source that `new` replaces. number: index among equal ones in this function."""

    path: str
    function: str
    kind: str
    line: int
    first: int
    last: int
    begin: int
    end: int
    old: str
    new: str
    number: int = 0

    @property
    def key(self) -> str:
        """Identifies the mutation while its line reads the same, wherever it moves."""
        alike = f" #{self.number}" if self.number else ""
        return f"{self.path} {self.function}: {self.old} -> {self.new}{alike}"

    def planted(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.begin] + self.new.encode() + source[self.end :]


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutations of a module in source order."""
    results = sorted(_Module(path, source).found(), key=lambda mutant: (mutant.begin, mutant.end, mutant.new))
    seen: dict[str, int] = {}
    numbered = []
    for mutant in results:
        number = seen[mutant.key] = seen.get(mutant.key, -1) + 1
        numbered.append(Mutant(**{name: getattr(mutant, name) for name in Mutant.__slots__} | {"number": number}))
    return numbered


def replaced(path: str, source: bytes, old: str, new: str) -> Mutant:
    """Return a manual mutation. Raises ValueError unless `old` is in the source exactly once."""
    if source.count(old.encode()) != 1:
        raise ValueError(f"{path} has {source.count(old.encode())} times what a mistake replaces: {old}")
    begin = source.index(old.encode())
    line = source[:begin].count(b"\n") + 1
    return Mutant(path=path, function="", kind="planted", line=line, first=line, last=line + old.count("\n"),
                  begin=begin, end=begin + len(old.encode()), old=old, new=new)  # fmt: skip


class _Module:
    """Walks the tree of a module."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._span = (0, 0)
        self._begins = [0]
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        yield from self._outside(ast.parse(self._source), "")

    def _outside(self, node: ast.AST, name: str) -> Iterator[Mutant]:
        """Look for functions."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = f"{name}.{child.name}".lstrip(".")
                if isinstance(child, ast.ClassDef):
                    yield from self._outside(child, inside)
                else:
                    yield from self._block(child.body, inside)

    def _block(self, body: list[ast.stmt], name: str) -> Iterator[Mutant]:
        for statement in body:
            yield from self._statement(statement, name)

    def _statement(self, node: ast.stmt, name: str) -> Iterator[Mutant]:
        before, self._span = self._span, _lines(node)
        yield from self._of_statement(node, name)
        self._span = before

    def _of_statement(self, node: ast.stmt, name: str) -> Iterator[Mutant]:  # noqa: PLR0912  one case per statement
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield from self._outside(ast.Module([node], []), name)
                return
            case ast.Assert() | ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
                return  # impossible cases; docstrings
            case ast.Expr() if _is_log(node.value):
                return
            case ast.Raise():
                yield self._mutant(name, "statement", node, "pass")
                return  # its message is for people
            case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
                yield self._mutant(name, "statement", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._mutant(name, "statement", node, "pass")
            case ast.Return(value=value) if value is not None and ast.unparse(value) not in ("None", "False"):
                yield self._mutant(name, "return", node, "return None")
            case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.Constant):
                yield self._mutant(name, "condition", test, f"(not ({ast.unparse(test)}))")
            case _:
                pass
        for field, value in ast.iter_fields(node):
            if field == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._statement(child, name)
                elif isinstance(child, ast.expr):
                    yield from self._expression(child, name)
                elif isinstance(child, ast.AST):
                    yield from self._within(child, name)

    def _within(self, node: ast.AST, name: str) -> Iterator[Mutant]:
        """Yield handlers, cases, `with` items and comprehensions of a node."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from self._statement(child, name)
            elif isinstance(child, ast.expr):
                if not isinstance(node, ast.MatchValue | ast.MatchClass | ast.ExceptHandler):
                    yield from self._expression(child, name)
            else:
                yield from self._within(child, name)

    def _expression(self, node: ast.expr, name: str) -> Iterator[Mutant]:
        match node:
            case ast.JoinedStr():
                return  # for people, and without places in the source
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                other = COMPARED[type(op)]()
                yield self._expr(name, "comparison", node, ast.Compare(left, [other], [right]))
            case ast.BoolOp(op=op, values=values):
                yield self._expr(name, "boolean", node, ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(),
                                                                   values))  # fmt: skip
            case ast.BinOp(left=left, op=op, right=right) if type(op) in CALCULATED and not _is_text(left, right):
                yield self._expr(name, "arithmetic", node, ast.BinOp(left, CALCULATED[type(op)](), right))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._expr(name, "boolean", node, operand)
            case ast.Constant(value=bool() as value):
                yield self._mutant(name, "constant", node, str(not value))
            case ast.Constant(value=int() | float() as number):
                yield self._mutant(name, "constant", node, repr(number + 1))
            case ast.Await(value=value):
                yield self._mutant(name, "await", node, f"__import__('asyncio').ensure_future({ast.unparse(value)})")
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from self._expression(child, name)
            elif isinstance(child, ast.keyword | ast.comprehension) and not _is_zip(node):
                yield from self._within(child, name)

    def _expr(self, name: str, kind: str, node: ast.expr, new: ast.expr) -> Mutant:
        return self._mutant(name, kind, node, f"({ast.unparse(new)})")

    def _mutant(self, name: str, kind: str, node: ast.stmt | ast.expr, new: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._begins[node.lineno - 1] + node.col_offset
        end = self._begins[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(self._source[begin:end].decode().split())
        return Mutant(path=self._path, function=name, kind=kind, line=node.lineno, first=self._span[0],
                      last=self._span[1], begin=begin, end=end, old=old, new=new)  # fmt: skip


def _lines(node: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement without its nested statements."""
    inner = [child.lineno for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    assert node.end_lineno is not None
    return node.lineno, max(node.lineno, min([node.end_lineno, *(line - 1 for line in inner)]))


def _is_log(value: ast.expr) -> bool:
    """Return whether an expression is a logging call."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("logger.")


def _is_zip(node: ast.expr) -> bool:
    """Return whether an expression is a call of zip with its `strict` keyword."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


def _is_text(*values: ast.expr) -> bool:
    return any(isinstance(v, ast.JoinedStr) or (isinstance(v, ast.Constant) and isinstance(v.value, str))
               for v in values)  # fmt: skip
