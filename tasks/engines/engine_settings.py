"""Settings of the engines a job may choose from; workers build engines from them. Imports no engine.

The knobs of a settings class are keys of [rollout.engine]; its other fields are filled by name, from that table or from
the values listed at `ENGINES`. engine_builder.py says where its engine is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from staleflow.tasks.emulation.batch_simulator import Drafting
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import Workload
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import Registry

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
    "it would sample from another distribution than the model's, which the trainer computes, so importance ratios "
    "would be wrong; rollout.temperature is applied by both",
)
"""Sampling options of other systems, and why a job may not set them."""
UNLIMITED = 2**31
"""A number of requests that no instance reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafted tokens, which the policy verifies several at once: what is sampled does not change, only how fast."""

    length: int = knob(0, "most tokens drafted for a step; 0: no speculation", low=0, high=32)
    source: str = knob(
        "responses",
        "what drafts come from; responses: the prompt, the response so far, and other responses to the same prompt; "
        "ngram, suffix: vLLM's own",
        choices=("responses", "ngram", "suffix"),
    )
    most_running: int = knob(
        0,
        "most requests that an instance runs at once while it drafts up to `length` tokens; 0: the coordinator decides "
        "for each instance whether it drafts, and how many",
        low=0,
    )

    @property
    def decided(self) -> bool:
        """Whether the coordinator decides how many tokens an instance drafts."""
        return self.length > 0 and self.most_running == 0

    @property
    def first_length(self) -> int:
        """Tokens that an instance drafts at most, as long as it was told nothing else."""
        return 0 if self.decided else self.length

    @property
    def cap(self) -> int:
        """Requests beyond which an instance drafts nothing, whatever it was told."""
        return self.most_running or UNLIMITED


class EngineSettings(Protocol):
    """Settings from which a worker builds its engine. Picklable."""

    keeps: ClassVar[bool]
    """Whether running requests can keep their old cache while weights change (rollout.on_pull)."""
    drafts: ClassVar[tuple[str, ...]]
    """The sources of drafts it can verify (rollout.engine.speculation.source)."""
    refused_options: ClassVar[Mapping[str, str]]
    """Keys of rollout.engine.options that a job may not set, and why."""


ENGINES: Registry[EngineSettings] = Registry("engine", "rollout.engine.name", contract=EngineSettings)
"""Values for fields: model, dtype, device, temperature, eos, seed, lora, adapters and keep, see ModelSettings and
VllmSettings; cost, drafting, workload, members and pull_s, see EmulatedSettings."""


class _Abilities:
    """What an engine can do unless its settings say otherwise."""

    keeps: ClassVar[bool] = False
    drafts: ClassVar[tuple[str, ...]] = ()
    refused_options: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Abilities):
    """Settings of every engine that samples from a model. model: folder or hub name. kv_tokens: size of the paged
    cache. eos: ids that end a response. adapters: versions that are served side by side, each an adapter of the model,
    as `lora` describes it; 0: a version is all weights, and only one is there."""

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
    speculation: Speculation = Speculation()
    lora: LoraConfig = LoraConfig()
    adapters: int = 0


@ENGINES.register("transformers")
@dataclass(frozen=True, kw_only=True)
class TransformersSettings(ModelSettings):
    """Settings of the transformers engine: the common ones only."""

    drafts: ClassVar[tuple[str, ...]] = ("responses",)


@ENGINES.register("vllm")
@dataclass(frozen=True, kw_only=True)
class VllmSettings(ModelSettings):
    """Settings of the vLLM engine. keep: running requests keep their old cache through a weight update."""

    keep: bool = False
    tensor_parallel: int = knob(1, "vllm: GPUs an instance spreads its model over", low=1, high=64)
    options: dict[str, Any] = knob({}, "vllm: further arguments of its EngineArgs, such as gpu_memory_utilization")

    keeps: ClassVar[bool] = True
    drafts: ClassVar[tuple[str, ...]] = ("responses", "ngram", "suffix")
    refused_options: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("model", "dtype", "seed", "tensor_parallel_size", "max_num_seqs", "block_size"), "has its own key"
        ),
        "num_gpu_blocks_override": "set rollout.engine.kv_tokens instead",
        "max_num_batched_tokens": "set rollout.engine.max_batch_tokens instead",
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
        "speculative_config": "set rollout.engine.speculation instead",
        **dict.fromkeys(
            ("logits_processors", "override_generation_config", "generation_config"),
            "stored logprobs would not be those of the policy that sampled",
        ),
        **dict.fromkeys(
            ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
            "it follows from training.lora and staleness.eta",
        ),
        **SAMPLING_REFUSED,
    }


@ENGINES.register("emulated")
@dataclass(frozen=True, kw_only=True)
class EmulatedSettings(_Abilities):
    """Settings of the emulated engine; see EngineConfig and SimulationConfig. members: trajectories per group. pull_s:
    in the cost model's seconds."""

    cost: CostModel
    workload: Workload
    members: int
    kv_tokens: int
    max_running: int
    pull_s: float
    keep: bool
    time_scale: float
    drafting: Drafting = Drafting()
    adapters: int = 0

    drafts: ClassVar[tuple[str, ...]] = ("responses", "ngram", "suffix")
    keeps: ClassVar[bool] = True
