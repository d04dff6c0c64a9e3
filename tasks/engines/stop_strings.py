"""Stop strings: an engine that samples token ids looks for them in the text of a turn. Both engines share this.

Invariants: the token that completes a stop string is the last one of its turn, whatever tokens the string is spread
over. The text is what the tokenizer makes of the turn's tokens, from its first one on, special ones left out: the very
text that an agent is told, cut. A request without stop strings has no check and pays nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from staleflow.stores.in_flight.stop_criteria import find_stop
from staleflow.tasks.engines.base import Request
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, load_chat_tokenizer, load_detokenizer

SLACK = 16
"""Characters kept before what a match may need: at its begin, decoded text may differ from the middle of a text."""
MAX_TOKENS_PER_CHARACTER = 4
"""Tokens that a character may have: one for each of its bytes."""
MAX_RUN = 64
"""Times the characters that are kept, after which bytes that make no text are not waited for."""


class StopCheck:
    """Looks for stop strings in the text of a turn, token by token. tokens: of the turn so far. Used by one thread at a
    time."""

    def __init__(self, detokenizer: Detokenizer, strings: Sequence[str], tokens: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._strings = tuple(strings)
        self._window_tokens = max(map(len, self._strings)) + SLACK
        """Characters of the end of the text that the next match may begin in."""
        self._window: list[int] = []
        """The last tokens, whose text has at least so many characters, or all."""
        self.has_stopped = False
        """Whether the text has a stop string: the turn ends with the last token that was added."""
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> int:
        """Add tokens up to the one that completes a stop string; returns how many were added: all, if none does."""
        for count, token in enumerate(tokens):
            if self.has_stopped:
                return count
            self._window.append(token)
            text = self._detokenizer.text(self._window)
            self.has_stopped = find_stop(text, self._strings) is not None
            if len(text) > 4 * self._window_tokens:
                self._shorten()
        return len(tokens)

    def _shorten(self) -> None:
        """Drop about half of the tokens, the first ones, if the rest has text enough, so that a token costs a constant
        on average. Not within a character, since decoders make nothing of a run of bytes that begins so; where one ends
        is known when the last one is whole."""
        text, middle = self._detokenizer.text(self._window), max(1, len(self._window) // 2)
        if text.endswith("\ufffd") and len(text) < MAX_RUN * self._window_tokens:
            return
        for cut in range(middle, min(middle + MAX_TOKENS_PER_CHARACTER, len(self._window))):
            rest = self._detokenizer.text(self._window[cut:])
            if len(rest) < self._window_tokens:
                return
            if text.endswith(rest[SLACK:]):
                del self._window[:cut]
                return


class StopChecks:
    """Makes checks. The tokenizer is loaded for the first request that has a stop string. model: folder or hub name."""

    def __init__(self, model: str, load: Callable[[str], Detokenizer] | None = None) -> None:
        self._model = model
        self._load = load or _model_texts
        self._detokenizer: Detokenizer | None = None
        self._loading = threading.Lock()

    def prepare(self, requests: Sequence[Request]) -> None:
        """Load what these requests need, before locks are taken. Raises ConfigError if that fails."""
        if self._detokenizer is None and any(request.stop.strings for request in requests):
            with self._loading:
                self._detokenizer = self._detokenizer or self._load(self._model)

    def check(self, request: Request, sampled: Sequence[int] = ()) -> StopCheck | None:
        """The check of a request that has sampled these tokens so far; None if it has no stop string."""
        if not request.stop.strings:
            return None
        self.prepare([request])
        assert self._detokenizer is not None
        before = request.tokens[len(request.tokens) - request.num_turn_tokens :]
        return StopCheck(self._detokenizer, request.stop.strings, [*before, *sampled])


def _model_texts(model: str) -> Detokenizer:
    """A model's tokenizer: from its file where that decodes alike, which is quicker."""
    return load_detokenizer(Path(model)) or load_chat_tokenizer(model)
