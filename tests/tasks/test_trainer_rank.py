"""The ranks of a trainer as actors: all do the same in the same order, and a failure of any rank is raised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleflow.stores.errors import ActorFailed, ActorLost, ProtocolViolation
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.weight_hash import Weights
from staleflow.tasks.actors import trainer_rank
from staleflow.tasks.actors.actor_calls import call_actor
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.actors.trainer_rank import FollowerRank
from staleflow.tasks.training.emulated_trainer import EmulatedTrainerSettings
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from tests.tasks.test_trainer import Server


class SynchronizedPolicy:
    """A policy whose ranks wait for each other in every method, as in torch, and which records the calls. breaks:
    (rank, method, exception)."""

    def __init__(self, ranks: int, breaks: tuple[int, str, Exception] | None = None) -> None:
        self.barrier = threading.Barrier(ranks)
        self.done: dict[int, list[str]] = {number: [] for number in range(ranks)}
        self.places: list[Rank] = []
        self.breaks = breaks

    def build(self, threads: int, rank: Rank = SINGLE_RANK) -> PolicyRank:
        self.places.append(rank)
        one = PolicyRank(self, rank)
        one.meet("build")
        return one


class PolicyRank:
    """One rank of a SynchronizedPolicy."""

    def __init__(self, group: SynchronizedPolicy, rank: Rank) -> None:
        self.group, self.rank = group, rank

    def meet(self, method: str) -> None:
        number = self.rank.number
        if self.group.breaks is not None and self.group.breaks[:2] == (number, method):
            raise self.group.breaks[2]
        self.group.barrier.wait(20.0)
        self.group.done[number].append(method)

    def wake(self) -> None:
        self.meet("wake")

    def sleep(self) -> None:
        self.meet("sleep")

    def fine_tune(self, step: int) -> dict[str, float]:
        self.meet("fine_tune")
        return {"loss": 0.25}

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        self.meet("step")
        return {"rows": float(len(rows))}

    def apply_to_weights(self, function: Callable[[Weights], Any]) -> Any:
        self.meet("published")
        return function({"w": torch.zeros(1)})

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        self.meet("probe")
        return (0.5,)

    def save(self, folder: Path, published: Path) -> None:
        assert self.rank.leads and published.exists()
        folder.mkdir()

    def begin_save(self, path: Path) -> None:
        assert path.is_dir()
        (path / f"rank-{self.rank.number}").touch()
        self.meet("begin_save")

    def end_save(self) -> None:
        assert self.rank.leads

    def load_state(self, path: Path) -> None:
        assert sorted(p.name for p in path.iterdir()) == [f"rank-{n}" for n in self.group.done]
        self.meet("load_state")

    def close(self) -> None:
        self.group.done[self.rank.number].append("close")


def actors(folder: Path, settings: Any, ranks: int) -> tuple[Trainer, list[FollowerRank]]:
    lead = Trainer(settings, str(folder / "memory"), 1, 60.0, str(folder / "resume"), 1, ranks=ranks)
    return lead, [FollowerRank(settings, 1) for _ in range(ranks - 1)]


def all_ranks(lead: Trainer, others: Sequence[FollowerRank]) -> list[Trainer | FollowerRank]:
    return [lead, *others]


async def test_all_ranks_call_the_same_methods_in_the_same_order(tmp_path: Path) -> None:
    group = SynchronizedPolicy(3)
    closed: list[Any] = []
    before = set(threading.enumerate())
    lead, others = actors(tmp_path, group, 3)
    await lead.form_group("localhost", *others)
    assert [await lead.fine_tune(step) for step in (0, 0, 1)] == [{"loss": 0.25}, {}, {"loss": 0.25}]
    initial = await lead.publish_initial((1, 2), PolicyVersion(0), "")
    assert initial.probe_logprobs == (0.5,)
    trained = await lead.train(Server(), 0, (), ())
    assert trained.metrics["rows"] == 0.0
    await lead.save_checkpoint(str(tmp_path / "checkpoint"))
    again = await lead.publish_initial((1, 2), PolicyVersion(1), trained.fingerprint)
    assert again.matches_record
    for actor in all_ranks(lead, others):
        await actor.close()
        closed.append(actor)  # or its threads would end because it is forgotten
    await asyncio.get_running_loop().shutdown_default_executor()
    for thread in set(threading.enumerate()) - before:
        thread.join(60.0)
        assert not thread.is_alive(), f"{thread.name} of {closed} runs on"
    published = ["published", "probe", "sleep"]
    tuned = ["wake", "fine_tune", "sleep"]
    expected = ["build", *tuned, *tuned, "wake", *published, "wake", "step", *published, "begin_save"]
    expected += ["wake", "load_state", *published]
    assert list(group.done.values()) == [[*expected, "close"]] * 3
    assert sorted((place.number, place.count, place.host) for place in group.places) == [
        (number, 3, "localhost") for number in range(3)
    ]
    assert len({place.port for place in group.places}) == 1
    assert [place.number for place in group.places if place.listener_fd is not None] == [0]
    assert ResumePoints(tmp_path / "resume").path(PolicyVersion(1)).name == "v00000001.shards"
    assert (tmp_path / "checkpoint").is_dir()


class LostRank:
    """A lost rank whose loss the other ranks detect first. after: number of calls before the loss."""

    def __init__(self, actor: FollowerRank, follows: int) -> None:
        self.actor, self.left = actor, follows

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def asked(*args: Any) -> Any:
            if method == "call_policy":
                self.left -= 1
                if self.left < 0:
                    await asyncio.sleep(0.5)
                    raise OSError("connection closed")
            return await getattr(self.actor, method)(*args)

        return asked


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38529")
OUT_OF_MEMORY = RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("first", [0, 1])
async def test_a_lost_rank_raises_actor_lost_when_other_ranks_fail_first(tmp_path: Path, first: int) -> None:
    """Their connections break before the loss is detected."""
    group = SynchronizedPolicy(3, breaks=(first, "step", CLOSED))
    lead, others = actors(tmp_path, group, 3)
    await lead.form_group("localhost", others[0], LostRank(others[1], 4))
    await lead.publish_initial((), PolicyVersion(0), "")
    with pytest.raises(ActorLost, match="trainer-2 is gone: connection closed"):
        await call_actor(lead, "train", Server(), 0, (), (), timeout_s=60.0, actor_name="trainer")
    group.barrier.abort()
    for actor in all_ranks(lead, others):
        await actor.close()


NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {}, NCCL version 2.27.5\n{}: {}\nLast error:\n{}"
)
LOST = (
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    "trainer-1 failed: DistNetworkError: failed to recv, got 0 bytes",
    NCCL.format("remote process exited or there was a network error", "ncclRemoteError", "A call failed possibly due "
                "to a network error or a remote process exiting prematurely.", "socketProgress: Connection closed"),
    NCCL.format("unhandled system error", "ncclSystemError", "System call (e.g. socket, malloc) or external library "
                "call failed or device error.", "socketPollConnect: Connection refused"),
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600029 ms",
)  # fmt: skip
OWN = (
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    NCCL.format("invalid usage", "ncclInvalidUsage", "This usually reflects invalid usage of NCCL library.",
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"),
    NCCL.format("unhandled cuda error", "ncclUnhandledCudaError", "Call to CUDA function failed.",
                "Cuda failure 2 'out of memory'"),
    NCCL.format("unhandled system error", "ncclSystemError", "System call (e.g. socket, malloc) or external library "
                "call failed or device error.", "Error while creating shared memory segment /dev/shm/nccl-2gYQ8q (size "
                "9637888), error: No space left on device (28)"),
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "[gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find interface for: eth9",
)  # fmt: skip


def test_permanent_errors_are_not_classified_as_a_lost_rank() -> None:
    """NCCL errors of ranks that share a GPU or are out of memory repeat on every attempt."""
    for message in LOST:
        lost = trainer_rank._cause(RuntimeError(message), [])
        assert isinstance(lost, ActorLost) and lost.actor == "trainer", message
    for message in OWN:
        error = RuntimeError(message)
        assert trainer_rank._cause(error, []) is error, message
        passed_on = ActorFailed(f"trainer-1 failed: RuntimeError: {message}", "trainer-1")
        assert trainer_rank._cause(passed_on, []) is passed_on, message


def failed_call(error: Exception) -> Future[None]:
    call: Future[None] = Future()
    call.set_exception(error)
    return call


@pytest.mark.parametrize("errors", [[OUT_OF_MEMORY, CLOSED, CLOSED], [CLOSED, CLOSED, OUT_OF_MEMORY]])
def test_a_rank_s_own_error_is_raised_instead_of_its_peers_connection_errors(errors: list[Exception]) -> None:
    policy = object.__new__(trainer_rank.DistributedPolicy)
    for _ in range(20):  # the order of a set of futures differs
        own_call, *peer_calls = map(failed_call, errors)
        with pytest.raises(RuntimeError, match="CUDA out of memory") as raised:
            policy._result(own_call, peer_calls)
        assert raised.value is OUT_OF_MEMORY


def test_an_error_while_saving_is_not_its_own_cause() -> None:
    def fail() -> None:
        raise OUT_OF_MEMORY

    policy = object.__new__(trainer_rank.DistributedPolicy)
    policy._policy, policy._peers = SimpleNamespace(end_save=fail), {}
    with pytest.raises(RuntimeError, match="CUDA out of memory") as raised:
        policy.end_save()
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, RuntimeError("CUDA out of memory"), "trainer failed: RuntimeError: CUDA out of memory"),
        (1, RuntimeError("CUDA out of memory"), "trainer-1 failed: RuntimeError: CUDA out of memory"),
        (1, CLOSED, "the trainer's ranks have lost each other: trainer-1 failed: RuntimeError: .*closed by peer"),
        (0, CLOSED, "the trainer's ranks have lost each other: .*closed by peer"),
    ],
)
async def test_an_error_of_one_rank_is_raised_while_other_ranks_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: Exception, message: str
) -> None:
    """Ranks that lost each other are replaced; an error raised by a rank would repeat."""
    monkeypatch.setattr(trainer_rank, "SETTLE_S", 0.2)
    group = SynchronizedPolicy(2, breaks=(number, "step", error))
    lead, others = actors(tmp_path, group, 2)
    await lead.form_group("localhost", *others)
    await lead.publish_initial((), PolicyVersion(0), "")
    with pytest.raises(ActorLost if error is CLOSED else ActorFailed, match=message):
        await call_actor(lead, "train", Server(), 0, (), (), timeout_s=60.0, actor_name="trainer")
    for actor in all_ranks(lead, others):
        await actor.close()
    assert not group.barrier.broken, "closed while the other rank was still waiting"
    group.barrier.abort()


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_rank_lost_during_a_resume_point_raises_actor_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """The error is not reported as a disk failure. gone: whether the loss is detected, and for which rank."""
    monkeypatch.setattr(trainer_rank, "SETTLE_S", 0.2)
    group = SynchronizedPolicy(2)

    class Broken(PolicyRank):
        def end_save(self) -> None:
            raise CLOSED

    def build(threads: int, rank: Rank = SINGLE_RANK) -> PolicyRank:
        one = Broken(group, rank)
        one.meet("build")
        return one

    monkeypatch.setattr(group, "build", build)

    class Gone:
        def __init__(self, actor: FollowerRank) -> None:
            self.actor = actor

        def __getattr__(self, method: str) -> Callable[..., Any]:
            async def asked(*args: Any) -> Any:
                if is_gone and method == "ping":
                    raise OSError("connection closed")
                return await getattr(self.actor, method)(*args)

            return asked

    lead, others = actors(tmp_path, group, 2)
    await lead.form_group("localhost", Gone(others[0]))
    await lead.train(Server(), 0, (), ())
    said = "trainer-1 is gone: connection closed" if is_gone else "the trainer's ranks have lost each other"
    with pytest.raises(ActorLost, match=said):
        await call_actor(lead, "train", Server(), 1, (), (), timeout_s=60.0, actor_name="trainer")
    for actor in all_ranks(lead, others):
        await actor.close()


async def test_a_resume_point_may_fail_while_another_method_is_called(tmp_path: Path) -> None:
    """It is written in a thread of its own, which then asks for lost ranks in the same context."""
    lead, others = actors(tmp_path, SynchronizedPolicy(2), 2)
    await lead.form_group("localhost", *others)
    policy = lead._policy
    assert isinstance(policy, trainer_rank.DistributedPolicy)
    ping = await asyncio.to_thread(policy._context.run, policy._call_peer, "trainer-1", "ping")
    await asyncio.wrap_future(ping)
    for actor in all_ranks(lead, others):
        await actor.close()


async def test_training_before_the_ranks_form_a_group_raises(tmp_path: Path) -> None:
    lead, _ = actors(tmp_path, SynchronizedPolicy(2), 2)
    with pytest.raises(ProtocolViolation, match="the 2 ranks of the trainer are not a group yet"):
        await lead.train(Server(), 0, (), ())
    await lead.close()


async def test_emulated_ranks_resume_from_their_resume_points(tmp_path: Path) -> None:
    settings = EmulatedTrainerSettings(train_s=0.0, s_per_token=0.0, time_scale=1.0)
    lead, others = actors(tmp_path, settings, 2)
    await lead.form_group("localhost", *others)
    trained = await lead.train(Server(), 4, (), ())
    await lead.save_checkpoint(str(tmp_path / "checkpoint"))
    for actor in all_ranks(lead, others):
        await actor.close()
    assert ResumePoints(tmp_path / "resume").complete_versions() == [5]
    for ranks in (1, 2):
        lead, others = actors(tmp_path, settings, ranks)
        if ranks > 1:
            await lead.form_group("localhost", *others)
        again = await lead.publish_initial((), PolicyVersion(5), trained.fingerprint)
        assert again.matches_record
        for actor in all_ranks(lead, others):
            await actor.close()
