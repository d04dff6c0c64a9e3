"""Changes to a job's settings, in the forms that Python callers use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from staleflow.pipeline.config.knob_tree import toml_value
from staleflow.stores.errors import ConfigError

Overrides = Mapping[str, object] | Iterable[str]
"""Values by dotted key, such as {"training.learning_rate": 1e-4}, or "key=value" strings as `--set` takes them."""


def override_lines(overrides: Overrides | None) -> tuple[str, ...]:
    """Convert changes of a job to "key=value" strings. Raises ConfigError for a single string, which would be iterated
    character by character.

    >>> override_lines({"training.learning_rate": 1e-4, "reward.function": "task"})
    ('training.learning_rate=0.0001', 'reward.function="task"')
    """
    if overrides is None:
        return ()
    if isinstance(overrides, str):
        raise ConfigError(f"overrides = {overrides!r}: pass a mapping or a list of key=value strings")
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={toml_value(value)}" for key, value in overrides.items())
    return tuple(overrides)
