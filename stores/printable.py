"""Makes texts of models and of user code safe for terminals and logs."""

from __future__ import annotations


def printable(text: str, max_chars: int | None = None) -> str:
    r"""Make a text's control characters visible, because they could corrupt a terminal. max_chars: characters of the
    result to keep.

    >>> printable("a\x1b[2Jb", 7)
    'a\\x1b[2...'
    """
    escaped = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text[:max_chars])
    is_shortened = max_chars is not None and max(len(text), len(escaped)) > max_chars
    return f"{escaped[:max_chars]}..." if is_shortened else escaped
