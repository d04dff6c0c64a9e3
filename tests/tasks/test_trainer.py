"""The trainer actor: steps, resume points and errors."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from staleflow.stores.errors import ActorFailed, StoreError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import resume_points
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.weight_hash import Weights as Weighed
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.actors import trainer as trainer_module
from staleflow.tasks.actors.actor_calls import call_actor
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.training.emulated_trainer import EmulatedTrainerSettings
from staleflow.tasks.training.microbatches import BatchMessage, Row
from staleflow.tasks.training.rank import SINGLE_RANK, Rank


class Server:
    async def take_batch(self, *_: Any) -> BatchMessage:
        return BatchMessage.of([], 0)


class Weights:
    """A policy with one number as its weights. full: whether the disk is full."""

    def __init__(self, full: bool = False, error: Exception | None = None) -> None:
        self.full, self.error = full, error

    def build(self, threads: int, rank: Rank = SINGLE_RANK) -> Weights:
        return self

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def fine_tune(self, step: int) -> dict[str, float]:
        raise NotImplementedError

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        return {}

    def apply_to_weights(self, function: Callable[[Weighed], Any]) -> Any:
        return function({"w": torch.zeros(1)})

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return ()

    def save(self, folder: Path, published: Path) -> None:
        assert torch.equal(load_file(published)["w"], torch.zeros(1))
        folder.mkdir()

    def begin_save(self, path: Path) -> None:
        path.write_bytes(b"")

    def end_save(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")

    def load_state(self, path: Path) -> None: ...

    def close(self) -> None: ...


def trainer(folder: Path, weights: Weights) -> Trainer:
    return Trainer(weights, str(folder / "memory"), 1, 60.0, str(folder / "resume"), 1)


@pytest.mark.parametrize("method", ["train", "save_checkpoint"])
async def test_a_failed_resume_point_raises_in_the_next_call(tmp_path: Path, method: str) -> None:
    """Even if the next step started before the write failed."""
    actor = trainer(tmp_path, Weights(full=True))
    try:
        await actor.train(Server(), 0, (), ())
        with pytest.raises(StoreError, match=r"No space left.*training.resume_every"):
            await (actor.train(Server(), 1, (), ()) if method == "train" else actor.save_checkpoint("folder"))
    finally:
        await actor.close()


async def test_a_step_of_fine_tuning_that_failed_is_done_again(tmp_path: Path) -> None:
    class FailingOnce(Weights):
        num_calls = 0

        def fine_tune(self, step: int) -> dict[str, float]:
            self.num_calls += 1
            if self.num_calls == 1:
                raise StoreError("an example cannot be read")
            return {"loss": 0.5}

    actor = trainer(tmp_path, FailingOnce())
    with pytest.raises(StoreError, match="an example"):
        await actor.fine_tune(0)
    assert await actor.fine_tune(0) == {"loss": 0.5}
    assert await actor.fine_tune(0) == {}, "it was done before"
    await actor.close()


class SlowPolicy(Weights):
    """A policy whose resume points are written once `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.begun = self.ended = 0

    def begin_save(self, path: Path) -> None:
        assert self.begun == self.ended, "one at a time"
        self.begun += 1
        super().begin_save(path)

    def end_save(self) -> None:
        assert self.free.wait(20.0)
        self.ended += 1
        super().end_save()


async def wait_until_waiting(actor: Trainer, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    """Start calls, and wait until each waits for the resume point, or one has ended."""
    waiting, wait_for_save = asyncio.Semaphore(0), actor._wait_for_save

    async def wait() -> None:
        waiting.release()
        await wait_for_save()

    actor._wait_for_save = wait  # type: ignore[method-assign]
    tasks = [asyncio.ensure_future(call) for call in calls]
    for _ in calls:
        await asyncio.wait({*tasks, asyncio.ensure_future(waiting.acquire())}, return_when=asyncio.FIRST_COMPLETED)
    return tasks


async def test_a_repeated_step_with_other_weights_gets_no_resume_point(tmp_path: Path) -> None:
    policy = SlowPolicy()
    policy.free.set()
    actor = trainer(tmp_path, policy)
    result = await actor.train(Server(), 0, (), (), "other")
    await actor.train(Server(), 0, (), (), result.fingerprint)
    await actor.close()
    assert policy.begun == 1


async def test_training_continues_while_a_resume_point_is_written(tmp_path: Path) -> None:
    class CopyingPolicy(SlowPolicy):
        trained = 0

        def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
            self.trained += 1
            return super().step(step, rows)

        def begin_save(self, path: Path) -> None:
            trained = self.trained
            time.sleep(0.1)
            assert self.trained == trained, "it copies the state of one step"
            super().begin_save(path)

    begin_s, policy = time.monotonic(), CopyingPolicy()
    actor = Trainer(policy, str(tmp_path / "memory"), 1, 60.0, str(tmp_path / "resume"), 2)
    for step in range(3):
        assert await actor.version() == step
        assert (await actor.train(Server(), step, (), ())).metrics["resume_wait_s"] == 0
    assert (policy.begun, policy.ended, actor._resume_points.versions()) == (1, 0, [])
    (fourth,) = await wait_until_waiting(actor, [actor.train(Server(), 3, (), ())])
    assert not fourth.done() and await actor.version() == 3
    policy.free.set()
    metrics = (await fourth).metrics
    assert metrics["resume_wait_s"] > 0
    times_s = [metrics[f"{work}_s"] for work in ("resume_wait", "fetch", "train", "publish")]
    assert min(times_s) >= 0 and sum(times_s) <= time.monotonic() - begin_s
    await actor.save_checkpoint(str(tmp_path / "checkpoint"))
    assert actor._resume_points.versions() == [2, 4]
    await actor.close()


async def test_resume_points_are_written_one_at_a_time_beside_a_checkpoint(tmp_path: Path) -> None:
    policy = SlowPolicy()
    actor = trainer(tmp_path, policy)
    await actor.train(Server(), 0, (), ())
    checkpoint, step = await wait_until_waiting(
        actor, [actor.save_checkpoint(str(tmp_path / "checkpoint")), actor.train(Server(), 1, (), ())]
    )
    assert not step.done() and not checkpoint.done()
    policy.free.set()
    assert await checkpoint
    assert (await step).metrics["resume_wait_s"] > 0
    await actor.close()
    assert (policy.begun, policy.ended) == (2, 2)


async def test_a_checkpoint_has_the_requested_version(tmp_path: Path) -> None:
    """Even if a step finishes while the resume point is awaited. A removed version gives no checkpoint."""
    saved: list[int] = []

    class Noting(SlowPolicy):
        def save(self, folder: Path, published: Path) -> None:
            saved.append(int(published.stem[1:]))

    policy = Noting()
    actor = Trainer(policy, str(tmp_path / "memory"), 1, 60.0, str(tmp_path / "resume"), 2)
    for step in range(2):
        await actor.train(Server(), step, (), ())
    requests = [asyncio.ensure_future(actor.save_checkpoint(str(tmp_path / "newest")))]
    requests += [
        asyncio.ensure_future(actor.save_checkpoint(str(tmp_path / str(v)), PolicyVersion(v))) for v in (1, 2, 7)
    ]
    await asyncio.sleep(0)
    await actor.train(Server(), 2, (), ())
    policy.free.set()
    assert await asyncio.gather(*requests) == [True, True, True, False]
    await actor.close()
    assert sorted(saved) == [1, 2, 2]


@pytest.mark.parametrize("late", [False, True])
async def test_a_failed_resume_point_raises_once_in_the_next_call_of_any_kind(tmp_path: Path, late: bool) -> None:
    """Also in a call much later or without a resume point. late: the write fails during the next step."""
    policy = SlowPolicy()
    policy.full = True
    actor = Trainer(policy, str(tmp_path / "memory"), 1, 60.0, str(tmp_path / "resume"), 5)
    for step in range(5 + late):
        await actor.train(Server(), step, (), ())
    policy.free.set()
    assert actor._save_task is not None
    await asyncio.wait({actor._save_task})
    with pytest.raises(StoreError, match=r"No space left.*training.resume_every"):
        await actor.train(Server(), 5 + late, (), ())
    await actor.train(Server(), 5 + late, (), ())
    await actor.close()


@pytest.mark.parametrize("full", [False, True])
async def test_close_waits_for_the_resume_point_and_logs_its_failure(
    tmp_path: Path, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SlowPolicy()
    policy.full = full
    actor = trainer(tmp_path, policy)
    await actor.train(Server(), 0, (), ())
    closing = asyncio.ensure_future(actor.close())
    await asyncio.sleep(0.1)
    assert not closing.done()
    policy.free.set()
    await closing
    assert ResumePoints(tmp_path / "resume").complete_versions() == []  # an empty file is not a resume point
    assert len(list((tmp_path / "resume").iterdir())) == (not full)
    assert ("the latest resume point is missing" in caplog.text) == full


async def test_close_stops_waiting_for_a_resume_point_after_a_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "SAVE_TIMEOUT_S", 0.01)
    policy = SlowPolicy()
    actor = trainer(tmp_path, policy)
    await actor.train(Server(), 0, (), ())
    await actor.close()
    assert policy.ended == 0
    assert "closed while a resume point was being written; the one before it is the newest" in caplog.text
    policy.free.set()
    for thread in threading.enumerate():
        if thread.name.startswith("resume-point"):
            thread.join(20.0)
    assert policy.ended == 1


@pytest.mark.parametrize("sharded", [False, True])
async def test_a_replaced_trainer_writes_no_resume_point(tmp_path: Path, sharded: bool) -> None:
    """Its driver was killed and the run resumed from an older resume point, which a new one would contradict."""
    points = ResumePoints(tmp_path / "resume")
    policy = SlowPolicy()
    left = trainer(tmp_path, policy)
    left._ranks = 1 + sharded
    if sharded:
        policy.begin_save = lambda path: None  # type: ignore[method-assign]  # no collective here
    await left.train(Server(), 0, (), ())
    points.claim()  # as `resume` does
    points.remove_after(PolicyVersion(0))
    policy.free.set()
    with pytest.raises(StoreError, match=r"v00000001.* is not written: the run goes on with another trainer"):
        await left.save_checkpoint(str(tmp_path / "checkpoint"))
    assert points.versions() == []
    following = trainer(tmp_path, Weights())
    await following.train(Server(), 0, (), ())
    await following.save_checkpoint(str(tmp_path / "checkpoint"))
    assert points.versions() == [1]
    await left.train(Server(), 1, (), ())  # it was in the middle of that one
    await left.close()
    assert points.versions() == [1]
    await following.close()


@pytest.mark.parametrize(("keep_every", "expected"), [(0, [5, 6, 7]), (2, [2, 4, 5, 6, 7]), (5, [5, 6, 7])])
def test_points_of_every_nth_version_are_kept_beside_the_latest(
    tmp_path: Path, keep_every: int, expected: list[int]
) -> None:
    points = ResumePoints(tmp_path / "resume", keep_every)
    for version in range(1, 8):
        with points.writing(PolicyVersion(version)) as part:
            part.touch()
    assert points.versions() == expected
    assert points.latest_versions() == [5, 6, 7]


def test_a_stopped_writer_does_not_block_other_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_points, "CLAIM_LOCK_S", 0.1)
    stopped, following = ResumePoints(tmp_path / "resume"), ResumePoints(tmp_path / "resume")
    stopped.claim()
    with stopped._locked():
        following.claim()
        with following.writing(PolicyVersion(1)) as part:
            part.touch()
    assert following.versions() == [1]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_point_that_is_flushed_while_another_trainer_claims_the_points_is_not_written(
    tmp_path: Path, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take longer to flush than a claimant waits for the lock."""
    monkeypatch.setattr(resume_points, "CLAIM_LOCK_S", 0.1)
    lost, following, sync = ResumePoints(tmp_path / "resume"), ResumePoints(tmp_path / "resume"), os.fsync
    lost.claim()

    def synced(fd: int) -> None:
        if not following._claim_token:
            following.claim()
        sync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    with (
        pytest.raises(StoreError, match="is not written: the run goes on with another trainer"),
        lost.writing(PolicyVersion(1), sharded=sharded) as part,
    ):
        (part / "shard" if sharded else part).write_text("state")
    assert following.versions() == []


def test_a_point_replaces_one_of_another_number_of_ranks(tmp_path: Path) -> None:
    """Otherwise a run would resume from the older of the two."""
    points, version = ResumePoints(tmp_path / "resume"), PolicyVersion(1)
    for sharded in (True, False, True):
        with points.writing(version, sharded=sharded) as part:
            (part / resume_points.SHARD_METADATA if sharded else part).write_text("state")
        assert points.path(version) == points.path(version, sharded=sharded)
        assert not points.path(version, sharded=not sharded).exists()


def test_files_moved_aside_by_a_killed_writer_are_removed_with_their_version(tmp_path: Path) -> None:
    """Otherwise the next writer of that version would restore them."""
    points = ResumePoints(tmp_path / "resume")
    for version in (1, 2):
        with points.writing(PolicyVersion(version), sharded=True) as part:
            (part / resume_points.SHARD_METADATA).write_text("old")
    for version in (1, 2):
        path = points.path(PolicyVersion(version))
        path.rename(path.with_name(f".{path.name}.{version:016x}.old"))  # and is killed before the second rename
    points.remove_after(PolicyVersion(1))
    with points.writing(PolicyVersion(2), sharded=True), points.writing(PolicyVersion(1), sharded=True):
        assert points.complete_versions() == [1]


async def test_an_error_at_the_start_of_a_resume_point_raises_too(tmp_path: Path) -> None:
    class Large(Weights):
        def begin_save(self, path: Path) -> None:
            raise RuntimeError("not enough memory for a copy")

    actor = trainer(tmp_path, Large())
    await actor.train(Server(), 0, (), ())
    with pytest.raises(StoreError, match="cannot be written: not enough memory for a copy"):
        await actor.save_checkpoint(str(tmp_path / "checkpoint"))
    await actor.close()
    assert list((tmp_path / "resume").iterdir()) == []


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598 (rank 1)",
        "PytorchStreamWriter failed writing file data/3: file write failed",
    ],
)
def test_torch_errors_of_a_full_disk_are_translated(tmp_path: Path, message: str) -> None:
    """On a full disk of 26 MiB one rank gets ENOSPC and another only a length mismatch."""
    text = (
        r"resume/v00000001.shards: cannot be written: a write was cut short, as on a full disk \([\d.]+ MiB are free\)"
    )
    points = ResumePoints(tmp_path / "resume")
    with pytest.raises(StoreError, match=text), points.writing(PolicyVersion(1), sharded=True):
        raise RuntimeError(message)
    assert list((tmp_path / "resume").iterdir()) == []


async def test_an_emulated_trainer_resumes_from_its_resume_points(tmp_path: Path) -> None:
    """A dry run can test recovery: its resume points are complete and give the same weights."""
    settings = EmulatedTrainerSettings(train_s=0.0, s_per_token=0.0, time_scale=1.0)
    points = ResumePoints(tmp_path / "resume")

    def started() -> Trainer:
        return Trainer(settings, str(tmp_path / "memory"), 1, 60.0, str(points.folder), 1)

    first = started()
    published = [await first.train(Server(), step, (), ()) for step in range(2)]
    await first.save_checkpoint(str(tmp_path / "checkpoint"))  # the points are written by then
    await first.close()
    assert points.complete_versions() == [1, 2]
    second = started()
    for result in published:
        again = await second.publish_initial((), result.version, result.fingerprint)
        assert (again.version, again.fingerprint) == (result.version, result.fingerprint)
    torn = points.path(PolicyVersion(2))
    torn.write_bytes(torn.read_bytes()[:-20])
    assert points.complete_versions() == [1]
    with pytest.raises(StoreError, match="no resume point of this job"):
        await second.publish_initial((), PolicyVersion(2), "")
    await second.close()


WITHOUT_TORCH = """
import asyncio, sys
from pathlib import Path
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.actors.trainer import Trainer
from staleflow.tasks.actors import parameter_server, reward_worker, rollout_instance, trajectory_server
from staleflow.tasks.training.emulated_trainer import EmulatedTrainerSettings
from tests.tasks.test_engine_emulated import EmulatedEngine, settings

async def whole(folder):
    training = EmulatedTrainerSettings(train_s=0.0, s_per_token=0.0, time_scale=1.0)
    trainer = Trainer(training, f"{folder}/memory", 1, 60.0, f"{folder}/resume", 1)
    initial = await trainer.publish_initial((), PolicyVersion(0), "")
    engine = EmulatedEngine(settings(), InstanceId("i"))
    loaded = engine.load(PolicyVersion(0), Path(initial.path))
    assert loaded.fingerprint == initial.fingerprint
    await trainer.save_checkpoint(f"{folder}/checkpoint")
    engine.close()
    await trainer.close()
    print(initial.fingerprint)

before = "torch" in sys.modules
asyncio.run(whole(sys.argv[1]))
sys.exit("torch was loaded" if "torch" in sys.modules and not before else "by the tests themselves" if before else 0)
"""


def test_an_emulated_run_imports_no_torch_and_its_fingerprints_are_stable(tmp_path: Path) -> None:
    """Importing torch costs 1.5 CPU-seconds in each process of a run."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == fingerprint({"emulated": torch.tensor([0.0])})


async def test_a_resumed_version_is_compared_with_the_recorded_fingerprint(tmp_path: Path) -> None:
    actor = trainer(tmp_path, Weights())
    recorded = ("", fingerprint({"w": torch.zeros(1)}), fingerprint({"w": torch.ones(1)}), "0" * 32)
    results = [(await actor.publish_initial((), PolicyVersion(0), item)).matches_record for item in recorded]
    await actor.close()
    assert results == [True, True, False, False]


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), OSError(5, "Input/output error")])
async def test_an_error_of_the_trainer_raises_actor_failed(tmp_path: Path, error: Exception) -> None:
    """Restarting a trainer that is out of memory would only fail again."""
    text = r"trainer failed: RuntimeError: CUDA out of memory|trainer failed: OSError: \[Errno 5\] Input/output error"
    actor = trainer(tmp_path, Weights(error=error))
    with pytest.raises(ActorFailed, match=text):
        await call_actor(actor, "train", Server(), 0, (), (), timeout_s=60.0, actor_name="trainer")
    await actor.close()
