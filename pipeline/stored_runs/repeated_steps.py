"""Repeats training steps of a stored run on the stored batches, for offline training and verification.

Invariant: on the batches that a run stored, from the weights and the optimizer state that it had, the trainer gives the
weights that the run published, bit for bit, on the same kind of machine (tasks/training/numerics.py).

With several ranks, the training task leads actors on other workers. If a rank is lost, the training ends with an error;
the same command continues it from the newest resume point, with equal weights for the same number of ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import filecmp
import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.knob_tree import with_values
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import certificate
from staleflow.pipeline.stored_runs.pool import EventCallback, Pool, open_store_at
from staleflow.stores.errors import ActorLost, ConfigError, StaleflowError, StoreError
from staleflow.stores.serialization import parse_json
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, PolicyVersion
from staleflow.stores.weights import weight_file, weight_folder
from staleflow.stores.weights.resume_points import LOAD_ERRORS, ResumePoints
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.actors.trainer_rank import DistributedPolicy, FollowerRank

if TYPE_CHECKING:
    from staleflow.tasks.training.policy import Policy, TrainerSettings

ADAPTER_PATH = ("adapter", "adapter_model.safetensors")
"""Where in a checkpoint an adapter's weights are, as they were published (tasks/training/lora.py)."""


def select_consumed_rows(store: VersionedStore, where: str) -> dict[int, npt.NDArray[np.int64]]:
    """Positions of the consumed rows that `where` selects, by training step in order."""
    columns = store.displayed_columns()
    mask = Selection(where).mask(columns) & (columns["staleness"] >= 0)
    (positions,) = np.nonzero(mask)
    positions = positions[np.argsort(columns["step"][positions], kind="stable")]
    steps, starts = np.unique(columns["step"][positions], return_index=True)
    return dict(zip(steps.tolist(), np.split(positions, starts[1:]), strict=True)) if len(positions) else {}


def offline_steps(
    store: VersionedStore, where: str, epochs: int, num_steps: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """For each step of all epochs: (step number for the learning-rate schedule, positions of its rows). num_steps: of
    the job, for the step numbers of later epochs."""
    rows_by_step = select_consumed_rows(store, where)
    for epoch in range(epochs):
        for step, rows in rows_by_step.items():
            yield epoch * num_steps + step, rows


@contextlib.contextmanager
def open_policy(config: RunConfig, run_job: RunConfig, num_steps: int, num_held_out: int) -> Iterator[Policy]:
    """Build the policy to train: in this process, or of a group that it leads.

    Args:
        config: The job to train by.
        run_job: The job with the run's seed, for the examples of supervised fine-tuning.
        num_steps: Length of the training, for schedules of the learning rate.
        num_held_out: Number of held-out prompts that the store's header has.
    """
    settings = dataclasses.replace(
        actor_settings.trainer_settings(config),
        num_steps=num_steps,
        shares_device=False,  # with layout "turns", too, the device has no rollout instance here
        # No driver watches these ranks, and each loads the model at its own speed.
        collective_timeout_s=max(config.deadlines.silent_s, config.deadlines.start_s),
        examples=actor_settings.example_settings(run_job, num_held_out),
    )
    if settings.training.ranks == 1:
        yield settings.build(config.cluster.threads)
        return
    with lead_rank_group(settings, config.cluster.threads) as policy:
        yield policy


def read_batch_rows(store: VersionedStore, positions: npt.NDArray[np.int64]) -> list[EndedTrajectory | UnreadableRow]:
    """Read a batch. positions: positions of its rows, in the trainer's order."""
    start, stop = int(positions[0]), int(positions[-1]) + 1  # they are close together, since one commit wrote them
    rows = list(store.trajectories_at(range(start, stop)))
    return [rows[i - start] for i in positions.tolist()]


def train_step(policy: Policy, step: int, batch: Sequence[EndedTrajectory]) -> dict[str, float]:
    """Train a step on a batch, and return its metrics. step: step number for the learning rate."""
    from staleflow.tasks.training.microbatches import Row

    rewards = [row.trajectory.reward for row in batch if row.loss_mask]
    metrics = policy.step(step, [Row.of(row) for row in batch]) if batch else {}
    return metrics | {"reward": float(np.mean(rewards)) if rewards else 0.0, "rows": float(len(batch))}


# -- verification ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """Steps start <= step < stop that one job trained. Other fields as in `open_policy`."""

    config: RunConfig
    run_job: RunConfig
    num_steps: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRange:
    """Consecutive steps that are repeated from a resume point; if `resume_point` is empty, from the model in the first
    part's job."""

    resume_point: str
    parts: tuple[JobPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionPlan:
    """Steps to repeat, and the expected results."""

    store_path: str
    snapshot: str
    where: str = ""
    epochs: int = 1
    """Which rows were trained on, as in offline training."""
    ranges: tuple[RepeatedRange, ...]
    checkpoint: tuple[str, JobPart] | None = None
    """Folder of a checkpoint to compare, and the job that its version was trained by, with `start` as its version."""
    weight_fingerprints: dict[int, str]
    """The published one of each version; version 0 may be unknown."""
    batch_fingerprints: dict[int, str]
    """The stored one of each step."""

    @property
    def ranks(self) -> int:
        """The most ranks of its jobs."""
        return max(part.config.training.ranks for steps_range in self.ranges for part in steps_range.parts)


@dataclass(frozen=True, slots=True)
class Difference:
    """A repeated result that differs from the run's record."""

    location: str
    message: str
    step: int
    """The training step that should have produced it; -1 for version 0."""
    was_computed: bool
    """Whether it was computed here, so that another kind of machine may be the reason."""


@dataclass(slots=True, kw_only=True)
class RepetitionResult:
    """Results of a repetition. Each range ends at its first difference."""

    equal_steps: list[int] = field(default_factory=list)
    """Steps with the recorded batch, whose weights equal the published ones bit for bit."""
    checkpoint_is_equal: bool = False
    """Whether the checkpoint is what the job's trainer saves of the published weights."""
    unverified: list[str] = field(default_factory=list)
    """Parts of the checkpoint that were not compared, with the reason."""
    differences: list[Difference] = field(default_factory=list)
    numerics: str = ""
    """Description of the numerics of this process."""


class _DifferenceFound(Exception):
    """Ends the repetition of a range; its arguments are those of the Difference."""


def repeat_steps(plan: RepetitionPlan, report: EventCallback) -> RepetitionResult:
    """Repeat steps in this process; with a rank group, this process must be a Dask task."""
    from staleflow.tasks.training.numerics import describe_numerics

    store = open_store_at(plan.store_path, plan.snapshot)
    repeater = _Repeater(plan, store, report)
    tasks = [functools.partial(repeater.repeat_range, steps_range) for steps_range in plan.ranges]
    if plan.checkpoint is not None:
        tasks.insert(0, functools.partial(repeater.compare_checkpoint, *plan.checkpoint))
    for task in tasks:
        try:
            task()
        except _DifferenceFound as error:
            repeater.result.differences.append(Difference(*error.args))
    repeater.result.numerics = describe_numerics()
    return repeater.result


class _Repeater:
    """Repeats ranges of steps one after another."""

    def __init__(self, plan: RepetitionPlan, store: VersionedStore, report: EventCallback) -> None:
        self._plan, self._store, self._report = plan, store, report
        self._steps = list(offline_steps(store, plan.where, plan.epochs, plan.ranges[0].parts[0].config.steps))
        self._num_steps = sum(part.stop - part.start for steps_range in plan.ranges for part in steps_range.parts)
        self.result = RepetitionResult()
        self._origin_note = ""
        """The resume point that steps are repeated from, for messages: the chain has no hash of its optimizer state."""

    def repeat_range(self, steps_range: RepeatedRange) -> None:
        """Repeat a range of steps. Raises _DifferenceFound."""
        version = steps_range.parts[0].start
        self._origin_note = f", repeated from the resume point of version {version}" if steps_range.resume_point else ""
        with tempfile.TemporaryDirectory(prefix="staleflow-") as folder:
            points = ResumePoints(Path(folder))
            point = Path(steps_range.resume_point) if steps_range.resume_point else None
            for part in steps_range.parts:
                with self._open_policy(part.config, part) as policy:
                    self._load(policy, part, point)
                    for step in range(part.start, part.stop):
                        self._step(policy, step)
                    if part is not steps_range.parts[-1]:  # the next part has other settings
                        version, sharded = PolicyVersion(part.stop), part.config.training.ranks > 1
                        with points.writing(version, sharded=sharded) as tmp_path:
                            policy.begin_save(tmp_path)
                            policy.end_save()
                        point = points.path(version)

    def compare_checkpoint(self, folder: str, part: JobPart) -> None:
        """Compare a checkpoint's weights with the published ones, and its files with those that the job's trainer saves
        of these weights. Raises _DifferenceFound."""
        location, version = f"version {part.start} in {folder}", part.start
        is_adapter = bool(part.config.training.lora.rank)
        with tempfile.TemporaryDirectory(prefix="staleflow-") as tmp:
            weight_path, saved_folder = Path(tmp) / "published.safetensors", Path(tmp) / "saved"
            try:
                if is_adapter:
                    adapter = weight_folder.read(Path(folder, *ADAPTER_PATH))
                    actual_fingerprint = weight_file.write(weight_path, adapter)
                else:
                    with self._open_policy(with_values(part.config, {"model.path": folder}), part) as policy:
                        actual_fingerprint = policy.apply_to_weights(
                            lambda tensors: weight_file.write(weight_path, tensors)
                        )
            except (ConfigError, StoreError) as error:
                raise _DifferenceFound(location, str(error), version - 1, False) from error
            self._compare(actual_fingerprint, version, location, was_computed=False)
            with self._open_policy(part.config, part) as policy:
                policy.save(saved_folder, weight_path)
            comparison = compare_checkpoint_files(Path(folder), saved_folder)
        self.result.unverified += comparison.unverified
        self.result.checkpoint_is_equal = comparison.weights_are_equal and not comparison.differences
        if comparison.differences:
            # An adapter was merged into the model's weights here.
            was_computed = is_adapter and not comparison.weights_are_equal
            raise _DifferenceFound(location, "; ".join(comparison.differences), version - 1, was_computed)

    @contextlib.contextmanager
    def _open_policy(self, config: RunConfig, part: JobPart) -> Iterator[Policy]:
        """`open_policy` for a part's job. Raises ConfigError if its model cannot be loaded."""
        num_held_out, path = self._store.header.num_held_out, config.model.path
        with contextlib.ExitStack() as stack:
            try:
                policy = stack.enter_context(open_policy(config, part.run_job, part.num_steps, num_held_out))
            except StaleflowError:
                raise
            except (*LOAD_ERRORS, SafetensorError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ConfigError(f"model.path = {path!r}: cannot be loaded: {reason}; copy the model again") from error
            yield policy

    def _load(self, policy: Policy, part: JobPart, point: Path | None) -> None:
        location, was_computed = f"version {part.start} in {part.config.model.path}", False
        if point is not None:
            location = f"resume point of version {part.start}"
            try:
                policy.load_state(point)
            except StoreError as error:
                raise _DifferenceFound(location, str(error), part.start - 1, False) from error
        elif not part.start:
            for step in range(part.config.training.sft.steps):
                policy.fine_tune(step)
                was_computed = True
        if part.start in self._plan.weight_fingerprints:
            self._compare(policy.apply_to_weights(fingerprint), part.start, location, was_computed=was_computed)

    def _step(self, policy: Policy, step: int) -> None:
        location = f"step {step}"
        if step >= len(self._steps):
            raise _DifferenceFound(location, "no row that it was trained on is stored", step, False)
        schedule_step, positions = self._steps[step]
        batch = [row for row in read_batch_rows(self._store, positions) if isinstance(row, EndedTrajectory)]
        if batch_fingerprint((row.trajectory, row.advantage) for row in batch) != self._plan.batch_fingerprints[step]:
            raise _DifferenceFound(location, "its batch is not the one that the trainer received", step, False)
        try:
            metrics = train_step(policy, schedule_step, batch)
        except IndexError as error:  # a forged token that is not in the vocabulary
            raise _DifferenceFound(location, f"no training on its batch: {error}", step, False) from error
        self._compare(policy.apply_to_weights(fingerprint), step + 1, location, was_computed=True)
        self.result.equal_steps.append(step)
        self._report({"done": len(self.result.equal_steps), "total": self._num_steps, "metrics": metrics})

    def _compare(self, actual_fingerprint: str, version: int, location: str, *, was_computed: bool) -> None:
        """Compare the fingerprint of weights with the published one of the version. Raises _DifferenceFound."""
        published_fingerprint = self._plan.weight_fingerprints.get(version, "")
        if actual_fingerprint != published_fingerprint:
            message = (
                f"the weights are {actual_fingerprint}, the run published {published_fingerprint or 'none'}"
                f"{self._origin_note}"
            )
            raise _DifferenceFound(location, message, version - 1, was_computed)


PATH_KEYS = ("_name_or_path", "base_model_name_or_path")
"""Keys of JSON files that have the base model's path, which has no effect on results."""
TRANSFORMERS_VERSION_KEY = "transformers_version"
"""Key of config.json with the version of transformers that saved the checkpoint."""


@dataclass(slots=True)
class FileComparison:
    """Result of comparing the files of a checkpoint."""

    differences: list[str] = field(default_factory=list)
    """One line per file that differs, is missing or is not expected."""
    unverified: list[str] = field(default_factory=list)
    """One line per file that has no effect on the model, or whose difference may come from another version of
    transformers."""
    weights_are_equal: bool = True


def compare_checkpoint_files(checkpoint: Path, saved_folder: Path) -> FileComparison:
    """Compare the files of a checkpoint with a folder that the trainer has just saved. Raises OSError."""
    comparison = FileComparison()
    actual_names, expected_names = _list_files(checkpoint), _list_files(saved_folder)
    checkpoint_version, own_version = (
        _read_json_values(folder / "config.json").get(TRANSFORMERS_VERSION_KEY) for folder in (checkpoint, saved_folder)
    )
    for name in sorted(expected_names):
        if name not in actual_names:
            comparison.differences.append(f"{name} is missing")
        elif not _is_equal(checkpoint / name, saved_folder / name):
            is_weights = name.endswith(".safetensors")
            comparison.weights_are_equal &= not is_weights
            line = f"{name} is not the file that the run's trainer saves"
            if checkpoint_version == own_version:
                comparison.differences.append(line)
            else:
                comparison.unverified.append(
                    f"{line} with transformers {own_version}; it names {str(checkpoint_version)[:50]!r}"
                )
    for name in sorted(actual_names - expected_names):
        if name.startswith(".") or name.endswith(".md"):
            comparison.unverified.append(f"{name}: the run saves no such file")
        elif not name.startswith(certificate.FILE):  # the certificate and its signature
            comparison.differences.append(f"{name}: the run saves no such file")
    return comparison


def _list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _is_equal(file: Path, other: Path) -> bool:
    if filecmp.cmp(file, other, shallow=False):
        return True
    values = _read_json_values(file)
    return bool(values) and values == _read_json_values(other)


def _read_json_values(file: Path) -> dict[str, Any]:
    """The values of a JSON file without paths; empty for other files."""
    try:
        values = parse_json(file.read_bytes()) if file.suffix == ".json" else None
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in values.items() if key not in PATH_KEYS} if isinstance(values, dict) else {}


RANK_CLOSE_S = 10.0
"""Seconds that another rank may take to leave the group. One that hangs in a step leaves after
`collective_timeout_s`."""


@contextlib.contextmanager
def lead_rank_group(settings: TrainerSettings, threads: int) -> Iterator[DistributedPolicy]:
    """Create the policy of a rank group that the current Dask task leads.

    Args:
        settings: The trainer's settings.
        threads: Number of threads of each rank.

    Raises:
        ConfigError: There are not enough workers.
        ActorLost: A rank is lost.
    """
    from distributed import get_client, get_worker
    from distributed.comm.addressing import parse_host_port

    worker, client = get_worker(), get_client()
    addresses = _follower_addresses(Pool(client), worker.address, settings.training.ranks)
    futures = [
        client.submit(FollowerRank, settings, threads, actor=True, workers=[address], pure=False)
        for address in addresses
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(client.cancel, futures)
        try:
            peers = [future.result() for future in futures]
            stack.callback(_close, peers)
            host, loop = parse_host_port(worker.address)[0], worker.loop.asyncio_loop
            policy = DistributedPolicy(settings, threads, host, peers, loop, contextvars.copy_context())
            stack.callback(policy.close)
            yield policy
        except ActorLost as error:
            raise ActorLost(
                f"a rank of the training was lost: {error}; the same command continues from the newest resume point"
            ) from error


def _close(peers: list[Any]) -> None:
    """Close the other ranks. Errors are ignored."""
    for peer in peers:
        with contextlib.suppress(Exception):
            peer.close().result(timeout=RANK_CLOSE_S)


def _follower_addresses(pool: Pool, own_address: str, ranks: int) -> list[str]:
    """Addresses of the workers for the other ranks. Waits for workers that are restarting."""
    addresses = [address for address in pool.wait_for_workers(ranks, for_models=True) if address != own_address]
    if len(addresses) < ranks - 1:
        raise ConfigError(
            f"training.ranks = {ranks}: {len(addresses) + 1} workers are free; start more, or set training.ranks="
            f"{len(addresses) + 1}, which gives weights that are equal up to rounding"
        )
    return addresses[: ranks - 1]
