"""The group of trainer processes, from one rank's view: a sharded model, and collective operations.

PyTorch's FSDP2 (`fully_shard`) keeps one part in `count` of every parameter, gradient and optimizer state on each rank,
gathers a layer's parameters while it computes, and adds up gradients where they are kept.

Invariants:
- All ranks call the same methods in the same order: each call of one waits for those of the others. What they compute
  may differ only by `rank.number`.
- Gradients and metrics are sums over the ranks, never means: the loss is normalized over the whole batch beforehand.
- A group of one has no process group, unless its parameters are offloaded, and returns its arguments unchanged.
- Parameters are read through `parameters`, which shards what a forward pass has left gathered.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from staleflow.tasks.training.blocks import blocks
from staleflow.tasks.training.rank import COLLECTIVE_TIMEOUT_S, SINGLE_RANK, Rank

T = TypeVar("T")

FILE_VISIBLE_S = 10.0
"""Maximum number of seconds until a file that one host has written to a shared folder is visible to another."""


class RankGroup:
    """The group from the view of rank `rank`. Creating it waits until all ranks have joined; a process can be in one
    group at a time."""

    def __init__(
        self,
        rank: Rank = SINGLE_RANK,
        device: str = "cpu",
        *,
        uses_bfloat16: bool = False,
        offload: bool = False,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """Join the group.

        Args:
            uses_bfloat16: Whether blocks compute in that type and are gathered in it.
            offload: Whether shards, gradients and optimizer states stay in host memory, and the device has one block at
                a time.
            collective_timeout_s: Seconds that a rank waits for the others in one operation before it fails.
        """
        self.rank = rank
        self.device = device
        self._mesh: Any = None
        self._save_process_group: Any = None
        """Process group for saving in the background, whose calls are not ordered with the trainer's."""
        if rank.count == 1 and not offload:
            return
        self._uses_bfloat16, self._offload = uses_bfloat16, offload
        if dist.is_initialized():  # by the group of an earlier run in this process
            dist.destroy_process_group()
        timeout, max_timeout = (
            datetime.timedelta(seconds=collective_timeout_s),
            datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        store = _rendezvous_store(rank, timeout) if rank.count > 1 else dist.HashStore()
        if device == "cuda":
            # Sets the device of this thread; a trainer does all of its work in one thread.
            torch.cuda.set_device(_local_rank(store, rank) % torch.cuda.device_count())
        # Objects and metrics are in host memory, so they use gloo also with a GPU.
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank.number, world_size=rank.count, timeout=timeout)
        self._mesh = init_device_mesh(device, (rank.count,))
        self._save_process_group = dist.new_group(backend="gloo", timeout=max_timeout)

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded."""
        return self._mesh is not None

    def shard(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Shard the model's parameters, so that each block is gathered only when it computes. Parameters are converted
        to `dtype` and moved to the device one block at a time, so neither the device nor host memory needs room for a
        second copy."""
        if self._mesh is None:
            return model.to(self.device)
        offload_policy = CPUOffloadPolicy(pin_memory=self.device == "cuda") if self._offload else OffloadPolicy()
        # Under autocast a block's products are in bfloat16 anyway. Parameters outside of blocks, such as embeddings,
        # stay in float32, as the residual stream that the blocks add to.
        mixed_precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self._uses_bfloat16 else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for block in blocks(model):
            _convert(block, dtype)
            fully_shard(block, mesh=self._mesh, mp_policy=mixed_precision, offload_policy=offload_policy)
        _convert(model, dtype)
        fully_shard(model, mesh=self._mesh, offload_policy=offload_policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return model

    def parameters(self, model: Any) -> dict[str, torch.Tensor]:
        """The model's parameters by name, each as this rank's shard; tied ones once."""
        self.reshard(model)
        return dict(model.named_parameters())

    def reshard(self, model: Any) -> None:
        """Free the parameters outside of blocks, which a forward pass without a backward pass leaves gathered."""
        if self._mesh is not None:
            model.reshard()

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a sharded tensor on all ranks."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def fill(self, shard: torch.Tensor, full_tensor: torch.Tensor) -> None:
        """Overwrite this rank's shard with its part of a full tensor."""
        if shard.shape != full_tensor.shape:
            raise ValueError(f"a tensor has shape {tuple(full_tensor.shape)}, the model's has {tuple(shard.shape)}")
        if isinstance(shard, DTensor):
            full_tensor = distribute_tensor(
                full_tensor.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None
            )
        shard.copy_(full_tensor)

    def broadcast(self, value: T) -> T:
        """Return the leading rank's value on all ranks; values of other ranks are ignored."""
        if self._mesh is None:
            return value
        values = [value if self.rank.leads else None]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]  # type: ignore[return-value]  # the leading rank's

    def all_gather(self, entries: Mapping[int, T]) -> dict[int, T]:
        """Gather the entries of all ranks, sorted by key."""
        if self._mesh is None:
            return dict(entries)
        parts: list[Any] = [None] * self.rank.count
        dist.all_gather_object(parts, dict(entries))
        return dict(sorted(item for part in parts for item in part.items()))

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over the ranks."""
        if self._mesh is None:
            return list(numbers)
        sums = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(number) for number in sums]

    def begin_save(self, state: dict[str, Any], folder: Path) -> Callable[[], None]:
        """Copy a sharded state, and start writing the copy; each rank writes its own shards. Returns a function that
        waits for it, on the leading rank until all ranks have finished. Errors are RuntimeErrors. folder: an existing
        folder that all ranks see."""
        with _checkpoint_errors():
            save = dcp.async_save(state, checkpoint_id=folder, process_group=self._save_process_group)

        def finish() -> None:
            with _checkpoint_errors():
                save.result()
            if self.rank.leads:
                _require_files_of_all_ranks(folder)

        return finish

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Overwrite a state with one that a group of any size has saved; each rank reads its own shards. Raises
        RuntimeError."""
        with _checkpoint_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a group of one, which has no process group
            dcp.load(state, checkpoint_id=folder, no_dist=self._mesh is None)

    def leave(self) -> None:
        """Leave the group. On GPUs this also ends operations of other threads that wait for other ranks."""
        if self._mesh is None or not dist.is_initialized():
            return
        if self.device == "cuda":  # a hung kernel would keep the GPU and its memory until its deadline
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def _convert(module: Any, dtype: torch.dtype | None) -> None:
    """Change the type of the parameters that are not sharded yet."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)


def _require_files_of_all_ranks(folder: Path) -> None:
    """Raise RuntimeError unless the files of all ranks are in a folder that they have written to."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    deadline = time.monotonic() + FILE_VISIBLE_S
    while missing_files := sorted(name for name in files if not (folder / name).is_file()):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{len(missing_files)} of {len(files)} files that the trainer's ranks have written are not there, the "
                f"first is {missing_files[0]}: runs_dir has to be a folder that the hosts of all ranks share"
            )
        time.sleep(0.1)


def _rendezvous_store(rank: Rank, timeout: datetime.timedelta) -> Any:
    """Create the store by which the ranks find each other. The rank that has the listening socket serves it."""
    if rank.listener_fd is None:
        return dist.TCPStore(rank.host, rank.port, timeout=timeout)
    return dist.TCPStore(
        rank.host,
        rank.port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=os.dup(rank.listener_fd),  # the store closes it
    )


def _local_rank(store: Any, rank: Rank) -> int:
    """Number of ranks before this one on the same host."""
    host = socket.gethostname()
    store.set(f"host-{rank.number}", host)
    return sum(store.get(f"host-{number}").decode() == host for number in range(rank.number))


@contextlib.contextmanager
def _checkpoint_errors() -> Iterator[None]:
    """Raise the error of a rank as RuntimeError: torch's CheckpointException is not an Exception."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{cause} (rank {rank})") from error
