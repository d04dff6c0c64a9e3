"""Loading and checking job files: TOML, overrides, and the costs measured by `staleflow profile`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.cross_checks import check_key_combinations
from staleflow.pipeline.config.knob_tree import apply_override, merge_trees
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.task_tables import with_named_tasks
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import build


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a job file and apply `key=value` overrides (values in TOML; bare words are strings)."""
    return from_tree_with_overrides(read_tree(path), overrides, str(path))


def read_tree(path: str | Path) -> dict[str, Any]:
    """A job file as nested plain values, unchecked. Raises ConfigError if it is not valid TOML."""
    path = Path(path)
    try:
        # Some editors begin a file with a byte order mark.
        return with_named_tasks(tomllib.loads(path.read_text("utf-8-sig")), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file; `staleflow init FOLDER` writes a first one") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, not a job file; name the file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deep") from None
    except ConfigError:
        raise
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def from_tree_with_overrides(tree: dict[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    """Apply overrides to nested plain values, then build and check a RunConfig from them."""
    for override in sorted(overrides, key=_key_depth):
        apply_override(tree, override)
    return from_tree(tree, source)


def _key_depth(override: str) -> int:
    """Depth of an override's key. Overrides are sorted by it: a whole table is set before the keys in that table."""
    return override.partition("=")[0].count(".")


def from_tree(tree: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Build and check a RunConfig from nested plain values."""
    config = build(RunConfig, _with_profile(with_named_tasks(tree, source), source), source)
    check_key_combinations(config, source)
    return config


def _with_profile(tree: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The tree with the profile's file name replaced by the costs in that file, so that later changes to the file do
    not affect the run. Without a [workload], simulated responses are those of the profiled run, if it is on this
    machine."""
    name = tree.get("profile")
    if not name or not isinstance(name, str):
        return tree
    setting = f"{source}: profile = {name!r}"
    try:
        profile = json.loads(Path(name).read_text("utf-8"))
        cost = {key: profile["coefficients"][key] for key in ("k1", "k2", "k3", "k4", "b", "prefill")}
        cost["verify_share"] = profile["coefficients"]["verify_share"]
        seconds = dict(profile.get("latencies", {}))
        if "train_s" in seconds:  # without a share by token the measured time is that of a mean step
            seconds.setdefault("train_s_per_token", 0.0)
        if (error := profile.get("held_out_error", {}).get("median")) is not None:
            seconds["cost_error"] = error
        run_dir = Path(profile.get("source", ""))
        acceptance = profile.get("acceptance_rate")  # None if the run drafted nothing, or an engine was profiled
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot be read: {error.strerror or error}; `staleflow profile` writes one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{setting}: not a profile ({error!r}); create it again with `staleflow profile`") from error
    measurements: dict[str, Any] = {"profile": "", "rollout": {"cost": cost}, "simulation": seconds}
    if acceptance is not None:
        measurements["workload"] = {"acceptance_rate": acceptance}
    if "workload" not in tree and (run_dir / "store").exists():
        measurements["workload"] = {**measurements.get("workload", {}), "kind": "recorded", "run": str(run_dir)}
    return merge_trees(tree, measurements)
