"""The engines a job may choose from, each by its settings: what a worker builds one from. Loads no engine.

A settings class names the module of its engine, which has `build(settings, instance, threads)`. Its knobs are keys of
[rollout.engine]; of what else it asks for, a job gives whatever has the same name in that table or is listed at
`ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from stores.trajectory import InstanceId
from tasks.engines.base import Engine
from tasks.engines.cost_model import CostModel
from tasks.knobs import knob
from tasks.registry import Registry
from tasks.workload import Workload

SAMPLING_REFUSED = dict.fromkeys(
    (
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "bad_words",
        "min_tokens",
    ),
    "it would sample from another distribution than the model's own, and the trainer, which computes that one, would "
    "weigh tokens by a wrong ratio; rollout.temperature is applied by both",
)
"""Ways to sample that other systems offer, and why a job may not ask for them."""


class EngineSettings(Protocol):
    """What a worker builds its engine from. Picklable."""

    module: ClassVar[str]
    """Of the engine."""
    keeps: ClassVar[bool]
    """Whether running requests can keep their old cache while weights change (rollout.on_pull)."""
    refused_options: ClassVar[Mapping[str, str]]
    """Which of rollout.engine.options a job may not set, and why."""

    def build(self, instance: InstanceId, threads: int) -> Engine: ...


ENGINES: Registry[EngineSettings] = Registry("engine", "rollout.engine.name", contract=EngineSettings)
"""May ask for: model, dtype, device, temperature, eos, seed and keep, see ModelSettings and VllmSettings; cost,
workload, members and pull_s, see EmulatedSettings."""


class _Built:
    module: ClassVar[str]
    keeps: ClassVar[bool] = False
    refused_options: ClassVar[Mapping[str, str]] = {}

    def build(self, instance: InstanceId, threads: int) -> Engine:
        """The engine, in this process. threads: it may compute with."""
        engine: Engine = importlib.import_module(self.module).build(self, instance, threads)
        return engine


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Built):
    """What engines that sample from a model have in common. model: folder or hub name. kv_tokens: size of the paged
    cache. eos: ids that end a response."""

    model: str
    dtype: str
    device: str
    temperature: float
    max_running: int
    kv_tokens: int
    page_tokens: int
    max_batch_tokens: int
    eos: tuple[int, ...]
    seed: int


@ENGINES.register("transformers")
@dataclass(frozen=True, kw_only=True)
class TransformersSettings(ModelSettings):
    """Nothing more than others have."""

    module: ClassVar[str] = "tasks.engines.transformers"


@ENGINES.register("vllm")
@dataclass(frozen=True, kw_only=True)
class VllmSettings(ModelSettings):
    """keep: a weight update leaves running requests their old cache."""

    keep: bool = False
    tensor_parallel: int = knob(1, "vllm: GPUs an instance spreads its model over", low=1, high=64)
    options: dict[str, Any] = knob({}, "vllm: further arguments of its EngineArgs, such as gpu_memory_utilization")

    module: ClassVar[str] = "tasks.engines.vllm"
    keeps: ClassVar[bool] = True
    refused_options: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("model", "dtype", "seed", "tensor_parallel_size", "max_num_seqs", "block_size"), "has its own key"
        ),
        "num_gpu_blocks_override": "rollout.engine.kv_tokens says it",
        "max_num_batched_tokens": "rollout.engine.max_batch_tokens says it",
        **dict.fromkeys(
            (
                "logprobs_mode",
                "async_scheduling",
                "weight_transfer_config",
                "worker_extension_cls",
                "skip_tokenizer_init",
            ),
            "tokens could no longer be attributed to their version and logprob",
        ),
        **dict.fromkeys(
            ("logits_processors", "override_generation_config", "generation_config", "speculative_config"),
            "stored logprobs would not be those of the policy that sampled",
        ),
        **SAMPLING_REFUSED,
    }


@ENGINES.register("emulated")
@dataclass(frozen=True, kw_only=True)
class EmulatedSettings(_Built):
    """See EngineConfig and SimulationConfig. members: trajectories a group. pull_s: in the cost model's seconds."""

    cost: CostModel
    workload: Workload
    members: int
    kv_tokens: int
    max_running: int
    pull_s: float
    keep: bool
    time_scale: float

    module: ClassVar[str] = "tasks.engines.emulated"
    keeps: ClassVar[bool] = True
