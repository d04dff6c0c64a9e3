"""Simulated fleets and the roles placed on them; docs/placement.md shows the diagrams."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from staleflow.pipeline.placement.devices import GB, Device, Host, parse_fleet, uniform_host
from staleflow.pipeline.placement.placement import (
    Assignment,
    Placement,
    Role,
    RoleKind,
    Shortage,
    place,
    placement_text,
)


def roles_of(
    *,
    instances: int = 1,
    tensor_parallel: int = 1,
    ranks: int = 1,
    environments: int = 0,
    instance_gb: int = 0,
    rank_gb: int = 0,
    teachers: int = 0,
) -> list[Role]:
    """The roles of one run."""
    trainer = [Role(name="trainer" if not n else f"trainer-{n}", kind=RoleKind.RANK, num_devices=1,
                    memory_bytes=rank_gb * GB) for n in range(ranks)]  # fmt: skip
    rollout = [
        Role(name=f"rollout-{n}", kind=RoleKind.INSTANCE, num_devices=tensor_parallel, memory_bytes=instance_gb * GB)
        for n in range(instances)
    ]
    environment = [Role(name=f"env-{n}", kind=RoleKind.ENVIRONMENT) for n in range(environments)]
    teacher = [Role(name=f"teacher-{n}", kind=RoleKind.TEACHER, num_devices=1) for n in range(teachers)]
    return [Role(name="server", kind=RoleKind.LIGHT), *trainer, *rollout, *teacher, *environment]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts, the roles to place, and their previous assignments."""

    hosts: Sequence[Host]
    roles: Sequence[Role]
    taken: Mapping[str, str] = field(default_factory=dict)
    previous: Mapping[str, Assignment] = field(default_factory=dict)
    may_share: bool = False
    takes_turns: bool = False

    def place(self) -> Placement | Shortage:
        return place(
            self.hosts,
            self.roles,
            gpu_owners=self.taken,
            previous=self.previous,
            may_share=self.may_share,
            takes_turns=self.takes_turns,
        )

    def picture(self) -> str:
        placed = self.place()
        return (
            placed.message
            if isinstance(placed, Shortage)
            else placement_text(self.hosts, placed.assignments, self.taken)
        )


def mig_host() -> Host:
    """Return a GPU split into seven MIG slices, which cannot access each other's memory."""
    slices = tuple(
        Device(uuid=f"MIG-{n}", visible_id=f"MIG-{n}", model="A100-MIG", memory_bytes=10 * GB, link_domain=f"MIG-{n}")
        for n in range(7)
    )
    return Host(name="node-0", devices=slices)


def without_gpu(host: Host, number: int) -> Host:
    """Return the host without a failed GPU."""
    return dataclasses.replace(host, devices=host.devices[:number] + host.devices[number + 1 :])


def placed_fleet(fleet: Fleet) -> Mapping[str, Assignment]:
    placement = fleet.place()
    assert isinstance(placement, Placement), placement
    return placement.assignments


def fleets() -> dict[str, Fleet]:
    """Return the fleets by the caption of their diagram."""
    eight = parse_fleet("8xH100-80")
    pair = parse_fleet("2x8xH100-80")
    tensor_parallel = Fleet(hosts=pair, roles=roles_of(instances=6, tensor_parallel=2, ranks=4, environments=2))
    first = Fleet(hosts=pair, roles=roles_of(instances=3, tensor_parallel=2, ranks=2))
    taken = {uuid: "job-a" for place in placed_fleet(first).values() for uuid in place.device_uuids}
    lost = Fleet(hosts=eight, roles=roles_of(instances=5, ranks=2))
    return {
        "One GPU, which trainer and instance share": Fleet(
            hosts=parse_fleet("1xH100-80"), roles=roles_of(instance_gb=30, rank_gb=40), may_share=True
        ),
        "Two GPUs, in turns": Fleet(
            hosts=parse_fleet("2xH100-80"),
            roles=roles_of(instances=2, ranks=2, instance_gb=60, rank_gb=70),
            takes_turns=True,
        ),
        "Eight GPUs: six instances, two ranks": Fleet(hosts=eight, roles=roles_of(instances=6, ranks=2)),
        "Two hosts of eight: instances of two GPUs, four ranks": tensor_parallel,
        "Sixteen hosts of eight and one without GPUs: 22 instances of four GPUs, 40 ranks": Fleet(
            hosts=(*parse_fleet("16x8xH100-80"), Host(name="cpu-0")),
            roles=roles_of(instances=22, tensor_parallel=4, ranks=40, environments=1),
        ),
        "80 and 141 GB: ranks need more than 80": Fleet(
            hosts=parse_fleet("8xH100-80+8xH200-141"), roles=roles_of(instances=8, ranks=8, instance_gb=60, rank_gb=120)
        ),
        "MIG slices: no instance of two": Fleet(hosts=[mig_host()], roles=roles_of(instances=2, tensor_parallel=2)),
        "MIG slices: instances of one": Fleet(hosts=[mig_host()], roles=roles_of(instances=5)),
        "A GPU has failed (the third): its role moves to the idle one, the others stay": Fleet(
            hosts=[without_gpu(eight[0], 2)], roles=lost.roles, previous=placed_fleet(lost)
        ),
        "A second job beside the first": Fleet(hosts=pair, roles=roles_of(instances=4, ranks=4), taken=taken),
        "A third job, too large": Fleet(
            hosts=pair, roles=roles_of(instances=4, tensor_parallel=2, ranks=4), taken=taken
        ),
        "Nine GPUs of eight": Fleet(hosts=[uniform_host("node-0", 8, "H100", 80)], roles=roles_of(instances=8)),
    }


SHOWN = (
    "One GPU, which trainer and instance share",
    "Two hosts of eight",
    "A third job, too large",
)


def diagrams() -> str:
    """Return the diagrams of docs/placement.md."""
    shown = {title: fleet for title, fleet in fleets().items() if title.split(":")[0] in SHOWN}
    return "\n\n".join(f"{title}:\n{fleet.picture()}" for title, fleet in shown.items())


if __name__ == "__main__":
    print(diagrams())
