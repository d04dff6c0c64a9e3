"""Environments of the `gymnasium` package whose observations and actions are written as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.episode import error_line

MAX_NUMBERS = 100
"""Numbers of an observation or action that are written out; a picture has more."""
NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m")
"""Text that a terminal shows in colour, which is how some environments mark where the player is."""


def open_game(name: str, options: Mapping[str, Any], where: str) -> Callable[[], GymnasiumGame]:
    """Return a function that creates episodes of an environment. Raises ConfigError. options: `rules`, a text that
    replaces the default explanation of the actions, and arguments of the environment. where: its name in the job
    file."""
    import gymnasium

    arguments = dict(options)
    rules = str(arguments.pop("rules", ""))
    problem = f"{where}: cannot be made with task.options = {dict(options)}"
    with raised_as(ConfigError, problem, Exception, describe=error_line):
        if "render_mode" not in arguments and "ansi" in _render_modes(gymnasium.spec(name)):
            arguments["render_mode"] = "ansi"
        trial = gymnasium.make(name, **arguments)
    try:
        for label, space in (("observations", trial.observation_space), ("actions", trial.action_space)):
            drawn = label == "observations" and trial.render_mode == "ansi"
            if not drawn and (why := _why_no_text(space, actions=label == "actions")):
                raise ConfigError(f"{where}: its {label} cannot be written as text: {why}")
    finally:
        trial.close()
    return lambda: GymnasiumGame(gymnasium.make(name, **arguments), rules or f"{name}. {_how(trial.action_space)}")


def _render_modes(spec: Any) -> list[str]:
    """The ways that an environment can be shown."""
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return list(getattr(creator, "metadata", {}).get("render_modes", []))


class GymnasiumGame:
    """One episode. An action that cannot be parsed costs a turn and changes nothing."""

    def __init__(self, env: Any, rules: str) -> None:
        self._env, self._rules = env, rules

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        observation, _ = self._env.reset(seed=seed)
        return f"{self._rules}\n{self._text(observation)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            chosen = action_of(self._env.action_space, action)
        except ValueError:
            return f"That is no action. {_how(self._env.action_space)}", 0.0, False, False, {}
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        return self._text(observation), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self._env.render_mode != "ansi":
            return text_of(self._env.observation_space, observation)
        drawn = HIGHLIGHTED.sub(r"[\1]", str(self._env.render())).strip("\n")
        if _why_no_text(self._env.observation_space, actions=False):
            return drawn
        return f"{drawn}\n{text_of(self._env.observation_space, observation)}"


def text_of(space: Any, value: Any) -> str:
    """Format an observation as text."""
    kind = _kind(space)
    if kind == "Text":
        return str(value)
    if kind == "Dict":
        return "\n".join(f"{name}: {text_of(below, value[name])}" for name, below in space.spaces.items())
    if kind == "Tuple":
        parts = zip(space.spaces, value, strict=True)
        return ", ".join(text_of(below, part) for below, part in parts)
    if kind == "Discrete":
        return str(int(value))
    return " ".join(f"{number:.4g}" for number in value.reshape(-1).tolist())


def action_of(space: Any, text: str) -> Any:
    """Parse the action at the end of a text. Raises ValueError if there is none, or it is not in the action space."""
    import numpy as np

    kind = _kind(space)
    if kind == "Text":
        action: Any = text.strip()
    else:
        numbers = [float(number) for number in re.findall(NUMBER, text)]
        size = 1 if kind == "Discrete" else math.prod(space.shape)
        if len(numbers) < size:
            raise ValueError("too few numbers")
        action_values = numbers[-size:]
        if not np.issubdtype(space.dtype, np.floating) and not all(number.is_integer() for number in action_values):
            raise ValueError("not whole numbers")
        action = (
            np.int64(action_values[0])
            if kind == "Discrete"
            else np.asarray(action_values, space.dtype).reshape(space.shape)
        )
    if not space.contains(action):
        raise ValueError("not in the space")
    return action


def _how(space: Any) -> str:
    """How an action is written."""
    kind = _kind(space)
    if kind == "Discrete":
        return f"Answer with an action, a whole number from {space.start} to {space.start + space.n - 1}."
    if kind == "Text":
        return f"Answer with an action, a text of at most {space.max_length} characters."
    count = math.prod(space.shape)
    if kind == "Box":
        return f"Answer with an action, {count} numbers from {space.low.min():g} to {space.high.max():g}."
    if kind == "MultiBinary":
        return f"Answer with an action, {count} times 0 or 1."
    return f"Answer with an action, {count} whole numbers from 0 to less than {' '.join(map(str, space.nvec.flat))}."


def _kind(space: Any) -> str:
    return type(space).__name__


def _why_no_text(space: Any, *, actions: bool) -> str:
    """Why a space has no text; empty if it has one."""
    kind = _kind(space)
    if kind in ("Discrete", "Text"):
        return ""
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        count = math.prod(space.shape)
        return "" if count <= MAX_NUMBERS else f"{kind} of {count} numbers; at most {MAX_NUMBERS} are written out"
    if kind in ("Dict", "Tuple") and not actions:
        below = space.spaces.values() if kind == "Dict" else space.spaces
        return next((reason for subspace in below if (reason := _why_no_text(subspace, actions=actions))), "")
    return f"a space of kind {kind}"
