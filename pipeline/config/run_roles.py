"""The roles of a job, which are placed on hosts and GPUs."""

from __future__ import annotations

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.placement.placement import Role, RoleKind
from staleflow.tasks.training.rank import rank_name


def tensor_parallel(config: RunConfig) -> int:
    """Number of GPUs of a rollout instance."""
    return int(getattr(config.rollout.engine, "tensor_parallel", 1))


def uses_gpus(config: RunConfig) -> bool:
    """Whether a job uses GPUs if there are any. A job without a model (an emulated one) does so only if it sets
    cluster.gpus."""
    return config.model.device != "cpu" and (not config.emulated or config.cluster.gpus > 0)


def run_roles(config: RunConfig, rank_bytes: int = 0, instance_bytes: int = 0) -> tuple[Role, ...]:
    """The roles of a job, one per actor. rank_bytes, instance_bytes: memory of a rank or instance on each of its GPUs;
    0 if unknown."""
    ranks = (rank_name(number) for number in range(config.training.ranks))
    instances = (f"rollout-{number}" for number in range(config.rollout.instances))
    reward_kind = RoleKind.ENVIRONMENT if config.has_environment else RoleKind.LIGHT
    return (
        Role(name="server", kind=RoleKind.LIGHT),
        *(Role(name=name, kind=reward_kind) for name in config.reward_actors),
        *(Role(name=name, kind=RoleKind.RANK, num_devices=1, memory_bytes=rank_bytes) for name in ranks),
        *(
            Role(name=name, kind=RoleKind.INSTANCE, num_devices=tensor_parallel(config), memory_bytes=instance_bytes)
            for name in instances
        ),
    )
