"""The policy of a finished run, or of a checkpoint, served by one engine on this machine."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.model_facts import ModelFacts, inspect_model
from staleflow.pipeline.config.model_files import find_model, read_context
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.endpoint.served_policy import ServedPolicy
from staleflow.tasks.engines.engine_builder import build_engine
from staleflow.tasks.rendering.chat_tokenizer import tokenizer_texts

ANSWER_TOKENS = 512
"""Most tokens that a model without a job answers, if its context is at least twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """What `staleflow serve` serves."""

    config: RunConfig
    """The run's job, of this model; the defaults for a checkpoint alone."""
    facts: ModelFacts
    label: str
    """In words."""

    def build(self, key: str) -> ServedPolicy:
        """Load the model, and begin to answer; on the present event loop."""
        config = self.config
        settings = actor_settings.engine_settings(config, 0, self.facts.eos, attempt=int(time.time()) % 2**20)
        engine = build_engine(settings, InstanceId("serving"), config.cluster.threads)
        return ServedPolicy(
            engine,
            tokenizer_texts(config.model.path),
            key,
            chat=next(iter(config.task.named.values())).chat,
            template=config.environment.template,
            room=min(self.facts.context, config.rollout.engine.kv_tokens),
            max_new_tokens=config.rollout.max_new_tokens,
        )


def serving_plan(named: str, overrides: tuple[str, ...] = ()) -> ServingPlan:
    """Find what to serve: of a run's folder its newest checkpoint, or a model's folder. Raises ConfigError."""
    path = Path(named)
    if not (path / "config.toml").is_file():
        folder = find_model(named, "MODEL")
        most = ANSWER_TOKENS if folder is None else min(ANSWER_TOKENS, read_context(folder, named) // 2)
        tree = {"model": {"path": named}, "rollout": {"max_new_tokens": most}}
        config = loading.from_overridden(tree, overrides, named)
        facts = inspect_model(config, "MODEL")
        chat = tokenizer_texts(named).has_chat_template
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, chat=chat))
        return ServingPlan(config=config, facts=facts, label=named)
    config = loading.load(path / "config.toml", overrides)
    if config.emulated:
        raise ConfigError(f"{named}: its engine is emulated, so it has no policy to serve")
    checkpoints = sorted((path / "checkpoints").glob("step-*"))
    if not checkpoints:
        raise ConfigError(f"{named}: the run has no checkpoint; let it end, or set training.checkpoint_every")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(checkpoints[-1])))
    return ServingPlan(config=config, facts=inspect_model(config), label=f"{checkpoints[-1].name} of {path.name}")
