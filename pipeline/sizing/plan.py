"""Whether a job fits on its GPUs, the smallest change with which it fits, and how to split GPUs between sampling and
training.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from staleflow.pipeline.sizing import memory
from staleflow.tasks.emulation.cost_model import CostModel

MAX_RUNNING = 256
"""Requests that an instance is proposed to run at once, at most."""
PREFILL_TOKENS = 8192
"""Tokens of a forward pass that use a GPU well."""
LOAD_BYTES_S, START_S = 1_000_000_000, 120.0
"""Bytes a second that weights are read at, and seconds for everything else until a role is ready. Estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedJob:
    """The settings of a job that determine its memory.

    Args:
        max_length: Tokens of its longest sequence, prompt included.
        num_gpus: GPUs of trainer, instances and teachers together.
        has_own_gpus: Whether trainer and instances have separate GPUs; otherwise all share one.
        takes_turns: Whether they use the same GPUs in turns.
        start_s: The job's deadlines.start_s.
        teachers: Number of teachers.
        teacher, teacher_model: Settings and model of a teacher; None without teachers, or if its model is not sized.
    """

    training: memory.TrainingShape
    engine: memory.EngineShape
    instances: int
    max_length: int
    num_gpus: int
    has_own_gpus: bool = True
    takes_turns: bool = False
    start_s: float = 0.0
    teachers: int = 0
    teacher: memory.EngineShape | None = None
    teacher_model: memory.ModelShape | None = None

    @property
    def teacher_gpus(self) -> int:
        """GPUs of all teachers."""
        return 0 if self.teacher is None else self.teachers * self.teacher.tensor_parallel

    @property
    def teacher_parts(self) -> dict[str, int]:
        """Bytes of each GPU of a teacher by use; empty without teachers."""
        if self.teacher is None or self.teacher_model is None:
            return {}
        return memory.engine_parts(self.teacher_model, self.teacher)

    @property
    def needed_gpus(self) -> int:
        if self.takes_turns:
            return self.teacher_gpus + max(self.training.ranks, self.instances * self.engine.tensor_parallel)
        num_gpus = self.training.ranks + self.instances * self.engine.tensor_parallel + self.teacher_gpus
        return num_gpus if self.has_own_gpus else 1

    @property
    def instances_on_gpu(self) -> int:
        """Number of instances that share a GPU."""
        return 1 if self.has_own_gpus or self.takes_turns else self.instances


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a rank's, an instance's and a teacher's GPU by part, with a proposal. changes: keys of the job file and
    the values with which it fits; empty if it fits already, None if no change is known."""

    device_bytes: int
    trainer: Mapping[str, int]
    engine: Mapping[str, int]
    teacher: Mapping[str, int]
    changes: Mapping[str, object] | None
    proposed: Mapping[str, object]

    @property
    def usable_bytes(self) -> int:
        return int(self.device_bytes * (1 - memory.MARGIN))


def make_plan(model: memory.ModelShape, job: SizedJob, device_bytes: int) -> MemoryPlan:
    """Plan the memory of a job on GPUs of one size."""
    changes = None
    for candidate, candidate_changes in _candidates(job):
        if candidate.needed_gpus <= max(job.num_gpus, job.needed_gpus) and _fits(model, candidate, device_bytes):
            changes, job_that_fits = candidate_changes, candidate
            break
    else:
        job_that_fits = job
    return MemoryPlan(
        device_bytes=device_bytes,
        trainer=memory.trainer_parts(model, job.training),
        engine=memory.engine_parts(model, job.engine),
        teacher=job.teacher_parts,
        changes=changes,
        proposed=_propose_settings(model, job_that_fits, device_bytes) if changes is not None else {},
    )


def _fits(model: memory.ModelShape, job: SizedJob, device_bytes: int) -> bool:
    trainer = sum(memory.trainer_parts(model, job.training).values())
    engine = sum(memory.engine_parts(model, job.engine).values())
    teacher = sum(job.teacher_parts.values())
    usable_bytes = device_bytes * (1 - memory.MARGIN)
    if job.takes_turns:
        return max(max(trainer, engine) + memory.CONTEXT_BYTES, teacher) <= usable_bytes
    if job.has_own_gpus:
        return max(trainer, engine, teacher) <= usable_bytes
    return trainer + engine * job.instances_on_gpu + teacher * job.teachers <= usable_bytes


def _candidates(job: SizedJob) -> Iterator[tuple[SizedJob, dict[str, object]]]:
    """The job, then with one change, with two and so on; of as many, those first that cost less."""
    training, engine = job.training, job.engine
    num_free_gpus = job.num_gpus - job.teacher_gpus
    num_free_gpus -= 0 if job.takes_turns else job.instances * engine.tensor_parallel
    options: dict[str, Sequence[object]] = {
        "rollout.instances": [1] if job.instances_on_gpu > 1 else [],
        "model.dtype": ["bfloat16"] if training.dtype == "float32" else [],
        "training.recompute_activations": [] if training.recompute else [True],
        "training.microbatch_tokens": [job.max_length] if job.max_length < training.microbatch_tokens else [],
        "rollout.engine.kv_tokens": [job.max_length] if job.max_length < engine.kv_tokens else [],
        "training.ranks": [2**power for power in range(1, 11) if training.ranks < 2**power <= num_free_gpus],
        "rollout.engine.tensor_parallel": [
            degree
            for degree in (2, 4, 8)
            if job.engine.is_vllm and job.has_own_gpus and engine.tensor_parallel < degree
        ],
        "training.offload": [] if training.offload else [True],
    }
    choices = itertools.product(*([None, *values] for values in options.values()))
    all_changes = [
        {option: value for option, value in zip(options, values, strict=True) if value is not None}
        for values in choices
    ]
    order = list(options)
    # Of as many changes, one whose last key comes earlier, and the least value of it.
    all_changes.sort(key=lambda changes: (len(changes), [order.index(option) for option in reversed(changes)]))
    for changes in all_changes:
        yield _apply_changes(job, changes), changes


SHAPE_FIELDS = {
    "training.recompute_activations": ("training", "recompute"),
    "training.microbatch_tokens": ("training", "microbatch_tokens"),
    "training.ranks": ("training", "ranks"),
    "training.offload": ("training", "offload"),
    "rollout.instances": ("job", "instances"),
    "rollout.engine.kv_tokens": ("engine", "kv_tokens"),
    "rollout.engine.tensor_parallel": ("engine", "tensor_parallel"),
}
"""Where a SizedJob has the values of keys."""


def _apply_changes(job: SizedJob, changes: Mapping[str, object]) -> SizedJob:
    parts: dict[str, dict[str, object]] = {"training": {}, "engine": {}, "job": {}}
    for option, value in changes.items():
        if option == "model.dtype":
            parts["training"]["dtype"] = parts["engine"]["dtype"] = value
            if job.teacher is not None:
                parts["job"]["teacher"] = dataclasses.replace(job.teacher, dtype=str(value))
        else:
            section, field = SHAPE_FIELDS[option]
            parts[section][field] = value
    return dataclasses.replace(
        job,
        training=dataclasses.replace(job.training, **parts["training"]),  # type: ignore[arg-type]
        engine=dataclasses.replace(job.engine, **parts["engine"]),  # type: ignore[arg-type]
        **parts["job"],  # type: ignore[arg-type]
    )


def _propose_settings(model: memory.ModelShape, job: SizedJob, device_bytes: int) -> dict[str, object]:
    """What uses the memory that is left: cache, running requests, tokens of a pass, vLLM's share; and the deadline if
    the weights take longer to load."""
    engine = dataclasses.replace(job.engine, kv_tokens=0, batch_tokens=max(job.engine.batch_tokens, PREFILL_TOKENS))
    usable_bytes = device_bytes * (1 - memory.MARGIN)
    num_sharing = job.instances_on_gpu
    free_bytes = usable_bytes - num_sharing * sum(memory.engine_parts(model, engine).values())
    if job.takes_turns:
        free_bytes -= memory.CONTEXT_BYTES
    elif not job.has_own_gpus:
        free_bytes -= sum(memory.trainer_parts(model, job.training).values())
        free_bytes -= job.teachers * sum(job.teacher_parts.values())
    free_bytes /= num_sharing
    if free_bytes < job.engine.kv_tokens * memory.cache_bytes(model, engine):
        engine = dataclasses.replace(engine, batch_tokens=job.engine.batch_tokens)
        kv_tokens = job.engine.kv_tokens
    else:
        kv_tokens = int(free_bytes) // memory.cache_bytes(model, engine) // 1024 * 1024
    engine = dataclasses.replace(engine, kv_tokens=kv_tokens)
    parts = memory.engine_parts(model, engine)
    proposal: dict[str, object] = {
        "rollout.engine.kv_tokens": kv_tokens,
        "rollout.engine.max_running": max(1, min(MAX_RUNNING, kv_tokens // job.max_length)),
        "rollout.engine.max_batch_tokens": engine.batch_tokens,
    }
    if job.engine.is_vllm:
        share = (sum(parts.values()) - memory.GRAPH_BYTES) / device_bytes
        proposal["rollout.engine.options.gpu_memory_utilization"] = round(min(share, 0.95), 2)
    parameters = max(m.parameters for m in (model, job.teacher_model) if m is not None)
    if (start_s := round(START_S + 4 * parameters / LOAD_BYTES_S)) > job.start_s:
        proposal["deadlines.start_s"] = start_s
    return proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of a training step. sample_s: seconds in which one instance samples its batch. train_s: seconds in which one
    rank trains on it."""

    sample_s: float
    train_s: float

    @classmethod
    def of(
        cls, costs: CostModel, *, responses: int, tokens: float, prompt_tokens: int, max_running: int, kv_tokens: int,
        train_s: float,
    ) -> StepWork:  # fmt: skip
        """Estimate the work with a cost model. An instance runs as many responses at once as max_running and its KV
        cache allow, each half finished on average.

        Args:
            costs: Times of prefill and decode steps.
            responses: Responses of a batch.
            tokens: Mean length of a response.
            prompt_tokens: Mean length of a prompt.
            max_running: Most responses that an instance runs at once.
            kv_tokens: KV cache of an instance, in tokens.
            train_s: Seconds in which one rank trains on a batch.

        >>> costs = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, b=0.0)
        >>> StepWork.of(costs, responses=64, tokens=100, prompt_tokens=0, max_running=32, kv_tokens=9999,
        ...             train_s=1.0).sample_s
        2.0
        """
        context = prompt_tokens + tokens / 2
        running = max(1, min(responses, max_running, int(kv_tokens // (prompt_tokens + tokens))))
        steps = responses * tokens / running
        prefill_s = responses * prompt_tokens * costs.prefill
        return cls(sample_s=steps * costs.step_s(running, running * context) + prefill_s, train_s=train_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of GPUs. reason: why it was chosen, in one line."""

    instances: int
    ranks: int
    reason: str


def propose_split(work: StepWork, num_gpus: int, tensor_parallel: int = 1, min_ranks: int = 1) -> Split | None:
    """Choose the division with the shortest step. Sampling and training overlap, so the slower one decides; among equal
    divisions, the one with fewer ranks is chosen. None if there are too few GPUs.

    Args:
        work: Of a step.
        num_gpus: GPUs to divide.
        tensor_parallel: GPUs of an instance.
        min_ranks: Least number of ranks on which the trainer fits into memory.
    """
    best: tuple[float, int, int] | None = None  # (seconds of a step, ranks, instances)
    for ranks in range(min_ranks, num_gpus - tensor_parallel + 1):
        instances = (num_gpus - ranks) // tensor_parallel
        option = max(work.sample_s / instances, work.train_s / ranks), ranks, instances
        best = option if best is None else min(best, option)
    if best is None:
        return None
    step_s, ranks, instances = best
    reason = (
        f"an instance samples a step's batch in {work.sample_s:.3g} s (rollout.cost), a rank trains it in "
        f"{work.train_s:.3g} s (simulation.train_s, training.ranks): together {step_s:.3g} s a step"
    )
    return Split(instances=instances, ranks=ranks, reason=reason)
