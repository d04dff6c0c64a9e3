"""The [environment] table of a job file."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.settings.knobs import knob

ISOLATIONS = ("auto", "process")
TOOL_NAMES = ("calculator", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Settings of the processes that run environments of several turns, and of their limits. docs/environments.md says
    how to write an environment."""

    hosts: int = knob(1, "environment hosts: processes that hold episodes", low=1, high=1024)
    max_failed_share: float = knob(
        0.5,
        "maximum share of failures among the latest hundred episodes that ended, each attempt counted and those lost "
        "with their host left out; above it the run stops",
        low=0,
        high=1,
    )
    max_turns: int = knob(16, "maximum turns of an episode; the last one ends it", low=1, high=10_000)
    tools: list[str] = knob(
        [],
        "tools that the model may call before it answers a task of a single turn; the first turn that calls none is "
        "scored",
        choices=TOOL_NAMES,
        user_code=True,
    )
    tool_timeout_s: float = knob(
        5.0, "seconds for all tool calls of one turn; a slower call returns an error text to the model", above=0
    )
    template: str = knob(
        "{observation}",
        "without task.chat: text around each observation after the first; must contain {observation}",
    )
    isolation: str = knob(
        "auto",
        "where environments run: auto: asynchronous code on its host's event loop, other code in one process per "
        "episode; "
        "process: all in one process per episode",
        choices=ISOLATIONS,
    )
    concurrency: int = knob(64, "maximum number of environment steps that a host runs at once", low=1, high=65_536)
    step_timeout_s: float = knob(
        30.0, "seconds for one step or reset of an environment; a slower one ends its episode with an error", above=0
    )
    episode_timeout_s: float = knob(
        600.0, "seconds for all environment steps of an episode together; a slower episode ends with an error", above=0
    )
    memory_mib: int = knob(
        1024,
        "MiB that an episode's process may use in addition to the loaded environment; 0: no limit. For the python "
        "tool: MiB in all; 0: 1024",
        low=0,
        high=2**30,
    )
