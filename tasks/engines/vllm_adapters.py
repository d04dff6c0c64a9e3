"""Adapters of several policy versions in vLLM. Each request is decoded with the adapter of its own version.

vLLM has a fixed number of slots for adapters. If all are used, it evicts the least recently used adapter, which a
running request may still need: vLLM before 0.25 then computed with the new contents of the slot
(vllm-project/vllm#47724). So this module never lets vLLM evict an adapter.

Invariants: an adapter has its slot from `add` to `drop`, and is only added while a slot is free; its id is never used
again; `drop` is called only when no request of its version is left.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import WeightPart, compare_parts
from staleflow.stores.weights.weight_report import WeightReport, sum_reports
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.adapters import LoraConfig

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks for which vLLM has slots."""
NUM_SPARE_SLOTS = 1
"""Number of slots beyond those of the served versions: a new version may be loaded before the last request of a dropped
version is stopped."""


def arguments(config: LoraConfig, num_versions: int, layers: list[str]) -> dict[str, Any]:
    """vLLM's engine arguments for `num_versions` served versions. layers: last name components of the adapted layers;
    without this list vLLM would also prepare its output layer, which then computes no prompt logprobs."""
    return {
        "enable_lora": True,
        "max_loras": num_versions + NUM_SPARE_SLOTS,
        "max_cpu_loras": num_versions + NUM_SPARE_SLOTS,
        "lora_target_modules": layers,
        "max_lora_rank": next(rank for rank in SLOT_RANKS if rank >= config.rank),
        "worker_extension_cls": f"{__name__}.{AdapterExtension.__name__}",
    }


class VllmAdapters:
    """The adapters of an LLMEngine in this process. Use only from the thread that drives the engine."""

    def __init__(self, engine: Any, config: LoraConfig, num_versions: int) -> None:
        self._engine = engine
        self._config = config
        self._num_slots = num_versions + NUM_SPARE_SLOTS
        self._adapters: dict[PolicyVersion, Any] = {}
        self._num_added = 0

    def lora_request(self, version: PolicyVersion) -> Any:
        """vLLM's LoRA request for a version; None if the version has no adapter, which is the model as it was
        loaded."""
        return self._adapters.get(version)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return len(self._adapters) >= self._num_slots

    def add(self, version: PolicyVersion, file: Path) -> None:
        """Load a version's adapter into a free slot. Raises vLLM's errors."""
        from vllm.lora.request import LoRARequest

        assert not self.is_full and version not in self._adapters
        self._num_added += 1
        settings = adapters.peft_settings(self._config)
        with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
            (Path(folder) / "adapter_model.safetensors").symlink_to(file.absolute())
            request = LoRARequest(lora_name=f"v{version}", lora_int_id=self._num_added, lora_path=folder)
            # vLLM reads the file only now, because later requests find the adapter loaded.
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

    def compare_version(self, version: PolicyVersion, file: Path) -> WeightReport:
        """Compare the contents of a version's slot on each worker with its file."""
        args = (self._adapters[version].lora_int_id, str(file), self._config.scaling)
        return sum_reports(self._engine.collective_rpc("compare_adapter", args=args))


class AdapterExtension:
    """Methods that are added to vLLM's worker class; the engine calls them by name."""

    model_runner: Any
    vllm_config: Any

    def compare_adapter(self, adapter_id: int, file: str, scaling: float) -> WeightReport:
        """Compare an adapter on this worker with its file. vLLM stores it for its kernels: with fused layers, padded to
        the size of the slot, and with B multiplied by alpha / rank. Shards are not compared."""
        tensors = weight_folder.read(Path(file))
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            return WeightReport(not_verified={"an adapter's shards": len(tensors)})
        layers_by_module = {layer.module: layer for layer in adapters.parse_layers(weight_folder.shapes(tensors), file)}
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(adapter_id)
        parts: dict[str, WeightPart] = {}
        for name, module in manager.modules.items():
            for index, module_name in enumerate(manager.packed_modules.get(name, [name])):
                layer = layers_by_module.get(module_name)
                if layer is None:
                    continue
                down, up = (
                    (layer.down_name, module.lora_a_stacked, 1.0),
                    (layer.up_name, module.lora_b_stacked, scaling),
                )
                for key, stacked_tensors, factor in (down, up):
                    slot_tensor = stacked_tensors[index][slot, 0]
                    rows, columns = tensors[key].shape
                    expected_tensor = torch.zeros_like(slot_tensor)
                    expected_tensor[:rows, :columns] = tensors[key].to(slot_tensor) * factor
                    parts[key] = WeightPart(name=key, loaded=slot_tensor, published=expected_tensor)
        missing_parts = (
            WeightPart(name=key, incomparable_reason="no layer of the engine has it")
            for key in tensors
            if key not in parts
        )
        return compare_parts([*parts.values(), *missing_parts])
