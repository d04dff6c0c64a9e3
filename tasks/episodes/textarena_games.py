"""Single-player games of the `textarena` package as environments.

Games of several are refused: somebody must play the others, and the package says neither which moves are legal nor what
a fair opponent is. Some would begin all the same, and have the policy play both sides.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.episode import error_line

RAW = "-raw"
"""Ending of the name of a game without wrappers, which gives only what is new, instead of all that was said so far."""

OTHERS = "choose a game of one player, or write an environment that plays the others"


def open_game(name: str, options: Mapping[str, Any], where: str) -> Callable[[], TextArenaGame]:
    """Return a function that creates episodes of a game. Raises ConfigError. options: arguments of the game. where: its
    name in the job file."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = difflib.get_close_matches(name, ENV_REGISTRY, n=1, cutoff=0.3)
        raise ConfigError(f"{where}: textarena has no game {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    raw = f"{name}{RAW}" if f"{name}{RAW}" in ENV_REGISTRY else name

    def make() -> TextArenaGame:
        return TextArenaGame(textarena.make(raw, **options))

    problem = f"{where}: cannot be made with task.options = {dict(options)}"
    with raised_as(ConfigError, problem, Exception, describe=error_line):
        game = make()
    with raised_as(
        ConfigError, f"{where}: cannot be played by one player", Exception, remedy=OTHERS, describe=error_line
    ):
        game.reset(0)
    if not game.has_one_player:
        raise ConfigError(f"{where}: is a game of several players; {OTHERS}")
    return make


class TextArenaGame:
    """One game. The reward is the game's reward for its player at the end."""

    def __init__(self, game: Any) -> None:
        self._game = game

    @property
    def has_one_player(self) -> bool:
        """Whether the game has a single player; known once it has begun."""
        from textarena.state import SinglePlayerState

        return isinstance(self._game.state, SinglePlayerState)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._game.reset(num_players=1, seed=seed)
        return self._new(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, _ = self._game.step(action)
        if not done:
            return self._new(), 0.0, False, False, {}
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True, False, {}

    def _new(self) -> str:
        """What the game has said since the player's last action, without repeating that."""
        from textarena import ObservationType

        _, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation
        # Some games mix up the fields where they repeat an action: the kind is in another place then.
        return "\n".join(entry[1] for entry in observation if ObservationType.PLAYER_ACTION not in entry)
