"""Registries: name, description, knobs and behaviour in one place; the table that chooses is composed from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from staleflow.tasks.settings.knobs import build, default_of, knob, knobs
from staleflow.tasks.settings.registry import Registry, choice, composed


class Brush(Protocol):
    @property
    def colour(self) -> str: ...

    def paint(self) -> str: ...


def brushes() -> Registry[Brush]:
    """Two brushes, one with a knob and with something it is given."""
    registry: Registry[Brush] = Registry("brush", "paint.brush", contract=Brush)

    @registry.register("plain")
    class Plain:
        colour = "white"

        def paint(self) -> str:
            return self.colour

    @registry.register("wide")
    @dataclass(frozen=True)
    class Wide:
        ink: str
        width: int = knob(3, "how wide", low=1)
        other: str = "as declared"

        colour = "blue"

        def paint(self) -> str:
            return self.ink * self.width + self.other

    return registry


def table(registry: Registry[Any], **choosing: Any) -> type[Any]:
    @dataclass(frozen=True, slots=True, kw_only=True)
    @composed
    class Paint:
        size: int = knob(1, "how much")
        brush: str = choice(registry, "plain", "with what", **choosing)
        wet: bool = knob(False, "whether it is wet")

    return Paint


def test_a_table_has_the_knobs_of_all_it_may_choose_behind_the_choice() -> None:
    registry = brushes()
    paint = table(registry)
    assert list(knobs(paint)) == ["size", "brush", "width", "wet"]
    assert list(knobs(table(registry, knobs_after="wet"))) == ["size", "brush", "wet", "width"]
    assert default_of(knobs(paint)["width"]) == 3
    with pytest.raises(ValueError, match=r"x: width = 0 is out of range; it must be >= 1"):
        build(paint, {"width": 0}, "x")


def test_it_is_made_with_its_knobs_and_with_what_it_asks_for() -> None:
    registry = brushes()
    paint = table(registry)
    assert registry.make(paint(), {"ink": "!"}).paint() == "white"
    assert registry.make(paint(brush="wide", width=2), {"ink": "!", "unasked": 1}).paint() == "!!as declared"
    assert registry.wants("wide", "ink") and not registry.wants("plain", "ink")
    with pytest.raises(ValueError, match="no brush 'thin'; choose from plain, wide"):
        registry.make(paint(brush="thin"))


def test_what_cannot_be_registered_says_why() -> None:
    registry = brushes()
    with pytest.raises(TypeError, match="brush 'dry' lacks colour, paint"):
        registry.register("dry")(object)
    with pytest.raises(ValueError, match="brush 'plain' is registered already"):
        registry.register("plain")(registry.find("wide"))

    def with_width(**limits: Any) -> type[Any]:
        @dataclass
        class Other:
            width: int = knob(3, "how wide", **limits)

            colour = "red"

            def paint(self) -> str:
                return ""

        return Other

    with pytest.raises(ValueError, match="knob width is declared differently by another brush"):
        registry.register("other")(with_width(low=2))
    registry.register("same")(with_width(low=1))
    table(registry)
    late = dataclasses.make_dataclass(
        "Late", [("depth", int, knob(1, "how deep"))], namespace={"colour": "", "paint": lambda self: ""}
    )
    with pytest.raises(ValueError, match=r"the table of paint.brush is already built, without depth"):
        registry.register("late")(late)


def test_a_table_that_declares_a_knob_itself_is_refused() -> None:
    registry = brushes()
    with pytest.raises(ValueError, match="Twice declares width, and so does a brush"):

        @composed
        class Twice:
            brush: str = choice(registry, "plain", "with what")
            width: int = knob(3, "how wide", low=1)

    with pytest.raises(ValueError, match="Thrice has no field nowhere to place knobs after"):

        @composed
        class Thrice:
            brush: str = choice(registry, "plain", "with what", knobs_after="nowhere")
