"""Published weights into a running vLLM model, in each of its worker processes, through vLLM's own update interface.

vLLM fuses some tensors of a checkpoint (q, k and v into one) and prepares others for its kernels. Loading in place has
to do both again; reading back what is held has to undo the fusing, so that its fingerprint can be compared with the
trainer's. Named in the engine's arguments, so that worker processes import it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils

from stores import parameters
from tasks.engines.unfusing import unfused

BACKEND = "staleflow"
"""Name of the file backend in vLLM's registry of weight transfers."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing has to be agreed on: the path of each update says all."""


@dataclass
class PublishedFile(WeightTransferUpdateInfo):
    """path: a version's file on this host."""

    path: str = field(default="")


class FileTransfer(WeightTransferEngine[NoInit, PublishedFile]):
    """Loads a published safetensors file; see tasks/parameters.py for how it gets to this host."""

    init_info_cls = NoInit
    update_info_cls = PublishedFile

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.device.type != "cpu":
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PublishedFile) -> None:
        self.model.load_weights(parameters.read(Path(update_info.path)).items())

    def finish_weight_update(self) -> None:
        if self.device.type != "cpu":
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            return
        # On a CPU each linear layer computes with a packed copy, which knows nothing of what was loaded: pack again.
        for module in self.model.modules():
            if hasattr(module, "cpu_linear"):
                layer_utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Methods that vLLM adds to its worker class; called by name from the engine."""

    model_runner: Any

    def held_fingerprint(self, shapes: parameters.Shapes) -> str:
        """Of the weights this worker holds, by the checkpoint's names and shapes; empty if they are sharded, or fused
        in a way that cannot be undone here."""
        model = self.model_runner.get_model()
        held = unfused(dict(model.named_parameters()), shapes, getattr(model, "packed_modules_mapping", {}))
        return parameters.fingerprint(held) if held is not None else ""


def keep_weights_beside_packed_copies() -> None:
    """vLLM's CPU build drops a linear layer's weight once it is packed; without it nothing can be loaded in place."""
    dispatch = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        dispatch(layer, remove_weight=False)

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch_and_keep


keep_weights_beside_packed_copies()
WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
