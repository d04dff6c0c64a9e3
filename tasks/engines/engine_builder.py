"""Builds engines from their settings, in the process that samples with them."""

from __future__ import annotations

import importlib
from typing import Any

from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.engines.base import Engine
from staleflow.tasks.engines.engine_settings import EmulatedSettings, TransformersSettings, VllmSettings

MODULES: dict[type[Any], str] = {
    TransformersSettings: "staleflow.tasks.engines.transformers",
    VllmSettings: "staleflow.tasks.engines.vllm",
    EmulatedSettings: "staleflow.tasks.engines.emulated_engine",
}
"""Module of the engine of each settings class. It has a function `build(settings, instance, threads)`, and is imported
when the engine is built."""


def build_engine(settings: Any, instance: InstanceId, threads: int) -> Engine:
    """Build the engine that the settings describe. Settings of an engine from another package must have a method
    `build(instance, threads)`.

    Args:
        settings: of one of the classes in MODULES, or of another package.
        instance: the rollout instance for which the engine samples.
        threads: number of CPU threads of the engine.
    """
    if (module := MODULES.get(type(settings))) is not None:
        engine: Engine = importlib.import_module(module).build(settings, instance, threads)
    else:
        engine = settings.build(instance, threads)
    return engine
