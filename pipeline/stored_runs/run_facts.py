"""Reading what is compared of a stored run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from staleflow.pipeline.config.knob_tree import explain_values, toml_value
from staleflow.pipeline.recovery import source_fingerprints
from staleflow.pipeline.recovery.run_folder import load_job, read_summary
from staleflow.pipeline.recovery.start_inputs import user_code_hash
from staleflow.pipeline.runtime.evaluation_results import read_evaluations, read_rewards, read_suites
from staleflow.pipeline.stored_runs.comparison import EvaluationFacts, RunFacts
from staleflow.stores.trajectories.reader import StoreReader

READ_COLUMNS = ("fate", "reward", "rewarded_s", "loss_mask", "source", "dataset_row")
"""Columns of the store that rewards in training are read from."""


def read_run_facts(run_dir: Path, store: StoreReader | None, name: str, shown_part: Mapping[str, str]) -> RunFacts:
    """Read what is compared of a run.

    Args:
        run_dir: Its folder.
        store: Its store at the snapshot to read; None before the run has one.
        name: To be shown.
        shown_part: What of the run is shown, if not all of it: `branch`, `at_step`.

    Raises:
        ConfigError: Its job cannot be read.
        StoreError: Another file cannot be read.
    """
    job, folder = load_job(run_dir), f"{run_dir.resolve()}/"
    settings = {row.key: toml_value(row.value).replace(folder, "RUN/") for row in explain_values(job)} | dict(
        shown_part
    )
    fingerprints = source_fingerprints.read(run_dir)
    digests = {} if fingerprints is None else fingerprints.digests_without_seed()
    digests["user code"] = user_code_hash(run_dir, includes_branches=False)[: source_fingerprints.HASH_DIGITS]
    settings |= {f"fingerprint of {part}": toml_value(digest) for part, digest in digests.items() if digest}
    facts = {} if fingerprints is None else asdict(fingerprints)
    reward, data = (json.dumps(facts[part], sort_keys=True) if facts.get(part) else "" for part in ("reward", "data"))
    reward += shown_part.get("branch", "")  # its rewards are others
    steps = [] if store is None else [record.metrics for record in store.commits() if record.kind == "step"]
    return RunFacts(
        name=name,
        settings=settings,
        steps=steps,
        evaluations=_evaluations(run_dir, len(steps)),
        training_rewards={} if store is None else _training_rewards(store, list(job.task.sources_by_name)),
        reward_fingerprint=reward,
        data_fingerprint=data,
        diagnosis=_diagnosis(run_dir),
    )


def _evaluations(run_dir: Path, num_steps: int) -> list[EvaluationFacts]:
    facts = []
    for evaluation in (*read_evaluations(run_dir), *read_suites(run_dir)):
        if evaluation.mean_reward is not None and evaluation.version <= num_steps:
            stderr = evaluation.sampled_stderr if evaluation.samples else evaluation.greedy_stderr
            prompts = read_rewards(run_dir, evaluation.version).get(evaluation.name, {})
            facts.append(
                EvaluationFacts(
                    set=evaluation.name, version=evaluation.version, reward=evaluation.mean_reward, stderr=stderr,
                    reward_fingerprint=evaluation.reward_fingerprint, rewards_by_prompt=prompts,
                )
            )  # fmt: skip
    return facts


def _training_rewards(store: StoreReader, sources: Sequence[str]) -> dict[str, list[float]]:
    """Rewards of all responses that were scored, by their prompt's source and row; empty if rows are not stored. A
    discarded response whose reward failed counts as 0. sources: names of the task sources."""
    columns = store.displayed_columns(names=READ_COLUMNS)
    has_failed = (columns["fate"] == "consumed") & ~columns["loss_mask"].astype(bool)
    (positions,) = np.nonzero((columns["rewarded_s"] > 0) & ~has_failed & (columns["dataset_row"] >= 0))
    rewards: dict[str, list[float]] = {}
    prompts = zip(columns["source"][positions].tolist(), columns["dataset_row"][positions].tolist(), strict=True)
    for (source, row), reward in zip(prompts, columns["reward"][positions].tolist(), strict=True):
        rewards.setdefault(f"{sources[source]}:{row}", []).append(reward)
    return rewards


def _diagnosis(run_dir: Path) -> str:
    """What limited a run's speed, as its summary has it; empty if it has none."""
    diagnosis = read_summary(run_dir).get("diagnosis")
    return str(diagnosis.get("line", "")) if isinstance(diagnosis, dict) else ""
