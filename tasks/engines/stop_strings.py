"""Search for stop strings in the text of a turn, for engines that sample token ids.

Invariants: the token that completes a stop string is the last token of its turn, however many tokens the string has.
The text is the decoded text of all tokens of the turn without special tokens, as agents receive it. A request without
stop strings has no check and no cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from staleflow.stores.in_flight.stop_criteria import find_stop
from staleflow.tasks.engines.base import Request
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, load_chat_tokenizer, load_detokenizer

MARGIN_CHARS = 16
"""Characters kept before the part that a match may need, because the first characters of a decoded window may differ
from the full text."""
MAX_TOKENS_PER_CHARACTER = 4
"""Maximum number of tokens of one character: one for each of its bytes."""
MAX_UNDECODED_WINDOWS = 64
"""Length of the window, in multiples of `_window_chars`, above which it is shortened even if it ends in an incomplete
character."""


class StopCheck:
    """Searches the text of one turn for stop strings, token by token. tokens: the turn's tokens so far. Not
    thread-safe."""

    def __init__(self, detokenizer: Detokenizer, strings: Sequence[str], tokens: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._strings = tuple(strings)
        self._window_chars = max(map(len, self._strings)) + MARGIN_CHARS
        """Number of characters at the end of the text in which the next match may begin, with a margin."""
        self._window: list[int] = []
        """The last tokens of the turn. Their text has at least `_window_chars` characters, unless the whole turn is
        shorter."""
        self.has_stopped = False
        """Whether the text has a stop string. The last token that was added completes it."""
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> int:
        """Add tokens up to the one that completes a stop string. Returns the number of added tokens."""
        for count, token in enumerate(tokens):
            if self.has_stopped:
                return count
            self._window.append(token)
            text = self._detokenizer.text(self._window)
            self.has_stopped = find_stop(text, self._strings) is not None
            if len(text) > 4 * self._window_chars:
                self._shorten()
        return len(tokens)

    def _shorten(self) -> None:
        """Drop about the first half of the window if the rest has enough text, so that the cost of a token is constant
        on average. The cut is never inside a character, which could not be decoded; it is chosen only when the last
        character is complete."""
        text, middle = self._detokenizer.text(self._window), max(1, len(self._window) // 2)
        if text.endswith("\ufffd") and len(text) < MAX_UNDECODED_WINDOWS * self._window_chars:
            return
        for cut in range(middle, min(middle + MAX_TOKENS_PER_CHARACTER, len(self._window))):
            rest = self._detokenizer.text(self._window[cut:])
            if len(rest) < self._window_chars:
                return
            if text.endswith(rest[MARGIN_CHARS:]):
                del self._window[:cut]
                return


class StopChecks:
    """Creates the StopCheck of each request, and loads the tokenizer for the first request with stop strings. model:
    folder or hub name."""

    def __init__(self, model: str, load: Callable[[str], Detokenizer] | None = None) -> None:
        self._model = model
        self._load = load or _load_detokenizer
        self._detokenizer: Detokenizer | None = None
        self._loading = threading.Lock()

    def prepare(self, requests: Sequence[Request]) -> None:
        """Load the tokenizer if these requests need it; call it before locking. Raises ConfigError if that fails."""
        if self._detokenizer is None and any(request.stop.strings for request in requests):
            with self._loading:
                self._detokenizer = self._detokenizer or self._load(self._model)

    def make_check(self, request: Request, sampled: Sequence[int] = ()) -> StopCheck | None:
        """Create the check for a request that has sampled these tokens so far; None if it has no stop strings."""
        if not request.stop.strings:
            return None
        self.prepare([request])
        assert self._detokenizer is not None
        earlier = request.tokens[len(request.tokens) - request.num_turn_tokens :]
        return StopCheck(self._detokenizer, request.stop.strings, [*earlier, *sampled])


def _load_detokenizer(model: str) -> Detokenizer:
    """Load a model's tokenizer: from tokenizer.json if that decodes equally, which is faster."""
    return load_detokenizer(Path(model)) or load_chat_tokenizer(model)
