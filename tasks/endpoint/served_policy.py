"""Serves a policy outside of runs. Requests are independent of each other."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import threading
import time
from dataclasses import replace

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import FinishReason, TrajectoryId
from staleflow.tasks.endpoint.replies import TurnReply, build_reply, render_tool_calls
from staleflow.tasks.endpoint.requests import ChatRequest, RequestError, to_model_message
from staleflow.tasks.engines.base import Engine, FailedRequest, Request, SampledTokens, TokenScores
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer
from staleflow.tasks.rendering.sampled_turn import SampledTurn

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds of one wait for the engine's events."""


class ServedPolicy:
    """Serves an engine at an endpoint to all clients with the API key. Use from one event loop.

    Args:
        engine: Samples the responses; closed with this policy.
        tokenizer: Encodes messages and decodes responses.
        api_key: The key that clients send.
        chat: Whether the chat template renders messages; if not, their texts are joined, those of users and tools
            inserted into `observation_template`.
        observation_template: Text with `{observation}`, used without a chat template.
        max_context: Maximum tokens of a prompt and its response.
        max_new_tokens: Maximum tokens of a response, unless the request has its own limit.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        api_key: str,
        *,
        chat: bool,
        observation_template: str,
        max_context: int,
        max_new_tokens: int,
    ) -> None:
        self._engine, self._tokenizer, self._api_key = engine, tokenizer, api_key
        self._chat, self._observation_template = chat, observation_template
        self._max_context, self._max_new_tokens = max_context, max_new_tokens
        self._request_ids = itertools.count()
        self._pending: dict[int, asyncio.Future[SampledTokens | FailedRequest]] = {}
        self._loop = asyncio.get_running_loop()
        self._unscored: list[tuple[tuple[int, ...], asyncio.Future[TokenScores]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._closed = threading.Event()
        self._failed = False
        self.pending_bytes = 0
        threading.Thread(target=self._forward_results, name="served", daemon=True).start()

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, key: str) -> ServedPolicy:
        """Return this policy if the key is correct. Raises RequestError."""
        if hmac.compare_digest(key.encode(), self._api_key.encode()):
            return self
        raise RequestError(401, "this is not the key that the server was started with", "invalid_api_key")

    async def request_turn(self, request: ChatRequest) -> TurnReply:
        """Sample the turn of a request. Raises RequestError."""
        prompt_tokens = self._encode(request)
        if not prompt_tokens:
            raise RequestError(400, "the messages have no tokens; send at least one text", "invalid_value")
        max_tokens = min(request.max_tokens or self._max_new_tokens, self._max_context - len(prompt_tokens))
        if max_tokens < 1:
            reason = f"the prompt has {len(prompt_tokens)} tokens; it must have fewer than {self._max_context}"
            raise RequestError(400, reason, "context_length_exceeded")
        if self._failed:
            raise RequestError(503, "the engine has ended; start the server again", "engine_failed", 60.0)
        request_id = next(self._request_ids)
        if request.echo:
            return await self._score_prompt(request, prompt_tokens, request_id)
        future = self._pending[request_id] = self._loop.create_future()
        engine_request = Request(
            trajectory=TrajectoryId(request_id),
            route_number=0,
            tokens=prompt_tokens,
            max_new_tokens=max_tokens,
            stop=request.stop,
            greedy=request.temperature == 0,
            temperature=request.temperature or None,
        )
        try:
            self._engine.submit([engine_request])
            result = await future
        except asyncio.CancelledError:
            self._engine.abort([TrajectoryId(request_id)])
            raise
        finally:
            del self._pending[request_id]
        if isinstance(result, FailedRequest):
            raise RequestError(503, "the engine failed on this request; try again", "engine_failed", 1.0)
        tokens = tuple(int(t) for s in result.segments for t in s.tokens)
        turn = SampledTurn(
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            logprobs=tuple(float(x) for s in result.segments for x in s.logprobs),
            text=self._tokenizer.text(tokens),
            truncated=result.finish is FinishReason.LENGTH,
        )
        return build_reply(f"chatcmpl-{request_id}", request_id, int(time.time()), turn, request)

    async def _score_prompt(self, request: ChatRequest, prompt_tokens: tuple[int, ...], id: int) -> TurnReply:
        """Score a prompt, together with those that arrived while the engine scored others. Raises RequestError."""
        future: asyncio.Future[TokenScores] = self._loop.create_future()
        self._unscored.append((prompt_tokens, future))
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.ensure_future(self._score_waiting())
        scores = await future
        tokens = scores.top_tokens[-1:] if request.max_tokens else ()
        turn = SampledTurn(
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            logprobs=scores.top_logprobs[-1:] if request.max_tokens else (),
            text=self._tokenizer.text(tokens),
            truncated=True,
        )
        reply = build_reply(f"cmpl-{id}", id, int(time.time()), turn, request)
        return replace(reply, scores=scores, prompt_text=self._tokenizer.text(prompt_tokens, keep_special=True))

    async def _score_waiting(self) -> None:
        """Score all waiting prompts, until there are none."""
        while self._unscored:
            waiting, self._unscored = self._unscored, []
            try:
                all_scores = await asyncio.to_thread(self._engine.score, [tokens for tokens, _ in waiting])
            except Exception:
                logger.exception("the engine could not score %d prompts", len(waiting))
                error = RequestError(503, "the engine failed on this request; try again", "engine_failed", 1.0)
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), scores in zip(waiting, all_scores, strict=True):
                    if not future.done():  # its client may have left
                        future.set_result(scores)

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()
        self._engine.close()

    def _encode(self, request: ChatRequest) -> tuple[int, ...]:
        """Encode the messages of a request. Raises RequestError."""
        if request.token_ids is not None:
            return request.token_ids
        if request.text is not None:
            return self._tokenizer.ids(request.text)
        messages = [to_model_message(m)._replace(content=render_tool_calls(m)) for m in request.messages]
        try:
            if self._chat:
                return self._tokenizer.chat_ids(messages, request.tools)
        except ConfigError as error:
            raise RequestError(400, str(error)) from error
        texts = [
            m.content
            if i == 0 or m.role == "assistant"
            else self._observation_template.replace("{observation}", m.content)
            for i, m in enumerate(messages)
        ]
        return self._tokenizer.ids("".join(texts))

    def _forward_results(self) -> None:
        """Pass the engine's events to the event loop, in a thread."""
        while not self._closed.is_set():
            try:
                events = self._engine.events(POLL_S)
            except Exception:  # noqa: BLE001  a closed engine may raise anything, and one that has failed does
                self._failed = True
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._fail_pending)
                return
            for event in events:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._set_result, event)

    def _fail_pending(self) -> None:
        """Fail all pending requests, because the engine has ended."""
        for request_id, future in self._pending.items():
            if not future.done():
                future.set_result(
                    FailedRequest(trajectory=TrajectoryId(request_id), route_number=0, error="the engine has ended")
                )

    def _set_result(self, event: SampledTokens | FailedRequest) -> None:
        future = self._pending.get(event.trajectory)
        if future is not None and not future.done():
            future.set_result(event)
