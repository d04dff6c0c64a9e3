"""The trainer's further processes, and how the leading one has all of them do the same.

Invariants:
- Every method of the policy is called on all ranks, one after another: each call ends on all of them before the next
  begins. So whatever they do together, they do in the same order.
- What fails on one rank is raised by the leading one, which does not wait for the others: they may wait for that one,
  for ever. The group is of no use afterwards.
- A rank that is lost is told as lost. The others' connections to it break at the same moment; that is told only if
  everybody is still there after SETTLE_S.
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
from staleflow.tasks.actors.actor_calls import LOOK_S, call, remote_methods
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.policy import Policy, PolicySettings
from staleflow.tasks.training.rank import Rank, listening, rank_name

if TYPE_CHECKING:
    from staleflow.stores.weights.weight_hash import Weights

T = TypeVar("T")

SETTLE_S = 3 * LOOK_S
"""Seconds after a failure within which it shows that another rank is gone: it is looked every LOOK_S, which takes as
long again if nothing answers."""
LONGEST_S = 7 * 86400.0
"""Seconds that a rank may take for anything. The driver's deadlines for the leading one end what takes too long; this
only ends calls that nobody waits for any more."""
CONNECTION = (
    "gloo/transport", "connectFullMesh", "TCPStore", "DistNetworkError", "DistStoreError", "ncclRemoteError",
    "ncclSystemError", "NCCL communicator was aborted", "collective operation timeout",
)  # fmt: skip
"""One of these is in the message of every error of torch's by which ranks notice that they have lost each other."""
OWN = ("out of memory", "No space left", "Duplicate GPU", "gloo/transport/tcp/device")
"""What one of these is in besides would happen again to ranks that are placed anew."""


def unused(weights: Weights) -> None:
    """What a rank that does not lead makes of weights."""


@remote_methods
class TrainerRank:
    """The Dask actor of a trainer's process that does not lead: does what the leading one does."""

    def __init__(self, settings: PolicySettings, threads: int) -> None:
        engine_handover.close_orphans()
        self._settings, self._threads = settings, threads
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._policy: Policy | None = None

    async def join(self, rank: Rank) -> None:
        """Build the policy, as one rank of the group. Returns when all ranks have."""
        self._policy = await self._in_thread(self._settings.build, self._threads, rank)

    async def follow(self, method: str, *args: Any) -> None:
        """Call a method of the policy. What it returns is the leading rank's to use."""
        await self._in_thread(getattr(self._policy, method), *args)

    async def present(self) -> None:
        """Answer, also while a step is being trained."""

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._policy is not None:
            await asyncio.to_thread(self._policy.close)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


class DistributedPolicy:
    """The policy that a group of ranks has together, as the leading one uses it: from one thread, not its loop's."""

    def __init__(
        self,
        settings: PolicySettings,
        threads: int,
        host: str,
        others: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
    ) -> None:
        """Form the group. host: this process's, as the others reach it. others: the further ranks, to be asked on
        `loop`. context: of an actor's method, by which `call` knows that an actor asks. Raises ActorLost, and what
        fails on any rank."""
        self._others: Mapping[str, Any] = {rank_name(i): actor for i, actor in enumerate(others, start=1)}
        self._loop, self._context = loop, context
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rank")
        with listening() as listener:
            place = Rank(count=len(others) + 1, host=host, port=listener.getsockname()[1])
            lead = replace(place, listener=listener.fileno())
            asked = [
                self._asked(name, "join", replace(place, number=number))
                for number, name in enumerate(self._others, start=1)
            ]
            self._policy: Policy = self._result(self._executor.submit(settings.build, threads, lead), asked)

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train on rows, which the other ranks are sent by the policy itself."""
        asked = [self._asked(name, "follow", "step", step, ()) for name in self._others]
        metrics: dict[str, float] = self._result(self._executor.submit(self._policy.step, step, rows), asked)
        return metrics

    def published(self, use: Callable[[Weights], T]) -> T:
        asked = [self._asked(name, "follow", "published", unused) for name in self._others]
        made: T = self._result(self._executor.submit(self._policy.published, use), asked)
        return made

    def probe(self, tokens: Sequence[int]) -> tuple[float, ...]:
        logprobs: tuple[float, ...] = self._together("probe", tokens)
        return logprobs

    def save(self, folder: Path, published: Path) -> None:
        self._policy.save(folder, published)

    def begin_save(self, path: Path) -> None:
        self._together("begin_save", path)

    def end_save(self) -> None:
        """The leading rank's part ends once all have written theirs, or one of them has failed."""
        try:
            self._policy.end_save()
        except Exception as error:
            raise _cause(error, [self._asked(name, "present") for name in self._others]) from error

    def load_state(self, path: Path) -> None:
        self._together("load_state", path)

    def close(self) -> None:
        """Leave the group; the other ranks do so when they are closed."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._policy.close()

    def _together(self, method: str, *args: Any) -> Any:
        asked = [self._asked(name, "follow", method, *args) for name in self._others]
        return self._result(self._executor.submit(getattr(self._policy, method), *args), asked)

    def _asked(self, name: str, method: str, *args: Any) -> Future[None]:
        asking: Coroutine[Any, Any, None] = call(self._others[name], method, *args, within_s=LONGEST_S, who=name)
        return self._context.run(asyncio.run_coroutine_threadsafe, asking, self._loop)

    def _result(self, own: Future[Any], asked: Sequence[Future[None]]) -> Any:
        """What this rank's part of the work gives, once all have done theirs."""
        ended, _ = wait((own, *asked), return_when=FIRST_EXCEPTION)
        for one in ended:
            if (error := one.exception()) is not None:
                raise _cause(error, asked)
        return own.result()


def _cause(error: BaseException, asked: Sequence[Future[None]]) -> BaseException:
    """Why a rank has failed with `error`: the loss of another, if there is one."""
    with contextlib.suppress(TimeoutError):
        for one in as_completed(asked, timeout=SETTLE_S):
            if isinstance(lost := one.exception(), ActorLost):
                return lost
    if not isinstance(error, ActorLost) and is_lost_rank_error(error):
        return ActorLost(f"the trainer's ranks have lost each other: {error}", rank_name(0))
    return error


def is_lost_rank_error(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer, rather than what went wrong on this one."""
    said = f"{type(error).__name__}: {error}"
    return any(mark in said for mark in CONNECTION) and not any(mark in said for mark in OWN)
