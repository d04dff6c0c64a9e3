"""The trained LoRA adapter of a model: the only part with a gradient. It is merged into the weights of checkpoints.

Names, initial values and files are those of peft, whose `from_pretrained` reads the saved files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from staleflow.stores.errors import ConfigError
from staleflow.stores.weights import weight_folder
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.engines.served_adapters import adapted_layers

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter in a checkpoint, for peft's `from_pretrained`; the checkpoint itself is the merged model."""


class LayerReadDirectlyError(ConfigError, AttributeError):
    """The model's code reads the weight of a layer that has an adapter. A subclass of AttributeError, so that `hasattr`
    returns False."""


class LinearWithAdapter(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A linear layer with frozen weights and a trained adapter."""

    def __init__(self, name: str, base: torch.nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self._name = name
        down = torch.nn.Linear(base.in_features, config.rank, bias=False)
        up = torch.nn.Linear(config.rank, base.out_features, bias=False)
        torch.nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        torch.nn.init.zeros_(up.weight)
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({"default": down})
        self.lora_B = torch.nn.ModuleDict({"default": up})
        self.enabled = True
        self._scaling = config.scaling

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base_layer(input)
        if not self.enabled:
            return output
        return output + self.lora_B["default"](self.lora_A["default"](input)) * self._scaling

    def __getattr__(self, name: str) -> Any:
        """Return an attribute as any module does. Raises LayerReadDirectlyError for the weight: a model that reads it
        instead of calling the layer, as Jamba does with dt_proj, would leave out the adapter."""
        if name in ("weight", "bias"):
            raise LayerReadDirectlyError(
                f"training.lora.targets: the model's code reads {self._name}.{name} itself, which would leave out the "
                "layer's adapter; name the layers that get one, without this, or train all weights"
            )
        return super().__getattr__(name)


def inject_adapter(model: Any, config: LoraConfig, seed: int) -> Any:
    """Add an adapter to a model, and freeze all other parameters. The new adapter does not change the output yet. Equal
    seeds give equal adapters. Raises ConfigError."""
    names = adapted_layers(model, config.targets)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name in names:
            model.set_submodule(name, LinearWithAdapter(name, model.get_submodule(name), config))
    return model


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Context manager: the model computes without its adapter."""
    layers = [module for module in model.modules() if isinstance(module, LinearWithAdapter)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merge_adapter(
    weights: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    """Merge an adapter into the weights of its model. Returns them in their own dtype. weights: of the model without
    adapter. adapter: tensors as published."""
    merged_weights = dict(weights)
    for layer in adapters.parse_layers(weight_folder.shapes(adapter), "the adapter"):
        base = weights[f"{layer.module}.weight"]
        delta = adapter[layer.up_name].float() @ adapter[layer.down_name].float()
        merged_weights[f"{layer.module}.weight"] = (base.float() + config.scaling * delta).to(base.dtype)
    return merged_weights


def save(adapter: Mapping[str, torch.Tensor], config: LoraConfig, model: str, folder: Path) -> None:
    """Write an adapter into a new folder for peft's `from_pretrained`. Raises OSError. adapter: as published. model:
    path of the model it belongs to."""
    layers = adapters.parse_layers(weight_folder.shapes(adapter), "the adapter")
    settings = adapters.peft_settings(config) | {
        "base_model_name_or_path": model,
        "target_modules": [layer.module for layer in layers],
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
    save_file(dict(adapter), folder / "adapter_model.safetensors", metadata={"format": "pt"})
