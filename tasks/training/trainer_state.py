"""Saves and restores the state that a trainer's next step depends on.

A trainer of one process writes one file. Each rank of a group writes its shards into a folder. Either can be loaded by
a group of any size.

With cluster.layout = "turns" a trainer's tensors are in host memory while rollout instances use its device: pinned
memory for a GPU; for a CPU a memory-mapped file without a name, so that the process frees its own memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import serialization
from torch.utils._pytree import tree_map_only

from staleflow.stores.weights import resume_points
from staleflow.tasks.training.rank_group import RankGroup


def trained_parameters(rank_group: RankGroup, model: Any) -> dict[str, torch.Tensor]:
    """The parameters of a model that are trained, by name; each is this rank's shard."""
    return {name: p for name, p in rank_group.parameters(model).items() if p.requires_grad}


class TrainerState:
    """The trained weights, optimizer state and random state of a trainer. adapter_only: save only trained parameters,
    instead of all tensors of the model."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        rng: np.random.Generator,
        rank_group: RankGroup,
        *,
        adapter_only: bool,
    ) -> None:
        self._model, self._optimizer, self._rng, self._rank_group = model, optimizer, rng, rank_group
        self._adapter_only = adapter_only
        self._finish_save: Callable[[], None] | None = None

    def begin_save(self, path: Path) -> None:
        """Copy the state to host memory, 12 bytes per parameter of this rank. In a group each rank starts writing its
        shards into an existing folder."""
        if self._rank_group.rank.count > 1:
            with contextlib.suppress(RuntimeError):  # on a rank other than 0: `end_save` is called on rank 0 only
                self.end_save()
            self._finish_save = self._rank_group.begin_save(self._state_tensors(), path)
            return
        state = {
            "model": self._tensors_to_save(),
            "optimizer": self._optimizer.state_dict(),
            "random": self._rng.bit_generator.state,
        }
        state = _copy_to_cpu(tree_map_only(torch.Tensor, self._rank_group.full_tensor, state))
        self._finish_save = functools.partial(_write_state, state, path)

    def end_save(self) -> None:
        """Write the copied state; in a group, wait until all ranks have written theirs. Raises the error of writing it.
        Does nothing if no save was started."""
        finish_save, self._finish_save = self._finish_save, None
        if finish_save is not None:
            finish_save()

    def load(self, path: Path) -> None:
        """Restore a saved state. Raises StoreError."""
        with resume_points.loading(path):
            self._optimizer.state.clear()  # a file from before the first step has no moments
            in_use = self._state_tensors()
            if path.is_dir():
                self._rank_group.load(in_use, path)
                self._rng.bit_generator.state = json.loads(in_use["random"])
                return
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if names := sorted(saved["model"].keys() ^ self._tensors_to_save().keys()):
                raise KeyError(f"{len(names)} tensors differ from the model's, the first is {names[0]}")
            moments = saved["optimizer"]["state"]
            for index, name in enumerate(in_use["model"]):
                self._rank_group.fill(in_use["model"][name], saved["model"][name])
                for key, tensor in in_use["optimizer"][name].items():
                    if index in moments:
                        self._rank_group.fill(tensor, moments[index][key])
                    else:  # it was saved before the first gradient
                        tensor.zero_()
            self._rng.bit_generator.state = saved["random"]

    def _tensors_to_save(self) -> dict[str, torch.Tensor]:
        """The tensors of the model that a resume point has, by name."""
        tensors: dict[str, torch.Tensor] = self._model.state_dict()
        if self._adapter_only:
            trained_names = trained_parameters(self._rank_group, self._model)
            return {name: tensor for name, tensor in tensors.items() if name in trained_names}
        return tensors

    def _state_tensors(self) -> dict[str, Any]:
        """The state by parameter names. Its tensors are those of the model and the optimizer, not copies."""
        parameters = trained_parameters(self._rank_group, self._model)
        for parameter in parameters.values():
            if not self._optimizer.state[parameter]:  # AdamW creates its state at the first gradient
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                device = parameter.device if self._optimizer.defaults["fused"] else "cpu"
                self._optimizer.state[parameter] = {"step": torch.tensor(0.0, device=device), **zeros}
        return {
            "model": {name: parameter.detach() for name, parameter in parameters.items()},
            "optimizer": {name: self._optimizer.state[parameter] for name, parameter in parameters.items()},
            "random": json.dumps(self._rng.bit_generator.state),
        }


def _copy_to_cpu(state: Any) -> Any:
    """Copy nested dicts and lists, and the tensors in them, to CPU memory. A tensor that occurs several times, such as
    tied weights, is copied once."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        storage_key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if storage_key not in copies:
            copies[storage_key] = value.detach().to("cpu", copy=True)
        return copies[storage_key]

    return copy(state)


def _write_state(state: dict[str, Any], path: Path) -> None:
    """Save a state with torch, without checksums: computing them takes three quarters of the time, and torch does not
    check them in a file that is loaded by mmap."""
    with serialization.config.patch("save.compute_crc32", False):
        torch.save(state, path)


class HostMemory:
    """Keeps copies of tensors by name in host memory, which is allocated once. device: where the tensors are while in
    use."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to host memory, and return the copy. The next `put` under this name overwrites it."""
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[name] = self._empty(tensor)
        return copy.copy_(tensor)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        if self._device == "cuda":
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        if not like.numel():
            return torch.empty_like(like)
        with tempfile.NamedTemporaryFile() as file:
            mapped_tensor = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        return mapped_tensor.view(like.shape)
