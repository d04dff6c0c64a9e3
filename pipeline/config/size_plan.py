"""The roles of a job, and its memory plan on given GPUs: memory of each role, whether the job fits, and the placement
on this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from staleflow.pipeline.config.knob_tree import toml_value, with_values
from staleflow.pipeline.config.model_files import find_local_model, find_model_folder, read_architecture
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.placement.devices import GB, Device, Host, describe_devices
from staleflow.pipeline.placement.placement import Role, RoleKind, Shortage, place, placement_text
from staleflow.pipeline.sizing import memory
from staleflow.pipeline.sizing.plan import MemoryPlan, MemorySettings, estimate_sample_s, make_plan, propose_gpu_split
from staleflow.stores.errors import ConfigError
from staleflow.stores.weights.retention import kept_versions
from staleflow.tasks.emulation.workload import RandomWorkload
from staleflow.tasks.training.rank import rank_name

THIS_MACHINE = "this machine"
NOTHING_HELPS = "no change of instances, dtype, recompute, micro-batch, cache, ranks, tensor_parallel or offload helps"


def memory_settings(config: RunConfig, num_gpus: int) -> MemorySettings:
    """The values of a job that determine its memory. A response is counted with a prompt of workload.prompt_tokens. A
    row longer than training.microbatch_tokens is a pass of its own. A teacher computes logits of all tokens of a
    pass."""
    training, teacher = config.training, config.teacher.engine
    max_length = config.workload.prompt_tokens + config.rollout.max_new_tokens
    pass_tokens = min(max(training.microbatch_tokens, max_length), config.trajectories_per_step * max_length)
    teacher = dataclasses.replace(teacher, max_running=teacher.max_batch_tokens)
    reference = config.training.kl.reference or ("" if training.lora.rank else config.model.path)
    holds_reference = config.needs_reference and not config.teachers
    return MemorySettings(
        training=dataclasses.replace(training, microbatch_tokens=pass_tokens),
        engine=config.rollout.engine,
        dtype=config.model.dtype,
        instances=config.rollout.instances,
        max_length=max_length,
        num_gpus=num_gpus,
        has_separate_gpus=num_gpus > 1,
        takes_turns=config.shares_gpus,
        start_limit_s=config.deadlines.start_s,
        reference=_model_shape(config, reference) if holds_reference else None,
        teachers=len(config.teachers),
        teacher=teacher if config.teachers else None,
        teacher_model=_model_shape(config, training.kl.reference or config.model.path) if config.teachers else None,
    )


def gpu_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Bytes of GPU memory that a rank, an instance and a teacher of a job need. 0 if unknown: the model is not on this
    machine, or of a kind that is not sized. With the layout "turns" those of a rank and an instance include the CUDA
    context of the sleeping process."""
    job, shape = memory_settings(config, 2), _model_shape(config, config.model.path)
    teacher_bytes = sum(job.teacher_bytes_by_use.values())
    if shape is None:
        return 0, 0, teacher_bytes
    sleeping_bytes = memory.CUDA_CONTEXT_BYTES if config.shares_gpus else 0
    rank_bytes = sum(job.trainer_bytes_by_use(shape).values())
    instance_bytes = sum(job.engine_bytes_by_use(shape).values())
    return rank_bytes + sleeping_bytes, instance_bytes + sleeping_bytes, teacher_bytes


def _model_shape(config: RunConfig, path: str) -> memory.ModelShape | None:
    """The sizes of a job's model at `path`; None if its config.json is not on this machine, or is not one of a
    decoder."""
    folder = find_local_model(path) if path and not config.emulated else None
    try:
        return None if folder is None else memory.ModelShape.of(read_architecture(folder, path), "")
    except ConfigError:
        return None


def describe_change_that_fits(config: RunConfig, num_gpus: int, device_bytes: int) -> str:
    """The smallest change with which a job fits on GPUs that are too small for it, for messages; empty if they are
    large enough, or no such change is known. device_bytes: memory of the largest GPU."""
    rank_bytes, instance_bytes, teacher_bytes = gpu_bytes(config)
    is_shared = num_gpus == 1 and not config.shares_gpus
    all_bytes = rank_bytes + instance_bytes * config.rollout.instances + teacher_bytes * len(config.teachers)
    needed_bytes = all_bytes if is_shared else max(rank_bytes, instance_bytes, teacher_bytes)
    shape = _model_shape(config, config.model.path)
    if shape is None or not device_bytes or needed_bytes <= device_bytes:
        return ""
    plan = make_plan(shape, memory_settings(config, num_gpus), device_bytes)
    return f"it fits with {_format_changes(plan)}" if plan.changes else NOTHING_HELPS


def gpu_split_line(config: RunConfig, num_gpus: int, device_bytes: int) -> str:
    """One line that proposes how many GPUs instances and ranks should get, and why; empty for too few GPUs, in turns,
    and for recorded responses, which are in a store."""
    if config.shares_gpus or config.workload.kind == "recorded":
        return ""
    job, shape = memory_settings(config, num_gpus), _model_shape(config, config.model.path)
    powers = (2**power for power in range(11))
    min_ranks = next(n for n in powers if not shape or n >= num_gpus or _rank_fits(shape, job, n, device_bytes))
    responses, prompt_tokens = config.trajectories_per_step, config.workload.prompt_tokens
    tokens = mean_response_tokens(config)
    batch_tokens = responses * (prompt_tokens + tokens)
    train_s = config.simulation.train_s + config.simulation.train_s_per_token * batch_tokens
    sample_s = estimate_sample_s(config.rollout.cost, job.engine, responses, tokens, prompt_tokens)
    split = propose_gpu_split(
        sample_s, train_s * config.training.ranks, num_gpus - job.num_teacher_gpus, memory.num_gpus_of(job.engine),
        min_ranks,
    )  # fmt: skip
    if split is None:
        return ""
    instances, ranks, reason = split
    return f"proposed for {num_gpus} GPUs: rollout.instances = {instances}, training.ranks = {ranks}: {reason}"


def mean_response_tokens(config: RunConfig) -> float:
    """Mean length of a job's random responses."""
    return RandomWorkload(
        config.workload,
        members_per_group=config.batch.group_size,
        max_tokens=config.rollout.max_new_tokens,
        seed=config.seed,
    ).mean_tokens


def _rank_fits(shape: memory.ModelShape, job: MemorySettings, ranks: int, device_bytes: int) -> bool:
    job = with_values(job, {"training.ranks": ranks})
    parts = job.trainer_bytes_by_use(shape)
    return not device_bytes or sum(parts.values()) <= device_bytes * (1 - memory.UNUSED_MEMORY_SHARE)


def explain_plan(config: RunConfig, hosts: Sequence[Host]) -> tuple[str, bool]:
    """Return a job's memory plan and placement on these GPUs as text, and whether the job fits on the smallest GPU.
    Raises ConfigError if the job has no model on this machine."""
    label = f"model.path = {config.model.path!r}"
    if not config.model.path:
        raise ConfigError("--gpus: the job names no model: set model.path to a folder; its config.json has the sizes")
    path = config.model.path
    folder = (find_local_model(path) or find_model_folder(path)) if config.has_texts else None
    if folder is None:
        raise ConfigError(f"--gpus: {label} is not on this machine; its config.json has the sizes")
    devices = [device for host in hosts for device in host.devices]
    sizes = [device.memory_bytes for device in devices if device.memory_bytes]
    if not sizes:
        raise ConfigError(
            "no GPU whose memory is known; `staleflow config explain JOB --gpus 8xH100-80` plans for others"
        )
    job = memory_settings(config, len(devices))
    model = memory.ModelShape.of(read_architecture(folder, label), label)
    plan = make_plan(model, job, min(sizes))
    lines = [f"on {describe_devices(devices)}: rollout.instances = {job.instances}, GPUs of each = "
             f"{memory.num_gpus_of(job.engine)}, training.ranks = {job.training.ranks}",
             *format_memory_table(plan)]  # fmt: skip
    if not config.training.lora.rank and (num_points := num_resume_points(config)):
        point_gb = memory.RESUME_POINT_BYTES * model.parameters / GB
        lines.append(f"disk, by the end: {num_points} resume points of {point_gb:.1f} GB, {num_points * point_gb:.1f}")
    placement = place(hosts, job_roles(config), may_share=len(devices) == 1, takes_turns=config.shares_gpus)
    lacks_gpus = isinstance(placement, Shortage)
    placed = placement.message if isinstance(placement, Shortage) else placement_text(hosts, placement.assignments)
    lines += ["", placed, "", format_verdict(plan)]
    if proposal := gpu_split_line(config, len(devices), min(sizes)):
        lines.append(proposal)
    return "\n".join(lines), plan.changes == {} and not lacks_gpus


def num_resume_points(config: RunConfig) -> int:
    """The number of resume points that a finished run has."""
    every, keep_every = config.training.resume_every, config.training.keep_every
    if not every:
        return 0
    return len(kept_versions(range(every, config.steps + 1, every), keep_every))


def format_memory_table(plan: MemoryPlan) -> list[str]:
    """The memory of a rank, of an instance and of a teacher by part, one line each, in GB."""
    columns = {"rank": plan.trainer_bytes, "instance": plan.engine_bytes}
    columns |= {"teacher": plan.teacher_bytes} if plan.teacher_bytes else {}
    names = dict.fromkeys(name for parts in columns.values() for name in parts)
    width = max(map(len, names))

    def format_cell(parts: Mapping[str, int], name: str) -> str:
        return f"{parts[name] / GB:10.1f}" if name in parts else " " * 10

    lines = ["  ".join([f"{'GB of a GPU':<{width}}", *(f"{column:>10}" for column in columns)])]
    for name in names:
        lines.append("  ".join([f"{name:<{width}}", *(format_cell(p, name) for p in columns.values())]).rstrip())
    total = "  ".join(f"{sum(parts.values()) / GB:10.1f}" for parts in columns.values())
    return [
        *lines,
        f"{'together':<{width}}  {total}   of {plan.usable_bytes / GB:.1f} ({memory.UNUSED_MEMORY_SHARE:.0%} are left "
        "free)",
    ]


def format_verdict(plan: MemoryPlan) -> str:
    """Lines that say whether the job fits, or with which change, and how to use the remaining memory."""
    proposal = "; ".join(f"{key} = {value}" for key, value in plan.proposed.items())
    if plan.changes is None:
        return f"does not fit; {NOTHING_HELPS}"
    if not plan.changes:
        return f"fits; proposed: {proposal}"
    return f"does not fit; it does with {_format_changes(plan)}; then: {proposal}"


def _format_changes(plan: MemoryPlan) -> str:
    return ", ".join(f"{key} = {toml_value(value)}" for key, value in (plan.changes or {}).items())


def usable_devices(config: RunConfig, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The GPUs of this machine that a job may use: the first cluster.gpus, or all. Raises ConfigError."""
    count = config.cluster.gpus
    if count > len(devices):
        remedy = f"{len(devices)} or less, or 0 for all" if devices else "0"
        raise ConfigError(f"cluster.gpus = {count}: {THIS_MACHINE} has {describe_devices(devices)}; set it to {remedy}")
    return tuple(devices[: count or len(devices)])


def place_locally(config: RunConfig, devices: Sequence[Device]) -> tuple[Mapping[str, str], str]:
    """Return CUDA_VISIBLE_DEVICES of each role's process by name, and the placement as text. Both are empty if the job
    uses no GPU. Roles share a GPU only if there is a single one. Raises ConfigError if there are too few GPUs. devices:
    those of this machine."""
    devices = usable_devices(config, devices) if uses_gpus(config) else ()
    if not devices:
        return {}, ""
    host = Host(name=THIS_MACHINE, devices=tuple(devices))
    placement = place(
        [host], job_roles(config, *gpu_bytes(config)), may_share=len(devices) == 1, takes_turns=config.shares_gpus
    )
    if isinstance(placement, Shortage):
        sizes = [device.memory_bytes for device in devices]
        remedy = describe_change_that_fits(config, len(devices), max(sizes)) or (
            "lower rollout.instances, training.ranks or rollout.engine.tensor_parallel"
        )
        raise ConfigError(f"cluster: the run {placement.message} on {THIS_MACHINE}; {remedy}")
    visible = {device.uuid: device.visible_id for device in devices}
    by_name = {
        name: ",".join(visible[uuid] for uuid in assignment.device_uuids)
        for name, assignment in placement.assignments.items()
    }
    text = placement_text([host], placement.assignments)
    num_idle = len(devices) - len(
        {uuid for assignment in placement.assignments.values() for uuid in assignment.device_uuids}
    )
    if num_idle and (proposal := gpu_split_line(config, len(devices), min(device.memory_bytes for device in devices))):
        text += f"\n{proposal}"
    return by_name, text


def uses_gpus(config: RunConfig) -> bool:
    """Whether a job uses GPUs if there are any. A job without a model (an emulated one) does so only if it sets
    cluster.gpus."""
    return config.model.device != "cpu" and (not config.emulated or config.cluster.gpus > 0)


def job_roles(
    config: RunConfig, rank_bytes: int = 0, instance_bytes: int = 0, teacher_bytes: int = 0
) -> tuple[Role, ...]:
    """The roles of a job, one per actor. rank_bytes, instance_bytes, teacher_bytes: memory of a rank, instance or
    teacher on each of its GPUs; 0 if unknown."""
    ranks = [rank_name(number) for number in range(config.training.ranks)]
    instances = [f"rollout-{number}" for number in range(config.rollout.instances)]
    heavy_roles = (
        (RoleKind.RANK, ranks, 1, rank_bytes),
        (RoleKind.INSTANCE, instances, memory.num_gpus_of(config.rollout.engine), instance_bytes),
        (RoleKind.TEACHER, config.teachers, memory.num_gpus_of(config.teacher.engine), teacher_bytes),
    )
    reward_kind = RoleKind.ENVIRONMENT if config.has_environment else RoleKind.LIGHT
    return (
        Role(name="server", kind=RoleKind.LIGHT),
        *(Role(name=name, kind=reward_kind) for name in config.reward_actors),
        *(
            Role(name=name, kind=kind, num_devices=num_devices, memory_bytes=memory_bytes)
            for kind, names, num_devices, memory_bytes in heavy_roles
            for name in names
        ),
    )
