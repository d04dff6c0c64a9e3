"""Tools that a model may call before its answer. They turn a task with a verifier into an episode of several turns."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.episode import EnvStepResult, EpisodeFailed, EpisodeStart
from staleflow.tasks.environments.fork_server import ForkServerSettings
from staleflow.tasks.environments.forked_episodes import ForkedEpisode, ForkServer, ProcessLost
from staleflow.tasks.environments.user_tools import (
    TOOL_ROLE,
    TOOLS_KEY,
    argument_error,
    load_tool,
    read_argument,
    unnamed_argument_of,
)
from staleflow.tasks.episodes.calculator import calculate
from staleflow.tasks.episodes.sandbox import run_python
from staleflow.tasks.rendering.task_source import Message, Prompt, Record, prompt_of

MAX_CALLS_PER_TURN = 8
"""Maximum number of tool calls of one turn that are executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a model can call.

    Args:
        description: Description for the model.
        parameters: JSON schema of the arguments.
        unnamed_argument: Name of the argument that a call may pass without a name; empty if there is none.
        run: run(argument, timeout_s, config) executes a call and returns its result.
        self_test: An argument, and the result of a working tool for it.
    """

    description: str
    parameters: Mapping[str, Any]
    unnamed_argument: str
    run: Callable[[str, float, EnvironmentConfig], Awaitable[str]]
    self_test: tuple[str, str] = ("", "")
    fork_server: ForkServer | None = field(default=None, compare=False)
    """Forks a process for each call of a user's tool, whose `run` receives all arguments as JSON; None for built-in
    tools."""


async def _run_calculator(text: str, timeout_s: float, config: EnvironmentConfig) -> str:
    return calculate(text)


async def _run_python(text: str, timeout_s: float, config: EnvironmentConfig) -> str:
    return await run_python(text, timeout_s=timeout_s, memory_mib=config.memory_mib)


def _text_argument_schema(argument: str, meaning: str) -> dict[str, Any]:
    """Build the JSON schema of one text argument."""
    properties = {argument: {"type": "string", "description": meaning}}
    return {"type": "object", "properties": properties, "required": [argument]}


TOOLS = {
    "calculator": Tool(
        description="Computes an arithmetic expression.",
        parameters=_text_argument_schema("expression", "such as 12 * 7"),
        unnamed_argument="expression",
        run=_run_calculator,
        self_test=("6 * 7", "42"),
    ),
    "python": Tool(
        description="Runs Python code; returns its output, and the value of a last expression.",
        parameters=_text_argument_schema("code", "such as print(12 * 7)"),
        unnamed_argument="code",
        run=_run_python,
        self_test=("import math; math.gcd(12, 18)", "6"),
    ),
}
"""Built-in tools, by name in a job file (TOOL_NAMES)."""


def load_tools(config: EnvironmentConfig) -> dict[str, Tool]:
    """Load the tools of a job, by name for the model. Starts no process. Raises ConfigError."""
    tools: dict[str, Tool] = {}
    for reference in config.tools:
        name, tool = (reference, TOOLS[reference]) if reference in TOOLS else _load_user_tool(reference, config)
        if name in tools or name == "tool_call":
            raise ConfigError(f"{TOOLS_KEY}: {reference!r}: another tool has the name {name}; rename the function")
        tools[name] = tool
    return tools


def _load_user_tool(reference: str, config: EnvironmentConfig) -> tuple[str, Tool]:
    """Load a user's tool. Returns its name and the tool. Raises ConfigError."""
    user_tool = load_tool(reference)
    server = ForkServer(ForkServerSettings(source=reference, options={}, key=TOOLS_KEY, memory_mib=config.memory_mib))
    return user_tool.name, Tool(
        description=user_tool.description,
        parameters=user_tool.parameters,
        unnamed_argument=unnamed_argument_of(user_tool.parameters),
        run=functools.partial(_call_user_tool, server),
        fork_server=server,
    )


async def _call_user_tool(server: ForkServer, arguments: str, timeout_s: float, config: EnvironmentConfig) -> str:
    """Call a user's tool in a new process, which is killed afterwards. Returns the result as text, or a line that
    begins with `error:`. Raises EpisodeFailed if the process cannot be started in time or was lost, which is no fault
    of the call."""
    episode = ForkedEpisode(server, EpisodeStart(index=0, held_out=False, seed=0))
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    try:
        try:
            async with asyncio.timeout(config.tool_timeout_s):  # little may be left of the turn's time
                await episode.begin()
        except TimeoutError as error:
            raise EpisodeFailed(f"a tool's process did not start within {config.tool_timeout_s:.3g} s") from error
        try:
            async with asyncio.timeout_at(deadline_s):
                result = await episode.step(arguments, truncated=False, last=False)
        except TimeoutError:
            return f"error: stopped after {timeout_s:.3g} s"
        except ProcessLost:
            raise
        except EpisodeFailed as error:
            return f"error: {error}"
    finally:
        episode.kill()
    return result.messages[0].content


def describe_tools(config: EnvironmentConfig) -> str:
    """Describe the tools of a job for the model, one line of JSON per tool. Raises ConfigError."""
    return "\n".join(
        json.dumps(
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": tool.parameters},
            },
            ensure_ascii=False,
        )
        for name, tool in load_tools(config).items()
    )


async def check_tools(tools: Mapping[str, Tool], config: EnvironmentConfig) -> None:
    """Raise ConfigError for a tool that does not work on this machine. Starts the fork servers of users' tools."""
    for name, tool in tools.items():
        if tool.fork_server is not None:
            await asyncio.to_thread(tool.fork_server.start)
            continue
        argument, expected_output = tool.self_test
        output = await tool.run(argument, config.tool_timeout_s, config)
        if output != expected_output:
            raise ConfigError(
                f"environment.tools: {name} does not work on this machine: "
                f"{argument} gave {' '.join(output.split())!r}; "
                "raise environment.memory_mib or environment.tool_timeout_s, or remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in a model's turn. argument: its text, or all arguments as JSON for a user's tool. error: why it
    cannot be executed; empty if it can. is_tagged: whether it is written as <name>argument</name>."""

    name: str = ""
    argument: str = ""
    error: str = ""
    is_tagged: bool = False


def parse_tool_calls(turn: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
    """Parse the tool calls in a model's turn, in order. A call is <tool_call>{"name": ..., "arguments":
    {...}}</tool_call>, or the argument in a tag with the tool's name. The last closing tag may be missing, because it
    may be a stop string.

    >>> [c.argument for c in parse_tool_calls("So <calculator>1 + 1</calculator>", TOOLS)]
    ['1 + 1']
    """
    tags = "|".join(map(re.escape, ("tool_call", *tools)))
    calls = []
    for tag, text in re.findall(rf"<({tags})>(.*?)(?:</\1>|\Z)", turn, re.DOTALL):
        calls.append(_json_call(text, tools) if tag == "tool_call" else _tagged_call(tag, text, tools[tag]))
    return calls


def _tagged_call(name: str, text: str, tool: Tool) -> ToolCall:
    if tool.fork_server is None:
        return ToolCall(name=name, argument=text, is_tagged=True)
    if not tool.unnamed_argument:
        arguments = ", ".join(tool.parameters["properties"])
        error = (
            f'call it as <tool_call>{{"name": "{name}", "arguments": {{...}}}}</tool_call>, with {arguments or "none"}'
        )
        return ToolCall(name=name, error=error, is_tagged=True)
    value = read_argument(text.strip(), tool.parameters["properties"][tool.unnamed_argument])
    return _user_tool_call(name, {tool.unnamed_argument: value}, tool, is_tagged=True)


def _user_tool_call(name: str, arguments: Mapping[str, Any], tool: Tool, *, is_tagged: bool = False) -> ToolCall:
    if error := argument_error(arguments, tool.parameters):
        return ToolCall(name=name, error=f"{name}: {error}", is_tagged=is_tagged)
    return ToolCall(name=name, argument=json.dumps(arguments), is_tagged=is_tagged)


def _json_call(text: str, tools: Mapping[str, Tool]) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='a call is {"name": ..., "arguments": {...}}')
    tool = tools.get(call["name"])
    if tool is None:
        return ToolCall(error=f"there is no tool {call['name']}; there are {', '.join(tools)}")
    arguments: Any = call.get("arguments", call.get("parameters"))
    arguments = _decoded(arguments, tool) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        if not tool.unnamed_argument:
            names = ", ".join(tool.parameters["properties"]) or "none"
            return ToolCall(error=f"{call['name']}: arguments must be an object, of {names}")
        arguments = {tool.unnamed_argument: arguments}
    if tool.fork_server is not None:
        return _user_tool_call(call["name"], arguments, tool)
    argument = arguments.get(tool.unnamed_argument)
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        argument = str(argument)
    if not isinstance(argument, str):
        return ToolCall(error=f'{call["name"]} takes {{"{tool.unnamed_argument}": text}}')
    return ToolCall(name=call["name"], argument=argument)


def _decoded(text: str, tool: Tool) -> Any:
    """Decode arguments that were written as a text, as in OpenAI's format. A text that is no JSON object is returned;
    so is, for a built-in tool, an object with other keys, such as code."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_object = isinstance(arguments, dict) and (
        tool.fork_server is not None or arguments.keys() <= tool.parameters["properties"].keys()
    )
    return arguments if is_object else text


class ToolEpisode:
    """An episode of a task with a verifier. Turns with tool calls are followed by the results of the calls. The first
    turn without tool calls is the answer, which is scored; so are a truncated turn and the last possible one."""

    def __init__(self, record: Record, tools: Mapping[str, Tool], config: EnvironmentConfig) -> None:
        self._record, self._tools, self._config = record, tools, config
        self._last_turn = ""

    async def begin(self) -> Prompt:
        return prompt_of(self._record["prompt"])

    async def step(self, text: str, *, truncated: bool, last: bool) -> EnvStepResult:
        self._last_turn = text
        calls = [] if truncated or last else parse_tool_calls(text, self._tools)
        if not calls:
            return await self.end_early()
        deadline = time.monotonic() + self._config.tool_timeout_s
        results = []
        for index, call in enumerate(calls):
            error = call.error
            if index >= MAX_CALLS_PER_TURN:
                error = f"a turn may call at most {MAX_CALLS_PER_TURN} tools"
            timeout_s = deadline - time.monotonic()
            if timeout_s <= 0:
                error = f"the calls of this turn took longer than {self._config.tool_timeout_s:g} s"
            result = (
                f"error: {error}" if error else await self._tools[call.name].run(call.argument, timeout_s, self._config)
            )
            result = result.encode("utf-8", "replace").decode()  # a model's JSON may name a lone surrogate
            results.append(Message(TOOL_ROLE, f"<result>{result}</result>" if call.is_tagged else result))
            if index >= MAX_CALLS_PER_TURN:
                break
        return EnvStepResult(messages=tuple(results))

    async def end_early(self) -> EnvStepResult:
        return EnvStepResult(ended=True, answer=self._last_turn)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def kill(self) -> None:
        """Do nothing: cancelling a running step also ends the processes that it started."""
