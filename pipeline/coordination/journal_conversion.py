"""Conversion of journal entries that commit 9e20fc41 wrote: events, commands and fields had other names. Pure."""

from __future__ import annotations

from typing import Any

TYPES = {
    "Act": "StepEnvironment",
    "Conclude": "FinishEvaluation",
    "Dismiss": "CloseEnvironment",
    "Draw": "FetchPrompts",
    "EnvironmentAnswered": "EnvironmentStepped",
    "Forget": "ReleaseCache",
    "Retire": "Discard",
    "Speculate": "SetDraftLength",
    "StepsTaken": "DecodeStats",
}
"""Names of events and commands, and those they have now."""
FIELDS = {"cut": "truncated", "epoch": "route_number", "safe": "delivered", "unanswered": "failed"}
"""Names of fields, and those they have now. No type has a field of such a name any more."""


def convert_entry(value: Any) -> Any:
    """An entry, as parsed from its JSON line, under the names of this version. Does not modify `value`; one that needs
    no conversion comes back equal.

    >>> convert_entry({"type": "Act", "epoch": 2, "cause": "EnvironmentAnswered#7"})
    {'type': 'StepEnvironment', 'route_number': 2, 'cause': 'EnvironmentStepped#7'}
    """
    if isinstance(value, list):
        return [convert_entry(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {FIELDS.get(key, key): convert_entry(item) for key, item in value.items()}
    if isinstance(kind := value.get("type"), str):
        converted["type"] = TYPES.get(kind, kind)
    if isinstance(cause := value.get("cause"), str):  # the event's name and number
        kind, mark, number = cause.partition("#")
        converted["cause"] = f"{TYPES.get(kind, kind)}{mark}{number}"
    return converted
