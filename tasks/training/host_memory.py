"""Host memory for a trainer's tensors while rollout instances use its device (cluster.layout = "turns").

For a GPU it is pinned host memory. For a CPU it is a memory-mapped file without a name: the process frees its own
memory, and the system can write the file to disk.
"""

from __future__ import annotations

import tempfile

import torch


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

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a stored tensor on the device."""
        return tensor.to(self._device, copy=True)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        if self._device == "cuda":
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        if not like.numel():
            return torch.empty_like(like)
        with tempfile.NamedTemporaryFile() as file:
            mapped = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        return mapped.view(like.shape)
