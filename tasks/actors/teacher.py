"""The teacher: an actor around an engine of the reference model, which computes the logprobs of finished responses.

Each sampled token's logprob is given the context that it was sampled with, at the sampling temperature: what the
trainer would compute if it held the reference model itself. The actor has no state, so another can repeat its calls.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.actors.server_messages import TeacherItem, TeacherLogprobs
from staleflow.tasks.engines import engine_handover
from staleflow.tasks.engines.base import Engine
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.rendering.chat_tokenizer import load_tokenizer
from staleflow.tasks.rendering.file_tokenizer import check_same_tokens
from staleflow.tasks.training.branch_sequences import BranchSequences
from staleflow.tasks.training.microbatches import Row

MAX_CONCURRENT = 64
"""Maximum number of sequences that the engine is asked for at once."""


@remote_methods
class Teacher:
    """The teacher's Dask actor. Its calls may be repeated: the server keeps the first logprobs of a response."""

    def __init__(
        self,
        engine_settings: Any,
        name: InstanceId,
        threads: int,
        temperature: float,
        call_s: float,
        policy: str = "",
    ) -> None:
        """Build the engine, which loads the model.

        Args:
            engine_settings: Settings of the engine, with the reference as their model.
            temperature: Sampling temperature of the responses.
            policy: Folder or hub name of the policy whose tokens the reference must have; empty if it is the same
                model.

        Raises:
            ConfigError: It has not each token of the policy under the same id.
        """
        if policy:
            tokens, reference_tokens = (load_tokenizer(path).get_vocab() for path in (policy, engine_settings.model))
            check_same_tokens(f"training.kl.reference = {engine_settings.model!r}", tokens, reference_tokens)
        engine_handover.close_orphans()
        self._temperature = temperature
        self._call_s = call_s
        self._engine: Engine = build_engine(engine_settings, name, threads)
        # Under no run: it is closed when this actor is gone, and never taken over.
        engine_handover.register("", engine_settings, self._engine, self)
        num_threads = min(engine_settings.max_running, MAX_CONCURRENT)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="teacher")

    async def ping(self) -> None:
        """Return at once, also while logprobs are being computed."""

    async def score(self, server: Any, trajectories: tuple[TrajectoryId, ...]) -> None:
        """Compute the logprobs of the responses that have none yet, and send them to the server."""
        items: list[TeacherItem] = await call_actor(
            server, "teacher_items", trajectories, timeout_s=self._call_s, actor_name="server"
        )
        values = await self._response_logprobs([item.row for item in items])
        logprobs = [TeacherLogprobs(item.trajectory, v) for item, v in zip(items, values, strict=True)]
        for trajectory, response_logprobs in logprobs:
            if not (finite := np.isfinite(response_logprobs)).all():
                token = int(finite.argmin())
                # Another teacher would compute the same: the run ends.
                raise ConfigError(
                    f"training.kl.reference: token {token} of response {trajectory} has a logprob of "
                    f"{response_logprobs[token]} under the reference model; each sampled token needs a finite one: use "
                    "another reference"
                )
        await call_actor(server, "record_teacher_logprobs", logprobs, timeout_s=self._call_s, actor_name="server")

    async def _response_logprobs(self, rows: list[Row]) -> list[npt.NDArray[np.float32]]:
        """[T] logprobs of each row's response, nats; 0 at tokens that were not sampled."""
        sequences = BranchSequences.of(rows)
        loop = asyncio.get_running_loop()
        values = await asyncio.gather(
            *(loop.run_in_executor(self._executor, self._sequence_logprobs, row) for row in sequences.rows)
        )
        by_row = sequences.merge_by_row(rows, dict(enumerate(values)))
        return [by_row[i] for i in range(len(rows))]

    def _sequence_logprobs(self, row: Row) -> npt.NDArray[np.float32]:
        """[T] logprobs of the response of a row without branches; 0 at tokens that were not sampled."""
        tokens = [*row.prompt.tolist(), *row.response.tolist()]
        (scores,) = self._engine.score([tokens], self._temperature)
        response_logprobs = np.asarray(scores.logprobs[len(row.prompt) - 1 :], np.float32)  # the first token has none
        return np.where(row.sampled, response_logprobs, np.float32(0))

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        engine_handover.unregister(self._engine)
        await asyncio.to_thread(self._engine.close)
