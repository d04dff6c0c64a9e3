"""Knobs are checked at their declaration and when they are read."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config.knob_tree import explain_values
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import PARAMETER, build, default_of, knob, knobs
from staleflow.tasks.settings.registry import RegistryEntry


@pytest.mark.parametrize(
    ("default", "limits", "fault"),
    [
        (2, {"high": 1}, "= 2 is out of range; it must be <= 1"),
        (1.0, {"low": 0, "below": 1}, "= 1.0 is out of range; it must be >= 0, < 1"),
        (0.0, {"above": 0}, "= 0.0 is out of range; it must be > 0"),
        (-1, {"low": 0, "high": 3}, "it must be >= 0, <= 3"),
        (float("inf"), {}, "= inf must be finite"),
        (
            "gredy",
            {"choices": ("greedy", "status")},
            "must be one of greedy, status, not 'gredy'; did you mean 'greedy'",
        ),
    ],
)
def test_an_invalid_default_fails_at_its_declaration(default: Any, limits: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=r"a knob's default breaks its own limits \('what it does'\)") as caught:
        knob(default, "what it does", **limits)
    assert fault in str(caught.value)


def is_table(declared: dataclasses.Field[Any]) -> bool:
    return PARAMETER not in declared.metadata


def test_every_default_passes_the_check_of_set_values() -> None:
    def check(node: Any) -> int:
        own = knobs(type(node))
        tables = {name: default_of(f) for name, f in own.items() if isinstance(default_of(f), RegistryEntry)}
        set_values = {name: default_of(f) for name, f in own.items() if name not in tables}
        chosen = {name: {"name": entry.name} for name, entry in tables.items()}
        assert build(type(node), set_values | chosen, "defaults") == type(node)()
        below = [getattr(node, f.name) for f in dataclasses.fields(node) if f.name not in own and is_table(f)]
        return len(own) + sum(check(item) for item in (*below, *tables.values()))

    assert check(RunConfig()) >= len(explain_values(RunConfig())) > 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    share: float = knob(0.5, "a share", low=0, high=1)
    names: dict[str, int] = knob({}, "numbers by name")
    given: int = 3


def test_only_knobs_are_read_and_tables_are_not_shared() -> None:
    assert build(Sample, {"share": 1}, "x") == Sample(share=1.0)
    assert build(Sample, {}, "x").names is not build(Sample, {}, "x").names
    with pytest.raises(ConfigError, match=r"x: unknown key a.given; known here: share, names"):
        build(Sample, {"given": 4}, "x", "a.")
    with pytest.raises(ConfigError, match=r"x: a.names must be a table, not 3"):
        build(Sample, {"names": 3}, "x", "a.")


class _Reads(ast.NodeVisitor):
    """Collects the attributes that a module reads. own: of `self`, by class; any: of other objects, by name."""

    def __init__(self) -> None:
        self.knobs: dict[str, set[str]] = {}
        """The fields declared as knobs, by class."""
        self.bases: dict[str, set[str]] = {}
        self.own: dict[str, set[str]] = {}
        self.any: set[str] = set()
        self._class = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._class = self._class, node.name
        self.bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        self.knobs[node.name] = {
            field.target.id
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(field.value, ast.Call) and ast.unparse(field.value.func) == "knob"
        }
        self.generic_visit(node)
        self._class = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            (self.own.setdefault(self._class, set()) if of_self else self.any).add(node.attr)
        self.generic_visit(node)


def unread_knobs(sources: Iterable[str]) -> list[str]:
    """Return the knobs that no code reads."""
    reads = _Reads()
    for source in sources:
        reads.visit(ast.parse(source))

    def below(name: str) -> set[str]:
        return {name}.union(*(below(item) for item, bases in reads.bases.items() if name in bases))

    return [
        f"{name}.{knob}"
        for name, knobs in sorted(reads.knobs.items())
        for knob in sorted(knobs - reads.any)
        if not any(knob in reads.own.get(item, ()) for item in below(name))
    ]


DECLARED = """
class Rule:
    share: float = knob(1.0, "read by nobody")
    least: int = knob(1, "read by a class below it")
    most: int = knob(1, "read by others")
"""
USED = """
class Mine(Rule):
    def check(self):
        return self.least

class Other:
    def check(self, rule):
        rule.share = 3
        return self.share + rule.most
"""


def test_an_unused_knob_is_found() -> None:
    assert unread_knobs([DECLARED, USED]) == ["Rule.share"]


def test_every_knob_is_read() -> None:
    sources = [
        path.read_text() for folder in ("cli", "pipeline", "tasks", "stores") for path in Path(folder).rglob("*.py")
    ]
    assert unread_knobs(sources) == ["RunConfig.profile"], "which is read from the job file while it is loaded"
