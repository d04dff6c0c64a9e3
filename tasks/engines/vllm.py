"""vLLM as a rollout engine: an LLMEngine in this process, driven by one thread.

Only that thread uses vLLM: it creates the LLMEngine, and runs calls between two decode steps.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.stores.errors import ActorLost, ConfigError, WeightsRefused, raised_as
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.stores.weights.weight_report import WeightReport, sum_reports
from staleflow.tasks.engines import adapters, vllm_arguments
from staleflow.tasks.engines.base import Engine, EngineLoad, LoadResult, Request, TokenScores
from staleflow.tasks.engines.engine_settings import VllmSettings
from staleflow.tasks.engines.engine_thread import EngineThread
from staleflow.tasks.engines.running_requests import RunningRequest
from staleflow.tasks.engines.vllm_drafting import VllmSpeculation
from staleflow.tasks.engines.vllm_drafting import arguments as speculation_arguments
from staleflow.tasks.engines.vllm_layouts import adapted_layer_names, cache_bytes, checkpoint_shapes
from staleflow.tasks.engines.vllm_scheduler import VllmScheduler, version_salt

if TYPE_CHECKING:
    from staleflow.tasks.engines.vllm_adapters import VllmAdapters

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables that vLLM reads at import: one process, no threads pinned to shared cores, no logging."""
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Further variables on a CPU, where compilation costs more than it saves."""
SLOT_POLL_S = 0.02
"""Seconds between two checks whether a slot for another adapter is free."""


def build(settings: VllmSettings, instance: InstanceId, threads: int) -> Engine:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return VllmEngine(settings, instance)


class VllmEngine(EngineThread):
    """See tasks/engines/base.py for the contract."""

    def __init__(self, settings: VllmSettings, instance: InstanceId) -> None:
        super().__init__(instance, settings.model)
        self._settings = settings
        self._probes: dict[str, Future[Any]] = {}  # probes under way, by request id
        self._num_probes = 0
        self._scheduler_statistics: dict[str, int] = {}  # as of the last step, stop or load
        self._engine: Any = None
        self._scheduler: VllmScheduler
        self._adapters: VllmAdapters | None = None
        self._speculation: VllmSpeculation
        self._shapes = checkpoint_shapes(settings.model)
        self._thread.start()
        try:
            self._call(self._create_engine).result()
        except BaseException:
            self.close()
            raise

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        if self._adapters is not None:
            return self._serve_adapter(self._adapters, version, weights)
        # A load that fails half-way leaves a model of two versions, so names and shapes are checked before.
        weight_folder.check_shapes(self._shapes, weight_folder.read_shapes(weights), weights)
        self._call(lambda: self._load(version, weights)).result()
        return LoadResult(fingerprint=fingerprint(weight_folder.read(weights)), weights=self._compare_weights(weights))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        assert temperature == 1.0, "vLLM's logprobs of given tokens are those of the model's own distribution"
        futures: list[Future[TokenScores]] = [Future() for _ in sequences]
        for tokens, future in zip(sequences, futures, strict=True):
            self._call(partial(self._add_probe, tokens, future))
        return [future.result() for future in futures]

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _create_engine(self) -> None:
        """Create the LLMEngine, in the engine's thread."""
        self._engine = make_engine(self._settings)
        self._speculation = VllmSpeculation(self._engine, self._settings.speculation, self._settings.eos)
        self._drafter = self._speculation.drafter
        self._scheduler = VllmScheduler(self._engine, self._settings.page_tokens)
        if self._settings.num_served_versions:
            from staleflow.tasks.engines.vllm_adapters import VllmAdapters

            self._adapters = VllmAdapters(self._engine, self._settings.lora, self._settings.num_served_versions)

    def _shut_down(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _is_busy(self) -> bool:
        return super()._is_busy() or bool(self._probes)

    def _pending_futures(self) -> Iterable[Future[Any]]:
        return self._probes.values()

    def _load_statistics(self) -> EngineLoad:
        statistics: dict[str, Any] = {**self._scheduler_statistics}
        return dataclasses.replace(self._requests.load_statistics(), **statistics)

    def _admit(self, running: RunningRequest) -> None:
        request, version = running.request, running.version
        self._add_to_vllm(running.key, request.tokens, self._sampling_params(request), version, version_salt(version))

    def _add_to_vllm(
        self,
        key: str,
        tokens: Sequence[int],
        sampling_params: Any,
        version: PolicyVersion,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Add a request to vLLM's engine core."""
        from vllm.inputs.engine import tokens_input

        engine = self._engine
        core = engine.engine_core
        core_request = engine.input_processor.process_inputs(
            key,
            tokens_input(list(tokens), cache_salt=cache_salt),
            sampling_params,
            core.get_supported_tasks(),
            lora_request=None if self._adapters is None else self._adapters.lora_request(version),
            priority=priority,
        )
        # Outputs are taken from the core directly (_step): vLLM's processing of them for display costs a tenth of a
        # small model's step.
        core.add_request(core_request)

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0 if request.greedy else request.temperature or self._settings.temperature,
            max_tokens=request.max_new_tokens,
            logprobs=0,
            stop_token_ids=[*self._settings.eos, *request.stop.token_ids],
            ignore_eos=True,
            detokenize=False,
        )

    def _add_probe(self, tokens: Sequence[int], future: Future[Any]) -> None:
        from vllm import SamplingParams

        self._num_probes += 1
        key = f"probe-{self._num_probes}"
        sampling_params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=1, detokenize=False)
        try:
            # Before all waiting requests, because a load waits for its probe.
            self._add_to_vllm(key, tokens, sampling_params, self.version, priority=-1)
        except Exception as error:  # noqa: BLE001  the caller's to handle
            future.set_exception(error)
        else:
            self._probes[key] = future

    def _remove(self, requests: Sequence[RunningRequest]) -> None:
        self._abort_in_vllm([running.key for running in requests])
        self._scheduler_statistics = self._scheduler.statistics()

    def _abort_in_vllm(self, keys: list[str]) -> None:
        """Abort requests in vLLM."""
        try:
            self._engine.engine_core.abort_requests(keys)
        except Exception as error:
            # `submit` may call this without waiting for the result, so the error must end the engine.
            raise ActorLost(f"{self._instance}: vLLM could not stop requests: {error}") from error

    def _drop_caches_and_counts(self) -> None:
        if self._probes:
            self._engine.engine_core.abort_requests(list(self._probes))
            for future in self._probes.values():
                future.cancel()
            self._probes.clear()
        self._scheduler.reset()
        self._speculation.reset()
        if self._adapters is not None:
            self._adapters.clear()
        self._scheduler_statistics = self._scheduler.statistics()

    def _free_device(self) -> None:
        self._engine.sleep(level=2)

    def _load(self, version: PolicyVersion, weights: Path) -> None:
        engine = self._engine
        with raised_as(WeightsRefused, f"{self._instance}: vLLM cannot load {weights}", Exception):
            if self._is_asleep:
                engine.wake_up()
                self._is_asleep = False
            engine.collective_rpc("start_weight_update")
            engine.collective_rpc("update_weights", args=({"path": str(weights)},))
            engine.collective_rpc("finish_weight_update")
        with self._condition:
            self._requests.change_version(version)
        self._scheduler.change_version(version, keep=self._settings.keep_cache)
        with self._condition:
            self._scheduler_statistics = self._scheduler.statistics()

    def _load_adapter(self, vllm_adapters: VllmAdapters, version: PolicyVersion, weights: Path) -> bool:
        """Serve an adapter beside the others. Returns False if no slot is free yet."""
        with self._condition:
            old_versions = self._requests.drop_old_versions(version, self._settings.num_served_versions)
        with raised_as(ActorLost, f"{self._instance}: {weights} cannot be served", Exception):
            for old_version in old_versions:
                vllm_adapters.drop(old_version)
            if vllm_adapters.lora_request(version) is None:  # else an earlier call has loaded it
                if vllm_adapters.is_full:
                    return False
                vllm_adapters.add(version, weights)
        with self._condition:
            self._requests.serve(version)
        return True

    def _step(self) -> None:
        from vllm.v1.engine import FinishReason as Reason

        outputs = self._engine.engine_core.get_output().outputs
        with self._condition:
            for output in outputs:
                if output.request_id in self._probes and output.new_token_ids:
                    self._probes.pop(output.request_id).set_result(scores_of(output))
                running = self._requests.get(output.request_id)
                if running is None:
                    continue
                if output.new_token_ids:
                    self._extend(running, output)
                if running.has_stopped and output.finish_reason is None:
                    self._abort_in_vllm([running.key])  # vLLM does not know of stop strings
                elif output.finish_reason is None:
                    continue
                self._drop_request(running)
                if running.has_stopped or output.finish_reason in (Reason.STOP, Reason.LENGTH):
                    is_stop = running.has_stopped or output.finish_reason == Reason.STOP
                    self._outputs.append(running.sampled_tokens(FinishReason.STOP if is_stop else FinishReason.LENGTH))
                else:
                    self._fail(running.request, f"vLLM ended it: {output.finish_reason}")
            self._scheduler_statistics = self._scheduler.statistics()
            if self._outputs:
                self._condition.notify_all()

    def _extend(self, running: RunningRequest, output: Any) -> None:
        """Record the tokens that a step has sampled for a request."""
        tokens = output.new_token_ids
        count = len(tokens) if running.stop_check is None else running.stop_check.add(tokens)
        # The sampled token's logprob comes first in each row.
        logprobs = output.new_logprobs.logprobs[:count, 0].tolist()
        num_drafted = self._speculation.num_drafted_by_request.get(output.request_id, 0)
        self._requests.extend(running, tokens[:count], logprobs, num_drafted)

    # -- the other threads ---------------------------------------------------------------------------------------

    def _serve_adapter(self, vllm_adapters: VllmAdapters, version: PolicyVersion, weights: Path) -> LoadResult:
        """Load an adapter as soon as a slot is free: without delay, unless requests still run under old versions."""
        layers = adapters.parse_layers(weight_folder.read_shapes(weights), weights)
        adapters.check_layers(layers, self._settings.lora.rank, self._shapes, weights)
        while not self._call(lambda: self._load_adapter(vllm_adapters, version, weights)).result():
            time.sleep(SLOT_POLL_S)
        return LoadResult(
            fingerprint=fingerprint(weight_folder.read(weights)),
            weights=self._call(lambda: vllm_adapters.compare_version(version, weights)).result(),
        )

    def _compare_weights(self, weights: Path) -> WeightReport:
        """Compare the weights of all workers with a published file. A single worker is in this process, and is compared
        in the caller's thread while decoding continues: only another load, which waits for this one, changes
        weights."""

        def compare() -> list[WeightReport]:
            reports: list[WeightReport] = self._engine.collective_rpc("compare_weights", args=(str(weights),))
            return reports

        return sum_reports(self._call(compare).result() if self._settings.tensor_parallel > 1 else compare())


def scores_of(output: Any) -> TokenScores:
    """The scores of a probe's tokens, from vLLM's output with the token that it sampled after them. The columns of its
    tensors are the sequence's own token and the most likely one."""
    prompt = output.new_prompt_logprobs_tensors
    ids, logprobs = ([], []) if prompt is None else (prompt.logprob_token_ids.tolist(), prompt.logprobs.tolist())
    return TokenScores(
        logprobs=tuple(own for own, _ in logprobs),
        top_tokens=(*(top for _, top in ids), output.new_token_ids[0]),
        top_logprobs=(*(top for _, top in logprobs), float(output.new_logprobs.logprobs[0, 0])),
    )


def make_engine(settings: VllmSettings) -> Any:
    """Create vLLM's engine with these settings in this process. Raises ConfigError if vLLM refuses them."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    arguments = vllm_arguments.arguments(settings) | speculation_arguments(settings) | update_arguments(settings)
    if current_platform.is_cpu():
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Given its size, vLLM neither takes a share of the machine's memory nor warms up; the number of blocks counts.
        if settings.shares_device:
            raise ConfigError('cluster.layout = "turns": the vllm installed here is the CPU build, which cannot sleep')
        if settings.device == "cuda":
            raise ConfigError('model.device = "cuda": the vllm installed here is the CPU build')
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes(settings)}
    with raised_as(ConfigError, "rollout.engine or teacher.engine: vLLM refuses it", TypeError, ValueError):
        engine = LLMEngine.from_engine_args(EngineArgs(**{**arguments, **settings.options}))
    if not settings.num_served_versions:
        engine.collective_rpc("init_weight_transfer_engine", args=({},))
    return engine


def update_arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's engine arguments for loading adapters, or new weights, after the start."""
    if settings.num_served_versions:
        from staleflow.tasks.engines import vllm_adapters

        return vllm_adapters.arguments(settings.lora, settings.num_served_versions, adapted_layer_names(settings))
    from staleflow.tasks.engines import vllm_weights

    return vllm_weights.arguments()
