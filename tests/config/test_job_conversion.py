"""Jobs of earlier versions: converted, each knob is where it is now, and nothing else has changed.

earlier_jobs/ has what commit 976202a wrote into config.toml for each example.
"""

from __future__ import annotations

import copy
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.job_conversion import CHOICES, MOVED, REMOVED, RENAMED, convert_job, is_earlier_job
from staleflow.pipeline.config.knob_tree import to_toml
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.strategies.routing import UserRouting
from staleflow.stores.errors import ConfigError
from staleflow.tasks.training.loss import UserLoss

EARLIER = sorted((Path(__file__).parent / "earlier_jobs").glob("*.config.toml"))
PREVIOUS = Path(__file__).parent / "previous_jobs"
REGISTRIES = dict(CHOICES)
NAME = {"training.loss": "training.loss.name", "rollout.engine": "rollout.engine.name"}
"""Keys that named an entry otherwise than by their own value."""


def earlier(name: str = "demo") -> dict[str, Any]:
    """The job of an example as 976202a wrote it."""
    return tomllib.loads((Path(__file__).parent / "earlier_jobs" / f"{name}.config.toml").read_text())


SAME_PLACE = [
    (choice, knob, name)
    for choice, table in (
        ("training.loss", earlier()["training"]["loss"]),
        ("rollout.engine", earlier()["rollout"]["engine"]),
    )
    for knob in table
    for name in REGISTRIES[choice].with_knob(knob)
    if knob != "speculation"
]
"""(key of the choice, knob, name of an entry that has it) of the knobs that stay where they were."""
MOVED_KNOBS = [
    (choice, old, new, name)
    for old, new in MOVED.items()
    for choice, _, knob in [new.rpartition(".")]
    if choice in REGISTRIES
    for name in REGISTRIES[choice].with_knob(knob)
]
"""(key of the choice, key before, key now, name of an entry that has it) of the knobs that have moved."""


def with_values(tree: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy of a tree with other values, by dotted key."""
    result = copy.deepcopy(tree)
    for key, value in values.items():
        *tables, name = key.split(".")
        table = reduce(lambda below, part: below[part], tables, result)
        assert name in table or name in {"routing_options", "options"}, f"{key} was no key"
        table[name] = value
    return result


def value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def other(default: Any) -> Any:
    """A value that differs from a knob's default and is within its limits."""
    if isinstance(default, float):
        return 2 * default if default >= 1 else (default + 1) / 2
    return {"trajectory": "segment"}.get(default, default) if isinstance(default, str) else default or {"a": 1}


@pytest.mark.parametrize("path", EARLIER, ids=lambda p: p.name.partition(".")[0])
def test_the_job_of_an_earlier_run_reads_as_the_same_job(path: Path) -> None:
    tree = tomllib.loads(path.read_text())
    before = copy.deepcopy(tree)
    converted = convert_job(tree)
    assert tree == before, "it is not modified"
    assert is_earlier_job(tree) and not is_earlier_job(converted)
    config = loading.from_tree(converted)
    assert config == loading.load(f"examples/{path.name.partition('.')[0]}.toml")
    assert convert_job(converted) == converted
    written = tomllib.loads(to_toml(config))
    assert convert_job(written) == written
    with pytest.raises(
        ConfigError, match=r"unknown key batch.straggler_patience; did you mean batch.stragglers.patience"
    ):
        loading.from_tree(tree)


def test_the_job_of_a_run_of_the_version_before_keeps_its_values_under_their_new_keys() -> None:
    """The file was written by commit 9e20fc41, with other values than the defaults for each key renamed since."""
    tree = tomllib.loads((PREVIOUS / "longtail.config.toml").read_text())
    assert is_earlier_job(tree)
    converted = convert_job(tree)
    assert not is_earlier_job(converted)
    config, default = loading.from_tree(converted), loading.load("examples/longtail.toml")
    for old, new in RENAMED.items():
        assert value(config, new) == reduce(lambda below, part: below[part], old.split("."), tree), old
        assert value(config, new) != value(default, new), old


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_job_with_a_renamed_key_is_refused_with_the_new_one(old: str, new: str) -> None:
    *tables, name = old.split(".")
    tree: dict[str, Any] = {}
    reduce(lambda below, part: below.setdefault(part, {}), tables, tree)[name] = 1
    with pytest.raises(ConfigError, match=f"^mine: unknown key {old}; did you mean {new}\\?$"):
        loading.from_tree(tree, "mine")


@pytest.mark.parametrize(("choice", "old", "new", "name"), MOVED_KNOBS, ids=lambda part: part.rpartition(".")[2])
def test_each_knob_that_has_moved_keeps_its_value(choice: str, old: str, new: str, name: str) -> None:
    base = with_values(earlier(), **{"staleness.eta": 9, choice: name})
    reference = loading.from_tree(convert_job(base))
    before = value(reference, new)
    set_to = 2 if new.endswith(".ahead") else other(before)
    config = loading.from_tree(convert_job(with_values(base, **{old: set_to})))
    assert value(config, f"{choice}.name") == name
    assert value(config, new) == set_to != before


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in MOVED.items() if old.count(".") == 2])
def test_each_setting_of_the_trainer_that_has_moved_keeps_its_value(old: str, new: str) -> None:
    set_to = {"training.aggregation": "sequence_mean", "training.entropy_bonus": 0.25}[new]
    assert value(loading.from_tree(convert_job(with_values(earlier(), **{old: set_to}))), new) == set_to


@pytest.mark.parametrize(("choice", "knob", "name"), SAME_PLACE, ids=lambda part: part.rpartition(".")[2])
def test_each_knob_that_stays_where_it_was_keeps_its_value(choice: str, knob: str, name: str) -> None:
    base, key = with_values(earlier(), **{NAME[choice]: name}), f"{choice}.{knob}"
    default = value(loading.from_tree(convert_job(base)), key)
    set_to = 2 * default if isinstance(default, int) else other(default)
    assert value(loading.from_tree(convert_job(with_values(base, **{key: set_to}))), key) == set_to != default


def test_each_key_of_an_earlier_job_that_is_none_any_more_has_moved() -> None:
    tree, refused = earlier(), set()
    for table in ("batch", "staleness", "rollout", "training"):
        for name, set_to in tree[table].items():
            try:
                loading.from_tree({"model": tree["model"], table: {name: set_to}})
            except ConfigError:
                refused.add(f"{table}.{name}")
    tables = {"rollout.engine", "rollout.cost", "training.loss"}  # of which a key has moved or was renamed
    assert {key for key in refused if key.count(".") == 1} - tables <= {*MOVED, *RENAMED, *REMOVED}


def test_knobs_of_user_code_move_into_its_table() -> None:
    tree = with_values(
        earlier(), **{
            "rollout.routing": "mine.py:Rule", "rollout.routing_options": {"most": 3},
            "training.loss.name": "mine.py:Loss", "training.loss.options": {"slope": 2.0},
            "training.advantage": "mine.py:best",
        }
    )  # fmt: skip
    config = loading.from_tree(convert_job(tree))
    assert config.rollout.routing == UserRouting(name="mine.py:Rule", knobs={"most": 3})
    assert config.training.loss == UserLoss(name="mine.py:Loss", knobs={"slope": 2.0})
    assert config.training.advantage.name == "mine.py:best"
