"""Jobs of commit 9e20fc41: converted, each setting that was renamed keeps its value."""

from __future__ import annotations

import copy
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.job_conversion import RENAMED, convert_job, is_earlier_job
from staleflow.pipeline.config.knob_tree import to_toml
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError

PREVIOUS = Path(__file__).parent / "previous_jobs"


def value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def test_the_job_of_a_run_of_the_version_before_keeps_its_values_under_their_new_keys() -> None:
    """The file was written by commit 9e20fc41, with other values than the defaults for each key renamed since."""
    tree = tomllib.loads((PREVIOUS / "longtail.config.toml").read_text())
    assert is_earlier_job(tree)
    before = copy.deepcopy(tree)
    converted = convert_job(tree)
    assert tree == before, "it is not modified"
    assert not is_earlier_job(converted)
    assert convert_job(converted) == converted
    config, default = loading.from_tree(converted), loading.load("examples/longtail.toml")
    for old, new in RENAMED.items():
        assert value(config, new) == reduce(lambda below, part: below[part], old.split("."), tree), old
        assert value(config, new) != value(default, new), old
    written = tomllib.loads(to_toml(config))
    assert not is_earlier_job(written) and convert_job(written) == written


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_job_with_a_renamed_key_is_refused_with_the_new_one(old: str, new: str) -> None:
    *tables, name = old.split(".")
    tree: dict[str, Any] = {}
    reduce(lambda below, part: below.setdefault(part, {}), tables, tree)[name] = 1
    with pytest.raises(ConfigError, match=f"^mine: unknown key {old}; did you mean {new}\\?$"):
        loading.from_tree(tree, "mine")
