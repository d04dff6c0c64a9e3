"""Dry runs: a few small steps of a job on random responses, without a model, and an audit of what they store."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from staleflow.pipeline.api.job_loading import Job, JobObjects, JobSource, with_objects
from staleflow.pipeline.api.run_handle import RunHandle
from staleflow.pipeline.config import preflight, user_files
from staleflow.pipeline.config.knob_tree import Overrides, with_values
from staleflow.pipeline.config.model_files import find_model_folder
from staleflow.pipeline.config.schema import TrackingConfig
from staleflow.pipeline.processes import local_cluster
from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.tasks.engines.engine_settings import EmulatedSettings
from staleflow.tasks.rendering.file_tokenizer import FileTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """What a dry run drew, scored and stored."""

    steps: int
    prompt_length_range: tuple[int, int]
    """Tokens of the shortest and of the longest prompt."""
    first_prompt: str
    """The text of a prompt as a model gets it, in its chat template; empty if the model is not on this machine."""
    num_scored: int
    """Random responses that were scored."""
    reward_range: tuple[float, float]
    """The least and the greatest reward."""
    reward_errors: Mapping[str, int]
    """Number of responses by error of the reward, most frequent first."""
    findings: tuple[str, ...]
    """What an audit of the store found; empty if all holds."""

    @property
    def lines(self) -> list[str]:
        """The result for display, one line per part of the job."""
        lines = ["prompts  drawn and encoded, {} to {} tokens".format(*self.prompt_length_range)]
        if self.first_prompt:
            text = repr(self.first_prompt)  # its white space as it is
            rest = "" if len(text) <= MAX_PROMPT_CHARS else f"... ({len(self.first_prompt)} characters)"
            lines.append(f"         the first: {text[:MAX_PROMPT_CHARS]}{rest}")
        lines.append(
            "reward   computed for {} random responses, {:g} to {:g}".format(self.num_scored, *self.reward_range)
        )
        if self.reward_errors:
            num_failed, first_error = sum(self.reward_errors.values()), next(iter(self.reward_errors))
            lines.append(f"         failed for {num_failed} more; most often: {first_error}")
        findings = self.findings
        outcome = f"{len(findings)} FINDINGS: {findings[0]}" if findings else "audited, all holds"
        return [*lines, f"store    {outcome}"]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def dry_run(
    job: JobSource,
    *,
    overrides: Overrides | None = None,
    rows: Any = None,
    reward: Any = None,
    **objects: Unpack[JobObjects],
) -> DryRunResult:
    """Test a job in seconds: its prompts, reward, coordination and store, on random responses. No model samples or is
    trained, and nothing is kept.

    Args:
        job, overrides, rows, reward, objects: As in `start`.

    Raises:
        ConfigError: The job has a mistake, or an object cannot be sent to workers.
        StaleflowError: The dry run failed.
    """
    config = with_objects(job, overrides, {"rows": rows, "reward": reward, **objects})
    with tempfile.TemporaryDirectory(prefix="staleflow-dry-") as folder:
        dry_config = make_dry_job(config, Path(folder))
        local_cluster.start_fork_server(dry_config.cluster.threads, local_cluster.modules_to_preload(emulated=True))
        preflight.check_job(replace(dry_config, reward=config.reward))
        handle = RunHandle(dry_config, resume=False, security=None, progress=False)
        return read_dry_run_result(handle.result_or_interrupt().run_dir)


def read_dry_run_result(run_dir: Path) -> DryRunResult:
    """Read the results of a dry run from its store, and audit it. Raises StoreError."""
    store = VersionedStore.open(run_dir / "store")
    audit_result = audit(store)
    scored_trajectories = [row.trajectory for row in store.trajectories() if row.trajectory.timings.rewarded_s]
    errors = Counter(t.error for t in scored_trajectories if t.error)
    rewards = [t.reward for t in scored_trajectories if not t.error]
    prompt_lengths = [len(t.prompt_tokens) for t in scored_trajectories]
    first_prompt, model = "", Path(load_job(run_dir).model.path)
    if scored_trajectories and model.is_dir():
        first_tokens = min(scored_trajectories, key=lambda t: t.id).prompt_tokens
        first_prompt = FileTokenizer(model).decode(first_tokens.tolist(), skip_special_tokens=False)
    return DryRunResult(
        steps=audit_result.num_steps,
        prompt_length_range=(min(prompt_lengths, default=0), max(prompt_lengths, default=0)),
        first_prompt=first_prompt,
        num_scored=len(rewards),
        reward_range=(min(rewards, default=0.0), max(rewards, default=0.0)),
        reward_errors=dict(errors.most_common()),
        findings=tuple(finding.message for finding in audit_result.findings),
    )


MAX_PROMPT_CHARS = 500
"""Maximum length of the prompt that is shown."""
MAX_STEPS, MAX_GROUPS, MAX_WORKERS = 3, 8, 2
"""Most training steps, groups per step, and rollout instances or reward workers of a dry run."""
MAX_RESPONSE_S = 0.5
"""Seconds the longest response should take."""
DEFAULT_TOKEN_S = 0.012
"""Seconds a token takes by the default cost model."""
MAX_TIME_SCALE = 100.0
"""Largest factor by which a dry run's time is shortened; beyond it, its own messages would count as slow."""


def make_dry_job(job: Job, runs_dir: Path) -> Job:
    """Build the dry run of a job, in another folder for runs, which has its store too. Prompts, template, tokenizer,
    reward and strategies are the job's; engine and trainer are emulated, on this machine. Raises ConfigError if the
    model is not found, or a text cannot name a folder."""
    preflight.check_names(job)
    config = user_files.with_absolute_paths(job)
    rollout, batch, max_new_tokens = config.rollout, config.batch, config.rollout.max_new_tokens
    folder = find_model_folder(config.model.path) if config.model.path else None
    scale = min(max(max_new_tokens * DEFAULT_TOKEN_S / MAX_RESPONSE_S, 1.0), MAX_TIME_SCALE)
    engine = EmulatedSettings.with_knobs_of(rollout.engine, time_scale=scale)
    groups, instances = min(batch.groups_per_step, MAX_GROUPS), min(rollout.instances, MAX_WORKERS)
    values: dict[str, Any] = {
        "runs_dir": str(runs_dir),
        "store": "",  # a bucket would keep it, under the name of the real run
        "steps": min(config.steps, MAX_STEPS),
        "model.path": str(folder or config.model.path),
        "model.device": "cpu",
        "batch.groups_per_step": groups,
        "batch.extra_groups": min(batch.extra_groups, groups),
        "rollout.engine": engine,
        "rollout.instances": instances,
        "rollout.min_instances": min(rollout.min_instances, instances),
        "rollout.logprob_drift_limit": 1e9,
        "training.minibatches": min(config.training.minibatches, groups * batch.group_size),
        # An emulated run has no checkpoint, and may have no held-out set.
        "evaluation.best_checkpoint_set": "",
        # Random answers may fail more often than a model's: failures are counted, and the first is shown.
        "reward.workers": min(config.reward.workers, MAX_WORKERS),
        "reward.max_error_share": 1.0,
        "cluster": dataclasses.replace(config.cluster, kind="local", address="", scheduler_file="", dashboard=False),
        "tracking": TrackingConfig(tensorboard=False),
        "workload": dataclasses.replace(
            config.workload, kind="lognormal", median=max(1.0, max_new_tokens / 4), prompts="task"
        ),
        "simulation": dataclasses.replace(config.simulation, train_s=1.0, train_s_per_token=0.0, pull_s=0.1),
    }
    return with_values(config, values)
