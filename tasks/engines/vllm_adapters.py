"""Adapters of several policy versions in vLLM, side by side: each request is decoded with that of its own version.

vLLM keeps adapters in a fixed number of slots, and takes one for an adapter that is not in any. If all are taken, it is
the slot of the one that was used the longest ago, which a running request may still need: versions of vLLM before 0.25
then went on with what was in the slot (vllm-project/vllm#47724). So here none is ever taken from another.

Invariants: an adapter has its slot from `add` to `drop`, and is only added while a slot is free; its number is never
used again; whoever calls `drop` knows that no request is left that was begun under it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import WeightPart, compared
from staleflow.stores.weights.weight_report import WeightReport, total
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import LoraConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of slots that vLLM has."""
SPARE = 1
"""Slots beyond those of the versions that are served: the next one may be loaded while a request of one that is not
served any more has yet to be stopped."""


def arguments(config: LoraConfig, served: int, layers: list[str]) -> dict[str, Any]:
    """vLLM's EngineArgs for so many versions side by side. layers: the last parts of the names of those that may have
    an adapter. Without them vLLM would prepare its output layer for one, too, which then has no logprobs of prompts."""
    return {
        "enable_lora": True,
        "max_loras": served + SPARE,
        "max_cpu_loras": served + SPARE,
        "lora_target_modules": layers,
        "max_lora_rank": next(rank for rank in RANKS if rank >= config.rank),
        "worker_extension_cls": f"{__name__}.{AdapterExtension.__name__}",
    }


class VllmAdapters:
    """The adapters of an LLMEngine in this process. Only the thread that drives it calls anything."""

    def __init__(self, engine: Any, config: LoraConfig, served: int) -> None:
        self._engine = engine
        self._config = config
        self._slots = served + SPARE
        self._adapters: dict[PolicyVersion, Any] = {}
        self._added = 0

    def request(self, version: PolicyVersion) -> Any:
        """What a request of this version is given to vLLM with; None if the version has no adapter: the model as it
        is."""
        return self._adapters.get(version)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return len(self._adapters) >= self._slots

    def add(self, version: PolicyVersion, file: Path) -> None:
        """Load the adapter of a version that is not held into a free slot. Raises what vLLM raises."""
        from vllm.lora.request import LoRARequest

        assert not self.full and version not in self._adapters
        self._added += 1
        settings = adapters.peft_settings(self._config)
        with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            (Path(folder) / "adapter_model.safetensors").symlink_to(file.absolute())
            request = LoRARequest(lora_name=f"v{version}", lora_int_id=self._added, lora_path=folder)
            # It is read here and never again: vLLM does so only for an adapter that it does not hold.
            self._engine.add_lora(request)
        self._adapters[version] = request

    def drop(self, version: PolicyVersion) -> None:
        """Free a version's slot."""
        adapter = self._adapters.pop(version, None)
        if adapter is not None:
            self._engine.remove_lora(adapter.lora_int_id)

    def clear(self) -> None:
        """Free all slots."""
        for version in tuple(self._adapters):
            self.drop(version)

    def compared(self, version: PolicyVersion, file: Path) -> WeightReport:
        """What is in a version's slot on each worker, compared with its file."""
        args = (self._adapters[version].lora_int_id, str(file), self._config.scaling)
        return total(self._engine.collective_rpc("compared_adapter", args=args))


class AdapterExtension:
    """Methods that vLLM adds to its worker class; called by name from the engine."""

    model_runner: Any
    vllm_config: Any

    def compared_adapter(self, number: int, file: str, scaling: float) -> WeightReport:
        """An adapter that this worker has, compared with its file. vLLM keeps it for its own kernels: layers fused,
        filled up to the size of the slot, and B times alpha / rank. Shards of it are not compared."""
        tensors = weight_folder.read(Path(file))
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            return WeightReport(not_verified={"an adapter's shards": len(tensors)})
        halves = {layer.module: layer for layer in adapters.layers(weight_folder.shapes(tensors), file)}
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(number)
        parts: dict[str, WeightPart] = {}
        for name, module in manager.modules.items():
            for index, module_name in enumerate(manager.packed_modules.get(name, [name])):
                layer = halves.get(module_name)
                if layer is None:
                    continue
                down, up = (layer.down, module.lora_a_stacked, 1.0), (layer.up, module.lora_b_stacked, scaling)
                for key, stacked, times in (down, up):
                    loaded = stacked[index][slot, 0]
                    rows, columns = tensors[key].shape
                    full = torch.zeros_like(loaded)
                    full[:rows, :columns] = tensors[key].to(loaded) * times
                    parts[key] = WeightPart(name=key, loaded=loaded, published=full)
        missing = (WeightPart(name=key, unknown="no layer of the engine has it") for key in tensors if key not in parts)
        return compared([*parts.values(), *missing])
