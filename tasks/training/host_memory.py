"""Where a trainer's tensors are while rollout instances have its device: in the layout "turns".

On a GPU that is pinned memory of the host. On a CPU, where the device's memory is the process's own, it is a mapped
file without a name, so that the process does free as much; the system writes it to disk as it needs the memory.
"""

from __future__ import annotations

import tempfile

import torch


class HostMemory:
    """Copies of tensors by name, whose memory is used again. device: where the tensors are while they are in use."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor, made anew unless the tensor itself is it."""
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = self._copies[name] = self._empty(tensor)
        return copy.copy_(tensor)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values on the device."""
        return tensor.to(self._device, copy=True)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        if self._device == "cuda":
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        if not like.numel():
            return torch.empty_like(like)
        with tempfile.NamedTemporaryFile() as file:
            mapped = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        return mapped.view(like.shape)
