"""Memory of a trainer and an engine that take turns on a device. The limit is what sizing/ computes for one of them,
which is not enough for both."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from staleflow.pipeline.sizing.memory import ModelShape, kv_bytes_per_token, training_state_bytes
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.transformers import TransformersEngine
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.policy_trainer import PolicyTrainer
from staleflow.tasks.training.trainer_settings import TrainingConfig
from tests.tasks.brake import brake, brake_of_transformers  # noqa: F401  used by name
from tests.tasks.engine_conformance import request, sample_until

KV_TOKENS = 512
ALLOWANCE_BYTES = 40_000
"""Rotary tables, generators and the rows of one pass, which matter for such a small model."""


@pytest.fixture
def others() -> Iterator[set[int]]:
    """Addresses of storages left by other tests. They are kept until the test has ended, so that no tensor of this test
    gets one of these addresses."""
    gc.collect()
    kept = storages()
    yield set(kept)
    kept.clear()


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in the process, by address. Tensors of PyTorch's compiler have no memory."""
    by_address = {}
    for item in gc.get_objects():
        # Not isinstance, which reads __class__: of some deprecated objects of PyTorch, that raises a warning.
        if issubclass(type(item), torch.Tensor) and not isinstance(item, FakeTensor):
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    try:
                        by_address[storage.data_ptr()] = storage
                    except RuntimeError as error:
                        if "python storage" not in str(error):  # a wrapper of the compiler, also without memory
                            raise
    return by_address


class SharedDevice:
    """Measures the memory in use. others: addresses that do not count."""

    def __init__(self, limit_bytes: int, others: set[int]) -> None:
        self.limit_bytes, self._others = limit_bytes, others
        self.used_bytes: dict[str, int] = {}
        self.trainer: PolicyTrainer | None = None

    def measure(self, moment: str) -> None:
        gc.collect()
        host = set() if self.trainer is None else {t.data_ptr() for t in self.trainer._host_memory._copies.values()}
        used = sum(s.nbytes() for address, s in storages().items() if address not in self._others | host)
        self.used_bytes[moment] = used
        assert used <= self.limit_bytes, f"{moment}: {used} bytes, the limit is {self.limit_bytes}"


def a_row() -> Row:
    return Row(
        prompt=np.array([3, 10, 14, 7], np.int32),
        response=np.array([5, 6, 7, 8, 1], np.int32),
        behaviour=np.full(5, -3, np.float32),
        sampled=np.ones(5, bool),
        advantage=1.0,
        staleness=0,
    )


def build_actors(model: Path, *, turns: bool) -> PolicyTrainer:
    return PolicyTrainer(
        TrainerSettings(
            model=str(model), dtype="float32", device="cpu", training=TrainingConfig(learning_rate=1e-3), num_steps=9,
            temperature=1.0, max_response_tokens=128, seed=0, shares_device=turns,
        )
    )  # fmt: skip


def limit_of(model: Path) -> int:
    """Return the memory that one of the two needs, as sizing/ computes it for weights, gradients, optimizer and KV
    cache."""
    shape = ModelShape.of(json.loads((model / "config.json").read_text()), str(model))
    trainer = (
        training_state_bytes(shape, TrainingConfig(), "float32") + 4 * shape.parameters
    )  # AdamW's temporary copies
    served = 4 * shape.parameters + KV_TOKENS * kv_bytes_per_token(shape, "float32")
    return max(trainer, served) + ALLOWANCE_BYTES


def take_turns(model: Path, folder: Path, device: SharedDevice, *, turns: bool) -> None:
    """Run two steps of both, and measure memory whenever either of them uses more than before."""
    weights = WeightFolder(folder)
    trainer = device.trainer = build_actors(model, turns=turns)
    trainer.optimizer.register_step_post_hook(lambda *_: device.measure("step"))
    device.measure("trainer built")
    settings = TransformersSettings(
        model=str(model), dtype="float32", device="cpu", temperature=1.0, eos=(), seed=0, shares_device=turns,
        max_running=4, kv_tokens=KV_TOKENS, page_tokens=16, max_batch_tokens=64,
    )  # fmt: skip
    with closing(TransformersEngine(settings, InstanceId("rollout-0"))) as engine:
        device.measure("engine built")
        for version in (PolicyVersion(0), PolicyVersion(1)):
            if turns:
                engine.sleep()
                trainer.wake()
            device.measure("trainer awake")
            if version:
                trainer.step(version - 1, [a_row()])
            trainer.apply_to_weights(partial(weights.publish, version))
            if turns:
                trainer.sleep()
            device.measure("trainer asleep")
            engine.load(version, weights.path(version))
            trajectories = [TrajectoryId(4 * version + number) for number in range(4)]
            sample_until(engine, 20, [request(trajectory, max_new_tokens=90) for trajectory in trajectories])
            device.measure("sampling")
            engine.interrupt(trajectories)


def test_trainer_and_engine_in_turns_stay_within_the_memory_of_one(
    tiny_model: Path, tmp_path: Path, others: set[int]
) -> None:
    take_turns(tiny_model, tmp_path, SharedDevice(limit_of(tiny_model), others), turns=True)


def test_without_sleep_the_memory_limit_is_exceeded(tiny_model: Path, tmp_path: Path, others: set[int]) -> None:
    with pytest.raises(AssertionError, match="the limit is"):
        take_turns(tiny_model, tmp_path, SharedDevice(limit_of(tiny_model), others), turns=False)
