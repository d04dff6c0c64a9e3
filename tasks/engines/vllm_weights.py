"""Loads published weights into a running vLLM model, in each of its worker processes, by vLLM's own update interface.

vLLM fuses some tensors of a checkpoint (q, k and v into one) and prepares others for its kernels. Loading in place has
to do both again; fingerprinting the held weights has to undo the fusing, so that they can be compared with the
trainer's. The module is named in the engine's arguments, so that worker processes import it too.

On a CPU both are done during decoding, in a spare model, and decoding waits only while the two are swapped. On a GPU
they are done in the model itself, while decoding waits: memory is scarcer there, and copying is fast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader.utils import initialize_model

from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_report import WeightReport, compared_by_name
from staleflow.tasks.engines.unfusing import unfused

BACKEND = "staleflow"
"""Name of the file backend in vLLM's registry of weight transfers."""


def arguments() -> dict[str, Any]:
    """vLLM's arguments for weights that are loaded in place of the model's."""
    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
    }


@dataclass
class NoInit(WeightTransferInitInfo):
    """Empty: an update needs nothing but its path."""


@dataclass
class PublishedFile(WeightTransferUpdateInfo):
    """An update from a file. path: of a version's file on this host."""

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
            self.model.load_weights(weight_folder.read(Path(update_info.path)).items())
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
    """A second model in which the next weights are prepared while the first decodes.

    On a CPU linear layers compute with packed copies of their weights, and no longer read the weights themselves, which
    the two models share. Of what decoding does read (embeddings, norms, biases) the spare has copies. So a swap
    exchanges the packed copies and the tensors that are not shared: pointers, no bytes.
    """

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self._model = model
        with torch.device("meta"):
            self._spare = initialize_model(vllm_config=second_config(config))
        packed = {id(m.weight) for m in model.modules() if getattr(m, "staleflow_packed", False)}
        self._own: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        of: dict[int, torch.nn.Parameter] = {}
        for module, twin in self._layers():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in of:  # else two layers share it
                    of[id(parameter)] = parameter if id(parameter) in packed else own_copy(parameter)
                    if id(parameter) not in packed:
                        self._own.append((parameter, of[id(parameter)]))
                setattr(twin, name, of[id(parameter)])

    def load(self, path: str) -> None:
        """Read a published file and pack it. The decoding model is not affected, not even by a failure."""
        self._spare.load_weights(weight_folder.read(Path(path)).items())
        for module, twin in self._layers():
            if hasattr(module, "cpu_linear"):
                layer_utils.dispatch_cpu_unquantized_gemm(twin, remove_weight=False)

    def swap(self) -> None:
        """Exchange the model's weights for the loaded ones."""
        for parameter, own in self._own:
            parameter.data, own.data = own.data, parameter.data
        for module, twin in self._layers():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear, twin.cpu_linear = twin.cpu_linear, module.cpu_linear

    def release(self) -> None:
        """Free the packed copies that were the model's before the swap. Not part of it: this takes milliseconds."""
        for _, twin in self._layers():
            if hasattr(twin, "cpu_linear"):
                twin.cpu_linear = None

    def _layers(self) -> zip[tuple[Any, Any]]:
        return zip(self._model.modules(), self._spare.modules(), strict=True)


def second_config(config: VllmConfig) -> VllmConfig:
    """The configuration of an engine's second model, whose layers are not registered with the engine by name."""
    second = copy.copy(config)
    second.compilation_config = copy.copy(config.compilation_config)
    second.compilation_config.static_forward_context = {}
    return second


def own_copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A copy of a parameter in its own memory, with the attributes vLLM has set, such as its loader."""
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
        """Do an update except for its finish, if there is a spare model for it. May run in any thread while the model
        decodes in another."""
        spare = self.weight_transfer_engine.spare
        if spare is not None:
            self.start_weight_update()
            spare.load(path)
        return spare is not None

    def release_weights(self) -> None:
        """Free the replaced weights after a prepared update."""
        if self.weight_transfer_engine.spare is not None:
            self.weight_transfer_engine.spare.release()

    def compared_weights(self, path: str) -> WeightReport:
        """What this worker has, compared with a published file."""
        model, published = self.model_runner.get_model(), weight_folder.read(Path(path))
        shapes = weight_folder.shapes(published)
        held = unfused(dict(model.named_parameters()), shapes, getattr(model, "packed_modules_mapping", {}))
        if held is None:
            return WeightReport(not_verified={"fused or sharded in a way that is unknown here": len(published)})
        # Some kernels keep biases as float32; all is published in the model's own type.
        return compared_by_name({n: t.to(self.model_runner.dtype) for n, t in held.items()}, published)


def keep_weights_beside_packed_copies() -> None:
    """Keep the weights of linear layers, which vLLM's CPU build drops once packed: loading in place needs them. They
    are marked, since decoding does not read them."""
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
