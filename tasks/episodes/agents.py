"""Episodes of agents: programs that request the model's turns over HTTP and need not know about training.

An agent's first request is its task's first observation; each further one is the observation after the turn before;
what it returns, or prints last, is the reward. `task.source` names it:

agent:path/to/agent.py:run    async def run(base_url, key, task) -> reward, or a plain function of the same
agent:command                 task.options.command, a list: a program; its environment variables have the same
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
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as, strerror
from staleflow.tasks.endpoint.requests import RequestError
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.endpoint.sessions import AgentSession
from staleflow.tasks.environments.coroutine_environments import AgentTask, AskingEpisode, without_exit
from staleflow.tasks.environments.episode import (
    CallEnvironment,
    EnvStepResult,
    EpisodeFailed,
    EpisodeStart,
    error_and_line,
    final_result,
    parse_observation,
)
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message, Prompt
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.endpoint_settings import EndpointSettings

COMMAND = "command"
"""In place of a file: the agent is a program."""
MAX_LINE_BYTES = 65_536
"""Longest line, in bytes, that is read of a program's output; the reward must be on one."""
POLL_S = 0.02
"""Seconds between two looks whether a program has ended."""
LAST_LINES = 20
"""Lines that a program printed last which are kept, for its reward and for messages."""


def load_agent(name: str, options: Mapping[str, Any], where: str) -> LoadedAgent:
    """Load the agent named `agent:NAME` in a job. Raises ConfigError. where: its key and name, for messages."""
    if name == COMMAND:
        return _program(options, where)
    loaded = user_code.load(name, where.partition(" = ")[0])
    with raised_as(ConfigError, f"{where}: an agent takes (base_url, key, task)", TypeError, ValueError):
        inspect.signature(loaded).bind("", "", None)
    if inspect.iscoroutinefunction(loaded):
        return LoadedAgent(
            run=lambda args: loaded(*args), blocking=bool(getattr(loaded, "blocking", False)), options=options
        )

    async def run(args: AgentArgs) -> Any:
        return await _in_thread(lambda: loaded(*args))

    return LoadedAgent(run=run, blocking=True, options=options)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new daemon thread. A few hung functions would take all threads of a pool, and one that never
    returns must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except (Exception, SystemExit) as error:  # noqa: BLE001  it is raised where the result is awaited
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    # In this context: programs that it starts belong to this episode.
    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="agent", daemon=True).start()
    return await done


def _program(options: Mapping[str, Any], where: str) -> LoadedAgent:
    command = options.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise ConfigError(f'{where}: task.options.command must be a list of texts, such as ["python", "agent.py"]')
    other_options = {name: value for name, value in options.items() if name != "command"}

    async def run(args: AgentArgs) -> Any:
        return await _run_program(command, args)

    return LoadedAgent(run=run, blocking=True, options=other_options)


async def _run_program(command: Sequence[str], args: AgentArgs) -> Any:
    """Run a program, and return the reward that it prints last. Raises EpisodeFailed."""
    base_url, key, task = args
    about = {"index": task.index, "held_out": task.held_out, "seed": task.seed, "options": dict(task.options)}
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "STALEFLOW_TASK": json.dumps(about)}
    pipe = asyncio.subprocess.PIPE
    with raised_as(EpisodeFailed, f"the agent's command {command[0]!r} cannot be started", OSError, describe=strerror):
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, limit=MAX_LINE_BYTES,
            env={**os.environ, **variables}, start_new_session=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        reading = asyncio.gather(_last_lines(process.stdout), _last_lines(process.stderr))
        while process.returncode is None:  # wait() also waits for its pipes, which a child that is left holds open
            await asyncio.sleep(POLL_S)
        _end_group(process.pid)
        output_lines, error_lines = await reading
        status = await process.wait()
    finally:
        _end_group(process.pid)
    if status:
        detail = f": {error_lines[-1]}" if error_lines else ""
        raise EpisodeFailed(f"the agent's command ended with exit code {status}{detail}")
    if not output_lines:
        raise EpisodeFailed("the agent's command printed nothing; its last line must be the reward")
    return _printed_reward(output_lines[-1])


def _end_group(leader: int) -> None:
    """End a program and the children that it has left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


async def _last_lines(stream: asyncio.StreamReader) -> list[str]:
    """Return the last lines of a stream that are not empty, once it has ended."""
    lines: deque[str] = deque(maxlen=LAST_LINES)
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # too long; what was read of it is dropped
            continue
        if not line:
            return list(lines)
        if text := " ".join(line.decode("utf-8", "replace").split()):
            lines.append(text)


def _printed_reward(line: str) -> Any:
    """Parse a printed reward: a number, or a number and its parts by name. Raises EpisodeFailed."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed.get("reward"), parsed.get("parts") or {}
    if not isinstance(parsed, (int, float)):
        raise EpisodeFailed(
            f'the last line that the agent printed must be its reward, a number or {{"reward": ..., "parts": ...}}, '
            f"not {line[:80]!r}"
        )
    return parsed


class AgentEnvironment:
    """An agent as an environment, with an endpoint. server: the endpoint; by default one is started with the first
    episode."""

    def __init__(self, agent: LoadedAgent, settings: EndpointSettings, server: EndpointServer | None = None) -> None:
        self._agent, self._settings = agent, settings
        self._server = server

    def episode(self, start: EpisodeStart) -> AgentEpisode:
        if self._server is None:
            self._server = EndpointServer(self._settings)
        return AgentEpisode(self._server, start, self._agent)


class AgentEpisode(AskingEpisode):
    """An episode of an agent that uses an endpoint."""

    runner = "the agent"

    def __init__(self, server: EndpointServer, start: EpisodeStart, agent: LoadedAgent) -> None:
        super().__init__()
        self._server, self._start, self._agent = server, start, agent
        self._session: AgentSession | None = None
        self._turn: SampledTurn | None = None
        self._limited = False

    async def begin(self) -> Prompt:
        try:
            await self._server.start()
        except ConfigError as error:
            raise EpisodeFailed(str(error)) from error
        session = self._session = self._server.sessions.open()
        args = (self._server.base_url, session.key, AgentTask.of(self._start, self._agent.options))
        self._run(self._agent.run, args)
        first = await self._messages(session)
        if isinstance(first, EnvStepResult):
            raise EpisodeFailed("the agent ended before it asked the model for anything")
        return first

    def set_turn(self, turn: SampledTurn) -> None:
        """Set the turn of the next step, with its token ids and logprobs."""
        self._turn = turn

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        session = self._session
        assert session is not None
        if self._turn is None:
            raise EpisodeFailed("the agent cannot be told a turn without its token ids")
        turn, self._turn = self._turn, None
        session.send_turn(turn)
        if truncated or last:
            return await self._end_at("rollout.max_new_tokens" if truncated else "environment.max_turns")
        request = await self._messages(session)
        return request if isinstance(request, EnvStepResult) else EnvStepResult(messages=request)

    async def end_early(self) -> EnvStepResult:
        return await self._end_at("rollout.max_new_tokens")

    async def _end_at(self, limit: str) -> EnvStepResult:
        """Refuse further requests, and wait for the agent's end. limit: the setting that allows no further turn."""
        assert self._session is not None and self._running is not None
        self._limited = True
        self._session.refuse(RequestError(400, f"the episode is at its limit, {limit}", "context_length_exceeded"))
        await asyncio.wait({self._running})
        return self._end()

    def kill(self) -> None:
        if self._session is not None:
            self._server.sessions.close(self._session)
        super().kill()

    async def _messages(self, session: AgentSession) -> tuple[Message, ...] | EnvStepResult:
        """Wait for the messages of the agent's next request, or for its end. Raises EpisodeFailed."""
        messages = await self._next_request(session.next_messages)
        if isinstance(messages, EnvStepResult):
            return messages
        observation = parse_observation([message._asdict() for message in messages], "what the agent said")
        assert not isinstance(observation, str)
        return observation

    def _result_after(self, error: BaseException) -> EnvStepResult | None:
        return EnvStepResult(ended=True) if self._limited else None


def forked_agent(agent: LoadedAgent) -> CallEnvironment:
    """Build the environment of an agent in forked processes that uses an endpoint of another process. Its whole run is
    one step, whose text is the endpoint's URL and key as JSON."""

    async def run(start: EpisodeStart, text: str) -> EnvStepResult:
        base_url, key = json.loads(text)
        try:
            args = (base_url, key, AgentTask.of(start, agent.options))
            reward = await without_exit(AgentEpisode.runner, agent.run, args)
        except EpisodeFailed:
            raise
        except Exception as error:
            raise EpisodeFailed(f"the agent raised: {error_and_line(error)}") from error
        return final_result(reward, label="what the agent returned")

    return CallEnvironment(run)
