"""Tools that a model may call before it answers: a task with a verifier becomes an episode of several turns."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from stores.errors import ConfigError
from tasks.episodes.calculator import calculate
from tasks.episodes.episode import Said
from tasks.episodes.limits import EnvironmentConfig
from tasks.episodes.sandbox import run_python
from tasks.task_source import Message, Prompt, Record, prompt_of

MOST_CALLS = 8
"""Calls of one turn that are carried out."""
GIVEN_BACK = "tool"
"""Role of what a tool gives back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool. argument: name of its one argument in a call as JSON. run: takes that text, the seconds left and the
    limits, and returns what is given back. trial: an argument, and what is given back for it where the tool works."""

    argument: str
    run: Callable[[str, float, EnvironmentConfig], Awaitable[str]]
    trial: tuple[str, str]


async def _calculator(text: str, left_s: float, limits: EnvironmentConfig) -> str:
    return calculate(text)


async def _python(text: str, left_s: float, limits: EnvironmentConfig) -> str:
    return await run_python(text, within_s=left_s, memory_mib=limits.memory_mib)


TOOLS = {
    "calculator": Tool(argument="expression", run=_calculator, trial=("6 * 7", "42")),
    "python": Tool(argument="code", run=_python, trial=("import math; math.gcd(12, 18)", "6")),
}
"""Tools by their names in a job file, which TOOL_NAMES lists."""


async def check_tools(limits: EnvironmentConfig) -> None:
    """Raise ConfigError for a tool of a job that does not work on this machine."""
    for name in limits.tools:
        argument, expected = TOOLS[name].trial
        found = await TOOLS[name].run(argument, limits.step_s, limits)
        if found != expected:
            raise ConfigError(
                f"environment.tools: {name} does not work on this machine: "
                f"{argument} gave {' '.join(found.split())!r}; raise environment.memory_mib, or remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool in a model's turn. problem: why it cannot be carried out. tagged: it is <name>text</name>."""

    name: str = ""
    text: str = ""
    problem: str = ""
    tagged: bool = False


def tool_calls(turn: str, tools: dict[str, Tool]) -> list[ToolCall]:
    """The calls in a model's turn, in order: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or the tool's
    name as a tag around the argument. The last closing tag may be missing: it may be what ended the turn.

    >>> [c.text for c in tool_calls("So <calculator>1 + 1</calculator>", TOOLS)]
    ['1 + 1']
    """
    tags = "|".join(map(re.escape, ("tool_call", *tools)))
    found = []
    for tag, text in re.findall(rf"<({tags})>(.*?)(?:</\1>|\Z)", turn, re.DOTALL):
        found.append(_json_call(text, tools) if tag == "tool_call" else ToolCall(name=tag, text=text, tagged=True))
    return found


def _json_call(text: str, tools: dict[str, Tool]) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='a call is {"name": ..., "arguments": {...}}')
    tool = tools.get(call["name"])
    if tool is None:
        return ToolCall(problem=f"there is no tool {call['name']}; there are {', '.join(tools)}")
    arguments: Any = call.get("arguments", call.get("parameters"))
    argument = arguments.get(tool.argument) if isinstance(arguments, dict) else arguments
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        argument = str(argument)
    if not isinstance(argument, str):
        return ToolCall(problem=f'{call["name"]} takes {{"{tool.argument}": text}}')
    return ToolCall(name=call["name"], text=argument)


class ToolEpisode:
    """An episode of a task with a verifier: turns that call tools are given the results, and the first one that calls
    none is the answer, to be scored. So is a turn that is cut, or the last one that may be taken."""

    def __init__(self, record: Record, tools: dict[str, Tool], limits: EnvironmentConfig) -> None:
        self._record, self._tools, self._limits = record, tools, limits

    async def begin(self) -> Prompt:
        return prompt_of(self._record["prompt"])

    async def step(self, text: str, *, cut: bool, last: bool) -> Said:
        calls = [] if cut or last else tool_calls(text, self._tools)
        if not calls:
            return Said(ended=True, answer=text)
        end = time.monotonic() + self._limits.tool_s
        results = []
        for number, call in enumerate(calls):
            problem = call.problem
            if number >= MOST_CALLS:
                problem = f"a turn may call at most {MOST_CALLS} tools"
            left_s = end - time.monotonic()
            if left_s <= 0:
                problem = f"the calls of this turn took longer than {self._limits.tool_s:g} s"
            result = (
                f"error: {problem}" if problem else await self._tools[call.name].run(call.text, left_s, self._limits)
            )
            results.append(Message(GIVEN_BACK, f"<result>{result}</result>" if call.tagged else result))
            if number >= MOST_CALLS:
                break
        return Said(messages=tuple(results))

    async def close(self) -> None:
        """There is nothing to release."""

    def abandon(self) -> None:
        """The step that runs is cancelled by whoever waits for it, and what it started ends with it."""
