"""Placements as text: a line per host, a cell per GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from staleflow.pipeline.placement.devices import Host, describe
from staleflow.pipeline.placement.placement import Assignment

IDLE, OTHERS = "..", "##"


def placement_text(hosts: Sequence[Host], assignments: Mapping[str, Assignment], others: Iterable[str] = ()) -> str:
    """Format which host and GPUs each role has. others: UUIDs of GPUs that other runs use.

    A cell has the roles on a GPU (r3: rollout-3, t0: the trainer, t1: trainer-1), `..` if it is idle, `##` if another
    run has it; link domains are between bars; roles without a GPU stand behind.
    """
    labels: dict[str, list[str]] = {}
    light: dict[str, list[str]] = {}
    for name, assignment in assignments.items():
        for uuid in assignment.devices:
            labels.setdefault(uuid, []).append(_label(name))
        if not assignment.devices:
            light.setdefault(assignment.host, []).append(name)
    used_gpus = set(others)
    width = max((len(host.name) for host in hosts), default=0)
    kinds = {host.name: describe(host.devices) for host in hosts}
    kind_width = max(map(len, kinds.values()), default=0)
    lines = []
    for host in hosts:
        domains: dict[str, list[str]] = {}
        for device in host.devices:
            cell = "+".join(labels.get(device.uuid, ())) or (OTHERS if device.uuid in used_gpus else IDLE)
            domains.setdefault(device.link_domain, []).append(f"{cell:<2}")
        cells = " | ".join(" ".join(domain) for domain in domains.values())
        parts = [f"{host.name:<{width}}  {kinds[host.name]:<{kind_width}}"]
        if cells:
            parts.append(f"| {cells} |")
        if host.name in light:
            parts.append(f"  {', '.join(light[host.name])}")
        lines.append(" ".join(parts).rstrip())
    return "\n".join(lines)


def _label(name: str) -> str:
    """A name's first letter and its number: r0 for rollout-0, t0 for trainer, t1 for trainer-1."""
    kind, _, number = name.partition("-")
    return f"{kind[0]}{number or 0}"
