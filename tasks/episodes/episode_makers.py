"""Builders of episodes for an environment host: of an environment, an agent, or a task with a verifier and tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.environment_loader import open_environment, traits_of
from staleflow.tasks.environments.episode import Episode, start_of
from staleflow.tasks.environments.fork_server import ForkServerSettings
from staleflow.tasks.environments.forked_episodes import ForkedEpisode, ForkServer
from staleflow.tasks.episodes.agents import AgentEpisode
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent
from staleflow.tasks.episodes.tools import Tool, ToolEpisode, load_tools
from staleflow.tasks.rendering.task_source import Record
from staleflow.tasks.settings.dataset_columns import DataUse
from staleflow.tasks.settings.source_kinds import SourceType, is_agent, open_source
from staleflow.tasks.sources.reward_process import ScoredResponse, Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import SourceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMaker:
    """Creates episodes of an environment.

    Args:
        make: Creates an episode of a task from its record.
        repeatable: See EnvironmentTraits.
        score: Scores the answer of a single-turn task; None for environments.
        close: Stops the processes that the episodes share.
        tools: Tools that episodes of tasks with a verifier may call.
    """

    make: Callable[[Record], Episode]
    repeatable: bool
    score: Callable[[str, Record], ScoredResponse] | None = None
    close: Callable[[], None] = lambda: None
    tools: Mapping[str, Tool] = field(default_factory=dict)


def environment_maker(source: SourceSettings, is_eval_source: bool, endpoint: EndpointServer) -> EpisodeMaker:
    """Build the maker of an environment's episodes, with the job's isolation. Raises ConfigError.

    Args:
        source: The task source of the job.
        is_eval_source: Whether to use task.eval_source, the environment of held-out tasks.
        endpoint: The endpoint of agents.
    """
    key = "task.eval_source" if is_eval_source else "task.source"
    task, config = source.task, source.environment_config
    reference, options = (task.eval_source, source.eval_options) if is_eval_source else (task.source, source.options)
    use = DataUse.EVALUATION if is_eval_source else source.training_use
    fork_server = ForkServer(
        ForkServerSettings(source=reference, options=dict(options), key=key, memory_mib=config.memory_mib, use=use)
    )
    is_isolated = config.isolation == "process"
    if is_agent(reference):
        return agent_maker(fork_server, endpoint, is_isolated=is_isolated)
    traits = traits_of(reference, key)
    if is_isolated or traits.blocking:
        fork_server.start()
        return EpisodeMaker(
            make=lambda record: ForkedEpisode(fork_server, start_of(record)),
            repeatable=traits.repeatable,
            close=fork_server.close,
        )
    environment = open_environment(reference, options, key, use=use)
    return EpisodeMaker(make=lambda record: environment.episode(start_of(record)), repeatable=traits.repeatable)


def agent_maker(fork_server: ForkServer, endpoint: EndpointServer, *, is_isolated: bool) -> EpisodeMaker:
    """Build the maker of an agent's episodes. Raises ConfigError.

    Args:
        fork_server: Fork server with the agent's settings. It is started only if episodes run in processes.
        endpoint: The endpoint of agents.
        is_isolated: Whether every episode runs in its own process. If not, coroutines run on the host's event loop.
    """
    key, reference, options = fork_server.settings.key, fork_server.settings.source, fork_server.settings.options
    agent: LoadedAgent = open_source(SourceType.AGENT, reference, options, f"{key} = {reference!r}")
    if not (is_isolated or agent.blocking):
        return EpisodeMaker(make=lambda record: AgentEpisode(endpoint, start_of(record), agent), repeatable=False)
    fork_server.start()

    def make(record: Record) -> Episode:
        start = start_of(record)

        async def run(args: AgentArgs) -> Any:
            episode = ForkedEpisode(fork_server, start)
            try:
                await episode.begin()
                result = await episode.step(json.dumps(args[:2]), truncated=False, last=False)
            finally:
                episode.kill()
            return result.reward, dict(result.parts)

        return AgentEpisode(endpoint, start, replace(agent, run=run))

    return EpisodeMaker(make=make, repeatable=False, close=fork_server.close)


def tool_maker(scoring: ScoringSettings, config: EnvironmentConfig) -> EpisodeMaker:
    """Build the maker of episodes of tasks with a verifier, in which the model may call tools. Raises ConfigError.
    config: the job's [environment]."""
    tools = load_tools(config)
    scorer = Scorer(scoring)
    scorer.check()

    def close() -> None:
        scorer.close()
        for tool in tools.values():
            if tool.fork_server is not None:
                tool.fork_server.close()

    return EpisodeMaker(
        make=lambda record: ToolEpisode(record, tools, config),
        repeatable=True,
        score=lambda text, record: scorer.score([(text, record)])[0],
        close=close,
        tools=tools,
    )
