"""Low-rank adapters (LoRA, arXiv 2106.09685): their settings in a job, and the names of their tensors. Pure.

An adapter adds alpha / rank x B A to the weight W of a linear layer: A is [rank, inputs], B is [outputs, rank] and
starts as 0. W never changes. A policy version consists of all layers' A and B, published under peft's names, so that
any program that reads adapters can read a version's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import StoreError
from staleflow.tasks.settings.knobs import knob

PEFT_PREFIX = "base_model.model."
"""Prefix of module names in peft's files."""
FILE_NAME_PATTERN = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Train a low-rank adapter instead of the weights; versions are adapters, a few megabytes each."""

    rank: int = knob(0, "rank of the adapter that is trained in place of the weights; 0: none", low=0, high=512)
    alpha: int = knob(32, "what the adapter adds to a layer is multiplied by alpha / rank", low=1)
    targets: list[str] = knob(
        [],
        "last part of the names of the linear layers that get one, such as q_proj; empty: all linear layers but the "
        "output layer; experts that are kept as one tensor, and routers, get none",
    )

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """Shapes of one layer's adapter. module: name of the layer in its model."""

    module: str
    rank: int
    inputs: int
    outputs: int

    @property
    def down_name(self) -> str:
        """Name of matrix A in a file."""
        return f"{PEFT_PREFIX}{self.module}.lora_A.weight"

    @property
    def up_name(self) -> str:
        """Name of matrix B in a file."""
        return f"{PEFT_PREFIX}{self.module}.lora_B.weight"


def peft_settings(config: LoraConfig) -> dict[str, Any]:
    """The contents of peft's adapter_config.json for an adapter."""
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.targets) or "all-linear",
        "bias": "none",
    }


def name_in_file(parameter: str) -> str:
    """Convert a trained parameter's name to its name in a file.

    >>> name_in_file("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{PEFT_PREFIX}{parameter.replace('.default.', '.')}"


def parse_layers(shapes: Mapping[str, tuple[int, ...]], source: object) -> list[AdapterLayer]:
    """The layers of an adapter, from the names and shapes of its tensors. Raises StoreError if they are not those of a
    complete adapter. source: for messages."""
    shapes_by_module: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = FILE_NAME_PATTERN.fullmatch(name)
        if match is None or len(shape) != 2:
            raise StoreError(f"{source}: {name} {shape} is not part of an adapter")
        shapes_by_module.setdefault(match["module"], {})[match["half"]] = shape
    layers = []
    for module, halves in shapes_by_module.items():
        down, up = halves.get("A"), halves.get("B")
        if down is None or up is None or down[0] != up[1]:
            raise StoreError(f"{source}: the adapter of {module} is incomplete: A is {down}, B is {up}")
        layers.append(AdapterLayer(module, rank=down[0], inputs=down[1], outputs=up[0]))
    return layers


def check_layers(
    layers: Iterable[AdapterLayer], rank: int, weights: Mapping[str, tuple[int, ...]], source: object
) -> None:
    """Raise StoreError if an adapter has another rank, or does not fit a model with these weights."""
    for layer in layers:
        shape = weights.get(f"{layer.module}.weight")
        if shape is None:
            raise StoreError(f"{source}: the model has no layer {layer.module}")
        if (layer.rank, layer.outputs, layer.inputs) != (rank, *shape):
            raise StoreError(
                f"{source}: the adapter of {layer.module} has rank {layer.rank} and a weight of "
                f"{(layer.outputs, layer.inputs)}; they must be {rank} and {shape}"
            )
