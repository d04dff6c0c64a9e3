"""Loads published weights into a running vLLM model, in each worker process, through vLLM's own update interface.

vLLM fuses some tensors of a checkpoint (q, k and v into one) and prepares others for its kernels; loading in place does
both again, while decoding waits. vLLM's CPU build packs linear layers into copies that an update would not change, and
packs experts only at the first load. With this module its linear layers compute with the weights themselves, and
experts are packed after each load. The engine's arguments name the module, so that worker processes import it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, meta

from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import compare_parts
from staleflow.stores.weights.weight_report import WeightReport
from staleflow.tasks.engines import vllm_layouts
from staleflow.tasks.engines.vllm_layouts import meta_model

BACKEND = "staleflow"
"""Name of this backend in vLLM's registry of weight transfers."""


def arguments() -> dict[str, Any]:
    """vLLM's engine arguments for loading weights in place of the model's."""
    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
    }


@dataclass
class EmptyInitInfo(WeightTransferInitInfo):
    """Empty initialization info: an update needs only its path."""


@dataclass
class PublishedFile(WeightTransferUpdateInfo):
    """Update info for loading a file. path: a version's file on this host."""

    path: str = field(default="")


class FileTransfer(WeightTransferEngine[EmptyInitInfo, PublishedFile]):
    """Loads a published safetensors file. tasks/actors/parameter_server.py brings it to this host."""

    init_info_cls = EmptyInitInfo
    update_info_cls = PublishedFile

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
        """Do nothing: every host has the file."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PublishedFile) -> None:
        tensors = checkpoint_tensors(self.model_config.model, update_info.path)
        if self.model_config.hf_config.model_type == "gpt_oss":
            tensors = split_experts(tensors)
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: no resource is open."""


def checkpoint_tensors(model: str, path: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a published file, and rename them as in the model's checkpoints, which vLLM knows. A trainer
    publishes them as transformers has them in memory, with all experts of a layer in one tensor."""
    return dict(revert_weight_conversion(_cached_empty_model(model), weight_folder.read(Path(path))))


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each expert of gpt-oss tensors of its own. vLLM copies those that hold all experts itself, so its postponed
    loading would not see them."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, marker, leaf = name.rpartition(".experts.")
        result |= {f"{layer}{marker}{i}.{leaf}": tensor[i] for i in range(len(tensor))} if marker else {name: tensor}
    return result


@functools.cache
def _cached_empty_model(model: str) -> Any:
    return meta_model(model)


class WorkerExtension:
    """Methods that are added to vLLM's worker class; the engine calls them by name."""

    model_runner: Any
    weight_transfer_engine: FileTransfer
    model_config: Any

    def compare_weights(self, path: str) -> WeightReport:
        """Compare this worker's weights with a published file."""
        tensors = checkpoint_tensors(self.model_config.model, path)
        return compare_parts(vllm_layouts.weight_parts(self.model_runner.get_model(), tensors))


def compute_with_weights_themselves() -> None:
    """Make linear layers of vLLM's CPU build compute with their weights instead of packed copies."""
    dispatch: Callable[..., None] = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch_unpacked(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            dispatch(layer, remove_weight=remove_weight)

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch_unpacked


def pack_experts_after_each_load() -> None:
    """Prepare experts for their kernel after every load. vLLM does so only after the first one, and its CPU kernel
    would then read unpacked weights as packed ones."""
    setup: Callable[..., None] = UnquantizedFusedMoEMethod._setup_kernel

    def setup_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_repeated = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if is_repeated and isinstance(self.moe_kernel.fused_experts, CPUUnquantizedExperts):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack


def load_attention_sinks_in_place() -> None:
    """Exclude attention sinks (gpt-oss) from vLLM's postponed loading: the model copies them itself, and a load would
    write them into a tensor that is thrown away."""
    for names in (meta.SKIP_TENSORS, meta.SKIP_LOAD_TENSORS):
        names.add("sinks")


compute_with_weights_themselves()
load_attention_sinks_in_place()
pack_experts_after_each_load()
WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
