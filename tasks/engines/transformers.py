"""The embedded engine: a loop over a model of transformers, on CPU or GPU, that says what an engine does.

Requests are rows of one batch. Each step computes what is new of each row (row_scheduler.py decides what, row_model.py
has the model compute it), samples a token after it, and gives the token to its request. Rows join and leave between two
steps. Nothing is used of transformers but a model's forward, its cache and its interface for attention.

Invariants: one thread runs the model, and carries out calls between two steps. So each token belongs to one version, a
request that is stopped has all tokens that were sampled, and weights change under running requests without losing any.
The lock guards requests and what has ended; the loop holds it only while it gives tokens to requests, so whoever asks
for the load or for what has ended is answered also while weights are loaded.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from staleflow.stores.errors import ActorLost, ConfigError
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import compared_by_name
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.engines import row_attention
from staleflow.tasks.engines.base import Engine, EngineLoad, Failed, LoadResult, PromptResponses, Request, SampledTokens
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.response_drafter import Drafter
from staleflow.tasks.engines.row_model import RowModel
from staleflow.tasks.engines.row_scheduler import RequestRow, RowScheduler
from staleflow.tasks.engines.row_storage import BatchRow
from staleflow.tasks.engines.running_requests import RunningRequest, RunningRequests
from staleflow.tasks.engines.served_adapters import ServedAdapters
from staleflow.tasks.engines.stop_strings import StopChecks
from staleflow.tasks.engines.token_sampling import accepted, sample

_loading = threading.Lock()
"""Held while a model is loaded. `from_pretrained` replaces functions of torch and transformers, and torch's default
dtype, for the whole process meanwhile: one thread could restore what another had replaced, and leave it so for good."""
CLOSE_S = 10.0
"""Seconds that closing waits for the step under way."""

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class DraftCounts:
    """Counts since the engine's start, see EngineLoad."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def build(settings: TransformersSettings, instance: InstanceId, threads: int) -> Engine:
    torch.set_num_threads(threads)
    return TransformersEngine(settings, instance)


class TransformersEngine:
    """See tasks/engines/base.py for the contract."""

    def __init__(self, settings: TransformersSettings, instance: InstanceId) -> None:
        self._settings = settings
        self._instance = instance
        device = resolve_device(settings.device)
        self._model: Any = load_model(settings.model, settings.dtype, device, row_attention.NAME)
        self._adapters = ServedAdapters(self._model, settings.lora) if settings.adapters else None
        self._random = torch.Generator(device).manual_seed(settings.seed)
        self._rows: dict[str, RequestRow] = {}
        """By the requests' keys."""
        self._new: deque[RequestRow] = deque()
        """Those that the scheduler does not know yet."""
        self._stops = StopChecks(settings.model)
        self._changed = threading.Condition()
        """The lock. It is notified of calls, of what has ended, and of the loop's end."""
        self._requests = RunningRequests(instance)
        self._batch = RowModel(self._model, settings.page_tokens, self._select_versions)
        self._drafter = self._make_drafter()
        self._scheduler = RowScheduler(settings, self._batch.cache, self._drafter)
        self._ended: list[SampledTokens | Failed] = []
        self._counts = DraftCounts()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> PolicyVersion:
        return self._requests.version

    def submit(self, requests: Sequence[Request]) -> None:
        self._stops.prepare(requests)
        for request in requests:
            older = self._requests.of(request.trajectory)
            if older is not None and older.request.route_number != request.route_number:
                self._call(partial(self._stop, [request.trajectory])).result()
            with self._changed:
                self._check()
                if self._requests.of(request.trajectory) is None:  # else it is a repeated request
                    self._start(RunningRequest(request, stop=self._stops.check(request)))

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[SampledTokens]:
        stopped = self._call(lambda: self._stop(trajectories)).result()
        return [running.sampled(FinishReason.UNFINISHED) for running in stopped]

    def peek(self) -> list[SampledTokens]:
        with self._changed:
            self._check()
            return self._requests.peek()

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        self._call(lambda: self._abort(trajectories)).result()

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        begin = time.monotonic()
        published = weight_folder.read(weights)
        if self._adapters is not None:
            layers, tensors = self._adapters.check(published, weights)
            self._call(lambda: self._serve(version, layers, tensors)).result()
            return loaded_weights(version, tensors, published, begin, stalled_s=0.0)
        tensors = dict(self._model.named_parameters())
        weight_folder.check_shapes(weight_folder.shapes(tensors), weight_folder.shapes(published), weights)
        stalled_s = self._call(lambda: self._replace_weights(version, tensors, published)).result()
        return loaded_weights(version, tensors, published, begin, stalled_s)

    def events(self, timeout_s: float) -> list[SampledTokens | Failed]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._error, timeout_s)
            self._check()
            ended, self._ended = self._ended, []
            return ended

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return self._call(lambda: self._probe(tokens)).result()

    def load_statistics(self) -> EngineLoad:
        with self._changed:
            self._check()
            return dataclasses.replace(
                self._requests.load(self._scheduler.num_waiting, self._scheduler.preemptions),
                kept_tokens=self._scheduler.kept_tokens,
                prefilled_tokens=self._scheduler.prefilled_tokens,
                cached_tokens=self._scheduler.cached_tokens,
                drafts=self._counts.drafts,
                drafted_tokens=self._counts.drafted_tokens,
                accepted_tokens=self._counts.accepted_tokens,
            )

    def set_draft_length(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.most = min(length, self._settings.speculation.num_speculative_tokens)

    def drafting(self) -> tuple[TrajectoryId, ...]:
        return () if self._drafter is None else self._drafter.running

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        if self._drafter is not None:
            for of_prompt in responses:
                for trajectory, tokens in of_prompt.responses:
                    self._drafter.add_response(of_prompt.prompt, trajectory, tokens)

    def reset(self, instance: InstanceId) -> None:
        self._call(lambda: self._begin_again(instance)).result()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    # -- the loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = RuntimeError("it was closed")
        try:
            with torch.inference_mode():
                while self._carry_out_calls():
                    self._step()
        except BaseException as raised:  # noqa: BLE001  whatever it is, this instance is lost, and says why
            error = raised
        with self._changed:
            self._error = error
            for _, answer in self._calls:
                answer.set_exception(self._lost())
            self._changed.notify_all()

    def _carry_out_calls(self) -> bool:
        """Carry out calls until there is something to compute; False once the engine is to close."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._rows or self._closing)
                if self._closing:
                    return False
                while self._new:
                    self._scheduler.add(self._new.popleft())
                if not self._calls:
                    return True
                call, answer = self._calls.popleft()
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001  the caller's to handle
                answer.set_exception(error)

    def _step(self) -> None:
        """Compute what is new of each row, and sample."""
        for counts in self._scheduler.passes():
            new = [(row, [*row.tokens[row.length : row.length + count], *row.draft]) for row, count in counts]
            wanted = [len(row.draft) + 1 if count == row.num_pending else 0 for row, count in counts]
            logits = self._batch.logits(new, wanted)
            temperatures = [row.temperature for (row, _), n in zip(counts, wanted, strict=True) for _ in range(n)]
            tokens, logprobs = sample(torch.cat(logits), temperatures, self._random) if temperatures else ([], [])
            first = 0
            with self._changed:
                for (row, count), n in zip(counts, wanted, strict=True):
                    row.length += count
                    if n:
                        self._take(row, tokens[first : first + n], logprobs[first : first + n])
                    first += n
                # After all have their lengths: one that leaves may have another moved, all of its computed tokens.
                for (row, _), n in zip(counts, wanted, strict=True):
                    if n:
                        self._end_if_complete(row)
        with self._changed:
            self._fail_without_memory()

    def _take(self, row: RequestRow, tokens: list[int], logprobs: list[float]) -> None:
        """Give a request what was sampled after its last token and its drafted ones."""
        running, draft = row.running, row.draft
        kept = accepted(draft, tokens, row.ends, row.most - len(row.tokens))
        new = tokens[: kept + 1]
        if running.stop is not None:
            new = new[: running.stop.add(new)]
        row.draft = []
        row.tokens += new
        row.length += len(new) - 1
        self._requests.extend(running, new, logprobs[: len(new)])
        if draft:
            self._counts.drafts += 1
            self._counts.drafted_tokens += len(draft)
            self._counts.accepted_tokens += len(new) - 1
            running.drafted_tokens += len(draft)
            running.accepted_tokens += len(new) - 1
        if self._drafter is not None:
            self._drafter.extend(running.key, new)

    def _end_if_complete(self, row: RequestRow) -> None:
        running = row.running
        stopped = running.stopped or row.tokens[-1] in row.ends
        if stopped or len(row.tokens) >= row.most:
            self._scheduler.end(row)
            self._leave(row)
            self._end(running.sampled(FinishReason.STOP if stopped else FinishReason.LENGTH))

    def _fail_without_memory(self) -> None:
        for row in self._scheduler.failed:
            self._leave(row)
            small = f"rollout.engine.kv_tokens = {self._settings.kv_tokens} is too small for {len(row.tokens)} tokens"
            self._end(Failed(trajectory=row.trajectory, route_number=row.running.request.route_number, error=small))
        self._scheduler.failed.clear()

    # -- calls, in the loop's thread -----------------------------------------------------------------------------

    def _stop(self, trajectories: Sequence[TrajectoryId]) -> list[RunningRequest]:
        """Stop requests and return them; unknown ones are ignored."""
        stopped = [running for trajectory in trajectories if (running := self._requests.of(trajectory)) is not None]
        with self._changed:
            for running in stopped:
                self._scheduler.remove(self._rows[running.key])
                self._leave(self._rows[running.key])
        return stopped

    def _abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        self._stop(trajectories)
        with self._changed:
            for trajectory in trajectories:
                self._scheduler.forget(trajectory)
            self._ended = [ended for ended in self._ended if ended.trajectory not in trajectories]

    def _serve(self, version: PolicyVersion, layers: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Serve a version's adapter beside the others."""
        assert self._adapters is not None
        self._adapters.add(version, layers, tensors)
        with self._changed:
            for old in self._requests.drop_old(version, self._settings.adapters):
                self._adapters.drop(old)
            self._requests.serve(version)

    def _replace_weights(self, version: PolicyVersion, parameters: dict[str, Any], loaded: dict[str, Any]) -> float:
        """Returns the seconds that it took."""
        begin = time.monotonic()
        for name, parameter in parameters.items():
            parameter.copy_(loaded[name])
        with self._changed:
            self._requests.change_version(version)
            self._scheduler.change_weights(keep=self._settings.keep)
        return time.monotonic() - begin

    def _probe(self, tokens: Sequence[int]) -> tuple[float, ...]:
        row, cache = BatchRow(), self._batch.new_cache()
        (logits,) = self._batch.logits([(row, tokens[:-1])], [len(tokens) - 1], cache)
        following = torch.tensor(tokens[1:], device=logits.device)[:, None]
        return tuple(logits.float().log_softmax(-1).gather(1, following)[:, 0].tolist())

    def _begin_again(self, instance: InstanceId) -> None:
        self._stop([running.request.trajectory for running in self._requests])
        with self._changed:
            self._scheduler.clear()
            self._counts = DraftCounts()
            self._instance, self._ended = instance, []
            self._requests.reset(instance)
        if self._drafter is not None:
            self._drafter.forget_all()
            self._drafter.most = self._settings.speculation.first_length
        if self._adapters is not None:
            self._adapters.clear()

    # -- inside --------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Have the loop call a function between two steps."""
        answer: Future[T] = Future()
        with self._changed:
            self._check()
            self._calls.append((function, answer))
            self._changed.notify_all()
        return answer

    def _start(self, running: RunningRequest) -> None:
        """Have a request wait for its first step; for whoever holds the lock."""
        request, vocabulary = running.request, self._model.config.get_text_config().vocab_size
        if running.stopped:  # its instance was lost before it could tell that the turn had ended
            self._end(running.sampled(FinishReason.STOP))
            return
        if max(request.tokens) >= vocabulary:  # a pass with it would end the whole engine
            unknown = f"token {max(request.tokens)} is none of the {vocabulary} of the model"
            self._end(Failed(trajectory=request.trajectory, route_number=request.route_number, error=unknown))
            return
        key = self._requests.enter(running)
        row = self._rows[key] = RequestRow(
            running=running,
            tokens=list(request.tokens),
            most=len(request.tokens) + request.max_new_tokens,
            ends=frozenset((*self._settings.eos, *request.stop.token_ids)),
            temperature=0.0 if request.greedy else request.temperature or self._settings.temperature,
        )
        self._new.append(row)
        self._changed.notify_all()
        if self._drafter is not None:
            self._drafter.begin(key, request.trajectory, request.prompt_tokens, request.tokens)

    def _check(self) -> None:
        if self._error is not None:
            raise self._lost()

    def _lost(self) -> ActorLost:
        return ActorLost(f"{self._instance}: decoding has ended: {self._error}")

    def _leave(self, row: RequestRow) -> None:
        """Remove a request that is no row any more; for whoever holds the lock."""
        del self._rows[row.running.key]
        self._requests.leave(row.running)
        if self._drafter is not None:
            self._drafter.end(row.running.key)

    def _end(self, ended: SampledTokens | Failed) -> None:
        """Say that a request has ended; for whoever holds the lock."""
        self._ended.append(ended)
        self._changed.notify_all()

    def _make_drafter(self) -> Drafter | None:
        speculation = self._settings.speculation
        if not speculation.num_speculative_tokens:
            return None
        if not self._batch.cache.can_crop:
            raise ConfigError(
                f"rollout.engine.speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: the model "
                "has layers whose states cannot take back rejected tokens; use 0"
            )
        return Drafter(speculation.first_length, speculation.cap, self._settings.eos)

    def _select_versions(self, rows: Sequence[BatchRow]) -> None:
        """Have the next pass compute each token under its row's version; a probe's under the newest."""
        if self._adapters is not None:
            self._adapters.versions.select(
                [row.running.version if isinstance(row, RequestRow) else self.version for row in rows]
            )


def loaded_weights(
    version: PolicyVersion,
    tensors: Mapping[str, Any],
    published: Mapping[str, Any],
    begin_s: float,
    stalled_s: float,
) -> LoadResult:
    """The result of a load that began at `begin_s` of the monotonic clock. tensors: what the model computes with."""
    report = compared_by_name(tensors, published)
    return LoadResult(
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
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=of_type, attn_implementation=attention)
        except ValueError:  # its code lacks this attention: gpt-oss has sinks, which PyTorch's own knows nothing of
            model = AutoModelForCausalLM.from_pretrained(path, dtype=of_type, attn_implementation="eager")
    return model.to(device).eval()
