"""The profile of a run: the cost model fitted to its responses, and latencies of everything else."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.knob_tree import toml_value
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.profiling.fit import CostModelFit
from staleflow.pipeline.profiling.step_samples import DraftStats
from staleflow.pipeline.profiling.time_breakdown import TimeTracker
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.files import replace_text
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.tasks.emulation.cost_model import CostModel

PLACEHOLDER_COST_MODEL = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=1.0, b=0.0, prefill=0.0)
"""Cost model for a `TimeTracker` whose comparison with a cost model is not used, only its fit."""
MAX_SLOPE_ERROR = 0.25
"""Largest standard error of the seconds by token, as a share of them if all time were proportional to the tokens: with
more, a batch of twice the tokens would be forecast worse than by that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Contents of a profile file, which a job reads with `profile = FILE`.

    run_dir: the run's folder. latencies: seconds by the setting's name in [simulation]. draft_stats: draft statistics.
    """

    run_dir: str
    fit: CostModelFit
    latencies: dict[str, float] = field(default_factory=dict)
    draft_stats: DraftStats = field(default_factory=DraftStats)

    def as_dict(self) -> dict[str, Any]:
        """The profile as it is stored: coefficients, ranges, residuals on held-out steps, and its source."""
        fit = self.fit
        return {
            "source": self.run_dir,
            "coefficients": asdict(fit.model),
            "latencies": self.latencies,
            "held_out_error": {"median": fit.error_median, "p90": fit.error_p90},
            "range": {"running": fit.running_range, "kv_tokens": fit.kv_tokens_range},
            "num_points": fit.num_points,
            "acceptance_rate": self.draft_stats.acceptance_rate,
        }


def profile_run(run_dir: Path) -> Profile:
    """Build a profile from a finished run, with all its starts.

    Raises:
        ConfigError: The run has not ended, or sampled too little.
        StoreError: Its summary is damaged.
    """
    try:
        json.loads((run_dir / "summary.json").read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{run_dir}: no finished run: summary.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{run_dir}: summary.json is damaged: {error}; restore it") from error
    job = run_dir / "config.toml"
    tree = loading.read_tree(job) if job.is_file() else {}
    batch, rollout = tree.get("batch", {}), tree.get("rollout", {})
    group_size = batch.get("group_size", 1) + batch.get("extra_members", 0)
    verify_share = rollout.get("cost", {}).get("verify_share", 1.0)
    tracker = TimeTracker(
        replace(PLACEHOLDER_COST_MODEL, verify_share=verify_share), group_size,
        on_pull=rollout.get("on_pull", "keep"),
        max_draft_length=rollout.get("engine", {}).get("speculation", {}).get("num_speculative_tokens", 0),
    )  # fmt: skip
    for _, events in journal.list_start_files(run_dir):
        for entry in journal.JournalReader(events):
            tracker.observe(entry.now, entry.event, entry.commands)
    fit = tracker.fit()
    if fit is None:
        raise ConfigError(f"{run_dir}: the run had too few decode steps to fit a cost model; make it longer")
    latencies = make_latency_settings(tracker, fit)
    if "train_s" in latencies:
        latencies |= split_train_time(latencies["train_s"], read_train_times(run_dir))
    return Profile(run_dir=str(run_dir), fit=fit, latencies=latencies, draft_stats=tracker.draft_stats)


def read_train_times(run_dir: Path) -> list[tuple[float, float]]:
    """Read the tokens, prompts included, and the seconds of each stored training step but the first, in which processes
    warm up."""
    if not (run_dir / "store").exists():
        return []
    store = VersionedStore.open(run_dir / "store")
    table = store.displayed_columns(names=("step", "staleness", "prompt_tokens", "response_tokens", "given_tokens"))
    tokens = table["prompt_tokens"] + table["response_tokens"] + table["given_tokens"]
    return [
        (
            float(tokens[(table["step"] == record.step) & (table["staleness"] >= 0)].sum()),
            sum(record.metrics.get(name, 0.0) for name in ("train_s", "publish_s", "overhead_s")),
        )
        for record in store.commits()
        if record.kind == "step" and record.step and "train_s" in record.metrics
    ]


def split_train_time(mean_s: float, times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Split the seconds of a training step into a constant part and one by token, so that they hold for other batches.

    The slope is that of least squares if its standard error is small; otherwise all of it counts as proportional to the
    tokens. At the mean number of tokens, the result is `mean_s` in any case.

    Args:
        mean_s: Mean seconds of a step in the run's latencies.
        times: (tokens, seconds) of each step.

    >>> split_train_time(2.0, [(100.0, 2.0), (200.0, 2.0), (300.0, 2.0), (400.0, 2.0)])
    {'train_s': 2.0, 'train_s_per_token': 0.0}
    """
    if not times:
        return {"train_s": mean_s, "train_s_per_token": 0.0}
    tokens, seconds = np.array(times).T
    proportional = mean_s / tokens.mean()
    deviations = tokens - tokens.mean()
    spread = float(deviations @ deviations)
    slope = proportional
    if len(times) > 2 and spread > 0:
        scale = mean_s / seconds.mean()  # an emulated run's stored seconds are not those of its journal
        fitted = float(deviations @ seconds) / spread * scale
        residuals = seconds * scale - mean_s - fitted * deviations
        error = math.sqrt(float(residuals @ residuals) / (len(times) - 2) / spread)
        if error < MAX_SLOPE_ERROR * proportional:
            slope = min(max(0.0, fitted), proportional)
    return {"train_s": max(0.0, mean_s - float(slope * tokens.mean())), "train_s_per_token": float(slope)}


def make_latency_settings(tracker: TimeTracker, fit: CostModelFit) -> dict[str, float]:
    """Make the settings of [simulation] from the latencies of a run, including slow instances. The delay of a response
    is two messages; messages of a pull are not counted in pull_s."""
    seconds = tracker.latency_tracker.means
    slow_names, factor = tracker.slow_instances
    if slow_names:
        seconds |= {"straggler_share": len(slow_names) / tracker.num_instances, "straggler_factor": factor}
    if fit.delay_s:
        seconds["message_s"] = fit.delay_s / 2
        if "pull_s" in seconds:
            seconds["pull_s"] = max(0.0, seconds["pull_s"] - fit.delay_s)
    return seconds


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON. Raises StoreError if the file cannot be written."""
    replace_text(path, json.dumps(profile.as_dict(), indent=1) + "\n", "choose another place with --out")


def make_recorded_overrides(run_dir: Path, profile: Profile) -> tuple[str, ...]:
    """A stored run's responses and measured times, as overrides of its job file."""
    overrides = ["workload.kind=recorded", f"workload.run={toml_value(str(run_dir))}"]
    cost = profile.draft_stats.scale_cost_model(profile.fit.model)
    overrides += [f"rollout.cost.{name}={value!r}" for name, value in asdict(cost).items()]
    if profile.draft_stats.acceptance_rate is not None:
        overrides.append(f"workload.acceptance_rate={profile.draft_stats.acceptance_rate!r}")
    overrides += [f"simulation.{name}={value!r}" for name, value in profile.latencies.items()]
    if "straggler_share" not in profile.latencies:  # the measured latencies include slow instances
        overrides.append("simulation.straggler_share=0.0")
    overrides.append(f"simulation.cost_error={profile.fit.error_median!r}")
    return tuple(overrides)
