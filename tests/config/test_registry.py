"""Registries: a job has the named class of each kind with the knobs of that class only."""

from __future__ import annotations

import tomllib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config.knob_tree import explain_values, to_toml
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import build, knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry, UserCode, choice


class Brush(RegistryEntry, ABC):
    __slots__ = ()

    @property
    @abstractmethod
    def colour(self) -> str: ...

    @abstractmethod
    def paint(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBrush(UserCode, Brush):
    @property
    def colour(self) -> str:
        return str(self.code.colour)

    def paint(self) -> str:
        return f"[{self.code.paint()}]"


BRUSHES: Registry[Brush] = Registry("brush", "brush", Brush, user_code=OwnBrush)


@BRUSHES.register("plain")
@dataclass(frozen=True, slots=True)
class Plain(Brush):
    colour = "white"

    def paint(self) -> str:
        return self.colour


@BRUSHES.register("wide")
@dataclass(frozen=True, slots=True)
class Wide(Brush):
    ink: str = parameter()
    width: int = knob(3, "how wide", low=1)

    colour = "blue"

    def paint(self) -> str:
        return self.ink * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    size: int = knob(1, "how much")
    brush: Brush = choice(BRUSHES, "plain", "with what")


def build_paint(tree: Any) -> Paint:
    return build(Paint, tree, "x")


def test_a_name_is_short_for_a_table_with_that_name() -> None:
    assert build_paint({"brush": "wide"}) == build_paint({"brush": {"name": "wide"}}) == Paint(brush=Wide())
    assert build_paint({}) == build_paint({"brush": {}}) == Paint(brush=Plain())
    assert build_paint({"brush": {"name": "wide", "width": 5}}).brush == Wide(width=5)
    assert (Plain.name, Wide().name) == ("plain", "wide")


@pytest.mark.parametrize(
    ("brush", "message"),
    [
        ("wid", "x: brush must be one of plain, wide, or your own, file.py:NAME, not 'wid'; did you mean 'wide'?"),
        ({"name": "wid"}, "x: brush.name must be one of plain, wide, or your own"),
        (3, "x: brush must be a name, or a table with name, not 3"),
        ({"width": 2}, "x: brush.width: a knob of wide; brush.name is plain, which has none"),
        ({"name": "wide", "widht": 2}, "x: brush.widht: the brush wide has no such knob; did you mean brush.width?"),
        ({"name": "wide", "colour": 2}, "x: brush.colour: the brush wide has no such knob; it has width"),
        ({"name": "wide", "ink": "!"}, "x: brush.ink: the brush wide has no such knob; it has width"),
        ({"name": "wide", "width": 0}, "x: brush.width = 0 is out of range; it must be >= 1"),
        ({"name": "wide", "width": "2"}, "x: brush.width must be a whole number, not '2'"),
        ({"name": "mine.py:X", "width": 2**64}, "x: brush.width = 18446744073709551616 is out of range"),
    ],
)
def test_each_mistake_gives_a_one_line_error(brush: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_paint({"brush": brush})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_suggests_the_table_that_has_it() -> None:
    with pytest.raises(ConfigError, match=r"unknown key width; did you mean brush.width\?"):
        build_paint({"width": 2})


def test_an_entry_is_made_with_its_knobs_and_parameters() -> None:
    wide = build_paint({"brush": {"name": "wide", "width": 2}}).brush
    assert wide.needs("ink") and not wide.needs("width") and not Plain().needs("ink")
    assert BRUSHES.make(wide, {"ink": "!", "other": 1}).paint() == "!!"
    assert BRUSHES.make(Plain(), {"ink": "!"}).paint() == "white"
    with pytest.raises(KeyError):
        BRUSHES.make(wide, {})


def test_user_code_has_its_knobs_in_the_same_table_and_is_loaded_on_use(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    table = {"name": f"{file}:Mine", "times": 2}
    brush = build_paint({"brush": table}).brush  # no file is there yet
    file.write_text(
        "from dataclasses import dataclass\nfrom staleflow.tasks.settings.knobs import knob\n"
        "@dataclass\nclass Mine:\n    ink: str\n    times: int = knob(1, 'how often', low=1)\n    colour = 'red'\n"
        "    def paint(self): return self.ink * self.times\n"
        "class Half:\n    colour = 'red'\n"
    )
    assert BRUSHES.make(brush, {"ink": "!"}).paint() == "[!!]"
    assert BRUSHES.make(brush, {"ink": "!"}) != brush
    with pytest.raises(ConfigError, match=r"unknown key brush.tmes; did you mean brush.times\?"):
        BRUSHES.make(build_paint({"brush": {"name": f"{file}:Mine", "tmes": 2}}).brush, {"ink": "!"})
    with pytest.raises(ConfigError, match="unknown parameter ink; available: nothing"):
        BRUSHES.make(brush)
    with pytest.raises(ConfigError, match=r"it lacks paint; docs/extending.md has an example"):
        BRUSHES.make(build_paint({"brush": f"{file}:Half"}).brush)
    with pytest.raises(ConfigError, match="the run sets times; give this knob another name"):
        BRUSHES.make(brush, {"ink": "!", "times": 7})


@pytest.mark.parametrize("brush", ["plain", {"name": "wide", "width": 5}, {"name": "mine.py:X", "a b": 1, "c": [2]}])
def test_a_choice_is_written_and_explained_with_its_knobs(brush: Any) -> None:
    paint = build_paint({"brush": brush})
    table = {"name": brush} if isinstance(brush, str) else brush
    assert tomllib.loads(to_toml(paint)) == {"size": 1, "brush": table}
    assert {row.key: row.value for row in explain_values(paint)} == {
        "size": 1, **{f"brush.{key}": value for key, value in table.items()}
    }  # fmt: skip


def test_an_invalid_registration_raises_with_the_reason() -> None:
    @dataclass(frozen=True)
    class Handle(Brush):
        pass

    with pytest.raises(TypeError, match="brush 'handle' lacks colour, paint"):
        BRUSHES.register("handle")(Handle)
    with pytest.raises(TypeError, match="brush 'bare' must be a dataclass derived from Brush"):
        BRUSHES.register("bare")(type("Bare", (Plain,), {}))
    with pytest.raises(ValueError, match="brush 'plain' is registered already"):
        BRUSHES.register("plain")(Wide)
    with pytest.raises(ValueError, match="no brush 'thin'; choose from plain, wide"):
        BRUSHES.find("thin")
