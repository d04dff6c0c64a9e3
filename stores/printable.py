"""Texts of models and of user code, as terminals and logs may be shown them."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    r"""Make a text's control characters visible, which could corrupt a terminal. most: characters that are kept.

    >>> printable("a\x1b[2Jb", 5)
    'a\\x1b[2J...'
    """
    kept = text if most is None or len(text) <= most else text[:most]
    escaped = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in kept)
    return escaped if len(kept) == len(text) else f"{escaped}..."
