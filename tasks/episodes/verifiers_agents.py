"""Tasksets of the package `verifiers` (0.4) as agents. Their environments, harnesses, rewards and train clients run
unchanged, and request token ids from the endpoint.

The train client renders the messages for the model, so the package `renderers` must know the job's tokenizer, or the
tokenizer must have a chat template.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.coroutine_environments import AgentTask
from staleflow.tasks.environments.episode import EpisodeFailed, error_line
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent, check_options

OPTION_TYPES = {"env": (dict,), "renderer": (str, dict), "tokenizer": (str,), "held_out_tasks": (int,)}
AGENT_DEFAULTS = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
"""Default settings of each agent of an environment. The package's own default runs agents in a hosted sandbox."""
UNSET_VARIABLE = "STALEFLOW_NO_KEY"
"""Name of an environment variable that is not set. The client needs no API key, because the key is part of the URL."""


def load_taskset(name: str, options: Mapping[str, Any], label: str) -> LoadedAgent:
    """Load a taskset by its id. Raises ConfigError. options: see OPTION_TYPES and docs/agents.md."""
    check_options(options, OPTION_TYPES, label)
    if (held_out := options.get("held_out_tasks", 0)) < 0:
        raise ConfigError(f"{label}: task.options.held_out_tasks = {held_out} must be at least 0")
    taskset = Taskset(name, options, label)
    return LoadedAgent(run=taskset.run, blocking=True, options={}, prepare=taskset.prepare)


class Taskset:
    """A taskset and its environment, loaded once per process."""

    def __init__(self, name: str, options: Mapping[str, Any], label: str) -> None:
        self._name, self._options, self._label = name, options, label
        self._env: Any = None
        self._client: Any = None
        self._tasks: tuple[Any, ...] = ()
        """All tasks of a finite taskset; empty for an endless one."""

    def prepare(self) -> None:
        """Load the environment that episodes share, unless it is loaded. Raises ConfigError."""
        if self._env is not None:
            return
        try:
            self._load()
        except Exception as error:
            self._env = None
            raise ConfigError(f"{self._label}: {error_line(error)}") from error

    def _load(self) -> None:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

        config = dict(self._options.get("env", {}))
        env_fields = env_config_type(self._name, config.get("id", "")).model_fields
        for role in (name for name, field in env_fields.items() if isinstance(field.default, AgentConfig)):
            config[role] = {**AGENT_DEFAULTS, **config.get(role, {})}
        config["taskset"] = {**config.get("taskset", {}), "id": self._name}
        tokenizer = self._options.get("tokenizer")
        self._client = TrainClientConfig(
            api_key_var=UNSET_VARIABLE, renderer=self._options.get("renderer"), renderer_model_name=tokenizer
        )
        self._env = load_environment(resolve_env_config(config))
        if self._env.taskset.bounded:
            self._tasks = tuple(self._env.taskset)
            if not self._tasks:
                raise ValueError("the taskset has no tasks")

    async def run(self, args: AgentArgs) -> tuple[float, dict[str, float]]:
        """Run one episode. Returns its reward and the reward's parts. Raises EpisodeFailed, ConfigError."""
        from verifiers.v1.clients import ModelContext

        base_url, key, task = args
        self.prepare()
        url = base_url.removesuffix("/v1") + f"/session/{key}/v1"
        context = ModelContext(model="policy", client=self._client.model_copy(update={"base_url": url}))
        async with self._env.serving():
            episode = await self._env.run_episode(self._task(task), context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            detail = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error was reported"
            raise EpisodeFailed(f"the taskset's episode failed: {' '.join(detail.split())[:500]}")
        rewards = [(name, r.value) for trace in episode.traces for name, r in trace.rewards.items() if r is not None]
        parts: dict[str, float] = {}
        for name, value in rewards:
            parts[name] = parts.get(name, 0.0) + float(value)
        return sum(parts.values()), parts

    def _task(self, task: AgentTask) -> Any:
        """Return the taskset's task for a task of the job. The first tasks of a finite taskset are held out, and used
        in turn. Every second task of an endless taskset is held out."""
        if not self._tasks:
            index = 2 * task.index + int(task.held_out)
            return next(itertools.islice(iter(self._env.taskset), index, None))
        default = len(self._tasks) // 10
        held_out = min(self._options.get("held_out_tasks", default), len(self._tasks) - 1)
        if held_out and task.held_out:
            return self._tasks[task.index % held_out]
        return self._tasks[held_out + task.index % (len(self._tasks) - held_out)]
