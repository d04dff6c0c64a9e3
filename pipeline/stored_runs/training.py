"""Offline training: the run's trainer and losses on its stored batches, in their order, without rollout.

On all batches of a run, with nothing changed, it reproduces the weights that the run published, step by step, as the
fingerprints in the store prove. Other rewards (a branch), a selection of rows or other settings give another policy.
Behavior logprobs are always the stored ones, so that the losses correct for the difference.

The training is one task on a Dask worker, which leads an actor for each further rank (repeated_steps.py). If it is
killed, the same command resumes it from its newest resume point.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config import actor_settings, knob_tree, user_files
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.config.model_files import find_model_folder
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import certificate, source_fingerprints, start_inputs
from staleflow.pipeline.recovery.certificate import Certificate
from staleflow.pipeline.recovery.run_folder import LOCK_FILE, load_job, lock_folder
from staleflow.pipeline.runtime.evaluation_results import NO_RESPONSE, Evaluation, fewer_prompts_warning
from staleflow.pipeline.stored_runs import repeated_steps
from staleflow.pipeline.stored_runs.pool import EventCallback, creation_lock, open_store_at, run_training
from staleflow.stores.errors import ConfigError, StoreError, raised_as
from staleflow.stores.files import flush_and_rename, replace_text, require_writable_folder
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.records import batch_fingerprint, chain_hash
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, InstanceId, PolicyVersion
from staleflow.stores.weights import weight_file
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.engines.engine_settings import TransformersSettings

if TYPE_CHECKING:
    from staleflow.tasks.sources.reward_process import ScoredResponse
    from staleflow.tasks.training.policy import Policy

OFFLINE_CHANGEABLE_KEYS = ("training.", "teacher.instances", "model.", "seed", "task.eval_prompts")
"""Keys that --set may change: how the policy learns, not what it learns from."""
RESUME_POINT_S = 30.0
"""Seconds of work after which a resume point is written."""
WRITE_REMEDY = "free space or choose another place with --out"
EVALUATION_LIMIT_S = 3600.0
"""Time limit of an evaluation, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """All inputs that determine the result of offline training."""

    config: RunConfig
    store_path: str
    snapshot: str
    branch: str
    where: str
    epochs: int
    out: str
    """The folder to create."""
    is_unchanged: bool
    """Whether nothing differs from the run's own training."""
    prompt_seed: int
    """The run's seed, which determines its prompts, whatever seed it is trained with now."""
    start: int = 0
    """Version to begin with. The steps before it are the run's own, unchanged."""
    resume_point: str = ""
    """The run's resume point of that version; empty for version 0."""

    @property
    def run_job(self) -> RunConfig:
        """The job with the run's seed, for prompts and rewards."""
        return dataclasses.replace(self.config, seed=self.prompt_seed)

    @property
    def digest(self) -> str:
        """Hash that identifies the plan."""
        parts = (knob_tree.to_toml(self.config), self.snapshot, self.where, self.epochs, self.start)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTrainingResult:
    """The result of offline training."""

    out: str
    """The folder that it created."""
    checkpoint: str
    """Folder of the trained weights, in `out`."""
    steps: int
    rows: int
    """Trajectories that were trained on, each counted once an epoch."""
    before: Evaluation | None
    """Reward on held-out prompts before; None if there are none left that were not trained on."""
    after: Evaluation | None
    same_steps: int | None
    """Number of leading steps after which the weights equal the run's bit for bit; None if they are not meant to."""
    errors: dict[int, str]
    """Of trajectories that cannot be read, by id; they are left out."""


def execute_plan(plan: OfflinePlan, client: Any, report: EventCallback) -> OfflineTrainingResult:
    """Execute a plan on as many workers as the job has ranks. Raises ConfigError if fewer are free. client: as in
    `open_pool`."""
    result: OfflineTrainingResult = run_training(train, plan, plan.config.training.ranks, client, report)
    return result


def make_plan(
    run_dir: Path, out: Path, overrides: tuple[str, ...] = (), branch: str = MAIN, where: str = "", epochs: int = 1
) -> OfflinePlan:
    """Make a plan and check it completely. Raises ConfigError."""
    for override in overrides:
        key = override.partition("=")[0]
        if not key.startswith(OFFLINE_CHANGEABLE_KEYS):
            raise ConfigError(
                f"override {override}: cannot be changed offline; these can: {', '.join(OFFLINE_CHANGEABLE_KEYS)}"
            )
    _refuse_existing(out)
    config = load_job(run_dir, overrides)
    if config.emulated:
        raise ConfigError(f"{run_dir}: an emulated run has nothing to train a model on")
    store = VersionedStore.open(run_dir / "store", branch=branch)
    if not repeated_steps.select_consumed_rows(store, where):
        matches = f" matches where = {where!r}" if where else " is stored yet"
        raise ConfigError(f"{run_dir}: no trajectory that was trained on{matches}")
    require_writable_folder(out.parent)
    _check_stored_reference(config, load_job(run_dir))
    if config.training.kl.reference and not config.teachers:
        find_model_folder(config.training.kl.reference, "training.kl.reference")
    inspect_model(config)  # last: it loads torch, which takes seconds
    kept_overrides = [o for o in overrides if not o.startswith("task.eval_prompts")]
    return OfflinePlan(
        config=dataclasses.replace(user_files.with_absolute_models(config), runs_dir=str(out.parent)),
        store_path=str(store.path),
        snapshot=store.snapshot,
        branch=branch,
        where=where,
        epochs=epochs,
        out=str(out.resolve()),
        is_unchanged=branch == "main" and not where and epochs == 1 and not kept_overrides,
        prompt_seed=load_job(run_dir).seed,
    )


def _check_stored_reference(config: RunConfig, run_job: RunConfig) -> None:
    """Raise ConfigError if training would read logprobs of the reference that the run's teachers did not compute."""
    reference, run_reference = (c.training.kl.reference or c.model.path for c in (config, run_job))
    if config.teachers and (not run_job.teachers or reference != run_reference):
        stored = f"those of {run_reference!r}" if run_job.teachers else "none"
        raise ConfigError(
            f"teacher.instances = {config.teacher.instances}: the run stored {stored} as logprobs of the reference; "
            f"set teacher.instances=0, so that the trainer computes those of {reference!r}"
        )


# -- on the worker ---------------------------------------------------------------------------------------------------


def train(plan: OfflinePlan, report: EventCallback) -> OfflineTrainingResult:
    """Execute a plan in this process; with a rank group, this process must be a Dask task."""
    out = Path(plan.out)
    tmp_path = out.with_name(f".{out.name}.tmp_path")
    with raised_as(StoreError, f"{tmp_path}: cannot be created", OSError, remedy="choose another place with --out"):
        tmp_path.mkdir(parents=True, exist_ok=True)
    with lock_folder(tmp_path):
        try:
            _refuse_existing(out)  # another training may have finished meanwhile
        except ConfigError:
            shutil.rmtree(tmp_path, ignore_errors=True)
            raise
        result = _train_and_evaluate(plan, out, tmp_path, report)
        try:
            flush_and_rename(tmp_path, out)
        except OSError as error:
            raise StoreError(f"{out}: cannot be created: {error}; the training's results are in {tmp_path}") from error
        (out / LOCK_FILE).unlink()  # after the rename: without its lock file a folder can be locked by others
    return result


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another folder, or remove it")


def _train_and_evaluate(plan: OfflinePlan, out: Path, tmp_path: Path, report: EventCallback) -> OfflineTrainingResult:
    _prepare(tmp_path, plan)
    with creation_lock:  # this imports transformers
        context = inspect_model(plan.config).context_length
        changes = source_fingerprints.describe_changes(
            source_fingerprints.read(Path(plan.store_path).parent), source_fingerprints.compute(plan.run_job)
        )
    for line in changes:
        report({"say": line})
    before = _evaluate(plan, plan.config.model.path, 0, context, report)
    num_steps = plan.config.steps * plan.epochs
    num_held_out = open_store_at(plan.store_path, plan.snapshot).header.num_held_out
    with repeated_steps.open_policy(plan.config, plan.run_job, num_steps, num_held_out) as policy:
        training = _Training(plan, tmp_path, policy)
        steps = list(
            repeated_steps.offline_steps(
                open_store_at(plan.store_path, plan.snapshot), plan.where, plan.epochs, plan.config.steps
            )
        )
        report({"total": len(steps)})
        for step in range(0 if training.version else plan.config.training.sft.steps):
            policy.fine_tune(step)
        if line := training.explain_other_numerics():
            report({"say": line})
        if training.version > plan.start:
            report({"say": f"resuming after {training.version} of {len(steps)} steps"})
        for number in range(training.version, len(steps)):
            report({"done": number + 1, "total": len(steps), "metrics": training.step(number, *steps[number])})
        checkpoint = tmp_path / "checkpoints" / f"step-{len(steps):06d}"
        training.save(checkpoint)
        version, run = PolicyVersion(len(steps)), out.name
        certificate.write(checkpoint, Certificate(run=run, store="", version=version, entry=training.entry))
    after = _evaluate(plan, str(checkpoint), len(steps), context, report)
    result = OfflineTrainingResult(
        out=plan.out,
        checkpoint=str(out / "checkpoints" / checkpoint.name),
        steps=len(steps),
        rows=sum(len(rows) for _, rows in steps) - len(training.errors) * plan.epochs,
        before=before,
        after=after,
        same_steps=training.same_steps(),
        errors=training.errors,
    )
    shutil.rmtree(tmp_path / "resume", ignore_errors=True)
    lineage = {"store": plan.store_path, "snapshot": plan.snapshot, "branch": plan.branch, "where": plan.where}
    numbers = {"epochs": plan.epochs, "start": plan.start}
    record = {**dataclasses.asdict(result), **lineage, **numbers, "metrics": training.history}
    replace_text(tmp_path / "offline.json", json.dumps(record, indent=2) + "\n", WRITE_REMEDY)
    return result


def _prepare(tmp_path: Path, plan: OfflinePlan) -> None:
    """Prepare the working folder, keeping the results of an earlier attempt at the same plan. Raises StoreError."""
    if not (tmp_path / "plan").is_file() or (tmp_path / "plan").read_text("utf-8") != plan.digest:
        for path in (tmp_path / name for name in ("resume", "checkpoints", "history.jsonl")):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        replace_text(tmp_path / "job.toml", knob_tree.to_toml(plan.config), WRITE_REMEDY)
        replace_text(tmp_path / "plan", plan.digest, WRITE_REMEDY)


HASH_KEYS = ("same", "batch", "weights", "numerics", "previous")
"""Keys in a line of history.jsonl that are not metrics: whether the weights equal the run's, fingerprints of batch and
weights, the trainer's numerics, and the hash of the previous line."""


def make_chain_origin(store: VersionedStore, branch: str, where: str, epochs: int, start: int, job: Path) -> bytes:
    """The predecessor of the first line in history.jsonl: the run's chain entry, and how its rows are trained on."""
    origin = {"entry": store.newest_chain_entry, "branch": branch, "where": where, "epochs": epochs}
    origin |= {"start": start} if start else {}
    return json.dumps(origin | {"settings": start_inputs.settings_hash(job)}).encode()


class _Training:
    """The trainer and its progress."""

    def __init__(self, plan: OfflinePlan, tmp_path: Path, policy: Policy) -> None:
        self._plan, self._tmp_path = plan, tmp_path
        self._store = open_store_at(plan.store_path, plan.snapshot)
        self.policy = policy
        self.errors: dict[int, str] = {}
        self.history: list[dict[str, float]] = []
        self._published = {r.step: r.weight_fingerprint for r in self._store.commits() if r.kind == "step"}
        self._are_equal: list[bool] = []
        self._points = ResumePoints(tmp_path / "resume")
        origin = make_chain_origin(self._store, plan.branch, plan.where, plan.epochs, plan.start, tmp_path / "job.toml")
        self.entry = chain_hash(origin)
        """Entry of the line before in history.jsonl: a chain that goes on from the run's."""
        self._saved_at = time.monotonic()
        self.version = max(self._points.complete_versions(), default=PolicyVersion(plan.start))
        if self.version > plan.start:
            self.policy.load_state(self._points.path(self.version))
            lines = (tmp_path / "history.jsonl").read_text("utf-8").splitlines()[: self.version - plan.start]
            entries = [json.loads(line) for line in lines]
            self._are_equal = [bool(entry.get("same", False)) for entry in entries]
            self.history = [{k: v for k, v in entry.items() if k not in HASH_KEYS} for entry in entries]
            self.entry = chain_hash(lines[-1].encode())
            replace_text(tmp_path / "history.jsonl", "".join(f"{line}\n" for line in lines), WRITE_REMEDY)
        elif plan.start:
            self.policy.load_state(Path(plan.resume_point))
            if self.policy.apply_to_weights(fingerprint) != self._published[plan.start - 1]:
                raise StoreError(
                    f"{plan.resume_point}: not the weights that step {plan.start - 1} published; remove it"
                )

    def step(self, number: int, schedule_step: int, positions: npt.NDArray[np.int64]) -> dict[str, float]:
        """Train step `number` on the rows at `positions`; returns its metrics. schedule_step: step
        number for the learning rate."""
        from staleflow.tasks.training.numerics import describe_numerics

        rows = repeated_steps.read_batch_rows(self._store, positions)
        self.errors |= {int(row.trajectory): row.error for row in rows if isinstance(row, UnreadableRow)}
        batch = [row for row in rows if isinstance(row, EndedTrajectory)]
        started_s = time.monotonic()
        metrics = repeated_steps.train_step(self.policy, schedule_step, batch)
        metrics |= {"step": float(number), "train_s": time.monotonic() - started_s}
        weights = self.policy.apply_to_weights(fingerprint)
        is_equal = self._plan.is_unchanged and weights == self._published.get(schedule_step)
        self._are_equal.append(is_equal)
        self.history.append(metrics)
        batch_hash = batch_fingerprint((row.trajectory, row.advantage) for row in batch)
        hashes = {"same": is_equal, "batch": batch_hash, "weights": weights}
        hashes |= {"numerics": describe_numerics(), "previous": self.entry}
        line = json.dumps({**metrics, **hashes})
        self.entry = chain_hash(line.encode())
        with (self._tmp_path / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        if time.monotonic() - self._saved_at > RESUME_POINT_S:
            is_sharded = self._plan.config.training.ranks > 1
            with self._points.writing(PolicyVersion(number + 1), sharded=is_sharded) as point:
                self.policy.begin_save(point)
                self.policy.end_save()
            self._saved_at = time.monotonic()
        return metrics

    def explain_other_numerics(self) -> str:
        """A line if the run's own steps were computed with other numerics than those of this process; else empty."""
        from staleflow.tasks.training.numerics import describe_numerics

        inputs = [record.inputs for record in self._store.commits() if record.step < self._plan.start]
        stored = [values["numerics"] for values in inputs if "numerics" in values]
        if {*stored} <= {describe_numerics()}:
            return ""
        return (
            f"the steps before were trained with {stored[-1]}; here it is {describe_numerics()}, which may give other "
            "weights"
        )

    def save(self, checkpoint: Path) -> None:
        """Save the current weights for `from_pretrained`."""
        with tempfile.NamedTemporaryFile(dir=self._tmp_path, prefix=".weights-") as file:
            weights = Path(file.name)
            self.policy.apply_to_weights(lambda tensors: weight_file.write(weights, tensors))
            self.policy.save(checkpoint, weights)

    def same_steps(self) -> int | None:
        """The value of OfflineTrainingResult.same_steps."""
        if not self._plan.is_unchanged:
            return None
        return next((i for i, is_equal in enumerate(self._are_equal) if not is_equal), len(self._are_equal))


def _evaluate(plan: OfflinePlan, model: str, version: int, context: int, report: EventCallback) -> Evaluation | None:
    """Mean reward on the job's held-out prompts under a model, except those the plan trains on; None if none remain."""
    scores = held_out_scores(plan, model, version, context, report)
    if scores is None:
        return None
    sampled, greedy = scores
    return Evaluation.summarize(version, sampled, greedy, source_fingerprints.compute(plan.run_job).digests())


def held_out_scores(
    plan: OfflinePlan,
    model: str,
    version: int,
    context: int,
    report: EventCallback,
    *,
    greedy_passes: Sequence[bool] = (False, True),
) -> list[list[ScoredResponse]] | None:
    """Sample and score a response to each held-out prompt of a job, except to those that the plan trains on.

    Args:
        plan: Has the job, and the rows that it trains on.
        model: Folder of the weights.
        version: Version of the weights, for messages; 0 of the base model.
        context: Maximum tokens of the model.
        report: Called with messages.
        greedy_passes: Whether to decode greedily, for each pass over the prompts; else at the job's temperature.

    Returns:
        For each pass, the scores in the order of the prompts; None if no prompt remains.
    """
    from staleflow.tasks.engines.engine_builder import build_engine, generate_responses
    from staleflow.tasks.sources.reward_process import Scorer

    config = plan.config
    counts = [task.eval_prompts for task in config.task.sources_by_name.values()]
    if not any(counts):
        return None
    if config.has_environment:
        if not version:
            report({"say": "no evaluation: environments are played by runs only"})
        return None
    report({"say": f"evaluating {'the base model' if not version else 'the trained policy'}"})
    store = open_store_at(plan.store_path, plan.snapshot)
    # From the store's header, since the job might draw other prompts for its groups now.
    prompt_settings = actor_settings.prompt_settings(
        plan.run_job, context, num_held_out=store.header.num_held_out, max_prompt_tokens=store.header.max_prompt_tokens
    )
    prompts = prompt_settings.build()
    scorer = Scorer(actor_settings.scoring_settings(plan.run_job))
    tasks = [task for number, count in enumerate(counts) for task in prompts.held_out(count, number)]
    num_held_out = store.header.num_held_out
    name = ", ".join(task.eval_source or task.source for task in config.task.sources_by_name.values())
    if not version and (line := fewer_prompts_warning(sum(counts), len(tasks), name)):
        report({"say": line})
    if not config.task.sources and num_held_out < sum(counts):  # those of several sources cannot be changed
        rows = np.concatenate(list(repeated_steps.select_consumed_rows(store, plan.where).values()))
        trained_prompts = {prompts.task(int(g)).prompt for g in np.unique(store.displayed_columns()["group"][rows])}
        untrained_tasks = [task for task in tasks if task.prompt not in trained_prompts]
        if not version and len(untrained_tasks) < len(tasks):
            report(
                {
                    "say": f"leaving out {len(tasks) - len(untrained_tasks)} of {len(tasks)} held-out prompts: they "
                    "were trained on"
                }
            )
        tasks = untrained_tasks
    if not tasks:
        return None
    # Always the transformers engine: it is available wherever the trainer is.
    engine_choice = TransformersSettings.with_knobs_of(config.rollout.engine)
    evaluation_config = knob_tree.with_values(config, {"model.path": model, "rollout.engine": engine_choice})
    settings = actor_settings.engine_settings(evaluation_config, 0, inspect_model(evaluation_config).eos)
    engine = build_engine(settings, InstanceId("evaluation"), config.cluster.threads)
    scores: list[list[ScoredResponse]] = []
    try:
        encoded_prompts = [prompts.encode(t) for t in tasks]
        for greedy in greedy_passes:
            tokens = generate_responses(
                engine,
                encoded_prompts,
                max_new_tokens=[prompt_settings.response_tokens(task.source) for task in tasks],
                greedy=greedy,
                timeout_s=EVALUATION_LIMIT_S,
            )
            responses = [(i, t) for i, t in enumerate(tokens) if t is not None]
            scored = scorer.score([(prompts.text(t), tasks[i].record) for i, t in responses])
            by_prompt = dict(zip((i for i, _ in responses), scored, strict=True))
            scores.append([by_prompt.get(i, NO_RESPONSE) for i in range(len(tasks))])
    finally:
        scorer.close()
        engine.close()
    return scores
