"""Environments of the `skyrl-gym` package, whose tasks are rows of a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.episode import error_line
from staleflow.tasks.settings.dataset_columns import Columns, DataUse
from staleflow.tasks.sources.dataset_rows import Rows, RowSource


def open_game(name: str, options: Mapping[str, Any], label: str, data: Rows, use: DataUse) -> Callable[[], SkyRLGame]:
    """Return a function that creates episodes of an environment. Raises ConfigError.

    Args:
        options: `rows`, which names the data set, and `env_config`, settings of the environment.
        label: Name of the environment in the job file, for messages.
        data: The data set, with the column `prompt` and columns that the environment needs, such as `reward_spec`.
        use: Which rows are held out.
    """
    import skyrl_gym
    from omegaconf import OmegaConf
    from skyrl_gym.envs.registration import registry

    if name not in registry:
        raise ConfigError(f"{label}: skyrl_gym has no environment {name!r}; there are {', '.join(sorted(registry))}")
    if unknown_options := set(options) - {"rows", "env_config"}:
        raise ConfigError(
            f"{label}: task.options.{min(unknown_options)}: unknown; there are rows, the data set, and env_config"
        )
    env_config = OmegaConf.create(dict(options.get("env_config") or {}))  # environments read its keys as attributes
    rows = RowSource(data, Columns(answer=""), f"{label}: rows", use)

    def make() -> SkyRLGame:
        return SkyRLGame(lambda row: skyrl_gym.make(name, env_config=env_config, extras=row), rows)

    with raised_as(ConfigError, f"{label}: cannot be made with its first row", Exception, describe=error_line):
        make().reset(0, {"index": 0, "held_out": False})
    return make


class SkyRLGame:
    """An episode of a skyrl-gym environment on one row of the data set. Its reward is the sum of its turns' rewards."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Any], rows: RowSource) -> None:
        self._make, self._rows = make, rows
        self._env: Any = None

    def reset(self, seed: int, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        row = self._rows.task(options["index"], held_out=options["held_out"]).record
        self._env = self._make(dict(row))
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        observation, _ = self._env.init(messages)
        return prompt if observation == messages else observation, {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._env.step(action)
        return result["observations"], float(result["reward"]), bool(result["done"]), False, {}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
