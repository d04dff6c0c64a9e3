"""Placing roles on GPUs: each rule of pipeline/placement/placement.py as a property of random fleets."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.placement.devices import GB, Device, Host, Process, describe_devices, parse_fleet
from staleflow.pipeline.placement.placement import (
    Assignment,
    Placement,
    Role,
    RoleKind,
    Shortage,
    place,
    placement_text,
)
from staleflow.stores.errors import ConfigError
from tests.placement import fleets
from tests.placement.fleets import Fleet, roles_of


@st.composite
def random_hosts(draw: st.DrawFn, most_hosts: int = 4, most_devices: int = 8) -> list[Host]:
    hosts = []
    for number in range(draw(st.integers(1, most_hosts))):
        name, memory_gb = f"node-{number}", draw(st.sampled_from([80, 141]))
        count = draw(st.integers(0, most_devices))
        per_domain = draw(st.sampled_from([1, 2, 4, 8]))
        devices = tuple(
            Device(
                uuid=f"{name}/{i}",
                visible_id=str(i),
                memory_bytes=memory_gb * GB,
                link_domain=str(i // per_domain),
                numa_node=i // 4,
            )
            for i in range(count)
        )
        hosts.append(Host(name=name, devices=devices))
    return hosts


def with_processes(host: Host, count: int, sees: str) -> Host:
    """Return a host with worker processes that see one GPU each, or all GPUs in rotated order as with dask-cuda."""
    uuids = [device.uuid for device in host.devices]
    lists = {
        "all": [uuids] * count,
        "rotated": [uuids[n % len(uuids) :] + uuids[: n % len(uuids)] if uuids else [] for n in range(count)],
        "own": [uuids[n : n + 1] for n in range(count)],
    }
    processes = tuple(Process(name=f"{host.name}:{n}", device_uuids=tuple(seen)) for n, seen in enumerate(lists[sees]))
    return dataclasses.replace(host, processes=processes)


@st.composite
def random_roles(draw: st.DrawFn, most: int = 8, most_teachers: int = 0) -> list[Role]:
    return roles_of(
        instances=draw(st.integers(1, most)),
        tensor_parallel=draw(st.sampled_from([1, 2, 3, 4])),
        ranks=draw(st.integers(1, most)),
        environments=draw(st.integers(0, 3)),
        instance_gb=draw(st.sampled_from([0, 60, 120])),
        rank_gb=draw(st.sampled_from([0, 60, 120])),
        teachers=draw(st.integers(0, most_teachers)),
    )


@st.composite
def random_fleets(draw: st.DrawFn) -> Fleet:
    hosts = draw(random_hosts())
    uuids = [device.uuid for host in hosts for device in host.devices]
    taken = draw(st.sets(st.sampled_from(uuids), max_size=len(uuids) // 2)) if uuids else set()
    return Fleet(
        hosts=hosts,
        roles=draw(random_roles(most_teachers=2)),
        taken=dict.fromkeys(taken, "job-b"),
        may_share=draw(st.booleans()),
    )


def check(fleet: Fleet, assignments: Mapping[str, Assignment]) -> None:
    """Check the rules that hold for every placement."""
    devices = {device.uuid: (host.name, device) for host in fleet.hosts for device in host.devices}
    num_free = sum(uuid not in fleet.taken for uuid in devices)
    assert set(assignments) == {role.name for role in fleet.roles}
    used = Counter(uuid for assignment in assignments.values() for uuid in assignment.device_uuids)
    assert not set(used) & set(fleet.taken)
    if not fleet.may_share or num_free >= sum(role.num_devices for role in fleet.roles):
        assert all(count == 1 for count in used.values())
    on: dict[str, list[Role]] = {uuid: [] for uuid in used}
    for role in fleet.roles:
        own = assignments[role.name]
        assert len(set(own.device_uuids)) == len(own.device_uuids) == role.num_devices
        assert {devices[uuid][0] for uuid in own.device_uuids} <= {own.host}
        assert len({devices[uuid][1].link_domain for uuid in own.device_uuids}) <= 1
        for uuid in own.device_uuids:
            on[uuid].append(role)
    for uuid, roles in on.items():
        assert sum(role.memory_bytes for role in roles) <= devices[uuid][1].memory_bytes
        assert sum(role.kind is RoleKind.RANK for role in roles) <= 1


@given(random_fleets())
def test_no_gpu_is_used_twice_and_no_instance_crosses_link_domains(fleet: Fleet) -> None:
    placed = fleet.place()
    if isinstance(placed, Placement):
        check(fleet, placed.assignments)
        assert placed == fleet.place()


@given(random_fleets())
def test_with_turns_a_gpu_has_at_most_one_instance_and_one_rank(fleet: Fleet) -> None:
    turns = dataclasses.replace(fleet, takes_turns=True, may_share=False)
    placed = turns.place()
    if isinstance(placed, Shortage):
        assert isinstance(dataclasses.replace(fleet, may_share=False).place(), Shortage)
        return
    memory_bytes = {device.uuid: device.memory_bytes for host in fleet.hosts for device in host.devices}
    on = Counter((uuid, role.kind) for role in fleet.roles for uuid in placed.assignments[role.name].device_uuids)
    assert all(count == 1 for count in on.values())
    taught = {uuid for uuid, kind in on if kind is RoleKind.TEACHER}
    assert not taught & {uuid for uuid, kind in on if kind is not RoleKind.TEACHER}, "a teacher has its own GPU"
    assert not {uuid for uuid, _ in on} & set(fleet.taken)
    for role in fleet.roles:
        for uuid in placed.assignments[role.name].device_uuids:
            assert role.memory_bytes <= memory_bytes[uuid]
    assert dataclasses.replace(turns, previous=placed.assignments).place() == placed


def test_with_turns_ranks_and_instances_share_gpus_where_possible() -> None:
    placed = place(
        parse_fleet("8xH100-80"), roles_of(instances=4, ranks=4, instance_gb=70, rank_gb=70), takes_turns=True
    )
    assert isinstance(placed, Placement)
    assert len({uuid for own in placed.assignments.values() for uuid in own.device_uuids}) == 4
    shortage = place(parse_fleet("4xH100-80"), roles_of(instances=5, ranks=2), takes_turns=True)
    assert isinstance(shortage, Shortage)
    assert "needs 5 GPUs (2 for training, 5 for rollout, in turns); 4 of 4 are free" in shortage.message


@pytest.mark.parametrize("turns", [False, True])
def test_a_teacher_has_its_own_gpu(turns: bool) -> None:
    roles = roles_of(teachers=1)
    placed = place(parse_fleet("4xH100-80"), roles, takes_turns=turns)
    assert isinstance(placed, Placement)
    devices = {name: own.device_uuids for name, own in placed.assignments.items()}
    assert not set(devices["teacher-0"]) & {*devices["trainer"], *devices["rollout-0"]}
    assert "T0" in placement_text(parse_fleet("4xH100-80"), placed.assignments)
    shortage = place(parse_fleet("1xH100-80"), roles, takes_turns=turns)
    assert isinstance(shortage, Shortage)
    total, in_turns = (2, ", in turns") if turns else (3, "")
    assert shortage.message.startswith(
        f"needs {total} GPUs (1 for training, 1 for rollout, 1 for teachers{in_turns}); 1 of 1 are free"
    )


def exists(hosts: Sequence[Host], roles: Sequence[Role]) -> bool:
    """Return whether a placement exists, by trying all numbers of instances in each domain and counting GPUs for
    ranks."""
    instances = [role for role in roles if role.kind is RoleKind.INSTANCE]
    ranks = [role for role in roles if role.kind is RoleKind.RANK]
    domains: dict[tuple[str, str], list[int]] = {}
    for host in hosts:
        for device in host.devices:
            domains.setdefault((host.name, device.link_domain), []).append(device.memory_bytes)
    width, needs, rank_needs = instances[0].num_devices, instances[0].memory_bytes, ranks[0].memory_bytes
    most = [sum(size >= needs for size in sizes) // width for sizes in domains.values()]
    for counts in itertools.product(*(range(n + 1) for n in most)):
        if sum(counts) != len(instances):
            continue
        left = 0
        for count, sizes in zip(counts, domains.values(), strict=True):
            able = sorted(size for size in sizes if size >= needs)
            rest = able[count * width :] if needs <= rank_needs else able[: len(able) - count * width]
            left += sum(size >= rank_needs for size in rest)
            left += sum(rank_needs <= size < needs for size in sizes)
        if left >= len(ranks):
            return True
    return False


@given(random_hosts(most_hosts=3, most_devices=6), random_roles(most=4))
def test_no_gpu_is_idle_while_a_role_that_fits_waits(hosts: list[Host], roles: list[Role]) -> None:
    assert isinstance(place(hosts, roles), Placement) == exists(hosts, roles)


@given(random_fleets(), st.sampled_from(["all", "rotated", "own"]), st.integers(0, 12))
def test_each_role_has_a_separate_process_that_sees_its_gpus(fleet: Fleet, sees: str, count: int) -> None:
    hosts = [with_processes(host, count, sees) for host in fleet.hosts]
    of_hosts = dataclasses.replace(fleet, hosts=hosts)
    placed = of_hosts.place()
    if isinstance(placed, Placement):
        check(of_hosts, placed.assignments)
        processes = {process.name: process for host in hosts for process in host.processes or ()}
        used = [processes[own.process] for own in placed.assignments.values()]
        assert len({process.name for process in used}) == len(used)
        for own, process in zip(placed.assignments.values(), used, strict=True):
            assert process.name.startswith(own.host) and set(own.device_uuids) <= set(process.device_uuids)
        assert dataclasses.replace(of_hosts, previous=placed.assignments).place() == placed


@given(random_fleets(), st.sampled_from(["all", "rotated"]))
def test_processes_that_see_all_gpus_do_not_limit_the_placement(fleet: Fleet, sees: str) -> None:
    """With as many processes as there may be roles."""
    hosts = [with_processes(host, 20, sees) for host in fleet.hosts]
    placed, with_them = fleet.place(), dataclasses.replace(fleet, hosts=hosts).place()
    assert isinstance(placed, Placement) == isinstance(with_them, Placement)


@pytest.mark.parametrize("sees", ["rotated", "own"])
def test_one_process_per_gpu_fills_all_gpus(sees: str) -> None:
    """Eight workers started by dask-cuda or a shell loop each get the first GPU they see."""
    hosts = [with_processes(host, 8, sees) for host in parse_fleet("2x8xH100-80")]
    placed = place([*hosts, Host(name="cpu-0")], roles_of(instances=12, ranks=4))
    assert isinstance(placed, Placement)
    heavy = [own for own in placed.assignments.values() if own.device_uuids]
    assert len({own.device_uuids for own in heavy}) == 16
    assert all(own.device_uuids[0].rpartition("/")[2] == own.process.rpartition(":")[2] for own in heavy)
    assert len({placed.assignments[f"trainer{n}"].host for n in ("", "-1", "-2", "-3")}) == 1


def test_a_process_has_only_roles_of_its_kinds() -> None:
    (host,) = parse_fleet("2xH100-80")
    uuids = tuple(device.uuid for device in host.devices)
    rank = Process(name="rank", device_uuids=uuids, role_kinds=frozenset([RoleKind.RANK.value]))
    any_kind = Process(name="any", device_uuids=uuids)
    placed = place([dataclasses.replace(host, processes=(any_kind, rank)), Host(name="cpu-0")], roles_of())
    assert isinstance(placed, Placement)
    assert placed.assignments["trainer"].process == "rank" and placed.assignments["rollout-0"].process == "any"


@given(random_fleets())
def test_light_roles_use_no_gpu_and_avoid_gpu_hosts(fleet: Fleet) -> None:
    hosts = [*fleet.hosts, Host(name="cpu-0")]
    placed = dataclasses.replace(fleet, hosts=hosts).place()
    if isinstance(placed, Placement):
        plain = {host.name for host in hosts if not host.devices}
        for role in fleet.roles:
            own = placed.assignments[role.name]
            assert bool(own.device_uuids) == bool(role.num_devices)
            assert role.kind is not RoleKind.LIGHT or own.host in plain


@given(random_fleets(), st.data())
def test_a_restart_moves_nothing_and_a_lost_gpu_moves_its_role_only(fleet: Fleet, data: st.DataObject) -> None:
    first = fleet.place()
    if not isinstance(first, Placement):
        return
    before = first.assignments
    again = dataclasses.replace(fleet, previous=before)
    assert again.place() == first
    used = sorted({uuid for item in before.values() for uuid in item.device_uuids})
    lost = data.draw(st.sampled_from(used))
    hosts = [
        dataclasses.replace(host, devices=tuple(d for d in host.devices if d.uuid != lost)) for host in fleet.hosts
    ]
    less = dataclasses.replace(again, hosts=hosts, may_share=False)
    now = less.place()
    if isinstance(now, Placement):
        check(less, now.assignments)
        stay = [name for name, item in before.items() if lost not in item.device_uuids]
        unmoved = all(now.assignments[name] == before[name] for name in stay)
        # Others move only where they would leave no place for the role that lost its own.
        rest = {uuid: "" for name in stay for uuid in before[name].device_uuids} | dict(fleet.taken)
        orphans = [role for role in fleet.roles if role.name not in stay]
        shared = Counter(uuid for item in before.values() for uuid in item.device_uuids).most_common(1)[0][1] > 1
        assert unmoved or shared or isinstance(place(hosts, orphans, gpu_owners=rest), Shortage)


def test_a_moved_role_prefers_its_host_and_then_one_with_the_weights() -> None:
    hosts = parse_fleet("3x2xH100-80")
    roles = roles_of(instances=2, ranks=1)
    before = {
        "server": Assignment(host="node-0"),
        "trainer": Assignment(host="node-1", device_uuids=("node-1/0",)),
        "rollout-0": Assignment(host="node-2", device_uuids=("node-2/0",)),
        "rollout-1": Assignment(host="node-2", device_uuids=("gone",)),
    }
    placed = place(hosts, roles, previous=before)
    assert isinstance(placed, Placement)
    assert placed.assignments["rollout-1"] == Assignment(host="node-2", device_uuids=("node-2/1",))
    placed = place(hosts, roles, previous=before, gpu_owners={"node-2/1": "job-b"})
    assert isinstance(placed, Placement)
    assert placed.assignments["rollout-1"] == Assignment(host="node-1", device_uuids=("node-1/1",))


def test_ranks_are_grouped_and_an_instance_is_on_one_numa_node() -> None:
    placed = place(parse_fleet("2x4xH100-80"), roles_of(instances=2, ranks=4))
    assert isinstance(placed, Placement)
    assert len({placed.assignments[f"trainer{n}"].host for n in ("", "-1", "-2", "-3")}) == 1
    hosts = parse_fleet("8xH100-80")
    placed = place(
        hosts, roles_of(instances=1, tensor_parallel=3), gpu_owners={"node-0/0": "job-b", "node-0/1": "job-b"}
    )
    assert isinstance(placed, Placement)
    assert {int(uuid[-1]) // 4 for uuid in placed.assignments["rollout-0"].device_uuids} == {1}


def test_a_host_has_no_more_roles_than_processes() -> None:
    host = with_processes(parse_fleet("8xH100-80")[0], 3, "all")
    assert isinstance(place([host], roles_of(instances=1, ranks=1)), Placement)
    shortage = place([host], roles_of(instances=1, ranks=1, environments=1))
    assert shortage == Shortage(message="no worker process is left for env-0; start one more")


@pytest.mark.parametrize(
    ("fleet", "roles", "line"),
    [
        ("8xH100-80", roles_of(instances=8), "needs 9 GPUs (1 for training, 8 for rollout); 8 of 8 are free"),
        ("2x2xH100-80", roles_of(instances=1, tensor_parallel=4, ranks=0), "together is 2 (on node-0)"),
        ("4xH100-80", roles_of(rank_gb=120), "trainer needs 1 of 120 GB, the most there are together is 0"),
    ],
)
def test_a_shortage_is_described_in_one_line(fleet: str, roles: list[Role], line: str) -> None:
    shortage = place(parse_fleet(fleet), roles)
    assert isinstance(shortage, Shortage)
    assert line in shortage.message
    assert "\n" not in shortage.message


def test_the_diagrams_in_the_docs_are_current() -> None:
    assert fleets.diagrams() in Path("docs/placement.md").read_text(), "print with python -m tests.placement.fleets"


def test_parse_fleet_reads_a_description() -> None:
    hosts = parse_fleet("2x4xH100-80+8xH200-141")
    assert [len(host.devices) for host in hosts] == [4, 4, 8]
    assert [host.name for host in hosts] == ["node-0", "node-1", "node-2"]
    assert describe_devices(device for host in hosts for device in host.devices) == "8 x H100 80 GB, 8 x H200 141 GB"
    assert describe_devices([]) == "no GPU"
    for bad in ("", "8", "0xH100-80", "8xH100", "8xH100-80+", "0x8xH100-80", "900000xH100-80"):
        with pytest.raises(ConfigError, match="--gpus"):
            parse_fleet(bad)
