"""The roles of a job that need a place, and their GPUs on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.placement.devices import Device, Host, describe
from staleflow.pipeline.placement.picture import draw
from staleflow.pipeline.placement.placement import Placement, Role, RoleKind, Shortage, place
from staleflow.stores.errors import ConfigError
from staleflow.tasks.training.rank import rank_name

THIS = "this machine"


def tensor_parallel(config: RunConfig) -> int:
    """GPUs of a rollout instance."""
    return int(getattr(config.rollout.engine, "tensor_parallel", 1))


def uses_gpus(config: RunConfig) -> bool:
    """Whether a job computes on GPUs, if there are any. One without a model only asks for them by cluster.gpus."""
    return config.model.device != "cpu" and (not config.emulated or config.cluster.gpus > 0)


def run_roles(config: RunConfig) -> tuple[Role, ...]:
    """The roles of a job, by the names of its actors."""
    ranks = (rank_name(number) for number in range(config.training.ranks))
    instances = (f"rollout-{number}" for number in range(config.rollout.instances))
    judge = RoleKind.ENVIRONMENT if config.acts else RoleKind.LIGHT
    return (
        Role(name="server", kind=RoleKind.LIGHT),
        *(Role(name=name, kind=judge) for name in config.reward_actors),
        *(Role(name=name, kind=RoleKind.RANK, num_devices=1) for name in ranks),
        *(Role(name=name, kind=RoleKind.INSTANCE, num_devices=tensor_parallel(config)) for name in instances),
    )


def usable_devices(config: RunConfig, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The GPUs of this machine that a job may use: the first cluster.gpus of them, or all. Raises ConfigError."""
    count = config.cluster.gpus
    if count > len(devices):
        most = f"{len(devices)} or less, or 0 for all" if devices else "0"
        raise ConfigError(f"cluster.gpus = {count}: {THIS} has {describe(devices)}; set it to {most}")
    return tuple(devices[: count or len(devices)])


def place_locally(config: RunConfig, devices: Sequence[Device]) -> tuple[Mapping[str, str], str]:
    """What CUDA_VISIBLE_DEVICES says in the process of each role, by name, and a picture of it. Both are empty if the
    job uses no GPU. The roles share a GPU only if there is one. devices: of this machine. Raises ConfigError if they do
    not suffice."""
    devices = usable_devices(config, devices) if uses_gpus(config) else ()
    if not devices:
        return {}, ""
    host = Host(name=THIS, devices=tuple(devices))
    placed = place([host], run_roles(config), share=len(devices) == 1)
    if isinstance(placed, Shortage):
        raise ConfigError(
            f"cluster: the run {placed.line} on {THIS}; lower rollout.instances, training.ranks or "
            "rollout.engine.tensor_parallel"
        )
    assert isinstance(placed, Placement)
    visible = {device.uuid: device.visible for device in devices}
    by_name = {
        name: ",".join(visible[uuid] for uuid in assignment.devices) for name, assignment in placed.assignments.items()
    }
    return by_name, draw([host], placed.assignments)
