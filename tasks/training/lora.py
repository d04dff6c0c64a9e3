"""The adapter in the model that is trained: put in by peft, all that has a gradient, and merged for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stores.errors import ConfigError
from tasks import adapters
from tasks.adapters import LoraConfig

FOLDER = "adapter"
"""Where in a checkpoint the adapter is, for peft's `from_pretrained`; the checkpoint itself is the merged model."""


def adapted(model: Any, config: LoraConfig, seed: int) -> Any:
    """Put an adapter that changes nothing yet into a model, and freeze all else. Equal seeds give equal adapters.
    Raises ConfigError."""
    peft = _peft()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            made = peft.inject_adapter_in_model(_described(config), model)
        except ValueError as error:
            raise ConfigError(f"training.lora.targets = {config.targets}: {error}") from error
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return made


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """While this lasts, the model computes as if it had no adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(weights: Mapping[str, torch.Tensor], config: LoraConfig) -> dict[str, torch.Tensor]:
    """The weights of a model without adapters that computes the same. weights: all of a model with one, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".lora_" in name:
            continue
        layer, base, rest = name.rpartition(".base_layer.")
        plain = f"{layer}.{rest}" if base else name
        found[plain] = tensor
        if base and rest == "weight":
            down, up = weights[f"{layer}.lora_A.default.weight"], weights[f"{layer}.lora_B.default.weight"]
            found[plain] = tensor + config.scaling * (up @ down)
    return found


def save(weights: Mapping[str, torch.Tensor], config: LoraConfig, model: str, folder: Path) -> None:
    """Write an adapter into a new folder, for peft's `from_pretrained`. weights: all of a model with one. model: the
    path of the one it belongs to. Raises OSError."""
    described = _described(config)
    described.base_model_name_or_path = model
    described.inference_mode = True
    described.save_pretrained(folder)
    trained = {adapters.name_in_file(n): t.contiguous() for n, t in weights.items() if ".lora_" in n}
    save_file(trained, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _described(config: LoraConfig) -> Any:
    return _peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("training.lora: peft is not installed; pip install 'staleflow[lora]'") from error
    return peft
