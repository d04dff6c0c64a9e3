"""Choosing the worker processes of a job among free ones: all or none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.cluster.gang import (
    DRIVER,
    EXCLUSIVE_ROLES,
    Gang,
    Needs,
    choose_workers,
    describe_workers,
    roles_by_worker,
)

PLAIN: dict[str, dict[str, float]] = {name: {} for name in "abcdef"}


def needs(instances: int = 1, rewards: int = 1, *, driver: bool = True, ranks: int = 1, teachers: int = 0) -> Needs:
    return Needs(
        num_instances=instances,
        num_reward_workers=rewards,
        has_driver_worker=driver,
        num_ranks=ranks,
        num_teachers=teachers,
    )


def choose(
    needs: Needs, workers: dict[str, dict[str, float]], free: Iterable[str], driver_worker: str = ""
) -> Gang | None:
    return choose_workers(needs, roles_by_worker(workers), free, driver_worker)


def roles(gang: Gang | None) -> dict[str, str]:
    assert gang is not None
    return {address: " ".join(names) for address, names in gang.items()}


def test_light_roles_share_a_worker_and_heavy_roles_have_one_each() -> None:
    assert roles(choose(needs(2, 3), PLAIN, "bcdef")) == {
        "b": "server driver reward", "c": "trainer", "d": "rollout", "e": "rollout",
    }  # fmt: skip
    assert choose(needs(2), PLAIN, "bcd") is None
    assert roles(choose(needs(2, ranks=2), PLAIN, "abcde")) == {
        "a": "server driver reward", "b": "trainer", "c": "trainer", "d": "rollout", "e": "rollout",
    }  # fmt: skip
    assert choose(needs(2, ranks=2), PLAIN, "abcd") is None
    assert roles(choose(needs(driver=False), PLAIN, "abc"))["a"] == "server reward"


def test_the_driver_stays_on_its_worker() -> None:
    assert roles(choose(needs(), PLAIN, "abcd", driver_worker="c")) == {
        "c": "driver server reward", "a": "trainer", "b": "rollout",
    }  # fmt: skip


def test_declared_roles_are_respected_and_reward_workers_spread() -> None:
    workers = {"t": {"trainer": 1.0}, "r": {"rollout": 1.0}, "s": {"server": 1.0, "reward": 1.0}, "x": {"reward": 1.0}}
    assert roles(choose(needs(1, 4), workers, "rstx")) == {
        "s": "server driver reward", "t": "trainer", "r": "rollout", "x": "reward",
    }  # fmt: skip
    assert choose(needs(), workers, "rsx") is None
    assert roles(choose(needs(), workers | {"d": {"driver": 1.0}}, "drst"))["d"] == "driver"


def test_a_worker_with_two_roles_is_left_to_the_role_without_another() -> None:
    workers = {"a": {"rollout": 1.0, "trainer": 1.0}, "b": {"rollout": 1.0}, "s": {"server": 1.0, "reward": 1.0}}
    result = roles(choose(needs(driver=False), workers, "abs"))
    assert (result["a"], result["b"]) == ("trainer", "rollout")


def test_each_teacher_has_a_worker_of_its_own() -> None:
    assert roles(choose(needs(teachers=2), PLAIN, "abcde")) == {
        "a": "server driver reward", "b": "trainer", "c": "teacher", "d": "teacher", "e": "rollout",
    }  # fmt: skip
    assert choose(needs(teachers=2), PLAIN, "abcd") is None
    declared = {"t": {"trainer": 1.0, "teacher": 1.0}, "q": {"teacher": 1.0}, "r": {"rollout": 1.0}}
    light = {"s": {"server": 1.0, "reward": 1.0}}
    assert roles(choose(needs(driver=False, teachers=1), declared | light, "tqrs")) == {
        "s": "server reward", "t": "trainer", "q": "teacher", "r": "rollout",
    }  # fmt: skip
    expected = "5 worker processes (1 rollout instance, the trainer, 2 teachers, one for the light roles)"
    assert str(needs(teachers=2)) == expected


def test_messages_count_workers_by_role() -> None:
    assert str(needs()) == "3 worker processes (1 rollout instance, the trainer, one for the light roles)"
    assert str(needs(ranks=2)).startswith("4 worker processes (1 rollout instance, 2 ranks of the trainer, one for")
    assert describe_workers(PLAIN) == "the cluster has 6"
    assert describe_workers({"d": {"driver": 1}, "e": {}}) == "the cluster has 2; declared: driver 1"


@given(
    st.lists(st.sets(st.sampled_from([DRIVER, "server", "reward", *EXCLUSIVE_ROLES])), max_size=6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
)
def test_workers_are_found_whenever_an_assignment_exists(
    declared: list[set[str]], instances: int, ranks: int, teachers: int, driver: bool
) -> None:
    """Compared with trying every assignment of workers to roles."""
    workers = {str(i): dict.fromkeys(roles, 1.0) for i, roles in enumerate(declared)}
    kinds = roles_by_worker(workers)
    light = (*((DRIVER,) if driver else ()), "server", "reward")

    def possible() -> bool:
        wanted = ["trainer"] * ranks + ["rollout"] * instances + ["teacher"] * teachers
        for heavy in itertools.permutations(workers, len(wanted)):
            fit = all(role in kinds[a] for a, role in zip(heavy, wanted, strict=True))
            rest = [kinds[a] for a in workers if a not in heavy]
            if fit and all(any(role in kind for kind in rest) for role in light):
                return True
        return False

    wanted = needs(instances, driver=driver, ranks=ranks, teachers=teachers)
    gang = choose(wanted, workers, workers)
    assert (gang is not None) == possible()
    if gang is not None:
        values = [role for names in gang.values() for role in names]
        assert {r: values.count(r) for r in (*light, *EXCLUSIVE_ROLES)} | {"reward": 1} == {
            **dict.fromkeys(light, 1), "trainer": ranks, "rollout": instances, "teacher": teachers,
        }  # fmt: skip
        assert all(set(names) <= kinds[address] for address, names in gang.items())
        assert all(len(names) == 1 for names in gang.values() if set(names) & set(EXCLUSIVE_ROLES))


@pytest.mark.timeout(60)
def test_choosing_workers_of_a_large_cluster_is_fast() -> None:
    both = {"rollout": 1.0, "trainer": 1.0}
    workers = {str(i): both if i % 2 else {"rollout": 1.0} for i in range(5000)} | {"s": {"server": 1.0, "reward": 1.0}}
    assert len(choose(needs(4096), workers, workers) or ()) == 4098
    assert len(choose(needs(4096, ranks=512), workers, workers) or ()) == 4096 + 512 + 1
    assert choose(needs(4096, ranks=2000), workers, workers) is None
