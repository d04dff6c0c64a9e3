"""Environments of the `gymnasium` package whose observations and actions are written as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.episode import error_line

MAX_NUMBERS = 100
"""Maximum numbers of an observation or action that are written as text; images have more."""
NUMBER_PATTERN = r"-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
COLORED_TEXT = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m")
"""Text that a terminal shows in color. Some environments mark the player's position by it."""


def open_game(name: str, options: Mapping[str, Any], label: str) -> Callable[[], GymnasiumGame]:
    """Return a function that creates episodes of an environment. Raises ConfigError. options: `rules`, a text that
    replaces the default explanation of the actions, and arguments of the environment. label: its name in the job
    file."""
    import gymnasium

    arguments = dict(options)
    rules = str(arguments.pop("rules", ""))
    problem = f"{label}: cannot be made with task.options = {dict(options)}"
    with raised_as(ConfigError, problem, Exception, describe=error_line):
        if "render_mode" not in arguments and "ansi" in _render_modes(gymnasium.spec(name)):
            arguments["render_mode"] = "ansi"
        trial = gymnasium.make(name, **arguments)
    try:
        for space_name, space in (("observations", trial.observation_space), ("actions", trial.action_space)):
            text = space_name == "observations" and trial.render_mode == "ansi"
            if not text and (error := _text_error(space, actions=space_name == "actions")):
                raise ConfigError(f"{label}: its {space_name} cannot be written as text: {error}")
    finally:
        trial.close()
    rules = rules or f"{name}. {_describe_action(trial.action_space)}"
    return lambda: GymnasiumGame(gymnasium.make(name, **arguments), rules)


def _render_modes(spec: Any) -> list[str]:
    """Return the render modes of an environment."""
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return list(getattr(creator, "metadata", {}).get("render_modes", []))


class GymnasiumGame:
    """One episode of a gymnasium environment. An action that cannot be parsed takes a turn and changes nothing."""

    def __init__(self, env: Any, rules: str) -> None:
        self._env, self._rules = env, rules

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        observation, _ = self._env.reset(seed=seed)
        return f"{self._rules}\n{self._text(observation)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            parsed_action = parse_action(self._env.action_space, action)
        except ValueError:
            return f"This is not a valid action. {_describe_action(self._env.action_space)}", 0.0, False, False, {}
        observation, reward, terminated, truncated, _ = self._env.step(parsed_action)
        return self._text(observation), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self._env.render_mode != "ansi":
            return format_observation(self._env.observation_space, observation)
        text = COLORED_TEXT.sub(r"[\1]", str(self._env.render())).strip("\n")
        if _text_error(self._env.observation_space, actions=False):
            return text
        return f"{text}\n{format_observation(self._env.observation_space, observation)}"


def format_observation(space: Any, value: Any) -> str:
    """Format an observation as text."""
    space_type = _space_type(space)
    if space_type == "Text":
        return str(value)
    if space_type == "Dict":
        return "\n".join(f"{name}: {format_observation(part, value[name])}" for name, part in space.spaces.items())
    if space_type == "Tuple":
        parts = zip(space.spaces, value, strict=True)
        return ", ".join(format_observation(part, part_value) for part, part_value in parts)
    if space_type == "Discrete":
        return str(int(value))
    return " ".join(f"{number:.4g}" for number in value.reshape(-1).tolist())


def parse_action(space: Any, text: str) -> Any:
    """Parse the action at the end of a text. Raises ValueError if there is none, or it is not in the action space."""
    import numpy as np

    space_type = _space_type(space)
    if space_type == "Text":
        action: Any = text.strip()
    else:
        numbers = [float(number) for number in re.findall(NUMBER_PATTERN, text)]
        size = 1 if space_type == "Discrete" else math.prod(space.shape)
        if len(numbers) < size:
            raise ValueError("too few numbers")
        action_values = numbers[-size:]
        if not np.issubdtype(space.dtype, np.floating) and not all(number.is_integer() for number in action_values):
            raise ValueError("not whole numbers")
        if any(abs(number) >= 2**63 for number in action_values):
            raise ValueError("numbers that no space has")
        action = (
            np.int64(action_values[0])
            if space_type == "Discrete"
            else np.asarray(action_values, space.dtype).reshape(space.shape)
        )
    if not space.contains(action):
        raise ValueError("not in the space")
    return action


def _describe_action(space: Any) -> str:
    """Tell the model how to write an action."""
    space_type = _space_type(space)
    if space_type == "Discrete":
        return f"Answer with an action, a whole number from {space.start} to {space.start + space.n - 1}."
    if space_type == "Text":
        return f"Answer with an action, a text of at most {space.max_length} characters."
    count = math.prod(space.shape)
    if space_type == "Box":
        return f"Answer with an action, {count} numbers from {space.low.min():g} to {space.high.max():g}."
    if space_type == "MultiBinary":
        return f"Answer with an action, {count} times 0 or 1."
    return f"Answer with an action, {count} whole numbers from 0 to less than {' '.join(map(str, space.nvec.flat))}."


def _space_type(space: Any) -> str:
    return type(space).__name__


def _text_error(space: Any, *, actions: bool) -> str:
    """Return why values of a space cannot be written as text; empty if they can."""
    space_type = _space_type(space)
    if space_type in ("Discrete", "Text"):
        return ""
    if space_type in ("Box", "MultiDiscrete", "MultiBinary"):
        count = math.prod(space.shape)
        return "" if count <= MAX_NUMBERS else f"{space_type} of {count} numbers; at most {MAX_NUMBERS} are written out"
    if space_type in ("Dict", "Tuple") and not actions:
        subspaces = space.spaces.values() if space_type == "Dict" else space.spaces
        return next((reason for subspace in subspaces if (reason := _text_error(subspace, actions=actions))), "")
    return f"a space of kind {space_type}"
