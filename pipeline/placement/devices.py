"""Hosts and their GPUs, as reported by workers or described by a text such as 2x8xH100-80."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from staleflow.stores.errors import ConfigError

GB = 10**9
"""Bytes of the gigabyte in which GPUs are sold and described here."""
FLEET_PART = re.compile(r"(?:(?P<hosts>\d+)x)?(?P<count>\d+)x(?P<model>[A-Za-z][\w.]*)-(?P<memory_gb>\d+)")
FLEET_EXAMPLES = "8xH100-80, 2x8xH100-80 (two hosts of eight), 4xH100-80+4xH200-141"
MAX_DEVICES = 100_000
"""GPUs of a fleet beyond which a number is a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or a MIG slice of one. Devices of one host with the same link_domain access each other's memory directly.
    numa_node: NUMA node of the device."""

    uuid: str
    """The same under whatever number a process sees it."""
    visible_id: str
    """What CUDA_VISIBLE_DEVICES has to say for it, in PCI order."""
    model: str = ""
    memory_bytes: int = 0
    """0: unknown, any role fits."""
    link_domain: str = ""
    numa_node: int = 0

    @property
    def memory_gb(self) -> int:
        return round(self.memory_bytes / GB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A worker process that can have one role. device_uuids: the GPUs that it sees, in its order. role_kinds: values of
    the role kinds that it may have; None: all."""

    name: str
    device_uuids: tuple[str, ...] = ()
    role_kinds: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine. processes: its worker processes; None: as many as are needed, each of which sees all GPUs."""

    name: str
    devices: tuple[Device, ...] = ()
    processes: tuple[Process, ...] | None = None


def parse_fleet(text: str) -> tuple[Host, ...]:
    """Parse a text that describes hosts, each with one link domain; docs/placement.md has the format. Raises
    ConfigError.

    >>> [len(host.devices) for host in parse_fleet("2x8xH100-80")]
    [8, 8]
    """
    hosts: list[Host] = []
    for part in text.split("+"):
        match = FLEET_PART.fullmatch(part.strip())
        if match is None or not int(match["count"]) or match["hosts"] == "0":
            raise ConfigError(f"--gpus {text}: {part.strip()!r} is not GPUs; write them as {FLEET_EXAMPLES}")
        num_hosts, count = int(match["hosts"] or 1), int(match["count"])
        if num_hosts * count > MAX_DEVICES:
            raise ConfigError(f"--gpus {text}: {num_hosts * count} GPUs; it must be at most {MAX_DEVICES}")
        for number in range(len(hosts), len(hosts) + num_hosts):
            hosts.append(uniform_host(f"node-{number}", count, match["model"], int(match["memory_gb"])))
    return tuple(hosts)


def uniform_host(name: str, count: int, model: str, memory_gb: int) -> Host:
    """A host with GPUs of one kind in one link domain, half of them on each of two NUMA nodes."""
    return Host(
        name=name,
        devices=tuple(
            Device(
                uuid=f"{name}/{number}",
                visible_id=str(number),
                model=model,
                memory_bytes=memory_gb * GB,
                link_domain="nvlink",
                numa_node=2 * number // count,
            )
            for number in range(count)
        ),
    )


def describe_devices(devices: Iterable[Device]) -> str:
    """Counts of GPUs by kind, such as `4 x H100 80 GB, 4 x H200 141 GB`; `no GPU` if there are none."""
    counts: dict[str, int] = {}
    for device in devices:
        kind = f"{device.model or 'GPU'} {device.memory_gb} GB" if device.memory_bytes else device.model or "GPU"
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "no GPU"
