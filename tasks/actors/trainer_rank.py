"""The trainer's other ranks, and how rank 0 calls the policy on all of them.

Invariants:
- Every method of the policy but `save`, `end_save` and `close` is called on all ranks, one after another: each call
  ends on all of them before the next begins. So collective operations are in the same order on all ranks.
- An error of one rank is raised by rank 0, which does not wait for the others: they may wait for the failed rank
  forever. The group cannot be used afterwards.
- A lost rank is reported as lost. The other ranks' connections to it break at the same moment; broken connections are
  reported only if no rank is found lost within SETTLE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from staleflow.stores.errors import ActorLost
from staleflow.tasks.actors.actor_calls import PROBE_S, call_actor, remote_methods
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.policy import Policy, PolicySettings
from staleflow.tasks.training.rank import Rank, open_listening_socket, rank_name

if TYPE_CHECKING:
    from staleflow.stores.weights.weight_hash import Weights

T = TypeVar("T")

SETTLE_S = 3 * PROBE_S
"""Seconds after a failure within which the loss of another rank shows: ranks are probed every PROBE_S, and a probe
takes as long again if nothing answers."""
CALL_TIMEOUT_S = 7 * 86400.0
"""Timeout of a call to a rank, in seconds. The driver's deadlines for rank 0 end what takes too long; this only ends
calls that nobody waits for any more."""
CONNECTION_ERROR_MARKS = (
    "gloo/transport", "connectFullMesh", "TCPStore", "DistNetworkError", "DistStoreError", "ncclRemoteError",
    "ncclSystemError", "NCCL communicator was aborted", "collective operation timeout",
)  # fmt: skip
"""Each error of torch by which ranks notice a lost connection has one of these in its message."""
RECURRING_ERROR_MARKS = ("out of memory", "No space left", "Duplicate GPU", "gloo/transport/tcp/device")
"""Messages with one of these are of errors that would recur on other workers, also if they contain one of the above."""


def ignore_weights(weights: Weights) -> None:
    """Take the gathered weights and do nothing, on ranks other than 0."""


@remote_methods
class FollowerRank:
    """The Dask actor of a trainer rank other than 0. It makes the same calls of the policy as rank 0."""

    def __init__(self, settings: PolicySettings, threads: int) -> None:
        engine_handover.close_orphans()
        self._settings, self._threads = settings, threads
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._policy: Policy | None = None

    async def join(self, rank: Rank) -> None:
        """Build the policy as one rank of the group. Returns when all ranks have."""
        self._policy = await self._in_thread(self._settings.build, self._threads, rank)

    async def call_policy(self, method: str, *args: Any) -> None:
        """Call a method of the policy. Only rank 0 uses its result."""
        await self._in_thread(getattr(self._policy, method), *args)

    async def ping(self) -> None:
        """Return at once, also while a step is being trained."""

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._policy is not None:
            await asyncio.to_thread(self._policy.close)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


class DistributedPolicy:
    """The policy of a group of ranks, as rank 0 uses it. Call it from one thread, not from the event loop; `end_save`
    may run in another one."""

    def __init__(
        self,
        settings: PolicySettings,
        threads: int,
        host: str,
        peers: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
    ) -> None:
        """Form the group.

        Args:
            host: Address of this process for the other ranks.
            peers: Actors of the other ranks, called from `loop`.
            context: Context of the caller. In that of an actor's method `call_actor` probes the addresses of `peers`.

        Raises:
            ActorLost: A rank is lost. Errors of any rank are raised too.
        """
        self._peers: Mapping[str, Any] = {rank_name(i): actor for i, actor in enumerate(peers, start=1)}
        self._loop, self._context = loop, context
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rank")
        with open_listening_socket() as listener:
            peer_rank = Rank(count=len(peers) + 1, host=host, port=listener.getsockname()[1])
            lead_rank = replace(peer_rank, listener_fd=listener.fileno())
            peer_calls = [
                self._call_peer(name, "join", replace(peer_rank, number=index))
                for index, name in enumerate(self._peers, start=1)
            ]
            self._policy: Policy = self._result(self._executor.submit(settings.build, threads, lead_rank), peer_calls)

    def wake(self) -> None:
        self._call_all(self._policy.wake)

    def sleep(self) -> None:
        self._call_all(self._policy.sleep)

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Run a training step on all ranks. The policy itself sends rows to the other ranks."""
        return self._call_all(self._policy.step, step, rows, peer_args=(step, ()))

    def fine_tune(self, step: int) -> dict[str, float]:
        return self._call_all(self._policy.fine_tune, step)

    def apply_to_weights(self, function: Callable[[Weights], T]) -> T:
        result: T = self._call_all(self._policy.apply_to_weights, function, peer_args=(ignore_weights,))
        return result

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return self._call_all(self._policy.logprobs, tokens)

    def save(self, folder: Path, published: Path) -> None:
        self._policy.save(folder, published)

    def begin_save(self, path: Path) -> None:
        self._call_all(self._policy.begin_save, path)

    def end_save(self) -> None:
        """Finish saving: rank 0's part ends once all ranks have written theirs, or one has failed."""
        try:
            self._policy.end_save()
        except Exception as error:
            cause = _cause(error, [self._call_peer(name, "ping") for name in self._peers])
            if cause is error:
                raise
            raise cause from error

    def load_state(self, path: Path) -> None:
        self._call_all(self._policy.load_state, path)

    def close(self) -> None:
        """Leave the group. The other ranks leave when they are closed."""
        self._executor.shutdown(wait=False)
        self._policy.close()

    def _call_all(self, method: Callable[..., T], *args: Any, peer_args: tuple[Any, ...] | None = None) -> T:
        """Call a method of the policy on all ranks. Returns this rank's result. peer_args: the other ranks' arguments,
        if they are not the same."""
        peer_args = args if peer_args is None else peer_args
        peer_calls = [self._call_peer(name, "call_policy", method.__name__, *peer_args) for name in self._peers]
        return self._result(self._executor.submit(method, *args), peer_calls)

    def _call_peer(self, name: str, method: str, *args: Any) -> Future[None]:
        call: Coroutine[Any, Any, None] = call_actor(
            self._peers[name], method, *args, timeout_s=CALL_TIMEOUT_S, actor_name=name
        )
        # A copy: `end_save` may call in another thread meanwhile, and a context is entered by one at a time.
        return self._context.copy().run(asyncio.run_coroutine_threadsafe, call, self._loop)

    def _result(self, own_call: Future[T], peer_calls: Sequence[Future[None]]) -> T:
        """Return this rank's result once all ranks are done. own_call: this rank's call. peer_calls: the others'."""
        all_calls: list[Future[Any]] = [own_call, *peer_calls]
        done, _ = wait(all_calls, return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise _cause(error, all_calls)
        return own_call.result()


def _cause(error: BaseException, calls: Sequence[Future[Any]]) -> BaseException:
    """Return the cause of a rank's `error`: the loss of a rank, else another error of `calls` if that one only means
    that a rank does not respond."""
    with contextlib.suppress(TimeoutError):
        for future in as_completed(calls, timeout=SETTLE_S):
            call_error = future.exception()
            if isinstance(call_error, ActorLost):
                return call_error
            if call_error is not None and is_lost_rank_error(error):
                error = call_error
    if is_lost_rank_error(error):
        return ActorLost(f"the trainer's ranks have lost each other: {error}", rank_name(0))
    return error


def is_lost_rank_error(error: BaseException) -> bool:
    """Whether an error means that another rank does not respond, rather than that this one failed."""
    text = f"{type(error).__name__}: {error}"
    return any(mark in text for mark in CONNECTION_ERROR_MARKS) and not any(
        mark in text for mark in RECURRING_ERROR_MARKS
    )
