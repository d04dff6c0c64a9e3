"""Episodes of agents: programs that request the model's turns over HTTP and need not know about training.

The messages of an agent's first request are the task's first observation. Those of each further request are the
observation after the previous turn. The value that the agent returns, or prints last, is the reward. Names in
`task.source`:

agent:path/to/agent.py:run    async def run(base_url, key, task) -> reward, or a plain function with these arguments
agent:command                 the program of the list task.options.command, with the arguments in environment variables
verifiers:TASKSET             see verifiers_agents.py
openenv:URL_OR_PACKAGE        see openenv_agents.py
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as, strerror
from staleflow.tasks.endpoint.requests import RequestError
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.endpoint.sessions import AgentSession
from staleflow.tasks.environments.coroutine_environments import AgentTask, CoroutineEpisodeBase, without_exit
from staleflow.tasks.environments.episode import (
    CallEnvironment,
    EnvStepResult,
    EpisodeFailed,
    EpisodeStart,
    error_with_location,
    final_result,
    parse_observation,
)
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Prompt
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

RESPONSE_LIMIT_KEY = "rollout.max_new_tokens"
COMMAND = "command"
"""Name of an agent that is a program."""
MAX_LINE_BYTES = 65_536
"""Maximum bytes of a line in a program's output; a longer line is ignored, also if it has the reward."""
DRAIN_TIMEOUT_S = 1.0
"""Seconds to read the rest of a program's output after its end."""
POLL_S = 0.02
"""Seconds between two checks whether a program has ended."""
MAX_OUTPUT_LINES = 20
"""Number of a program's last lines that are kept, for its reward and for error messages."""


def load_agent(name: str, options: Mapping[str, Any], label: str) -> LoadedAgent:
    """Load the agent named `agent:NAME` in a job file. Raises ConfigError. label: its key and name, for messages."""
    if name == COMMAND:
        return _load_program(options, label)
    loaded = user_code.load(name, label.partition(" = ")[0])
    with raised_as(ConfigError, f"{label}: an agent takes (base_url, key, task)", TypeError, ValueError):
        inspect.signature(loaded).bind("", "", None)
    if inspect.iscoroutinefunction(loaded):
        return LoadedAgent(
            run=lambda args: loaded(*args), blocking=bool(getattr(loaded, "blocking", False)), options=options
        )

    async def run(args: AgentArgs) -> Any:
        return await _run_in_thread(lambda: loaded(*args))

    return LoadedAgent(run=run, blocking=True, options=options)


async def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new daemon thread and return its result. A thread pool could be filled by functions that
    hang, and would keep the process from ending."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except (StopIteration, asyncio.CancelledError) as error:  # a future would not pass these on
            future.set_exception(RuntimeError(f"{type(error).__name__} {error}".rstrip()))
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            future.set_exception(error)

    # The thread inherits the context, so that programs that the function starts belong to this episode.
    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="agent", daemon=True).start()
    return await asyncio.wrap_future(future)


def _load_program(options: Mapping[str, Any], label: str) -> LoadedAgent:
    command = options.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise ConfigError(f'{label}: task.options.command must be a list of texts, such as ["python", "agent.py"]')
    task_options = {name: value for name, value in options.items() if name != "command"}

    async def run(args: AgentArgs) -> Any:
        return await _run_program(command, args)

    return LoadedAgent(run=run, blocking=True, options=task_options)


async def _run_program(command: Sequence[str], args: AgentArgs) -> Any:
    """Run a program, and return the reward on its last line. Raises EpisodeFailed."""
    base_url, key, task = args
    task_fields = {"index": task.index, "held_out": task.held_out, "seed": task.seed, "options": dict(task.options)}
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "STALEFLOW_TASK": json.dumps(task_fields)}
    pipe = asyncio.subprocess.PIPE
    with raised_as(EpisodeFailed, f"the agent's command {command[0]!r} cannot be started", OSError, describe=strerror):
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, limit=MAX_LINE_BYTES,
            env={**os.environ, **variables}, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    readers: list[asyncio.Future[None]] = []
    try:
        output_lines, error_lines = deque[str](maxlen=MAX_OUTPUT_LINES), deque[str](maxlen=MAX_OUTPUT_LINES)
        streams = ((process.stdout, output_lines), (process.stderr, error_lines))
        readers = [asyncio.ensure_future(_keep_lines(stream, lines)) for stream, lines in streams]
        while process.returncode is None:  # wait() also waits for the pipes, which a remaining child may keep open
            await asyncio.sleep(POLL_S)
        _kill_group(process.pid)
        # A child in a session of its own may keep the pipes open.
        await asyncio.wait(readers, timeout=DRAIN_TIMEOUT_S)
        exit_code = process.returncode
    finally:
        _kill_group(process.pid)
        for reader in readers:
            reader.cancel()
        transport: Any = getattr(process, "_transport", None)
        for descriptor in (1, 2) if transport is not None else ():  # stdout and stderr, which the child may keep open
            transport.get_pipe_transport(descriptor).close()
    if exit_code:
        detail = f": {error_lines[-1]}" if error_lines else ""
        raise EpisodeFailed(f"the agent's command ended with exit code {exit_code}{detail}")
    if not output_lines:
        raise EpisodeFailed("the agent's command printed nothing; its last line must be the reward")
    return _parse_reward(output_lines[-1])


def _kill_group(leader: int) -> None:
    """Kill a program and its remaining children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


async def _keep_lines(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    """Append the non-empty lines of a stream until it ends, except those longer than MAX_LINE_BYTES."""
    is_too_long = False
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(error.consumed)
            is_too_long = True
            continue
        except asyncio.IncompleteReadError as error:
            line = error.partial
        if not line:
            return
        text = " ".join(line.decode("utf-8", "replace").split())
        if text and not is_too_long:  # otherwise it is the end of a line that is dropped
            lines.append(text)
        is_too_long = False


def _parse_reward(line: str) -> Any:
    """Parse the reward that a program printed: a number, or a JSON object with a number and its parts. Raises
    EpisodeFailed."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value.get("reward"), value.get("parts") or {}
    if not isinstance(value, (int, float)):
        raise EpisodeFailed(
            f'the last line that the agent printed must be its reward, a number or {{"reward": ..., "parts": ...}}, '
            f"not {line[:80]!r}"
        )
    return value


class AgentEnvironment:
    """An environment whose episodes run an agent. Its endpoint is started with the first episode."""

    def __init__(self, agent: LoadedAgent, settings: EndpointSettings) -> None:
        self._agent, self._settings = agent, settings
        self._server: EndpointServer | None = None

    def episode(self, start: EpisodeStart) -> AgentEpisode:
        if self._server is None:
            self._server = EndpointServer(self._settings)
        return AgentEpisode(self._server, start, self._agent)


class AgentEpisode(CoroutineEpisodeBase):
    """An episode of an agent that uses an endpoint."""

    runner = "the agent"

    def __init__(self, server: EndpointServer, start: EpisodeStart, agent: LoadedAgent) -> None:
        super().__init__()
        self._server, self._start, self._agent = server, start, agent
        self._session: AgentSession | None = None
        self._turn: SampledTurn | None = None
        self._is_cut_off = False
        """Whether the response may have no more tokens, so that the agent cannot have got what it expects."""

    async def begin(self) -> Prompt:
        try:
            await self._server.start()
        except ConfigError as error:
            raise EpisodeFailed(str(error)) from error
        session = self._session = self._server.sessions.open()
        args = (self._server.base_url, session.key, AgentTask.of(self._start, self._agent.options))
        self._run(self._agent.run, args)
        first = await self._next_messages(session)
        if isinstance(first, EnvStepResult):
            raise EpisodeFailed("the agent ended before its first request to the model")
        return first

    def set_turn(self, turn: SampledTurn) -> None:
        """Set the turn of the next step, with its token ids and logprobs."""
        self._turn = turn

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        session = self._session
        assert session is not None
        if self._turn is None:
            raise EpisodeFailed("the agent's turn came without its token ids")
        turn, self._turn = self._turn, None
        session.send_turn(turn)
        if truncated or last:
            return await self._end_at(RESPONSE_LIMIT_KEY if truncated else "environment.max_turns")
        request = await self._next_messages(session)
        return request if isinstance(request, EnvStepResult) else EnvStepResult(messages=request)

    async def end_early(self) -> EnvStepResult:
        return await self._end_at(RESPONSE_LIMIT_KEY)

    async def _end_at(self, limit: str) -> EnvStepResult:
        """Refuse further requests, and wait for the agent's end. limit: the setting that allows no further turn."""
        assert self._session is not None and self._running_coroutine is not None
        self._is_cut_off = limit == RESPONSE_LIMIT_KEY
        self._session.refuse(RequestError(400, f"the episode reached its limit, {limit}", "context_length_exceeded"))
        await asyncio.wait({self._running_coroutine})
        return self._end()

    def kill(self) -> None:
        if self._session is not None:
            self._server.sessions.close(self._session)
        super().kill()

    async def _next_messages(self, session: AgentSession) -> tuple[Message, ...] | EnvStepResult:
        """Wait for the agent's next request or its end. Returns the request's messages, or the episode's result. Raises
        EpisodeFailed."""
        messages = await self._next_request(session.next_messages)
        if isinstance(messages, EnvStepResult):
            return messages
        observation = parse_observation([message._asdict() for message in messages], "the agent's request")
        assert not isinstance(observation, str)
        return observation

    def _result_after_error(self, error: BaseException) -> EnvStepResult | None:
        assert self._session is not None
        return EnvStepResult(ended=True) if self._is_cut_off or self._session.has_refused else None


def forked_agent_environment(agent: LoadedAgent) -> CallEnvironment:
    """Build the environment of an agent that runs in forked processes and uses the endpoint of another process. Its
    whole run is one step, whose text is the endpoint's URL and key as JSON."""

    async def run(start: EpisodeStart, text: str) -> EnvStepResult:
        base_url, key = json.loads(text)
        try:
            args = (base_url, key, AgentTask.of(start, agent.options))
            reward = await without_exit(AgentEpisode.runner, agent.run, args)
        except EpisodeFailed:
            raise
        except Exception as error:
            raise EpisodeFailed(f"the agent raised: {error_with_location(error)}") from error
        return final_result(reward, label="what the agent returned")

    return CallEnvironment(run)
