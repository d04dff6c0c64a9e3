"""Whether a job fits on its GPUs, the smallest change with which it fits, and how to split GPUs between sampling and
training.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.pipeline.sizing import memory
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.engines.engine_settings import EngineSettings
from staleflow.tasks.training.trainer_settings import TrainingConfig

MAX_RUNNING = 256
"""Requests that an instance is proposed to run at once, at most."""
PREFILL_TOKENS = 8192
"""Tokens of a forward pass that use a GPU well."""
LOAD_BYTES_PER_S, START_OVERHEAD_S = 1_000_000_000, 120.0
"""Bytes a second that weights are read at, and seconds for everything else until a role is ready. Estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The settings of a job that determine its memory.

    Args:
        training: The trainer's settings, with the tokens of a pass as `microbatch_tokens`.
        engine: Settings of an instance.
        dtype: The job's model.dtype.
        reference: The reference model of which each rank holds its share; None if there is none, or teachers hold it.
        max_length: Tokens of its longest sequence, prompt included.
        num_gpus: GPUs of trainer, instances and teachers together.
        has_separate_gpus: Whether trainer and instances have separate GPUs; otherwise all share one.
        takes_turns: Whether they use the same GPUs in turns.
        start_limit_s: The job's deadlines.start_s.
        teachers: Number of teachers.
        teacher, teacher_model: Settings and model of a teacher; None without teachers, or if its model is not sized.
    """

    training: TrainingConfig
    engine: EngineSettings
    dtype: str
    instances: int
    max_length: int
    num_gpus: int
    has_separate_gpus: bool = True
    takes_turns: bool = False
    start_limit_s: float = 0.0
    teachers: int = 0
    reference: memory.ModelShape | None = None
    teacher: EngineSettings | None = None
    teacher_model: memory.ModelShape | None = None

    @property
    def num_teacher_gpus(self) -> int:
        """GPUs of all teachers."""
        return 0 if self.teacher is None else self.teachers * memory.num_gpus_of(self.teacher)

    @property
    def num_instance_gpus(self) -> int:
        """GPUs of all instances together."""
        return self.instances * memory.num_gpus_of(self.engine)

    def trainer_bytes_by_use(self, model: memory.ModelShape) -> dict[str, int]:
        """Bytes of a rank's GPU by use."""
        return memory.trainer_bytes_by_use(model, self.training, self.dtype, self.reference)

    def engine_bytes_by_use(self, model: memory.ModelShape) -> dict[str, int]:
        """Bytes of each GPU of an instance by use."""
        return memory.engine_bytes_by_use(model, self.engine, self.dtype)

    @property
    def teacher_bytes_by_use(self) -> dict[str, int]:
        """Bytes of each GPU of a teacher by use; empty without teachers."""
        if self.teacher is None or self.teacher_model is None:
            return {}
        return memory.engine_bytes_by_use(self.teacher_model, self.teacher, self.dtype)

    @property
    def num_needed_gpus(self) -> int:
        if self.takes_turns:
            return self.num_teacher_gpus + max(self.training.ranks, self.num_instance_gpus)
        num_gpus = self.training.ranks + self.num_instance_gpus + self.num_teacher_gpus
        return num_gpus if self.has_separate_gpus else 1

    @property
    def num_instances_per_gpu(self) -> int:
        """Number of instances that share a GPU."""
        return 1 if self.has_separate_gpus or self.takes_turns else self.instances


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of a rank's, an instance's and a teacher's GPU by part, with a proposal. changes: keys of the job file and
    the values with which it fits; empty if it fits already, None if no change is known."""

    device_bytes: int
    trainer_bytes: Mapping[str, int]
    engine_bytes: Mapping[str, int]
    teacher_bytes: Mapping[str, int]
    changes: Mapping[str, object] | None
    proposed: Mapping[str, object]

    @property
    def usable_bytes(self) -> int:
        return int(self.device_bytes * (1 - memory.UNUSED_MEMORY_SHARE))


def make_plan(model: memory.ModelShape, job: MemorySettings, device_bytes: int) -> MemoryPlan:
    """Plan the memory of a job on GPUs of one size."""
    changes = None
    for candidate, candidate_changes in _candidates(job):
        has_gpus = candidate.num_needed_gpus <= max(job.num_gpus, job.num_needed_gpus)
        if has_gpus and _fits(model, candidate, device_bytes):
            changes, job_that_fits = candidate_changes, candidate
            break
    else:
        job_that_fits = job
    return MemoryPlan(
        device_bytes=device_bytes,
        trainer_bytes=job.trainer_bytes_by_use(model),
        engine_bytes=job.engine_bytes_by_use(model),
        teacher_bytes=job.teacher_bytes_by_use,
        changes=changes,
        proposed=_propose_settings(model, job_that_fits, device_bytes) if changes is not None else {},
    )


def _fits(model: memory.ModelShape, job: MemorySettings, device_bytes: int) -> bool:
    trainer, engine = sum(job.trainer_bytes_by_use(model).values()), sum(job.engine_bytes_by_use(model).values())
    teacher = sum(job.teacher_bytes_by_use.values())
    usable_bytes = device_bytes * (1 - memory.UNUSED_MEMORY_SHARE)
    if job.takes_turns:
        return max(max(trainer, engine) + memory.CUDA_CONTEXT_BYTES, teacher) <= usable_bytes
    if job.has_separate_gpus:
        return max(trainer, engine, teacher) <= usable_bytes
    return trainer + engine * job.num_instances_per_gpu + teacher * job.teachers <= usable_bytes


def _candidates(job: MemorySettings) -> Iterator[tuple[MemorySettings, dict[str, object]]]:
    """The job, then with one change, with two and so on; of as many, those first that cost less."""
    training, engine = job.training, job.engine
    num_free_gpus = job.num_gpus - job.num_teacher_gpus
    num_free_gpus -= 0 if job.takes_turns else job.num_instance_gpus
    options: dict[str, Sequence[object]] = {
        "rollout.instances": [1] if job.num_instances_per_gpu > 1 else [],
        "model.dtype": ["bfloat16"] if job.dtype == "float32" else [],
        "training.recompute_activations": [] if training.recompute_activations else [True],
        "training.microbatch_tokens": [job.max_length] if job.max_length < training.microbatch_tokens else [],
        "rollout.engine.kv_tokens": [job.max_length] if job.max_length < engine.kv_tokens else [],
        "training.ranks": [2**power for power in range(1, 11) if training.ranks < 2**power <= num_free_gpus],
        "rollout.engine.tensor_parallel": [
            degree
            for degree in (2, 4, 8)
            if engine.name == "vllm" and job.has_separate_gpus and memory.num_gpus_of(engine) < degree
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


def _apply_changes(job: MemorySettings, changes: Mapping[str, object]) -> MemorySettings:
    values: dict[str, dict[str, Any]] = {"training": {}, "rollout.engine": {}, "rollout": {}, "model": {}}
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        values[table][name] = value
    training = dataclasses.replace(job.training, **values["training"])
    engine = dataclasses.replace(job.engine, **values["rollout.engine"])
    return dataclasses.replace(job, training=training, engine=engine, **values["rollout"], **values["model"])


def _propose_settings(model: memory.ModelShape, job: MemorySettings, device_bytes: int) -> dict[str, object]:
    """What uses the memory that is left: cache, running requests, tokens of a pass, vLLM's share; and the deadline if
    the weights take longer to load."""
    max_batch_tokens = max(job.engine.max_batch_tokens, PREFILL_TOKENS)
    engine = dataclasses.replace(job.engine, kv_tokens=0, max_batch_tokens=max_batch_tokens)
    usable_bytes = device_bytes * (1 - memory.UNUSED_MEMORY_SHARE)
    num_sharing = job.num_instances_per_gpu
    free_bytes = usable_bytes - num_sharing * sum(memory.engine_bytes_by_use(model, engine, job.dtype).values())
    if job.takes_turns:
        free_bytes -= memory.CUDA_CONTEXT_BYTES
    elif not job.has_separate_gpus:
        free_bytes -= sum(job.trainer_bytes_by_use(model).values())
        free_bytes -= job.teachers * sum(job.teacher_bytes_by_use.values())
    free_bytes /= num_sharing
    token_bytes = memory.cache_bytes_per_kv_token(model, engine, job.dtype)
    if free_bytes < job.engine.kv_tokens * token_bytes:
        engine = dataclasses.replace(engine, max_batch_tokens=job.engine.max_batch_tokens)
        kv_tokens = job.engine.kv_tokens
    else:
        kv_tokens = int(free_bytes) // token_bytes // 1024 * 1024
    engine = dataclasses.replace(engine, kv_tokens=kv_tokens)
    parts = memory.engine_bytes_by_use(model, engine, job.dtype)
    proposal: dict[str, object] = {
        "rollout.engine.kv_tokens": kv_tokens,
        "rollout.engine.max_running": max(1, min(MAX_RUNNING, kv_tokens // job.max_length)),
        "rollout.engine.max_batch_tokens": engine.max_batch_tokens,
    }
    if engine.name == "vllm":
        share = (sum(parts.values()) - memory.CUDA_GRAPH_BYTES) / device_bytes
        proposal["rollout.engine.options.gpu_memory_utilization"] = round(min(share, 0.95), 2)
    parameters = max(m.parameters for m in (model, job.teacher_model) if m is not None)
    if (start_s := round(START_OVERHEAD_S + 4 * parameters / LOAD_BYTES_PER_S)) > job.start_limit_s:
        proposal["deadlines.start_s"] = start_s
    return proposal


def estimate_sample_s(
    costs: CostModel, engine: EngineSettings, num_responses: int, mean_response_tokens: float, mean_prompt_tokens: int
) -> float:
    """Estimate the seconds in which one instance samples the batch of a training step. It runs as many responses at
    once as max_running and its KV cache allow, each half finished on average.

    Args:
        costs: Times of prefill and decode steps.
        engine: Settings of the instance.
        num_responses: Responses of a batch.
        mean_response_tokens: Mean length of a response.
        mean_prompt_tokens: Mean length of a prompt.

    >>> costs = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, b=0.0)
    >>> estimate_sample_s(costs, EngineSettings(max_running=32), 64, mean_response_tokens=100, mean_prompt_tokens=0)
    2.0
    """
    context = mean_prompt_tokens + mean_response_tokens / 2
    num_fitting = int(engine.kv_tokens // (mean_prompt_tokens + mean_response_tokens))
    running = max(1, min(num_responses, engine.max_running, num_fitting))
    steps = num_responses * mean_response_tokens / running
    return steps * costs.step_s(running, running * context) + num_responses * mean_prompt_tokens * costs.prefill


def propose_gpu_split(
    sample_s: float, train_s: float, num_gpus: int, tensor_parallel: int = 1, min_ranks: int = 1
) -> tuple[int, int, str] | None:
    """Choose the division with the shortest step. Sampling and training overlap, so the slower one decides; among equal
    divisions, the one with fewer ranks is chosen.

    Args:
        sample_s: Seconds in which one instance samples the batch of a training step.
        train_s: Seconds in which one rank trains on it.
        num_gpus: GPUs to divide.
        tensor_parallel: GPUs of an instance.
        min_ranks: Least number of ranks on which the trainer fits into memory.

    Returns:
        The numbers of instances and of ranks, and why, in one line; None if there are too few GPUs.
    """
    options = []
    for ranks in range(min_ranks, num_gpus - tensor_parallel + 1):
        instances = (num_gpus - ranks) // tensor_parallel
        options.append((max(sample_s / instances, train_s / ranks), ranks, instances))
    if not options:
        return None
    step_s, ranks, instances = min(options)
    reason = (
        f"an instance samples a step's batch in {sample_s:.3g} s (rollout.cost), a rank trains it in "
        f"{train_s:.3g} s (simulation.train_s, training.ranks): together {step_s:.3g} s a step"
    )
    return instances, ranks, reason
