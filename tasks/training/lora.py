"""The adapter in the model that is trained: put in by peft, all that has a gradient, and merged for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import LoraConfig

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
    for name, module in made.named_modules():
        layer = module.get_base_layer() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) else None
        if layer is not None and not isinstance(layer, torch.nn.Linear):
            raise ConfigError(
                f"training.lora.targets = {config.targets}: {name} is a {type(layer).__name__}, adapters are for "
                "torch.nn.Linear; name layers of that kind, or train all weights"
            )
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


def merged(
    weights: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: LoraConfig
) -> dict[str, torch.Tensor]:
    """The weights of a model that computes what one with an adapter does, in their own type. weights: of the model
    without it. adapter: as it was published."""
    found = dict(weights)
    for layer in adapters.layers({name: tuple(t.shape) for name, t in adapter.items()}, "the adapter"):
        held = found[f"{layer.module}.weight"]
        added = adapter[layer.up].float() @ adapter[layer.down].float()
        found[f"{layer.module}.weight"] = (held.float() + config.scaling * added).to(held.dtype)
    return found


def save(adapter: Mapping[str, torch.Tensor], config: LoraConfig, model: str, folder: Path) -> None:
    """Write an adapter into a new folder, for peft's `from_pretrained`. adapter: as it was published. model: the path
    of the one it belongs to. Raises OSError."""
    described = _described(config)
    described.base_model_name_or_path = model
    described.inference_mode = True
    described.save_pretrained(folder)
    save_file(dict(adapter), folder / "adapter_model.safetensors", metadata={"format": "pt"})


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
