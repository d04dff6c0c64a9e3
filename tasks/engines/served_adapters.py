"""Adapters of several policy versions in one model. Each token is computed with the adapter of its own version.

Each adapted linear layer is replaced by one that adds the output of the token's adapter. Tokens of a version without an
adapter are computed by the base model. A pass costs two thin matrix products per layer and version more than without
adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_folder
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import AdapterLayer, LoraConfig

AdapterMatrices = tuple[torch.Tensor, torch.Tensor]
"""A layer's A and B."""
AdapterTensors = dict[str, torch.Tensor]
"""An adapter, by name in its file."""


def adapted_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """The names of the layers that get an adapter: those with one of these name endings, or all linear layers. The
    output layer gets none. Raises ConfigError.

    Routers that return more than their product (Llama 4) and experts in one tensor (most mixtures of experts) do not
    count as linear layers.
    """
    modules = dict(model.named_modules())
    output = model.get_output_embeddings()
    linear_names = {
        name
        for name, module in modules.items()
        if type(module).forward is torch.nn.Linear.forward and module is not output
    }
    if not targets:
        module_names = [name for name in modules if name in linear_names]
        problem = None if module_names else "it has no torch.nn.Linear but its output layer"
    else:
        module_names = [name for name in modules if name.rpartition(".")[2] in targets]
        unsupported_name = next((name for name in module_names if name not in linear_names), "")
        missing_targets = [
            target for target in targets if not any(name.rpartition(".")[2] == target for name in module_names)
        ]
        problem = None
        if unsupported_name:
            module = modules[unsupported_name]
            kind = "the output layer" if module is output else f"a {type(module).__name__}"
            problem = f"{unsupported_name} is {kind}"
        elif missing_targets:
            problem = f"no layer of the model is called {missing_targets[0]}"
    if problem:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear_names}))
        remedy = f"name layers of that kind ({names}), or train all weights" if names else "train all weights"
        raise ConfigError(
            f"training.lora.targets = {list(targets)}: {problem}; adapters are for torch.nn.Linear; {remedy}"
        )
    return module_names


class PassVersions:
    """The versions of the new tokens in the next forward pass: the positions of each version's tokens, or None if all
    have one version. Layers that also compute cached tokens need passes of one version (row_scheduler.py)."""

    def __init__(self) -> None:
        self.token_indices: dict[PolicyVersion, torch.Tensor | None] = {}

    def select(self, versions: Sequence[PolicyVersion]) -> None:
        """Set the versions of the next pass. versions: one per token, in the pass's order."""
        version_of_token = torch.tensor(versions)
        distinct_versions = set(versions)
        self.token_indices = {
            version: (version_of_token == version).nonzero()[:, 0] if len(distinct_versions) > 1 else None
            for version in distinct_versions
        }


class AdaptedLinear(torch.nn.Linear):
    """A linear layer that adds the output of each token's adapter. It shares the weights of the layer it replaces."""

    def __init__(self, base: torch.nn.Linear, scaling: float, versions: PassVersions) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.matrices: dict[PolicyVersion, AdapterMatrices] = {}
        self._scaling = scaling
        self._versions = versions

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        for version, rows in self._versions.token_indices.items():
            if version not in self.matrices:
                continue
            down, up = self.matrices[version]
            if rows is None:
                output += (input @ down.T @ up.T) * self._scaling
                continue
            flat, indices = output.view(-1, output.shape[-1]), rows.to(output.device)
            flat[indices] += (input.reshape(-1, input.shape[-1])[indices] @ down.T @ up.T) * self._scaling
        return output


class ServedAdapters:
    """The adapters of a model. `prepare` may be called from any thread; all other methods only from the thread that
    runs the model."""

    def __init__(self, model: Any, config: LoraConfig) -> None:
        self.versions = PassVersions()
        self._model = model
        self._config = config
        self._shapes = weight_folder.shapes(dict(model.named_parameters()))
        self._layers: dict[str, AdaptedLinear] = {}

    def prepare(self, tensors: AdapterTensors, file: Path) -> tuple[list[AdapterLayer], AdapterTensors]:
        """Check a version's adapter, and move it to the model's device for `add`. Raises StoreError if it is not an
        adapter of this model."""
        layers = adapters.parse_layers(weight_folder.shapes(tensors), file)
        adapters.check_layers(layers, self._config.rank, self._shapes, file)
        for layer in layers:
            module = self._model.get_submodule(layer.module)
            if type(module).forward not in (torch.nn.Linear.forward, AdaptedLinear.forward):
                raise StoreError(f"{file}: the model's {layer.module} is not a linear layer and cannot have an adapter")
        return layers, {name: tensor.to(self._model.device) for name, tensor in tensors.items()}

    def add(self, version: PolicyVersion, layers: Sequence[AdapterLayer], tensors: AdapterTensors) -> None:
        """Serve an adapter that `prepare` has returned."""
        for layer in layers:
            if layer.module not in self._layers:
                base: Any = self._model.get_submodule(layer.module)
                self._layers[layer.module] = AdaptedLinear(base, self._config.scaling, self.versions)
                self._model.set_submodule(layer.module, self._layers[layer.module])
            self._layers[layer.module].matrices[version] = tensors[layer.down_name], tensors[layer.up_name]

    def drop(self, version: PolicyVersion) -> None:
        """Free a version's adapter."""
        for layer in self._layers.values():
            layer.matrices.pop(version, None)

    def clear(self) -> None:
        """Free all adapters."""
        for layer in self._layers.values():
            layer.matrices.clear()
