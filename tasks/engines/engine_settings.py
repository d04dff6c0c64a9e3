"""Settings of the engines a job may choose from; workers build engines from them. Imports no engine.

The knobs of a settings class are keys of [rollout.engine]; its parameters are those listed at `ENGINES`.
engine_builder.py says where its engine is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from staleflow.stores.errors import ConfigError
from staleflow.tasks.emulation.batch_simulator import DraftSettings
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import Workload
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.settings.knobs import knob, parameter
from staleflow.tasks.settings.registry import Registry, RegistryEntry

REFUSED_SAMPLING_OPTIONS = dict.fromkeys(
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
"""Sampling options that a job may not set, and the reason."""
MIN_NUM_PAGES, SMALL_PAGE_TOKENS = 8, 32
"""Minimum number of pages of a cache, unless fewer responses may run concurrently; not checked for pages of at most
SMALL_PAGE_TOKENS tokens."""
UNLIMITED_REQUESTS = 2**31
"""Number of running requests that stands for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Settings of speculative decoding. It changes how fast tokens are sampled, not which."""

    num_speculative_tokens: int = knob(0, "most draft tokens a step; 0: no speculation", low=0, high=32)
    source: str = knob(
        "responses",
        "what drafts come from; responses: the prompt, the response so far, and other responses to the same prompt; "
        "suffix: vLLM's own",
        choices=("responses", "suffix"),
    )
    disable_above: int = knob(
        32,
        "most running requests with which an instance drafts (vLLM: disable_by_batch_size); 0: no limit",
        low=0,
    )

    @property
    def max_running(self) -> int:
        """Number of running requests above which an instance does not draft."""
        return self.disable_above or UNLIMITED_REQUESTS


@dataclass(frozen=True, kw_only=True)
class EngineSettings(RegistryEntry):
    """Settings from which a worker builds an engine. Picklable."""

    max_running: int = knob(64, "most trajectories that an instance decodes at once (vLLM: max_num_seqs)", low=1)
    kv_tokens: int = knob(16384, "size of an instance's KV cache, tokens", low=64)
    page_tokens: int = knob(32, "tokens per cache page (vLLM: block_size)", low=4)
    max_batch_tokens: int = knob(
        1024, "most tokens in one forward pass, prefill and decode (vLLM: max_num_batched_tokens)", low=1
    )
    speculation: Speculation = Speculation()

    package: ClassVar[str] = ""
    """The optional package that it needs."""
    emulated: ClassVar[bool] = False
    """Whether responses are drawn at random and only their time passes; no model is involved."""
    scores_at_any_temperature: ClassVar[bool] = False
    """Whether it computes the logprobs of given tokens at other temperatures than 1."""
    draft_sources: ClassVar[tuple[str, ...]] = ()
    """The sources of drafts it can verify (rollout.engine.speculation.source)."""

    @classmethod
    def with_knobs_of(cls, other: EngineSettings, **changes: Any) -> Self:
        """Settings of this class with the common knobs of another engine's, such as the sizes of cache and batch."""
        return cls(**{f.name: getattr(other, f.name) for f in dataclasses.fields(EngineSettings)} | changes)

    @property
    def time_scale(self) -> float:
        """Seconds on the coordinator's clock per second of real time."""
        return 1.0

    def check(self, key: str = "rollout.engine") -> None:
        """Raise ConfigError if the settings contradict each other. key: their table in the job file."""
        speculation = self.speculation
        if speculation.num_speculative_tokens and not self.draft_sources:
            raise ConfigError(
                f"{key}.speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: the "
                f"{self.name} engine verifies no drafts; use 0"
            )
        if speculation.num_speculative_tokens and speculation.source not in self.draft_sources:
            raise ConfigError(
                f"{key}.speculation.source = {speculation.source!r} is not supported by the {self.name} "
                f"engine; use {' or '.join(map(repr, self.draft_sources))}"
            )


ENGINES: Registry[EngineSettings] = Registry("engine", "rollout.engine", EngineSettings)
"""Parameters of ModelSettings: model, dtype, device, temperature, eos, seed, lora, num_served_versions, keep_cache and
shares_device; of EmulatedSettings: cost, drafting, workload, members_per_group, pull_s and switch_s."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(EngineSettings):
    """Settings of engines that sample from a model.

    Args:
        model: Folder or hub name.
        kv_tokens: Size of the paged cache in tokens.
        eos: Ids of the tokens that end a response.
        num_served_versions: Number of versions served side by side, each an adapter of the model as `lora` describes
            it. 0: a version is a full set of weights, and one is served at a time.
        keep_cache: Whether running requests keep their old cache through a weight update.
        shares_device: Whether the engine sleeps while the trainer uses its device.
    """

    model: str = parameter()
    dtype: str = parameter()
    device: str = parameter()
    temperature: float = parameter()
    eos: tuple[int, ...] = parameter()
    seed: int = parameter()
    lora: LoraConfig = parameter(LoraConfig())
    num_served_versions: int = parameter(0)
    keep_cache: bool = parameter(False)
    shares_device: bool = parameter(False)


@ENGINES.register("transformers")
@dataclass(frozen=True, kw_only=True)
class TransformersSettings(ModelSettings):
    """Settings of the transformers engine, which has only the common ones."""

    scores_at_any_temperature: ClassVar[bool] = True
    draft_sources: ClassVar[tuple[str, ...]] = ("responses",)

    def check(self, key: str = "rollout.engine") -> None:
        super().check(key)
        min_pages, num_pages = min(MIN_NUM_PAGES, self.max_running), self.kv_tokens // self.page_tokens
        if num_pages < min_pages and self.page_tokens > SMALL_PAGE_TOKENS:
            raise ConfigError(
                f"{key}.page_tokens = {self.page_tokens}: {key}.kv_tokens = {self.kv_tokens} has "
                f"{num_pages} such pages, and each running response holds one at least; use "
                f"{max(SMALL_PAGE_TOKENS, self.kv_tokens // min_pages)} or less"
            )


@ENGINES.register("vllm")
@dataclass(frozen=True, kw_only=True)
class VllmSettings(ModelSettings):
    """Settings of the vLLM engine."""

    tensor_parallel: int = knob(1, "GPUs an instance spreads its model over", low=1, high=64)
    options: dict[str, Any] = knob({}, "further arguments of its EngineArgs, such as gpu_memory_utilization")

    package: ClassVar[str] = "vllm"
    draft_sources: ClassVar[tuple[str, ...]] = ("responses", "suffix")
    REFUSED_OPTIONS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("model", "dtype", "seed", "tensor_parallel_size", "max_num_seqs", "block_size"), "has its own key"
        ),
        **dict.fromkeys(
            ("pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
            "weights are loaded and compared on the workers of one model, which may be divided by tensor_parallel only",
        ),
        "num_gpu_blocks_override": "set rollout.engine.kv_tokens instead",
        "max_num_batched_tokens": "set rollout.engine.max_batch_tokens instead",
        "max_model_len": "it follows from the model and rollout.engine.kv_tokens",
        "enable_sleep_mode": "it follows from cluster.layout",
        "scheduling_policy": "the coordinator gives each request a priority",
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
        **REFUSED_SAMPLING_OPTIONS,
    }
    """Keys of `options` that a job may not set, and the reason."""

    def check(self, key: str = "rollout.engine") -> None:
        super().check(key)
        if (
            self.speculation.num_speculative_tokens
            and self.speculation.source == "responses"
            and self.tensor_parallel > 1
        ):
            raise ConfigError(
                f"{key}.speculation.source = 'responses' needs tensor_parallel = 1, since vLLM drafts in "
                "processes of its own otherwise; use 'suffix'"
            )
        for option in self.options:
            if reason := self.REFUSED_OPTIONS.get(option):
                raise ConfigError(f"{key}.options.{option}: {reason}; remove it")


@ENGINES.register("emulated")
@dataclass(frozen=True, kw_only=True)
class EmulatedSettings(EngineSettings):
    """Settings of the emulated engine; see SimulationConfig. pull_s, switch_s: seconds of the cost model to load
    weights and to fall asleep."""

    cost: CostModel = parameter()
    workload: Workload = parameter()
    members_per_group: int = parameter()
    pull_s: float = parameter()
    switch_s: float = parameter(0.0)
    keep_cache: bool = parameter()
    drafting: DraftSettings = parameter(DraftSettings())
    num_served_versions: int = parameter(0)
    time_scale: float = knob(1.0, "cost-model seconds that pass in one second of real time", above=0)

    emulated: ClassVar[bool] = True
    draft_sources: ClassVar[tuple[str, ...]] = ("responses", "suffix")
