"""Gang admission of jobs: all workers or none, first come, first served."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from staleflow.pipeline.cluster.gang import Needs, RoleSetByWorker, WorkerGpus, choose_workers, roles_by_worker
from staleflow.pipeline.cluster.job_queue import (
    WAITS_FOR_GPU_REPORT,
    JobQueue,
    find_driver_worker,
)
from staleflow.pipeline.cluster.worker_pool import REPORT_LIMIT_S, RESTART_LIMIT_S
from staleflow.pipeline.placement.devices import Device, parse_fleet


def needs_workers(workers: int) -> Needs:
    return Needs(num_instances=workers - 2, num_reward_workers=1, has_driver_worker=True)


def make_queue(workers: str, *jobs: tuple[str, int]) -> JobQueue:
    """Return a queue with plain workers and with jobs that need this many, in order."""
    queue = JobQueue()
    for address in workers:
        queue.add_worker(address, {})
    for id, count in jobs:
        queue.add_job(id, f"/runs/{id}", needs_workers(count), 0.0, 0.0)
    return queue


def queue_of_roles(**workers: str) -> JobQueue:
    """Return a queue of workers that declare roles."""
    queue = JobQueue()
    for address, roles in workers.items():
        queue.add_worker(address, dict.fromkeys(roles.split(), 1.0))
    return queue


def are_enough(needs: Needs, role_sets: RoleSetByWorker) -> bool:
    return choose_workers(needs, role_sets, role_sets, with_surplus=False) is not None


def admit(queue: JobQueue, now: float = 0.0) -> list[str]:
    return list(queue.admit_jobs(now)[0])


def test_a_job_has_all_workers_it_needs_or_none() -> None:
    queue = make_queue("abcd", ("first", 3), ("second", 3))
    assert admit(queue) == ["first"]
    assert len(queue.workers_of("first")) == 3
    assert queue.workers_of("second") == {}
    assert queue.entries["second"].reason == (
        "needs 3 worker processes (1 rollout instance, the trainer, one for the light roles); free 1 of 4; next in line"
    )
    queue.remove_job("first")
    assert admit(queue) == ["second"]


def test_no_job_overtakes_one_that_waits_for_workers_in_use() -> None:
    queue = make_queue("abcdef", ("first", 3), ("big", 6), ("small", 3))
    assert admit(queue) == ["first"]
    assert queue.entries["small"].reason.endswith("free 3 of 6; 1 job before it")
    queue.remove_job("first")
    assert admit(queue) == ["big"]
    queue.remove_job("big")
    assert admit(queue) == ["small"]


def test_a_job_larger_than_the_cluster_does_not_block_others() -> None:
    queue = make_queue("abc", ("huge", 9), ("small", 3))
    assert admit(queue) == ["small"]
    assert queue.entries["huge"].reason == (
        "needs 9 worker processes (7 rollout instances, the trainer, one for the light roles); the cluster has 3; "
        "starts once there are enough"
    )
    queue.add_job("later", "/runs/later", needs_workers(3), 0.0, 1.0)
    for address in "defghi":
        queue.add_worker(address, {})
    assert admit(queue) == [], "it is in the queue once there are enough workers"
    queue.remove_job("small")
    assert admit(queue) == ["huge"]


def test_the_wait_limit_is_for_waiting_jobs() -> None:
    queue = make_queue("abc")
    queue.add_job("runs", "/runs/runs", needs_workers(3), 5.0, 0.0)
    queue.add_job("waits", "/runs/waits", needs_workers(3), 5.0, 0.0)
    assert queue.admit_jobs(4.0)[1] == []
    assert queue.admit_jobs(6.0)[1] == ["waits"]
    queue.remove_job("runs")
    gangs, expired = queue.admit_jobs(7.0)
    assert (list(gangs), expired) == (["waits"], []), "it is admitted late"


def test_the_wait_limit_begins_anew_for_a_job_whose_driver_is_lost() -> None:
    queue = make_queue("abc")
    queue.add_job("first", "/runs/first", needs_workers(3), 5.0, 0.0)
    assert admit(queue) == ["first"]
    for address in queue.requeue_after_driver_loss("first", 100.0):
        queue.remove_worker(address, 101.0)
    assert queue.admit_jobs(104.0)[1] == []
    assert queue.admit_jobs(106.0)[1] == ["first"]


def test_workers_of_a_lost_driver_are_not_assigned_before_their_restart() -> None:
    queue = make_queue("abc", ("first", 3), ("second", 3))
    assert admit(queue) == ["first"]
    assert sorted(queue.requeue_after_driver_loss("first", 1.0)) == ["a", "b", "c"]
    assert admit(queue, 1.0) == []
    assert queue.entries["first"].reason == "needs the workers of its earlier driver to restart"
    for old, new in zip("abc", "xyz", strict=True):
        queue.remove_worker(old, 2.0)
        assert admit(queue, 2.0) == []
        queue.add_worker(new, {})
    assert admit(queue, 3.0) == ["first"], "at its old place, before the second"


def test_no_job_overtakes_one_whose_workers_restart() -> None:
    queue = make_queue("abcdef", ("first", 3))
    assert admit(queue) == ["first"]
    queue.requeue_after_driver_loss("first", 1.0)
    queue.add_job("second", "/runs/second", needs_workers(3), 0.0, 1.0)
    assert admit(queue, 1.0) == [], "d, e and f would do"


def test_workers_of_an_abandoned_run_are_not_assigned_before_their_restart() -> None:
    queue = make_queue("abc", ("first", 3), ("second", 3))
    assert admit(queue) == ["first"]
    queue.requeue_after_driver_loss("first", 1.0)
    queue.remove_job("first")
    assert admit(queue, 1.0) == []
    for old, new in zip("abc", "xyz", strict=True):
        queue.remove_worker(old, 2.0)
        queue.add_worker(new, {})
    assert admit(queue, 2.0) == ["second"]


def drop_driver(queue: JobQueue) -> str:
    """Drop the driver of the first job; returns the worker that has only its engine."""
    (engine,) = [address for address, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    queue.requeue_after_driver_loss("first", 1.0)
    return engine


def restart(queue: JobQueue, workers: str) -> None:
    for address in workers:
        queue.remove_worker(address, 2.0)
        queue.add_worker(address.upper(), {})


def queue_with_reserved_engine(*jobs: tuple[str, int], workers: str = "abc") -> tuple[JobQueue, str]:
    """Return a queue whose first job has lost its driver, and the worker that is reserved with its engine."""
    queue = make_queue(workers, ("first", 3), *jobs)
    assert admit(queue) == ["first"]
    engine = drop_driver(queue)
    queue.reserve_or_restart(engine, 1.0)
    return queue, engine


def queue_with_reused_engine(*jobs: tuple[str, int]) -> tuple[JobQueue, str]:
    """Return a queue whose first job continues on its reserved engine and two restarted workers."""
    queue, engine = queue_with_reserved_engine(*jobs)
    restart(queue, "abc".replace(engine, ""))
    assert admit(queue, 3.0) == ["first"]
    return queue, engine


def test_a_worker_with_an_engine_is_reserved_for_the_next_driver_of_its_job() -> None:
    queue, engine = queue_with_reserved_engine(("second", 3), workers="abcd")
    assert queue.take_pending_restarts() == []
    assert engine not in queue.free_workers
    assert engine in queue.unavailable_workers("second")
    assert engine in queue.unavailable_workers("")
    restart(queue, "abcd".replace(engine, ""))
    gangs, _ = queue.admit_jobs(3.0)
    assert list(gangs) == ["first"]
    assert gangs["first"][engine] == ("rollout",), "and no other role is placed there"
    assert queue.unavailable_workers("first") == []


@pytest.mark.parametrize("end", ["waited too long", "cancelled"])
def test_a_reserved_worker_whose_job_ends_is_restarted_first(end: str) -> None:
    queue, engine = queue_with_reserved_engine(("second", 3))
    if end == "cancelled":
        queue.remove_job("first")
    assert admit(queue, 1.0 + (RESTART_LIMIT_S + 1 if end == "waited too long" else 0)) == []
    assert queue.take_pending_restarts() == [engine]
    assert queue.take_pending_restarts() == [], "the restart is requested once"
    restart(queue, "abc")
    assert admit(queue, 40.0) == (["second"] if end == "cancelled" else ["first"])


def test_only_an_engine_alone_is_reserved_and_only_for_a_waiting_job() -> None:
    queue = make_queue("abc", ("first", 3))
    assert admit(queue) == ["first"]
    engine = drop_driver(queue)
    for address in "abc".replace(engine, ""):
        queue.reserve_or_restart(address, 1.0)
    assert sorted(queue.take_pending_restarts()) == sorted("abc".replace(engine, ""))
    queue.remove_job("first")
    queue.reserve_or_restart(engine, 1.0)
    assert queue.take_pending_restarts() == [engine]
    assert queue.free_workers == []


def test_a_reserved_worker_whose_engine_was_not_reused_is_restarted_first() -> None:
    queue, engine = queue_with_reused_engine(("second", 3))
    queue.requeue("first", 4.0)  # the driver's worker has left before it began
    assert queue.take_pending_restarts() == [engine]
    assert engine not in queue.free_workers
    queue.remove_worker(engine, 5.0)
    queue.add_worker("z", {})
    assert admit(queue, 5.0) == ["first"]
    queue.remove_worker(next(a for a, roles in queue.workers_of("first").items() if "trainer" in roles), 6.0)
    queue.add_worker("y", {})
    assert queue.replace_lost_workers("first", 6.0), "a restarted worker is free"


def test_a_replacement_of_the_trainer_is_not_placed_on_a_reserved_engine() -> None:
    queue, engine = queue_with_reused_engine()
    queue.remove_worker(next(a for a, roles in queue.workers_of("first").items() if "trainer" in roles), 4.0)
    queue.add_worker("new", {})
    assert queue.replace_lost_workers("first", 4.0, find_driver_worker(queue.workers_of("first")))
    assert queue.workers_of("first")[engine] == ("rollout",)
    assert "trainer" in queue.workers_of("first")["new"]


def test_a_reserved_worker_that_another_role_needs_is_restarted() -> None:
    queue = queue_of_roles(a="server reward", b="rollout trainer", c="rollout trainer")
    both, only = {"rollout": 1.0, "trainer": 1.0}, {"rollout": 1.0}
    queue.add_job("first", "/runs/first", needs_workers(3), 0.0, 0.0)
    assert admit(queue) == ["first"]
    engine = drop_driver(queue)
    queue.reserve_or_restart(engine, 1.0)
    queue.remove_worker("a", 2.0)
    queue.add_worker("A", {"server": 1.0, "reward": 1.0})
    queue.remove_worker("b" if engine == "c" else "c", 2.0)
    queue.add_worker("B", only)
    assert admit(queue, 2.0) == []
    assert queue.entries["first"].reason == "needs the workers of its earlier driver to restart"
    assert queue.take_pending_restarts() == [engine]
    queue.remove_worker(engine, 3.0)
    queue.add_worker("C", both)
    assert admit(queue, 3.0) == ["first"]


def test_a_reserved_worker_that_the_job_does_not_get_is_restarted_first() -> None:
    """The lost driver had one instance more than its job needs."""
    queue = make_queue("abcd", ("first", 3))
    assert admit(queue) == ["first"]
    (spare,) = queue.free_workers
    assert queue.claim_worker("first", spare, "rollout")
    engines = [address for address, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    queue.requeue_after_driver_loss("first", 1.0)
    for address in engines:
        queue.reserve_or_restart(address, 1.0)
    restart(queue, "".join(address for address in "abcd" if address not in engines))
    ((id, gang),) = queue.admit_jobs(3.0)[0].items()
    assert id == "first"
    assert queue.take_pending_restarts() == [address for address in engines if address not in gang] != []


def test_a_worker_that_left_is_neither_reserved_nor_restarted() -> None:
    queue, engine = queue_with_reserved_engine()
    other = next(address for address in "abc" if address != engine)
    queue.reserve_or_restart(other, 1.0)
    for address in (engine, other):
        queue.remove_worker(address, 2.0)
    assert queue.take_pending_restarts() == []
    assert queue.unavailable_workers("") == [address for address in "abc" if address not in (engine, other)]


def test_a_worker_keeps_its_engine_when_another_worker_is_replaced() -> None:
    queue, engine = queue_with_reused_engine()
    lost = next(address for address in queue.workers_of("first") if address != engine)
    queue.remove_worker(lost, 4.0)
    queue.add_worker("new", {})
    assert queue.replace_lost_workers("first", 4.0)
    queue.requeue("first", 5.0)
    assert queue.take_pending_restarts() == [engine], "else its engine would stay without a job"


@pytest.mark.parametrize("end", ["it was restarted at its address", "its job has ended"])
def test_a_reserved_engine_that_is_gone_is_forgotten(end: str) -> None:
    queue, engine = queue_with_reused_engine()
    if end == "its job has ended":
        queue.remove_job("first")
        queue.add_job("first", "/runs/first", needs_workers(3), 0.0, 4.0)
        assert admit(queue, 4.0) == ["first"]
    else:
        queue.remove_worker(engine, 4.0)
        queue.add_worker(engine, {})
        assert queue.replace_lost_workers("first", 4.0)
    queue.requeue("first", 5.0)
    assert queue.take_pending_restarts() == [], "there is no engine that a restart would end"


def test_a_worker_that_rejoined_counts_once() -> None:
    queue = make_queue("abc", ("huge", 4), ("small", 3))
    queue.remove_worker("c", 0.0)
    queue.add_worker("d", {})
    assert admit(queue) == ["small"]


def test_restarting_workers_count_as_present() -> None:
    """Otherwise a small job would overtake a big one whenever a worker restarts."""
    queue = make_queue("abcdef", ("big", 6), ("small", 3))
    queue.remove_worker("f", 0.0)
    assert admit(queue, 1.0) == []
    queue.add_worker("g", {})
    assert admit(queue, 2.0) == ["big"]
    queue.remove_job("big")
    queue.add_job("big again", "/runs/again", needs_workers(6), 0.0, 3.0)
    queue.remove_job("small")
    queue.add_job("small", "/runs/small", needs_workers(3), 0.0, 3.0)
    queue.remove_worker("g", 3.0)
    assert admit(queue, 4.0) == []
    assert admit(queue, 4.0 + RESTART_LIMIT_S) == ["small"], "it has not come back"


def test_a_running_job_gets_its_lost_worker_back_before_others_start() -> None:
    queue = make_queue("abcde", ("first", 4), ("second", 3))
    assert admit(queue) == ["first"]
    (rollout, *_) = [a for a, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    queue.remove_worker(rollout, 1.0)
    queue.add_worker("x", {})
    queue.add_worker("y", {})  # with e, x and y the second one could run
    assert admit(queue, 1.0) == []
    assert queue.claim_worker("first", "x", "rollout")
    assert queue.claim_worker("first", "x", "rollout"), "a repeated release counts once"
    queue.add_worker("z", {})
    assert admit(queue, 1.0) == ["second"]
    assert not queue.claim_worker("second", "x", "rollout")
    assert not queue.claim_worker("unknown", "e", "rollout")


def test_a_role_that_shares_a_worker_after_a_loss_gets_no_other() -> None:
    queue = queue_of_roles(t="trainer", r="rollout", s="server reward", x="reward")
    queue.add_job(
        "first", "/runs/first", Needs(num_instances=1, num_reward_workers=1, has_driver_worker=False), 0.0, 0.0
    )
    assert admit(queue) == ["first"]
    assert queue.workers_of("first")["x"] == ("reward",)
    queue.remove_worker("x", 1.0)
    for address, roles in {"t2": ["trainer"], "r2": ["rollout"], "s2": ["server", "reward"]}.items():
        queue.add_worker(address, dict.fromkeys(roles, 1.0))
    queue.add_job(
        "second", "/runs/second", Needs(num_instances=1, num_reward_workers=1, has_driver_worker=False), 0.0, 0.0
    )
    assert admit(queue, 1.0) == []
    assert queue.claim_worker("first", "s", "reward")
    assert admit(queue, 1.0) == ["second"], "the first one waits for none any more"
    assert queue.replace_lost_workers("first", 1.0)


def test_extra_reward_workers_are_released_for_a_job_that_could_start() -> None:
    queue = queue_of_roles(t="trainer", r="rollout", s="server", x="reward", y="reward", z="reward")
    needs = Needs(num_instances=1, num_reward_workers=3, has_driver_worker=True)
    queue.add_job("first", "/runs/first", needs, 0.0, 0.0)
    assert admit(queue) == ["first"]
    assert {a for a, roles in queue.workers_of("first").items() if roles == ("reward",)} == {"x", "y", "z"}
    queue.add_job("second", "/runs/second", needs, 0.0, 1.0)
    assert admit(queue, 1.0) == []
    assert queue.surplus_to_return == {}, "it would not be enough"
    for address, role in (("t2", "trainer"), ("r2", "rollout"), ("s2", "server")):
        queue.add_worker(address, {role: 1.0})
    assert admit(queue, 2.0) == []
    assert queue.entries["second"].reason.endswith("; next in line; one more with resource reward=1 would be enough")
    ((surplus,),) = queue.surplus_to_return.values()
    assert surplus in {"x", "y", "z"}
    assert not queue.return_worker("first", "s")
    assert not queue.return_worker("second", surplus)
    assert queue.return_worker("first", surplus)
    assert admit(queue, 3.0) == ["second"]
    assert queue.workers_of("second")[surplus] == ("reward",)
    assert queue.surplus_to_return == {}
    assert queue.replace_lost_workers("first", 3.0), "it lacks none"
    kept, other = (a for a, roles in queue.workers_of("first").items() if roles == ("reward",))
    assert queue.return_worker("first", other)
    assert not queue.return_worker("first", kept), "it needs one"


def test_no_extra_worker_is_assigned_while_another_job_waits() -> None:
    queue = queue_of_roles(t="trainer", r="rollout", s="server", x="reward", y="reward")
    needs = Needs(num_instances=1, num_reward_workers=2, has_driver_worker=True)
    for id in ("first", "second"):
        queue.add_job(id, f"/runs/{id}", needs, 0.0, 0.0)
    assert admit(queue) == ["first"]
    assert len([a for a, roles in queue.workers_of("first").items() if roles == ("reward",)]) == 1
    assert queue.entries["second"].reason.endswith(
        "free 1 of 5; next in line; of these server 0, reward 1, rollout 0, trainer 0"
    )


def test_a_resuming_driver_gets_its_lost_workers_or_waits_again() -> None:
    queue = make_queue("abcd", ("first", 3), ("second", 3))
    (gang,) = queue.admit_jobs(0.0)[0].values()
    place = find_driver_worker(gang)
    lost = next(a for a, roles in gang.items() if roles == ("trainer",))
    queue.remove_worker(lost, 1.0)
    assert queue.replace_lost_workers("first", 1.0, place), "d was free"
    assert find_driver_worker(queue.workers_of("first")) == place
    queue.remove_worker("d", 2.0)
    assert not queue.replace_lost_workers("first", 2.0, place)
    assert not queue.replace_lost_workers("first", 1.0 + RESTART_LIMIT_S, place)
    assert len(queue.workers_of("first")) == 2
    assert not queue.replace_lost_workers("first", 3.0 + RESTART_LIMIT_S, place)
    assert queue.workers_of("first") == {}
    assert queue.is_waiting("first")
    queue.add_worker("e", {})
    assert admit(queue, 40.0) == ["first"]


def test_an_optional_instance_replaces_no_lost_trainer() -> None:
    queue = make_queue("abcdef", ("first", 4))
    gang = queue.admit_jobs(0.0)[0]["first"]
    driver_worker = find_driver_worker(gang)
    for address in queue.free_workers:
        assert queue.claim_worker("first", address, "rollout")
    queue.remove_worker(next(a for a, roles in gang.items() if roles == ("trainer",)), 1.0)
    queue.add_worker("g", {})
    light_needs = Needs(num_instances=0, num_reward_workers=0, num_ranks=0, has_driver_worker=True)
    queue.add_job("second", "/runs/second", light_needs, 0.0, 1.0)
    assert admit(queue, 1.0) == [], "the first one needs a trainer"
    assert queue.replace_lost_workers("first", 2.0, driver_worker)
    roles = list(queue.workers_of("first").values())
    assert (roles.count(("trainer",)), roles.count(("rollout",))) == (1, 2)
    assert find_driver_worker(queue.workers_of("first")) == driver_worker


def test_a_driver_stays_on_its_worker_though_another_fits_better() -> None:
    queue = queue_of_roles(t="trainer", r="rollout", s="server reward rollout")
    queue.add_job(
        "first", "/runs/first", Needs(num_instances=1, num_reward_workers=1, has_driver_worker=True), 0.0, 0.0
    )
    (gang,) = queue.admit_jobs(0.0)[0].values()
    assert find_driver_worker(gang) == "s"
    queue.remove_worker("t", 1.0)
    queue.add_worker("t2", {"trainer": 1.0})
    queue.add_worker("light", {"server": 1.0, "reward": 1.0})
    assert queue.replace_lost_workers("first", 1.0, "s")
    assert find_driver_worker(queue.workers_of("first")) == "s"


class Cluster(RuleBasedStateMachine):
    """Jobs and workers that arrive and leave in random order."""

    jobs = Bundle("jobs")
    workers = Bundle("workers")

    @initialize(target=workers)
    def begin(self) -> object:
        self.one = JobQueue()
        self.now = 0.0
        self.number = 0
        return multiple()

    @rule(target=workers, roles=st.sampled_from([(), (), ("trainer",), ("rollout",), ("server", "reward")]))
    def join(self, roles: tuple[str, ...]) -> str:
        self.number += 1
        self.one.add_worker(f"w{self.number}", dict.fromkeys(roles, 1.0))
        return f"w{self.number}"

    @rule(worker=consumes(workers), later=st.sampled_from([0.0, 1.0, 40.0]))
    def leave(self, worker: str, later: float) -> None:
        self.now += later
        self.one.remove_worker(worker, self.now)

    @rule(target=jobs, instances=st.integers(1, 3), driver=st.booleans())
    def enter(self, instances: int, driver: bool) -> str:
        self.number += 1
        needs = Needs(num_instances=instances, num_reward_workers=1, has_driver_worker=driver)
        self.one.add_job(f"j{self.number}", f"/runs/{self.number}", needs, 0.0, self.now)
        return f"j{self.number}"

    @rule(job=consumes(jobs))
    def end(self, job: str) -> None:
        self.one.remove_job(job)

    @rule(job=jobs)
    def driver_gone(self, job: str) -> None:
        if job in self.one.entries and not self.one.is_waiting(job):
            self.one.requeue_after_driver_loss(job, self.now)

    @rule(worker=workers)
    def keep(self, worker: str) -> None:
        if worker in self.one.restart_claims:
            self.one.reserve_or_restart(worker, self.now)

    @rule(job=jobs, worker=workers, role=st.sampled_from(["rollout", "trainer", "reward"]))
    def claim(self, job: str, worker: str, role: str) -> None:
        had = self.one.claims.get(worker)
        given = self.one.claim_worker(job, worker, role)
        assert given <= (had is None or had.job == job)

    @rule(job=jobs)
    def resume(self, job: str) -> None:
        if job in self.one.entries:
            place = find_driver_worker(self.one.workers_of(job))
            if self.one.replace_lost_workers(job, self.now, place):
                assert find_driver_worker(self.one.workers_of(job)) == place or not place

    @rule(later=st.sampled_from([0.0, 1.0, 40.0]))
    def serve(self, later: float) -> None:
        self.now += later
        before = {entry.id for entry in self.one.entries.values() if not entry.num_workers}
        gangs, _ = self.one.admit_jobs(self.now)
        kinds = roles_by_worker(self.one.workers)
        waiting = False
        for id, entry in self.one.entries.items():
            if id in gangs:
                assert not waiting, "it overtook an earlier job that fits the cluster"
                assert self.one.workers_of(id) == gangs[id]
                assert are_enough(entry.needs, {a: kinds[a] & set(roles) for a, roles in gangs[id].items()})
            elif id in before:
                assert entry.reason
                waiting = waiting or are_enough(entry.needs, kinds)

    @invariant()
    def each_worker_has_one_owner_and_who_waits_has_none(self) -> None:
        if not hasattr(self, "one"):
            return
        one = self.one
        owners = [*one.claims, *one.restart_claims, *one._reservations, *one.free_workers]
        assert sorted(owners) == sorted(one.workers)
        assert all(one.is_waiting(claim.job) and claim.roles == ("rollout",) for claim, _ in one._reservations.values())
        for entry in one.entries.values():
            assert len(one.workers_of(entry.id)) == 0 or entry.num_workers
        assert {claim.job for claim in one.claims.values()} <= set(one.entries)


Cluster.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase


# -- GPUs --------------------------------------------------------------------------------------------------------


def gpu_queue(fleet: str, *, rotated: bool = False, plain: int = 1) -> JobQueue:
    """Return a queue with one worker per GPU, which sees that GPU only or all GPUs of its host starting with it, and
    plain workers."""
    queue = JobQueue()
    for host in parse_fleet(fleet):
        for number, device in enumerate(host.devices):
            seen = host.devices[number:] + host.devices[:number] if rotated else (device,)
            join(queue, f"{host.name}:{number}", host.name, seen)
    for number in range(plain):
        join(queue, f"plain-{number}", "cpu-0", ())
    return queue


def join(queue: JobQueue, address: str, host: str, devices: tuple[Device, ...]) -> None:
    queue.add_worker(address, {}, 0.0)
    queue.set_gpus(address, WorkerGpus(host=host, devices=devices))


def gpu_job(instances: int, ranks: int = 1, tensor_parallel: int = 1) -> Needs:
    return Needs(
        num_instances=instances,
        num_reward_workers=1,
        has_driver_worker=True,
        num_ranks=ranks,
        gpus_per_instance=tensor_parallel,
    )


def enter(queue: JobQueue, id: str, needs: Needs) -> None:
    queue.add_job(id, f"/runs/{id}", needs, 0.0, 0.0)


@pytest.mark.parametrize("rotated", [False, True])
def test_no_two_roles_share_a_gpu_and_light_roles_have_none(rotated: bool) -> None:
    queue = gpu_queue("8xH100-80", rotated=rotated)
    enter(queue, "first", gpu_job(instances=6, ranks=2))
    assert admit(queue) == ["first"]
    visible = queue.cuda_visible_devices("first")
    assert sorted(text for text in visible.values() if text) == [str(n) for n in range(8)]
    assert visible["plain-0"] == "" and set(queue.workers_of("first")["plain-0"]) == {"driver", "server", "reward"}
    assert "| t0 t1 r0 r1 r2 r3 r4 r5 |" in queue.placement_text("first")


def test_an_instance_of_two_gpus_is_one_worker_that_sees_both() -> None:
    queue = gpu_queue("4xH100-80", rotated=True)
    enter(queue, "first", gpu_job(instances=1, ranks=1, tensor_parallel=2))
    assert admit(queue) == ["first"]
    (instance,) = [a for a, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    assert len(queue.cuda_visible_devices("first")[instance].split(",")) == 2
    apart = gpu_queue("4xH100-80")
    enter(apart, "first", gpu_job(instances=1, ranks=1, tensor_parallel=2))
    assert admit(apart) == []
    assert "rollout-0 needs 2 in one link domain" in apart.entries["first"].reason


def test_the_queue_counts_gpus_and_not_processes() -> None:
    """With 16 worker processes for four GPUs, two jobs of three GPUs run in sequence."""
    queue = gpu_queue("4xH100-80", rotated=True, plain=12)
    enter(queue, "first", gpu_job(instances=2))
    enter(queue, "second", gpu_job(instances=2))
    enter(
        queue, "third", Needs(num_instances=2, num_reward_workers=1, has_driver_worker=True)
    )  # computes on no GPU, but does not go ahead
    assert admit(queue) == ["first"]
    why = queue.entries["second"].reason
    assert why.endswith("needs 3 GPUs (1 for training, 2 for rollout); 1 of 4 are free, 3 belong to first")
    assert queue.gpu_shortage(gpu_job(instances=2)) == "" != queue.gpu_shortage(gpu_job(instances=4))
    queue.remove_job("first")
    assert admit(queue) == ["second", "third"]


def test_a_lost_gpu_is_replaced_on_its_host_or_near_the_weights() -> None:
    queue = gpu_queue("3xH100-80+1xH100-80+2xH100-80")
    enter(queue, "first", gpu_job(instances=1))
    assert admit(queue) == ["first"]
    (address,) = [a for a, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    host = address.partition(":")[0]
    queue.remove_worker(address, 1.0)
    assert queue.claim_gpu_worker("first", "rollout", dry_run=True) == queue.claim_gpu_worker(
        "first", "rollout", dry_run=True
    )
    second = queue.claim_gpu_worker("first", "rollout")
    assert second.startswith(host) and second != address
    assert queue.cuda_visible_devices("first")[second] == second.partition(":")[2]
    queue.remove_worker(second, 2.0)
    spare = [a for a in queue.free_workers if a.startswith(host)]
    if not spare:
        assert queue.claim_gpu_worker("first", "rollout") and not queue.claim_gpu_worker(
            "first", "rollout", avoided_workers=queue.free_workers
        )


def test_each_lost_gpu_is_replaced_once_near_its_own_place() -> None:
    queue = gpu_queue("4xH100-80+4xH100-80")
    enter(queue, "first", gpu_job(instances=4))
    assert admit(queue) == ["first"]
    instances = [a for a, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    by_host = {host: [a for a in instances if a.startswith(host)] for host in ("node-0", "node-1")}
    full, other = sorted(by_host, key=lambda host: -len(by_host[host]))
    devices = queue.worker_gpus[by_host[full][0]].devices
    queue.remove_worker(by_host[full][0], 1.0)
    assert queue.claim_gpu_worker("first", "rollout").startswith(other)
    join(queue, "again", full, devices)
    queue.remove_worker(by_host[other][0], 2.0)
    assert queue.claim_gpu_worker("first", "rollout").startswith(other), "the place of the first loss is taken"


def test_a_hung_worker_keeps_its_gpu_until_it_has_left() -> None:
    queue = gpu_queue("2xH100-80", rotated=True)
    enter(queue, "first", gpu_job(instances=1))
    assert admit(queue) == ["first"]
    (address,) = [a for a, roles in queue.workers_of("first").items() if roles == ("rollout",)]
    assert queue.claim_gpu_worker("first", "rollout", avoided_workers=[address]) == ""
    queue.remove_worker(address, 1.0)
    join(queue, "again", "node-0", queue.worker_gpus[address].devices)
    assert queue.claim_gpu_worker("first", "rollout", avoided_workers=[address]) == "again"


def test_workers_that_used_gpus_are_restarted_before_another_job_gets_them() -> None:
    queue = gpu_queue("2xH100-80")
    enter(queue, "first", gpu_job(instances=1))
    enter(queue, "second", gpu_job(instances=1))
    assert admit(queue) == ["first"]
    heavy = [a for a, text in queue.cuda_visible_devices("first").items() if text]
    queue.restart_gpu_workers("first", [*heavy, "plain-0"])
    queue.remove_job("first")
    assert admit(queue) == [] and sorted(queue.take_pending_restarts()) == sorted(heavy)
    for number, address in enumerate(heavy):
        devices = queue.worker_gpus[address].devices
        queue.remove_worker(address, 1.0)
        join(queue, f"again-{number}", "node-0", devices)
    assert admit(queue) == ["second"]


def test_a_job_that_waits_again_has_its_gpu_workers_restarted() -> None:
    queue = gpu_queue("2xH100-80")
    enter(queue, "first", gpu_job(instances=1))
    assert admit(queue) == ["first"]
    lost, left = (a for a, text in queue.cuda_visible_devices("first").items() if text)
    queue.remove_worker(lost, 1.0)
    assert not queue.replace_lost_workers("first", 1.0, "plain-0")
    assert not queue.replace_lost_workers("first", 2.0 + RESTART_LIMIT_S, "plain-0")
    assert queue.is_waiting("first") and queue.take_pending_restarts() == [left]


def test_a_gpu_worker_that_rejoins_at_its_address_keeps_its_gpus() -> None:
    queue = gpu_queue("2xH100-80")
    for address in ("node-0:0", "node-0:1"):
        queue.remove_worker(address, 1.0)
    join(queue, "node-0:1", "node-0", queue.worker_gpus["node-0:1"].devices)
    assert admit(queue, 2.0 + RESTART_LIMIT_S) == []
    assert list(queue.worker_gpus) == ["node-0:1"]


def test_a_job_waits_until_new_workers_have_reported_their_gpus() -> None:
    queue = gpu_queue("2xH100-80")
    queue.add_worker("silent", {}, 0.0)
    enter(queue, "first", gpu_job(instances=1))
    enter(queue, "plain", Needs(num_instances=1, num_reward_workers=1, has_driver_worker=True))
    assert admit(queue) == [] and queue.entries["first"].reason == WAITS_FOR_GPU_REPORT
    assert admit(queue, REPORT_LIMIT_S + 1.0) == ["first"]


def test_no_job_waits_for_the_gpus_of_a_worker_that_has_left() -> None:
    queue = gpu_queue("2xH100-80")
    queue.add_worker("silent", {}, 0.0)
    enter(queue, "first", gpu_job(instances=1))
    queue.remove_worker("silent", 1.0)
    assert admit(queue, 1.0) == ["first"]


def test_without_gpus_a_job_with_optional_gpus_runs_and_one_with_required_gpus_waits() -> None:
    queue = make_queue("abc")
    enter(queue, "auto", gpu_job(instances=1))
    assert admit(queue) == ["auto"] and queue.cuda_visible_devices("auto") == {} and queue.placement_text("auto") == ""
    asks = Needs(num_instances=1, num_reward_workers=1, has_driver_worker=True, gpus_per_instance=1, max_gpus=2)
    assert queue.gpu_shortage(asks) == "may have cluster.gpus = 2; the cluster's workers have no GPU"
