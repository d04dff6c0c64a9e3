"""Single-player games of the `textarena` package as environments.

Games of several players are refused, because the package has no opponents and does not list the legal moves. Some of
these games would start anyway, with the policy as all players.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.episode import error_line

RAW_SUFFIX = "-raw"
"""Suffix of a game's name without wrappers. Such a game returns only new text, not the whole transcript."""

REMEDY = "choose a game of one player, or write an environment that plays the others"


def open_game(name: str, options: Mapping[str, Any], label: str) -> Callable[[], TextArenaGame]:
    """Return a function that creates episodes of a game. Raises ConfigError. options: arguments of the game. label: its
    name in the job file."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        matches = difflib.get_close_matches(name, ENV_REGISTRY, n=1, cutoff=0.3)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise ConfigError(f"{label}: textarena has no game {name!r}{hint}")
    raw_name = f"{name}{RAW_SUFFIX}" if f"{name}{RAW_SUFFIX}" in ENV_REGISTRY else name

    def make() -> TextArenaGame:
        return TextArenaGame(textarena.make(raw_name, **options))

    problem = f"{label}: cannot be made with task.options = {dict(options)}"
    with raised_as(ConfigError, problem, Exception, describe=error_line):
        game = make()
    with raised_as(
        ConfigError, f"{label}: cannot be played by one player", Exception, remedy=REMEDY, describe=error_line
    ):
        game.reset(0)
    if not game.has_one_player:
        raise ConfigError(f"{label}: is a game of several players; {REMEDY}")
    return make


class TextArenaGame:
    """One episode of a textarena game. The reward is that of the game's player at its end."""

    def __init__(self, game: Any) -> None:
        self._game = game

    @property
    def has_one_player(self) -> bool:
        """Whether the game has a single player. Valid after `reset`."""
        from textarena.state import SinglePlayerState

        return isinstance(self._game.state, SinglePlayerState)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._game.reset(num_players=1, seed=seed)
        return self._new_text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, _ = self._game.step(action)
        if not done:
            return self._new_text(), 0.0, False, False, {}
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True, False, {}

    def _new_text(self) -> str:
        """Return the game's text since the player's last action, without the action."""
        from textarena import ObservationType

        _, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation
        # Some games repeat an action with its fields in another order, so the observation type may be in any of them.
        return "\n".join(entry[1] for entry in observation if ObservationType.PLAYER_ACTION not in entry)
