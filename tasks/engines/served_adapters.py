"""Adapters of several policy versions in one model: each token is computed with that of its own version.

A hook on every linear layer that an adapter changes adds what the token's version adds. Whoever runs the model says
before, in the thread that runs it, which versions the tokens of the pass are of; of a version without an adapter, they
are computed by the model as it is. A pass costs what it does without adapters, and two thin products a layer and
version on top.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_folder
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import LoraConfig

Halves = tuple[torch.Tensor, torch.Tensor]
"""A layer's A and B."""


class ServedAdapters:
    """The adapters of a model. Methods may be called while another thread runs the model, under versions that are held
    before and after."""

    def __init__(self, model: Any, config: LoraConfig) -> None:
        self._config = config
        self._modules = dict(model.named_modules())
        self._device = model.device
        self._shapes = weight_folder.shapes(dict(model.named_parameters()))
        self._held: dict[PolicyVersion, dict[str, torch.Tensor]] = {}
        self._layers: dict[str, dict[PolicyVersion, Halves]] = {}
        self._pass = threading.local()

    def add(self, version: PolicyVersion, file: Path) -> dict[str, torch.Tensor]:
        """Hold a version's adapter; returns its tensors as they are held. Raises StoreError, and holds nothing then."""
        tensors = weight_folder.read(file)
        layers = adapters.layers(weight_folder.shapes(tensors), file)
        adapters.check(layers, self._config.rank, self._shapes, file)
        held = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        for layer in layers:
            if layer.module not in self._layers:
                self._layers[layer.module] = {}
                self._modules[layer.module].register_forward_hook(partial(self._added, layer.module))
            self._layers[layer.module][version] = held[layer.down], held[layer.up]
        self._held[version] = held
        return held

    def drop(self, version: PolicyVersion) -> None:
        """Free a version's adapter. Nothing is computed with it any more."""
        self._held.pop(version, None)
        for held in self._layers.values():
            held.pop(version, None)

    def clear(self) -> None:
        """Free all adapters."""
        for version in tuple(self._held):
            self.drop(version)

    def select(self, tokens: Sequence[tuple[PolicyVersion, int]]) -> None:
        """Say that the next pass in this thread is over tokens of these versions, so many of each, one after the
        other."""
        places: dict[PolicyVersion, list[range]] = {}
        begin = 0
        for version, count in tokens:
            if version in self._held:
                places.setdefault(version, []).append(range(begin, begin + count))
            begin += count
        self._pass.places = {
            version: torch.cat([torch.arange(one.start, one.stop) for one in ranges])
            for version, ranges in places.items()
        }

    @contextmanager
    def under(self, version: PolicyVersion, count: int) -> Iterator[None]:
        """While this lasts, passes in this thread are over `count` tokens of one version."""
        self.select([(version, count)])
        try:
            yield
        finally:
            self.select([])

    def _added(self, layer: str, module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """A layer's output [1, T, outputs] with what its adapters add."""
        held, scaling = self._layers[layer], self._config.scaling
        for version, places in getattr(self._pass, "places", {}).items():
            found = held.get(version)
            if found is None:
                continue  # dropped: whatever ran under it was stopped, and this pass counts for it no more
            down, up = found
            chosen = places.to(output.device)
            output[:, chosen] += (args[0][:, chosen] @ down.T @ up.T) * scaling
        return output
