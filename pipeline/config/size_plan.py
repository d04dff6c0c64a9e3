"""The plan of a job's memory on given GPUs, and its table."""

from __future__ import annotations

from collections.abc import Sequence

from staleflow.pipeline.config.model_files import find_model, read_architecture
from staleflow.pipeline.config.run_roles import run_roles, tensor_parallel
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.placement.devices import GB, Host, describe
from staleflow.pipeline.placement.picture import draw
from staleflow.pipeline.placement.placement import Shortage, place
from staleflow.pipeline.sizing.memory import MARGIN, EngineShape, TrainingShape
from staleflow.pipeline.sizing.model_shape import ModelShape
from staleflow.pipeline.sizing.plan import MemoryPlan, SizedJob, make_plan
from staleflow.stores.errors import ConfigError


def sized_job(config: RunConfig, num_gpus: int) -> SizedJob:
    """What of a job decides about memory. A response counts with a prompt of workload.prompt_tokens."""
    training, engine = config.training, config.rollout.engine
    return SizedJob(
        training=TrainingShape(
            ranks=training.ranks,
            dtype=config.model.dtype,
            microbatch_tokens=training.microbatch_tokens,
            recompute=training.recompute_activations,
            offload=training.offload,
        ),
        engine=EngineShape(
            tensor_parallel=tensor_parallel(config),
            dtype=config.model.dtype,
            kv_tokens=engine.kv_tokens,
            max_running=engine.max_running,
            batch_tokens=engine.max_batch_tokens,
        ),
        instances=config.rollout.instances,
        longest=config.workload.prompt_tokens + config.rollout.max_new_tokens,
        num_gpus=num_gpus,
        own_gpu=num_gpus > 1,
    )


def explain_plan(config: RunConfig, hosts: Sequence[Host]) -> tuple[str, bool]:
    """A job's plan on these GPUs as text, with the placement, and whether it fits. The smallest GPU counts. Raises
    ConfigError if the job has no model on this machine."""
    label = f"model.path = {config.model.path!r}"
    if not config.model.path:
        raise ConfigError("--gpus: the job names no model: set model.path to a folder; its config.json has the sizes")
    folder = find_model(config.model.path) if config.has_texts else None
    if folder is None:
        raise ConfigError(f"--gpus: {label} is not on this machine; its config.json has the sizes")
    devices = [device for host in hosts for device in host.devices]
    sizes = [device.memory_bytes for device in devices if device.memory_bytes]
    if not sizes:
        raise ConfigError("--gpus: no GPU whose memory is known")
    job = sized_job(config, len(devices))
    plan = make_plan(ModelShape.of(read_architecture(folder, label), label), job, min(sizes))
    lines = [f"on {describe(devices)}: {job.instances} instances of {job.engine.tensor_parallel}, "
             f"{job.training.ranks} ranks", *table(plan)]  # fmt: skip
    placed = place(hosts, run_roles(config), share=len(devices) == 1)
    short = isinstance(placed, Shortage)
    lines += ["", placed.line if isinstance(placed, Shortage) else draw(hosts, placed.assignments)]
    return "\n".join([*lines, "", verdict(plan)]), plan.changes == {} and not short


def table(plan: MemoryPlan) -> list[str]:
    """The parts of a rank and of an instance in GB, a line each."""
    names = dict.fromkeys((*plan.trainer, *plan.engine))
    width = max(map(len, names))

    def cell(parts: dict[str, int], name: str) -> str:
        return f"{parts[name] / GB:10.1f}" if name in parts else " " * 10

    trainer, engine = dict(plan.trainer), dict(plan.engine)
    lines = [f"{'GB of a GPU':<{width}}  {'rank':>10}  {'instance':>10}"]
    lines += [f"{name:<{width}}  {cell(trainer, name)}  {cell(engine, name)}".rstrip() for name in names]
    total = f"{sum(trainer.values()) / GB:10.1f}  {sum(engine.values()) / GB:10.1f}"
    return [*lines, f"{'together':<{width}}  {total}   of {plan.usable_bytes / GB:.1f} ({MARGIN:.0%} are left free)"]


def verdict(plan: MemoryPlan) -> str:
    """Whether it fits, or with which change, and what is proposed for the memory that is left."""
    proposed = "; ".join(f"{key} = {value}" for key, value in plan.proposed.items())
    if plan.changes is None:
        return (
            "does not fit; no change of dtype, recompute, micro-batch, cache, ranks, tensor_parallel or offload helps"
        )
    if not plan.changes:
        return f"fits; to use the memory that is left: {proposed}"
    changes = ", ".join(f"{key} = {_toml(value)}" for key, value in plan.changes.items())
    return f"does not fit; it does with {changes}; then: {proposed}"


def _toml(value: object) -> str:
    """A value as a job file has it."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
