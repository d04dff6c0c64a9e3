"""Serves the policy of a run's checkpoint, or a model, with one engine on this machine (`staleflow serve`, `chat` and
`eval`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.knob_tree import with_values
from staleflow.pipeline.config.model_facts import ModelFacts, inspect_model
from staleflow.pipeline.config.model_files import find_model_folder, read_context_length, read_vocabulary_size
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.run_folder import find_checkpoint
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.endpoint.served_policy import ServedPolicy
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.rendering.chat_tokenizer import load_chat_tokenizer
from staleflow.tasks.settings.endpoint_settings import EndpointConfig, EndpointSettings

DEFAULT_MAX_NEW_TOKENS = 512
"""Maximum response length of a model without a job; half of the context if that is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The model that is served, and the settings of its engine."""

    config: RunConfig
    """The run's job with `model.path` set to the checkpoint; default settings for a model without a run."""
    facts: ModelFacts
    label: str
    """Name of the model for display, such as `step-000100 of first`."""
    version: int | None = None
    """Policy version of a run's checkpoint; None for a model without a run."""

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its response."""
        return min(self.facts.context_length, self.config.rollout.engine.kv_tokens)

    @contextlib.asynccontextmanager
    async def serve(self, endpoint: EndpointConfig, key: str) -> AsyncIterator[EndpointServer]:
        """Context manager: the model behind an endpoint with this API key. Raises ConfigError if the address cannot be
        used."""
        settings = EndpointSettings(
            config=endpoint,
            model=self.label,
            temperature=self.config.rollout.temperature,
            vocabulary=read_vocabulary_size(self.config.model.path),
        )
        async with contextlib.AsyncExitStack() as stack:
            policy = self.build(key)
            stack.callback(policy.close)
            server = EndpointServer(settings, policy)
            stack.push_async_callback(server.stop)
            await server.start()
            yield server

    def build(self, key: str) -> ServedPolicy:
        """Load the model, and start its engine on the running event loop. key: API key of the endpoint."""
        config = self.config
        settings = actor_settings.engine_settings(config, 0, self.facts.eos, attempt=int(time.time()) % 2**20)
        tokenizer = load_chat_tokenizer(config.model.path)  # before the engine, which nothing would close if it fails
        return ServedPolicy(
            build_engine(settings, InstanceId("serving"), config.cluster.threads),
            tokenizer,
            key,
            chat=next(iter(config.task.sources_by_name.values())).chat,
            observation_template=config.environment.template,
            max_context=self.context,
            max_new_tokens=config.rollout.max_new_tokens,
        )


def make_serving_plan(target: str, overrides: tuple[str, ...] = (), *, step: int | None = None) -> ServingPlan:
    """Plan to serve a checkpoint of a run, or a model. Raises ConfigError. target: folder of the run, or folder or name
    of the model. step: step of the checkpoint; None: the newest."""
    path = Path(target)
    for override in overrides:
        if override.partition("=")[0] in ("model", "model.path"):
            raise ConfigError(
                f"--set {override}: the model is that of {target}; serve another one by its own name, and set only "
                "model.dtype and model.device"
            )
    if not (path / "config.toml").is_file():
        if step is not None:
            raise ConfigError(f"--step = {step}: {target} is a model without a run; leave out --step")
        folder = find_model_folder(target, "MODEL")
        max_new_tokens = (
            DEFAULT_MAX_NEW_TOKENS
            if folder is None
            else min(DEFAULT_MAX_NEW_TOKENS, read_context_length(folder, target) // 2)
        )
        tree: dict[str, Any] = {"model": {"path": target}, "rollout": {"max_new_tokens": max_new_tokens}}
        config = loading.from_tree_with_overrides(tree, overrides, target)
        _require_policy(config, target)
        facts = inspect_model(config, "MODEL")
        if "chat" not in tree.get("task", {}):  # which the overrides have changed
            chat = load_chat_tokenizer(target).has_chat_template
            config = with_values(config, {"task.chat": chat})
        return ServingPlan(config=config, facts=facts, label=target)
    config = loading.load(path / "config.toml", overrides)
    _require_policy(config, target)
    version, checkpoint = find_checkpoint(path, step)
    config = with_values(config, {"model.path": str(checkpoint)})
    label = f"{checkpoint.name} of {path.name}"
    return ServingPlan(config=config, facts=inspect_model(config), label=label, version=version)


def _require_policy(config: RunConfig, target: str) -> None:
    """Raise ConfigError if the engine is emulated, because it samples random tokens."""
    if config.emulated:
        raise ConfigError(
            f"{target}: its engine is emulated, so it has no policy to serve; choose another run, or another "
            "rollout.engine.name"
        )
