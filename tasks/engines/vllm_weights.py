"""Published weights into a running vLLM model, in each of its worker processes, through vLLM's own update interface.

vLLM fuses some tensors of a checkpoint (q, k and v into one) and prepares others for its kernels. Loading in place has
to do both again; reading back what is held has to undo the fusing, so that its fingerprint can be compared with the
trainer's. Named in the engine's arguments, so that worker processes import it too.

On a CPU both are done beside decoding, in a spare model, and decoding waits only while the two change hands. On a GPU
they are done in the model itself, while decoding waits: memory is dearer there, and the bytes are there in no time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader.utils import initialize_model

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
    """Loads a published safetensors file; see tasks/actors/parameter_server.py for how it gets to this host."""

    init_info_cls = NoInit
    update_info_cls = PublishedFile

    def init_transfer_engine(self, init_info: NoInit) -> None:
        self.spare = Spare(self.model, self.vllm_config) if self.device.type == "cpu" else None

    def start_weight_update(self) -> None:
        if self.spare is None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PublishedFile) -> None:
        if self.spare is None:
            self.model.load_weights(parameters.read(Path(update_info.path)).items())
        else:
            self.spare.load(update_info.path)

    def finish_weight_update(self) -> None:
        if self.spare is not None:
            self.spare.swap()
        else:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.spare = None


class Spare:
    """A second model that the next weights are made ready in, while the first decodes.

    On a CPU linear layers compute with packed copies of their weights, and read the weights themselves no more. Those
    the two models share; what decoding does read (embeddings, norms, biases) the spare has a copy of. So a swap
    exchanges the packed copies and the tensors that are not shared: pointers, no bytes.
    """

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self._model = model
        with torch.device("meta"):
            self._spare = initialize_model(vllm_config=beside(config))
        packed = {id(m.weight) for m in model.modules() if getattr(m, "staleflow_packed", False)}
        self._own: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        of: dict[int, torch.nn.Parameter] = {}
        for module, twin in self._layers():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in of:  # else two layers share it
                    of[id(parameter)] = parameter if id(parameter) in packed else copied(parameter)
                    if id(parameter) not in packed:
                        self._own.append((parameter, of[id(parameter)]))
                setattr(twin, name, of[id(parameter)])

    def load(self, path: str) -> None:
        """Read a published file and pack it. The model decodes as before, whatever comes of it."""
        self._spare.load_weights(parameters.read(Path(path)).items())
        for module, twin in self._layers():
            if hasattr(module, "cpu_linear"):
                layer_utils.dispatch_cpu_unquantized_gemm(twin, remove_weight=False)

    def swap(self) -> None:
        """What was loaded is the model's from now on."""
        for parameter, own in self._own:
            parameter.data, own.data = own.data, parameter.data
        for module, twin in self._layers():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear, twin.cpu_linear = twin.cpu_linear, module.cpu_linear

    def release(self) -> None:
        """Give back the packed copies that were the model's before the swap. Apart from it: that takes milliseconds."""
        for _, twin in self._layers():
            if hasattr(twin, "cpu_linear"):
                twin.cpu_linear = None

    def _layers(self) -> zip[tuple[Any, Any]]:
        return zip(self._model.modules(), self._spare.modules(), strict=True)


def beside(config: VllmConfig) -> VllmConfig:
    """For a second model of one engine: its layers are not entered among those that the engine finds by name."""
    second = copy.copy(config)
    second.compilation_config = copy.copy(config.compilation_config)
    second.compilation_config.static_forward_context = {}
    return second


def copied(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """With a memory of its own, and all that vLLM hung on it: how it is to be loaded, for one."""
    own = copy.copy(parameter)
    own.__dict__.update(parameter.__dict__)
    own.data = parameter.detach().clone()
    return own


class WorkerExtension:
    """Methods that vLLM adds to its worker class; called by name from the engine."""

    model_runner: Any
    weight_transfer_engine: FileTransfer

    start_weight_update: Callable[[], None]

    def prepare_weights(self, path: str) -> bool:
        """Do all of an update but finish it, if there is a spare model for that. In any thread, while the model decodes
        in another."""
        spare = self.weight_transfer_engine.spare
        if spare is not None:
            self.start_weight_update()
            spare.load(path)
        return spare is not None

    def release_weights(self) -> None:
        """After an update that was prepared."""
        if self.weight_transfer_engine.spare is not None:
            self.weight_transfer_engine.spare.release()

    def held_fingerprint(self, shapes: parameters.Shapes) -> str:
        """Of the weights this worker holds, by the checkpoint's names and shapes; empty if they are sharded, or fused
        in a way that cannot be undone here."""
        model = self.model_runner.get_model()
        held = unfused(dict(model.named_parameters()), shapes, getattr(model, "packed_modules_mapping", {}))
        if held is None:
            return ""
        # Some kernels keep biases as float32; all is published in the model's own type.
        return parameters.fingerprint({n: t.to(self.model_runner.dtype) for n, t in held.items()})


def keep_weights_beside_packed_copies() -> None:
    """vLLM's CPU build drops a linear layer's weight once it is packed; without it nothing can be loaded in place.
    What would have been dropped is marked: nothing reads it while decoding."""
    dispatch: Callable[..., None] = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch_and_keep(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        dispatch(layer, remove_weight=remove_weight)
        if layer.weight is not weight:
            layer.weight = weight
            layer.staleflow_packed = True

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch_and_keep


keep_weights_beside_packed_copies()
WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
