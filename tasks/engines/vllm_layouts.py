"""Maps checkpoint tensors to the parameters of a vLLM model: which piece of which parameter holds which tensor.

vLLM fuses some tensors of a checkpoint (q, k and v into one), stacks those of experts, pads vocabularies and shards
most tensors over the workers. This module maps them back by the attributes of vLLM's layers (sizes, rank, names), not
by vLLM's weight loading, so that a worker's parameters can be compared with the published weights. Layers and kernels
with an unknown layout are reported as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import WeightPart
from staleflow.tasks.engines.engine_settings import VllmSettings

Tensors = Mapping[str, torch.Tensor]
ParameterName = tuple[str, Any]
"""Name of a vLLM parameter, and the index of a tensor fused into it; None if nothing is fused."""

UNCHANGED_EXPERT_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that use stacked experts without changing their layout."""
STACKED_EXPERTS = {"w13_weight", "w13_bias", "w2_weight", "w2_bias"}
"""vLLM's names for the tensors of gpt-oss's experts. Each holds all experts of a layer, transposed, and gate and up
alternate."""
DERIVED_TENSORS = ("W_UK_T", "W_UV")
"""Tensors that multi-head latent attention derives from its weights and computes with."""


def weight_parts(model: Any, tensors: Tensors) -> Iterator[WeightPart]:
    """All parts of a worker's model, each with the values it should be equal to.

    Args:
        model: The vLLM model of this worker.
        tensors: The published weights under the names of the model's checkpoints.
    """
    modules = dict(model.named_modules())
    num_covered: dict[int, int] = {}
    experts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        target, fused_index = _parameter_name(model, modules, name)
        path, _, leaf = target.rpartition(".")
        if (layer := _experts_path(modules, target)) is not None:
            experts.setdefault(layer, {})[target.removeprefix(f"{modules[layer].layer_name}.")] = tensor
            continue
        parameter = getattr(modules.get(path), leaf, None)
        if parameter is None:
            yield WeightPart(name=name, incomparable_reason="the engine has no layer of that name")
            continue
        slices = _matching_slices(modules[path], parameter, leaf, fused_index, tensor)
        if isinstance(slices, str):
            num_covered[id(parameter)] = parameter.numel()
            yield WeightPart(name=name, incomparable_reason=slices)
            continue
        loaded, published = slices
        is_vocabulary = isinstance(modules[path], VocabParallelEmbedding)  # the rest is padding
        num_covered[id(parameter)] = num_covered.get(id(parameter), 0) + (
            parameter.numel() if is_vocabulary else loaded.numel()
        )
        yield _weight_part(name, loaded, published)
    for path, experts_of_layer in experts.items():
        num_covered |= {id(parameter): parameter.numel() for parameter in modules[path].parameters()}
        yield from _expert_parts(path, modules[path], experts_of_layer)
    for name, parameter in model.named_parameters():
        if num_covered.get(id(parameter), 0) < parameter.numel():
            yield WeightPart(name=name, incomparable_reason="not all of a parameter is published")
    for path, module in modules.items():
        for leaf in DERIVED_TENSORS:
            if getattr(module, leaf, None) is not None:
                yield WeightPart(name=f"{path}.{leaf}", incomparable_reason="derived from other weights")


def _weight_part(name: str, loaded: torch.Tensor, published: torch.Tensor) -> WeightPart:
    """Build a part to compare. A published tensor is converted if the layer has a wider type, which changes no
    value."""
    if loaded.dtype != published.dtype:
        if torch.promote_types(loaded.dtype, published.dtype) != loaded.dtype:
            return WeightPart(name=name, incomparable_reason=f"kept as {str(loaded.dtype).removeprefix('torch.')}")
        published = published.to(loaded.dtype)
    return WeightPart(name=name, loaded=loaded, published=published)


def _parameter_name(model: Any, modules: Mapping[str, Any], name: str) -> ParameterName:
    """Map a checkpoint tensor's name to its vLLM parameter, by the mappings that the model declares. A tensor of
    stacked experts keeps its name: what the model declares as fused are layers of the same names outside of them."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    fused_index: Any = None
    if mapper is not None:
        marker = torch.empty(0)
        name = next((mapped_name for mapped_name, _ in mapper.apply([(name, marker)])), name)
        fused_index = getattr(marker, "shard_id", None)
    if fused_index is None and _experts_path(modules, name) is None:
        *prefix, module, leaf = name.split(".") if "." in name else ("", name)
        for fused_name, part_names in getattr(model, "packed_modules_mapping", {}).items():
            if module in part_names and fused_name != module:
                fused_index = part_names.index(module)
                return ".".join([*prefix, fused_name, leaf]), "qkv"[
                    fused_index
                ] if fused_name == "qkv_proj" else fused_index
    return name, fused_index


def _matching_slices(
    module: Any, parameter: torch.Tensor, leaf: str, fused_index: Any, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Return the slice of a layer's parameter that holds a checkpoint tensor, and the slice of the tensor that this
    worker has; or the reason why they are unknown."""
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    layer_type = type(module)
    problem = f"the layout of {layer_type.__name__} is unknown here"
    if layer_type is QKVParallelLinear and fused_index in ("q", "k", "v"):
        key_rows, value_rows = module.num_kv_heads * module.head_size, module.num_kv_heads * module.v_head_size
        rows = {"q": module.num_heads * module.head_size, "k": key_rows, "v": value_rows}
        start = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}[fused_index]
        shard = rank if fused_index == "q" else rank // module.num_kv_head_replicas
        return parameter[start : start + rows[fused_index]], tensor[
            shard * rows[fused_index] : (shard + 1) * rows[fused_index]
        ]
    if layer_type is MergedColumnParallelLinear and isinstance(fused_index, int):
        count, start = module.output_sizes[fused_index] // size, sum(module.output_sizes[:fused_index]) // size
        return parameter[start : start + count], tensor[rank * count : (rank + 1) * count]
    if fused_index is not None:
        return problem
    if layer_type in (VocabParallelEmbedding, ParallelLMHead):
        shard = module.shard_indices
        shard_rows = tensor[shard.org_vocab_start_index : shard.org_vocab_end_index]
        return parameter[: len(shard_rows)], shard_rows
    if leaf == "sinks":  # one for each head
        count, start = len(parameter), module.qkv_proj.tp_rank * len(parameter)
        return parameter, tensor[start : start + count]
    if size > 1 and layer_type is ColumnParallelLinear:
        return parameter, tensor[rank * len(parameter) : (rank + 1) * len(parameter)]
    if size > 1 and layer_type is RowParallelLinear and leaf == "weight":
        columns = parameter.shape[1]
        return parameter, tensor[:, rank * columns : (rank + 1) * columns]
    return (parameter, tensor) if parameter.shape == tensor.shape else problem


def _experts_path(modules: Mapping[str, Any], name: str) -> str | None:
    """The path of the stacked experts that a tensor belongs to; None if it belongs to none."""
    for path in (name[: name.find(".experts.") + len(".experts")] + tail for tail in (".routed_experts", "")):
        if isinstance(modules.get(path), RoutedExperts):
            return path
    return None


def _expert_parts(path: str, layer: Any, tensors: Tensors) -> Iterator[WeightPart]:
    """The parts of a layer's stacked experts. tensors: by name within the layer, such as "3.up_proj.weight"."""
    method = layer.quant_method
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    is_packed = isinstance(kernel, CPUUnquantizedExperts) and not kernel._use_zentorch
    is_unchanged = getattr(method, "unquantized_backend", None) in UNCHANGED_EXPERT_BACKENDS
    names = {
        (expert, shard): f"{name.removeprefix('experts.')}weight"
        for _, name, expert, shard in layer.get_expert_mapping()
    }
    are_stacked = tensors.keys() == STACKED_EXPERTS
    if (
        type(method) is not UnquantizedFusedMoEMethod
        or not (is_packed or is_unchanged)
        or not (are_stacked or tensors.keys() <= {*names.values()})
    ):
        for name in tensors:
            yield WeightPart(
                name=f"{path}.{name}",
                incomparable_reason=f"the layout of experts of {type(kernel).__name__} is unknown here",
            )
        return
    rank, rows = layer.moe_config.tp_rank, layer.moe_config.intermediate_size_per_partition
    shard_rows = slice(rank * rows, (rank + 1) * rows)
    for expert in sorted({expert for expert, _ in names}):
        local_expert = layer._map_global_expert_id_to_local_expert_id(expert)
        if local_expert < 0:  # another worker's
            continue
        if are_stacked:
            gate_and_up_rows = slice(2 * rank * rows, 2 * (rank + 1) * rows)
            gate_and_up, down = tensors["w13_weight"][expert].T[gate_and_up_rows], tensors["w2_weight"][expert].T
            biases = {
                "w13_bias": tensors["w13_bias"][expert][gate_and_up_rows],
                # Workers add up their results.
                "w2_bias": tensors["w2_bias"][expert] if rank == 0 else torch.zeros_like(tensors["w2_bias"][expert]),
            }
            for name, bias in biases.items():
                yield _weight_part(f"{path}[{expert}] {name}", getattr(layer, name)[local_expert], bias)
        else:
            gate, up, down = (tensors.get(names[expert, shard]) for shard in ("w1", "w3", "w2"))
            if gate is None or up is None or down is None:
                yield WeightPart(name=f"{path}[{expert}]", incomparable_reason="not all of an expert is published")
                continue
            halves = (half[shard_rows] for half in (gate, up))
            gate_and_up = torch.cat([_pad_to_kernel(kernel, half) if is_packed else half for half in halves])
        down = down[:, shard_rows]
        if is_packed:
            gate_and_up = _pack_for_kernel(kernel, gate_and_up)
            down = _pack_for_kernel(kernel, _pad_to_kernel(kernel, down.T).T)
        yield _weight_part(f"{path}[{expert}] gate and up", layer.w13_weight[local_expert], gate_and_up)
        yield _weight_part(f"{path}[{expert}] down", layer.w2_weight[local_expert], down)


def _pad_to_kernel(kernel: Any, rows: torch.Tensor) -> torch.Tensor:
    """Append the zero rows that the kernel adds to an expert's rows."""
    num_missing = kernel._padded_intermediate_size(kernel.moe_config) - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, num_missing))


def _pack_for_kernel(kernel: Any, weight: torch.Tensor) -> torch.Tensor:
    """Rearrange an expert's weight in the order in which the kernel reads it."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight.contiguous()[None], kernel.isa)[0]


def cache_bytes(settings: VllmSettings) -> int:
    """Bytes of the KV cache: keys and values of every layer, for kv_tokens rounded up to pages."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * num_kv_heads * width * getattr(torch, settings.dtype).itemsize
    return int(token_bytes * (settings.kv_tokens + settings.page_tokens))


def checkpoint_shapes(model: str) -> weight_folder.Shapes:
    """Names and shapes of the tensors that a trainer of this model publishes. Allocates nothing."""
    return weight_folder.shapes(dict(meta_model(model).named_parameters()))


def adapted_layer_names(settings: VllmSettings) -> list[str]:
    """Last name components of the layers with an adapter. Allocates nothing."""
    from staleflow.tasks.engines import served_adapters

    names = served_adapters.adapted_layers(meta_model(settings.model), settings.lora.targets)
    return sorted({name.rpartition(".")[2] for name in names})


def meta_model(model: str) -> Any:
    """A transformers model on the meta device, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
