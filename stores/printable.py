"""Makes texts of models and of user code safe for terminals and logs."""

from __future__ import annotations


def printable(text: str, max_chars: int | None = None) -> str:
    r"""Make a text's control characters visible, because they could corrupt a terminal. max_chars: characters to keep.

    >>> printable("a\x1b[2Jb", 5)
    'a\\x1b[2J...'
    """
    short_text = text if max_chars is None or len(text) <= max_chars else text[:max_chars]
    escaped = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in short_text)
    return escaped if len(short_text) == len(text) else f"{escaped}..."
