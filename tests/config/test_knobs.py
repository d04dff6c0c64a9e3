"""Knobs: checked where they are declared and where they are read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from staleflow.pipeline.config.knob_tree import explained
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import PARAMETER, build, default_of, knob, knobs
from staleflow.tasks.settings.registry import RegistryEntry


@pytest.mark.parametrize(
    ("default", "limits", "fault"),
    [
        (2, {"high": 1}, "= 2 is out of range; it must be <= 1"),
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
def test_a_default_beyond_its_own_limits_fails_where_it_is_declared(default: Any, limits: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=r"a knob's default breaks its own limits \('what it does'\)") as caught:
        knob(default, "what it does", **limits)
    assert fault in str(caught.value)


def is_table(declared: dataclasses.Field[Any]) -> bool:
    return PARAMETER not in declared.metadata


def test_every_default_of_a_job_passes_the_check_that_a_set_value_passes() -> None:
    def check(node: Any) -> int:
        own = knobs(type(node))
        tables = {name: default_of(f) for name, f in own.items() if isinstance(default_of(f), RegistryEntry)}
        set_values = {name: default_of(f) for name, f in own.items() if name not in tables}
        chosen = {name: {"name": entry.name} for name, entry in tables.items()}
        assert build(type(node), set_values | chosen, "defaults") == type(node)()
        below = [getattr(node, f.name) for f in dataclasses.fields(node) if f.name not in own and is_table(f)]
        return len(own) + sum(check(one) for one in (*below, *tables.values()))

    assert check(RunConfig()) >= len(explained(RunConfig())) > 100


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
