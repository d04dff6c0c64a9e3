"""Base of all engines: one thread runs the model or its emulation, and other threads send it requests and calls.

Invariants: only the engine's thread uses a model and its scheduler, and it runs calls between two steps. So each token
belongs to one version, a stopped request has all tokens that were sampled, and weights change under running requests
without losing any. The lock guards requests, events and what any thread may use, such as the batch of the emulated
engine. The thread holds it only for moments, so `load_statistics` and `events` return also while weights are loaded.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from staleflow.stores.errors import ActorLost, ProtocolViolation
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.engines.base import EngineLoad, FailedRequest, PromptResponses, Request, SampledTokens
from staleflow.tasks.engines.response_drafter import Drafter
from staleflow.tasks.engines.running_requests import RunningRequest, RunningRequests, StopCheckMaker

CLOSE_S = 10.0
"""Maximum number of seconds that `close` waits for the current step."""

T = TypeVar("T")


class EngineThread(ABC):
    """Base class of an engine that runs in one thread. Subclasses implement a step by the abstract methods; the
    contract of an engine is in tasks/engines/base.py."""

    def __init__(self, instance: InstanceId, model: str | None) -> None:
        """model: folder or hub name, for the tokenizer of stop strings; None if responses have no texts."""
        self._instance = instance
        self._requests = RunningRequests(instance)
        self._stop_check_maker = StopCheckMaker(model)
        self._drafter: Drafter | None = None
        self._condition = threading.Condition()
        """The lock. It is notified of calls, events and the thread's end."""
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._outputs: list[SampledTokens | FailedRequest] = []
        self._error: BaseException | None = None
        self._is_asleep = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def version(self) -> PolicyVersion:
        return self._requests.version

    def submit(self, requests: Sequence[Request]) -> None:
        self._stop_check_maker.load_tokenizer_for(requests)
        self._call(lambda: self._submit(requests))

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[SampledTokens]:
        requests = self._call(lambda: self._stop(trajectories)).result()
        return [running.sampled_tokens(FinishReason.UNFINISHED) for running in requests]

    def peek(self) -> list[SampledTokens]:
        with self._condition:
            self._check()
            return self._requests.peek()

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        self._call(lambda: self._abort(frozenset(trajectories))).result()

    def sleep(self) -> None:
        self._call(self._fall_asleep).result()

    def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        with self._condition:
            self._condition.wait_for(lambda: self._outputs or self._error, timeout_s)
            self._check()
            outputs, self._outputs = self._outputs, []
            return outputs

    def load_statistics(self) -> EngineLoad:
        with self._condition:
            self._check()
            return self._load_statistics()

    def drafting_trajectories(self) -> tuple[TrajectoryId, ...]:
        return () if self._drafter is None else self._drafter.drafted_trajectories

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        if self._drafter is not None:
            for prompt_responses in responses:
                for trajectory, tokens in prompt_responses.responses:
                    self._drafter.add_response(prompt_responses.prompt, trajectory, tokens)

    def reset(self, instance: InstanceId) -> None:
        self._call(lambda: self._reset(instance)).result()

    def close(self) -> None:
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join(CLOSE_S)

    # -- implemented by subclasses; all except _load_statistics run in the engine's thread -----------------------

    @abstractmethod
    def _step(self) -> None:
        """Compute the new tokens of running requests, and record sampled tokens."""

    @abstractmethod
    def _admit(self, running: RunningRequest) -> None:
        """Start computing a request. An error means that the request has failed."""

    @abstractmethod
    def _remove(self, requests: Sequence[RunningRequest]) -> None:
        """Stop computing requests, or end those that end by themselves at this moment. The caller holds the lock."""

    @abstractmethod
    def _drop_caches_and_counts(self) -> None:
        """Drop all caches and counts for a new run. No request is running."""

    @abstractmethod
    def _free_device(self) -> None:
        """Drop weights and caches. No request is running."""

    @abstractmethod
    def _load_statistics(self) -> EngineLoad:
        """Return the current load. The caller holds the lock."""

    def _is_busy(self) -> bool:
        """Whether there is something to compute."""
        return len(self._requests) > 0

    def _pending_futures(self) -> Iterable[Future[Any]]:
        """Futures that callers wait for, besides those of calls."""
        return ()

    def _shut_down(self) -> None:  # noqa: B027  not every engine has something to free
        """Free what the thread has used."""

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = RuntimeError("it was closed")
        try:
            while self._run_calls():
                self._step()
        except BaseException as exception:  # noqa: BLE001  the instance is lost; later calls raise this error
            error = exception
        with self._condition:
            self._error = error
            for future in (*(answer for _, answer in self._calls), *self._pending_futures()):
                future.set_exception(self._lost_error())
            self._condition.notify_all()
        self._shut_down()

    def _run_calls(self) -> bool:
        """Run calls until there is something to compute. Returns False when the engine is closing."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._calls or self._is_busy() or self._is_closing)
                if self._is_closing:
                    return False
                if not self._calls:
                    return True
                call, future = self._calls.popleft()
            try:
                future.set_result(call())
            except ActorLost as error:
                future.set_exception(error)
                raise
            except Exception as error:  # noqa: BLE001  the caller's to handle
                future.set_exception(error)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self._begin(request)
            except ActorLost:
                raise
            except Exception as error:  # noqa: BLE001  such as a prompt longer than the model can attend to
                with self._condition:
                    if (running := self._requests.get_by_trajectory(request.trajectory)) is not None:
                        self._drop_request(running)
                self._fail(request, str(error))

    def _begin(self, request: Request) -> None:
        """Start a request, in place of an earlier one of its trajectory. An error means that it has failed."""
        previous = self._requests.get_by_trajectory(request.trajectory)
        if previous is not None:
            if previous.request.route_number >= request.route_number:
                return  # a repeated request, or an old one that was delayed
            self._stop([request.trajectory])
        running = RunningRequest(request, stop_check=self._stop_check_maker.make_check(request))
        if running.has_stopped:  # its instance was lost before it could report the end of the turn
            self._emit(running.sampled_tokens(FinishReason.STOP))
            return
        with self._condition:
            key = self._requests.add(running)
        if self._drafter is not None:
            self._drafter.begin(key, request.trajectory, request.prompt_tokens, request.tokens)
        self._admit(running)

    def _stop(self, trajectories: Iterable[TrajectoryId]) -> list[RunningRequest]:
        """Stop requests and return them; unknown ones are ignored, and those that end by themselves as they are
        removed."""
        with self._condition:
            requests = [
                running
                for trajectory in dict.fromkeys(trajectories)
                if (running := self._requests.get_by_trajectory(trajectory)) is not None
            ]
            self._remove(requests)
            stopped_requests = [running for running in requests if self._requests.get(running.key) is not None]
            for running in stopped_requests:
                self._drop_request(running)
        return stopped_requests

    def _abort(self, trajectories: frozenset[TrajectoryId]) -> None:
        with self._condition:  # no request may be returned that ends as it is stopped
            self._stop(trajectories)
            self._outputs = [output for output in self._outputs if output.trajectory not in trajectories]

    def _fall_asleep(self) -> None:
        if len(self._requests):
            raise ProtocolViolation(f"{self._instance} is put to sleep while it runs {len(self._requests)} requests")
        if not self._is_asleep:
            self._free_device()
            self._is_asleep = True

    def _reset(self, instance: InstanceId) -> None:
        with self._condition:
            self._stop([running.request.trajectory for running in self._requests])
            self._instance, self._outputs = instance, []
            self._requests.reset(instance)
            self._drop_caches_and_counts()

    # -- internals -----------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread, between two steps. Calls are run in order."""
        future: Future[T] = Future()
        with self._condition:
            self._check()
            self._calls.append((function, future))
            self._condition.notify_all()
        return future

    def _check(self) -> None:
        if self._error is not None:
            raise self._lost_error()

    def _lost_error(self) -> ActorLost:
        return ActorLost(f"{self._instance}: decoding has ended: {type(self._error).__name__}: {self._error}")

    def _drop_request(self, running: RunningRequest) -> None:
        """Remove a request that has ended. The caller holds the lock."""
        self._requests.remove(running)
        if self._drafter is not None:
            self._drafter.end(running.key)

    def _emit(self, event: SampledTokens | FailedRequest) -> None:
        """Return a request that has ended, by `events`."""
        with self._condition:
            self._outputs.append(event)
            self._condition.notify_all()

    def _fail(self, request: Request, error: str) -> None:
        """Return a request that cannot be continued, by `events`."""
        self._emit(FailedRequest(trajectory=request.trajectory, route_number=request.route_number, error=error))
