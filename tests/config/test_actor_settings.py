"""Settings of actors follow the job and can be pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.actor_settings import engine_settings, policy_settings
from staleflow.tasks.engines.engine_settings import (
    ENGINES,
    EmulatedSettings,
    EngineSettings,
    Speculation,
    TransformersSettings,
    VllmSettings,
)
from staleflow.tasks.settings.seeds import engine_seed

JOB = ("model.path=somewhere", "seed=3", "rollout.engine.max_running=7", "rollout.engine.page_tokens=8")
MODEL: dict[str, Any] = {
    "model": "somewhere", "dtype": "float32", "device": "auto", "temperature": 1.0, "max_running": 7,
    "kv_tokens": 16384, "page_tokens": 8, "max_batch_tokens": 1024, "eos": (1, 2), "seed": engine_seed(3, 2, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES.names)
def test_engine_settings_follow_the_job(name: str) -> None:
    own = {
        "vllm": ("rollout.engine.tensor_parallel=2", "rollout.engine.options={a=1}", "rollout.on_pull=keep"),
        "transformers": (
            "rollout.engine.speculation.num_speculative_tokens=5",
            "rollout.engine.speculation.disable_above=2",
            "rollout.on_pull=keep",
        ),
        "emulated": ("rollout.engine.time_scale=9", "simulation.pull_s=2", "rollout.on_pull=keep"),
    }.get(name, ())
    config = loading.load("examples/longtail.toml", (*JOB, f"rollout.engine.name={name}", *own))
    settings = engine_settings(config, 2, (1, 2))
    if name == "emulated":
        assert isinstance(settings, EmulatedSettings)
        assert (settings.time_scale, settings.pull_s) == (9.0, 2.0)
        assert settings.keep_cache and settings.members_per_group == 8
        assert settings.max_running == 7 and settings.workload.prompt_tokens(0) == config.workload.prompt_tokens
        assert pickle.loads(pickle.dumps(settings)).cost == settings.cost
    else:
        known = MODEL | {"kv_tokens": config.rollout.engine.kv_tokens}
        known["max_batch_tokens"] = config.rollout.engine.max_batch_tokens
        make_expected: dict[str, Callable[[], EngineSettings]] = {
            "transformers": lambda: TransformersSettings(
                **known, keep_cache=True, speculation=Speculation(num_speculative_tokens=5, disable_above=2)
            ),
            "vllm": lambda: VllmSettings(**known, keep_cache=True, tensor_parallel=2, options={"a": 1}),
        }
        assert pickle.loads(pickle.dumps(settings)) == settings == make_expected[name]()


def test_trainer_settings_have_the_training_table() -> None:
    config = loading.load(
        "examples/longtail.toml", (*JOB, "rollout.engine.name=transformers", "training.minibatches=2")
    )
    settings = pickle.loads(pickle.dumps(policy_settings(config)))
    assert settings.training == config.training
    assert (settings.model, settings.num_steps, settings.seed) == ("somewhere", config.steps, 3)


def test_emulated_instances_have_the_costs_of_simulated_ones() -> None:
    job = ("rollout.instances=4", "simulation.straggler_share=0.25", "simulation.straggler_factor=3")
    config = loading.load("examples/dryrun.toml", job)
    costs = []
    for index in range(4):
        settings = engine_settings(config, index, ())
        assert isinstance(settings, EmulatedSettings)
        costs.append(settings.cost)
    assert costs == [config.rollout.cost.scaled(3.0), *[config.rollout.cost] * 3]
