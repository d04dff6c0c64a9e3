"""The embedded engine: transformers' continuous batching, on CPU or GPU, driven through its public manager.

The manager decodes in a thread of its own, and hands over a request's output once it has ended; what a request that
runs has sampled is read from the manager's scheduler when somebody asks. Under the manager's pause nothing is in
flight, and that is exactly what was sampled: so interrupting keeps tokens, and weights change under running requests
without losing any. The scheduler is our own (keeping_scheduler.py): it keeps the pages of trajectories that may return.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from staleflow.stores.errors import ActorLost
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.stores.weights.weight_report import compared_by_name
from staleflow.tasks.engines.base import Engine, EngineLoad, Failed, Loaded, PromptResponses, Request, Sampled
from staleflow.tasks.engines.drafted_steps import DraftCounts, DraftedSteps
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.keeping_scheduler import NAME as KEEPING
from staleflow.tasks.engines.keeping_scheduler import KeepingScheduler
from staleflow.tasks.engines.request_attention import RequestAttention
from staleflow.tasks.engines.response_drafter import Drafter
from staleflow.tasks.engines.running_requests import RunningRequest, RunningRequests
from staleflow.tasks.engines.served_adapters import ServedAdapters
from staleflow.tasks.engines.stop_strings import StopChecks

_loading = threading.Lock()
"""Held while a model is loaded. `from_pretrained` replaces functions of torch and transformers, and torch's default
dtype, for the whole process meanwhile: one thread could restore what another had replaced, and leave it so for good."""

START_POLL_S = 0.003
"""Seconds between two looks whether a manager has started."""
LIVES_S = 0.1
"""Seconds between two looks whether the managers live, while their outputs are waited for."""
LOAD_WAIT_S = 0.1
"""Seconds that a report waits for the engine's lock, before it repeats the last one."""


def build(settings: TransformersSettings, instance: InstanceId, threads: int) -> Engine:
    torch.set_num_threads(threads)
    return TransformersEngine(settings, instance)


class TransformersEngine:
    """See tasks/engines/base.py for the contract."""

    def __init__(self, settings: TransformersSettings, instance: InstanceId) -> None:
        self._settings = settings
        self._instance = instance
        device = resolve_device(settings.device)
        self._model: Any = load_model(settings.model, settings.dtype, device, attention="sdpa")
        # transformers notes in the model's configuration, for the time of a pass, whether its attention is causal. Of
        # two passes that overlap, the second would restore what the first has noted: every later pass is wrong.
        self._model.forward = one_at_a_time(self._model.forward)
        self._adapters = ServedAdapters(self._model, settings.lora) if settings.adapters else None
        self._managers: dict[float, Any] = {}
        """By temperature; 0 is greedy."""
        self._schedulers: dict[float, KeepingScheduler] = {}
        self._drafters: dict[float, Drafter] = {}  # of those managers that speculate
        self._draft_length = settings.speculation.first_length
        self._steps: dict[float, DraftedSteps] = {}
        self._requests = RunningRequests(instance)
        self._stops = StopChecks(settings.model)
        # Guards the requests and the order of pause, drain and cancel; never held while waiting for output.
        self._lock = threading.RLock()
        self._ended: list[Sampled | Failed] = []
        self._arrived = threading.Event()
        """Set when an output may be there that events() has not seen."""
        self._seen = self._requests.load()
        """The load when it was last looked at."""
        self._manager(settings.temperature)

    @property
    def version(self) -> PolicyVersion:
        return self._requests.version

    def submit(self, requests: Sequence[Request]) -> None:
        self._stops.prepare(requests)
        with self._lock:
            for request in requests:
                older = self._requests.of(request.trajectory)
                if older is not None:
                    if older.request.epoch == request.epoch:
                        continue  # a repeated request
                    self._stop(older)
                if max(request.tokens) >= self._model.config.vocab_size:  # a pass with it would end the whole engine
                    unknown = f"token {max(request.tokens)} is none of the {self._model.config.vocab_size} of the model"
                    self._ended.append(Failed(trajectory=request.trajectory, epoch=request.epoch, error=unknown))
                    self._arrived.set()
                    continue
                self._start(RunningRequest(request))

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[Sampled]:
        with self._lock, self._paused():
            stopped = [self._stop(r) for t in trajectories if (r := self._requests.of(t)) is not None]
            return [r.sampled(FinishReason.UNFINISHED) for r in stopped]

    def peek(self) -> list[Sampled]:
        with self._lock:
            self._drain()
            return self._requests.peek()

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        with self._lock:
            self._check()
            for trajectory in trajectories:
                running = self._requests.of(trajectory)
                if running is not None:
                    self._stop(running)
                for temperature, scheduler in self._schedulers.items():
                    kept = scheduler.kept_key(trajectory)
                    if kept is not None:
                        self._managers[temperature].cancel_request(kept)

    def load(self, version: PolicyVersion, weights: Path) -> Loaded:
        begin = time.monotonic()
        if self._adapters is not None:
            held = self._serve(self._adapters, version, weights)
            return loaded_weights(version, held, weight_folder.read(weights), begin, stalled_s=0.0)
        named = dict(self._model.named_parameters())
        loaded = weight_folder.read(weights)
        weight_folder.check_shapes(weight_folder.shapes(named), weight_folder.shapes(loaded), weights)
        with self._lock, self._paused():
            paused = time.monotonic()
            # Their KV cache belongs to the old weights: stop, swap, and prefill again with the tokens they have.
            interrupted = [self._stop(r) for r in self._requests]
            for scheduler in self._schedulers.values():
                scheduler.forget_all()
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(loaded[name])
            self._requests.change_version(version)
            for running in interrupted:
                self._start(running)
            stalled_s = time.monotonic() - paused
        return loaded_weights(version, named, loaded, begin, stalled_s)

    def events(self, timeout_s: float) -> list[Sampled | Failed]:
        deadline = time.monotonic() + timeout_s
        while True:
            ended: list[Sampled | Failed] = []
            self._arrived.clear()
            # Outputs are only ever taken under the lock: one popped outside it could be overtaken by a weight update.
            with self._held_soon(max(0.0, deadline - time.monotonic())) as held:
                if held:
                    self._take_ended()
                    ended, self._ended = self._ended, []
            left_s = deadline - time.monotonic()
            if ended or left_s <= 0:
                return ended
            self._arrived.wait(min(left_s, LIVES_S))

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        with self._lock, self._paused():
            paged = self._model.config._attn_implementation
            self._model.set_attn_implementation("sdpa")  # the managers have set the paged one
            own = nullcontext() if self._adapters is None else self._adapters.under(self.version, len(tokens))
            # Each manager's loop sets this flag and restores what it found: two at once may leave what the other set.
            self._model.config.is_causal = True
            try:
                with own:
                    return forward_logprobs(self._model, tokens)
            finally:
                self._model.set_attn_implementation(paged)

    def load_statistics(self) -> EngineLoad:
        self._check()
        with self._held_soon(LOAD_WAIT_S) as held:
            if held:
                self._drain()
                self._seen = self._load()
            return self._seen

    def speculate(self, length: int) -> None:
        with self._lock:
            self._check()
            self._set_draft_length(min(length, self._settings.speculation.length))

    def drafts_for(self) -> tuple[TrajectoryId, ...]:
        drafter = self._drafters.get(self._settings.temperature)
        return () if drafter is None else drafter.running

    def learn(self, responses: Sequence[PromptResponses]) -> None:
        if (drafter := self._drafters.get(self._settings.temperature)) is not None:
            for of_prompt in responses:
                for trajectory, tokens in of_prompt.responses:
                    drafter.learn(of_prompt.prompt, trajectory, tokens)

    def begin_again(self, instance: InstanceId) -> None:
        with self._lock, self._paused():
            self._check()
            for running in self._requests:
                self._stop(running)
            for scheduler in self._schedulers.values():
                scheduler.forget_all()
                scheduler.prefilled_tokens = scheduler.cached_tokens = 0
            for drafter in self._drafters.values():
                drafter.forget_all()
            self._set_draft_length(self._settings.speculation.first_length)
            for steps in self._steps.values():
                steps.forget_all()
            self._instance, self._ended = instance, []
            self._requests.begin_again(instance)
            if self._adapters is not None:
                self._adapters.clear()
            self._seen = self._load()

    def close(self) -> None:
        for manager in self._managers.values():
            if manager.is_running():
                manager.stop(block=True, timeout=10, hard_stop=True)
        self._managers.clear()
        self._schedulers.clear()

    # -- inside --------------------------------------------------------------------------------------------------

    def _temperature(self, request: Request) -> float:
        return 0.0 if request.greedy else request.temperature or self._settings.temperature

    def _manager(self, temperature: float) -> Any:
        """The manager that samples at a temperature, made when first used: an evaluation may want others. Each has a
        KV cache of its own."""
        if temperature not in self._managers:
            settings = self._settings
            generation = GenerationConfig(
                do_sample=temperature > 0,
                temperature=temperature or None,
                top_k=0,
                top_p=1.0,
                eos_token_id=list(settings.eos) or -1,
                pad_token_id=0,
                max_new_tokens=settings.kv_tokens,
            )
            batching = ContinuousBatchingConfig(
                page_size=settings.page_tokens,
                num_blocks=-(-settings.kv_tokens // settings.page_tokens),
                max_batch_tokens=settings.max_batch_tokens,
                max_requests_per_batch=settings.max_running,
                return_logprobs=True,
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=False,
                seed=settings.seed,
                scheduler_type=KEEPING,
            )
            manager = self._model.init_continuous_batching(
                generation_config=generation, continuous_batching_config=batching
            )
            manager.start()
            self._managers[temperature] = manager
            while manager.batch_processor is None:  # made in the manager's thread
                self._check()
                time.sleep(START_POLL_S)
            self._announce(manager.batch_processor.output_router)
            scheduler = manager.batch_processor.scheduler
            if self._adapters is not None:
                scheduler.scheduled = self._adapters.select
            self._schedulers[temperature] = scheduler
            if RequestAttention.fits(manager.batch_processor):
                RequestAttention(manager.batch_processor)
            self._speculate(manager.batch_processor, temperature)
        return self._managers[temperature]

    def _set_draft_length(self, length: int) -> None:
        self._draft_length = length
        for drafter in self._drafters.values():
            drafter.most = length

    def _speculate(self, processor: Any, temperature: float) -> None:
        """Have a manager verify drafts, if the job says so. Each has a drafter of its own, as each has a thread."""
        asked = self._settings.speculation
        if asked.length:
            drafter = Drafter(self._draft_length, asked.cap, self._settings.eos)
            self._steps[temperature] = DraftedSteps(processor, drafter)
            self._drafters[temperature] = processor.scheduler.drafter = drafter

    def _serve(self, held: ServedAdapters, version: PolicyVersion, weights: Path) -> dict[str, torch.Tensor]:
        """Serve a version's adapter beside the others; returns its tensors. Decoding goes on meanwhile."""
        tensors = held.add(version, weights)
        with self._lock:
            for gone in self._requests.drop_old(version, self._settings.adapters):
                held.drop(gone)
            self._requests.serve(version)
        return tensors

    @contextmanager
    def _held_soon(self, within_s: float) -> Iterator[bool]:
        """The lock, if it is free within so many seconds: a load of weights holds it as long as it takes."""
        held = self._lock.acquire(timeout=within_s)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def _paused(self) -> Any:
        """Pause all managers and collect everything they have sampled."""
        return _Paused(self)

    def _start(self, running: RunningRequest) -> None:
        request = running.request
        sampled = [token for part in running.closed for token in part.tokens]
        running.stop = self._stops.check(request, sampled)
        if running.stopped:  # its instance was lost before it could tell that the turn had ended
            self._ended.append(running.sampled(FinishReason.STOP))
            self._arrived.set()
            return
        temperature = self._temperature(request)
        manager, key = self._manager(temperature), self._requests.enter(running)
        if request.may_return:
            self._schedulers[temperature].returning.add(key)
        tokens = [*request.tokens, *sampled]
        ends = [*self._settings.eos, *request.stop.token_ids]
        if running.stop is not None:
            self._schedulers[temperature].stops[key] = running.stop
        if (drafter := self._drafters.get(temperature)) is not None:
            drafter.begin(key, request.trajectory, request.prompt_tokens, tokens)
            self._steps[temperature].counts[key] = DraftCounts()
        accepted = manager.add_request(
            tokens,
            request_id=key,
            max_new_tokens=request.max_new_tokens - len(sampled),
            eos_token_id=ends or -1,
        )
        if accepted is None:
            raise ActorLost(f"{self._instance}: the decoding loop has stopped and accepts no requests")

    def _stop(self, running: RunningRequest) -> RunningRequest:
        """Remove a request; its current segment is closed."""
        self._manager(self._temperature(running.request)).cancel_request(running.key)
        self._leave(running)
        return running

    def _leave(self, running: RunningRequest) -> None:
        """Remove a request that decodes no longer."""
        self._requests.leave(running)
        steps = self._steps.get(self._temperature(running.request))
        if steps is not None and (counts := steps.counts.pop(running.key, None)) is not None:
            running.drafted_tokens += counts.drafted
            running.accepted_tokens += counts.accepted

    def _load(self) -> EngineLoad:
        schedulers = self._schedulers.values()
        return replace(
            self._requests.load(),
            kept_tokens=sum(one.kept_tokens for one in schedulers),
            prefilled_tokens=sum(one.prefilled_tokens for one in schedulers),
            cached_tokens=sum(one.cached_tokens for one in schedulers),
            drafts=sum(one.drafts for one in self._steps.values()),
            drafted_tokens=sum(one.drafted_tokens for one in self._steps.values()),
            accepted_tokens=sum(one.accepted_tokens for one in self._steps.values()),
        )

    def _check(self) -> None:
        if not all(manager.is_running() for manager in list(self._managers.values())):
            raise ActorLost(f"{self._instance}: the decoding loop has died")

    def _announce(self, router: Any) -> None:
        """Have whoever waits for outputs be told of them."""

        def announced(deliver: Callable[[Any], None]) -> Callable[[Any], None]:
            def delivered(outputs: Any) -> None:
                deliver(outputs)
                self._arrived.set()

            return delivered

        router.deliver, router.deliver_batch = announced(router.deliver), announced(router.deliver_batch)

    def _drain(self) -> None:
        """Record all that was sampled until now, at least; under the manager's pause, just that."""
        self._take_ended()
        for running in self._requests:
            scheduler = self._schedulers[self._temperature(running.request)]
            self._requests.extend(running, *scheduler.sampled(running.key, len(running.tokens)))

    def _take_ended(self) -> None:
        self._check()
        for manager in self._managers.values():
            while (output := manager.get_result(timeout=0.0)) is not None:
                self._take(output)

    def _take(self, output: Any) -> None:
        running = self._requests.get(output.request_id)
        if running is None:
            return  # its request was stopped meanwhile
        # It carries all that was sampled since the request was started.
        seen = len(running.tokens)
        self._requests.extend(running, output.generated_tokens[seen:], output.logprobs[seen:])
        self._leave(running)
        self._arrived.set()
        request = running.request
        if output.error is not None:
            self._ended.append(Failed(trajectory=request.trajectory, epoch=request.epoch, error=output.error))
            return
        ends = (*self._settings.eos, *request.stop.token_ids)
        stopped = running.stopped or (bool(output.generated_tokens) and output.generated_tokens[-1] in ends)
        self._ended.append(running.sampled(FinishReason.STOP if stopped else FinishReason.LENGTH))


class _Paused:
    """Pauses all decoding loops and collects their outputs."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._pauses: list[Any] = []

    def __enter__(self) -> None:
        self._engine._check()
        for manager in self._engine._managers.values():
            pause = manager.pause()
            pause.__enter__()
            self._pauses.append(pause)
        self._engine._drain()

    def __exit__(self, *exc: object) -> None:
        for pause in self._pauses:
            pause.__exit__(None, None, None)


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but a call waits for those in other threads."""
    lock = threading.Lock()

    @functools.wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return locked


def loaded_weights(
    version: PolicyVersion, held: Mapping[str, Any], published: Mapping[str, Any], begin_s: float, stalled_s: float
) -> Loaded:
    """The result of a load that began at `begin_s` of the monotonic clock. held: what the model computes with."""
    report = compared_by_name(held, published)
    return Loaded(
        version=version,
        fingerprint=fingerprint(published),
        weights=report,
        elapsed_s=time.monotonic() - begin_s,
        stalled_s=stalled_s,
    )


def resolve_device(name: str) -> str:
    """cpu or cuda for a configured device; auto takes CUDA when there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def forward_logprobs(model: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Logprobs of tokens[1:], nats, each given all before it, by one plain forward pass."""
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return tuple(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist())


def load_model(path: str, dtype: str, device: str, attention: str) -> Any:
    """A causal LM from a folder or the hub, in eval mode. dtype: auto for that of its file, whose pages are then all
    that it takes of this process's memory. Threads load one after another."""
    of_type = dtype if dtype == "auto" else getattr(torch, dtype)
    with _loading:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=of_type, attn_implementation=attention)
    return model.to(device).eval()
