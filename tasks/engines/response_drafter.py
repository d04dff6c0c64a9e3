"""Draft tokens for speculative decoding from known texts of the same prompt.

Known texts of a prompt are the prompt itself, the responses to it that this engine samples or has sampled, in any
epoch, and those passed to `add_response`. A draft continues with the tokens that followed the longest suffix match
among the latest occurrences of the text's last two tokens; several matches vote on each token. It ends where its tokens
are no longer likely enough to be sampled.

Invariants:
- A draft never changes what is sampled, only in how many decode steps: an engine keeps a drafted token only where the
  policy samples it (docs/speculation.md).
- Memory is bounded: each time a text is added, at most `max_indexed_tokens` are kept; or, if the texts and prompts of
  running requests alone are more, twice those.
- All methods except `begin`, `add_response` and `drafted_trajectories` must be called by the decoding thread. Those
  three are safe in any thread: each is one insertion into, or one copy of, a dict or deque, which CPython does at once,
  and the decoding thread iterates over copies. Only the decoding thread changes the index.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from staleflow.stores.trajectory import TrajectoryId

MIN_MATCH_LENGTH = 2
"""Minimum length of a match, in tokens; matches are looked up by their last two tokens."""
MAX_MATCH_LENGTH = 16
"""Length at which the comparison of a match ends, in tokens."""
MAX_OCCURRENCES = 32
"""Maximum number of occurrences of a text's last two tokens that are compared with its suffix; the latest ones."""
MAX_MATCHES = 16
"""Maximum number of matches that vote on a token; the latest ones are used."""
MIN_LIKELIHOOD = 0.3
"""Minimum probability that a draft token and all before it are accepted. Assumes that verifying one more token costs
less than this fraction of a step; above max_running requests, drafting is off."""
PRIORS = (0.2, 0.45, 0.5, 0.7, 0.85)
"""Prior probability that a drafted token is sampled, by the agreement of its matches (`_agreement`)."""
PRIOR_WEIGHT = 8
"""Weight of the prior, as a number of observations."""
DECAY_COUNT = 1000
"""Count at which counts are halved, so that old observations decay: responses change as the policy learns."""
MAX_INDEXED_TOKENS = 500_000
"""Number of indexed tokens of all prompts above which ended responses are dropped, at 12 to 150 bytes per token, more
for novel text. The texts of running requests are never dropped."""
MAX_PENDING_RESPONSES = 1024
"""Maximum number of responses of other engines that wait to be indexed, which happens when a request drafts. The latest
ones are kept."""
NO_POSITION = -1
_POSITION_MASK = (1 << 32) - 1

PredictionKind = tuple[int, int]
"""Class of a drafted token: the match's length, as a bit length, and the agreement of the votes."""


@dataclass(slots=True)
class IndexedText:
    """The tokens of a prompt or a response."""

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    previous_match: array[int] = field(default_factory=lambda: array("q"))
    """previous_match[i]: where the two tokens that end at token i were last indexed before; the position after them,
    encoded as PromptIndex says, or NO_POSITION."""


class PromptIndex:
    """Index of the known texts of one prompt. A position is encoded as text.number << 32 | position, where `position`
    is the number of tokens before it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.num_tokens = 0
        self.num_running = 0
        """Running requests whose texts are in the index."""
        self._texts: list[IndexedText] = []
        self._latest_position: dict[int, int] = {}
        """The latest encoded position after two tokens, by the tokens: first << 32 | second."""
        self._responses: dict[TrajectoryId, IndexedText] = {}
        self.extend(self._add_text(), prompt)

    def update_response(self, trajectory: TrajectoryId, tokens: Sequence[int]) -> IndexedText:
        """Return the text of a trajectory's response, updated to these tokens. If they continue its earlier text, that
        is extended."""
        text = self._responses.get(trajectory)
        if text is None or text.tokens.tolist() != list(tokens[: len(text.tokens)]):
            text = self._responses[trajectory] = self._add_text()
        self.extend(text, tokens[len(text.tokens) :])
        return text

    def add_response(self, trajectory: TrajectoryId, tokens: Sequence[int]) -> None:
        """Add a response that no request of this engine samples, unless at least as many of its tokens are indexed
        already."""
        text = self._responses.get(trajectory)
        if text is None or len(text.tokens) < len(tokens):
            self.update_response(trajectory, tokens)

    def extend(self, text: IndexedText, tokens: Sequence[int]) -> None:
        """Append tokens to a text and index them."""
        self.num_tokens += len(tokens)
        for token in tokens:
            previous = NO_POSITION
            if text.tokens:
                token_pair = text.tokens[-1] << 32 | token
                previous = self._latest_position.get(token_pair, NO_POSITION)
                self._latest_position[token_pair] = text.number << 32 | len(text.tokens) + 1
            text.tokens.append(token)
            text.previous_match.append(previous)

    def matches(self, text: IndexedText) -> tuple[int, list[tuple[IndexedText, int]]]:
        """Return the length of the longest match of a text's suffix among the latest MAX_OCCURRENCES of its last two
        tokens, and the latest MAX_MATCHES of that length as (text, position). Only those followed by a token count."""
        max_length = 0
        matches: list[tuple[IndexedText, int]] = []
        encoded_position = (
            self._latest_position[text.tokens[-2] << 32 | text.tokens[-1]]
            if len(text.tokens) >= MIN_MATCH_LENGTH
            else NO_POSITION
        )
        for _ in range(MAX_OCCURRENCES):
            if encoded_position == NO_POSITION:
                break
            other, position = self._texts[encoded_position >> 32], encoded_position & _POSITION_MASK
            encoded_position = other.previous_match[position - 1]
            if position == len(other.tokens):
                continue
            length = _common_suffix_length(text.tokens, other.tokens, position)
            if length > max_length:
                max_length, matches = length, []
            if length == max_length and len(matches) < MAX_MATCHES:
                matches.append((other, position))
        return max_length, matches

    def _add_text(self) -> IndexedText:
        self._texts.append(IndexedText(len(self._texts)))
        return self._texts[-1]


def _common_suffix_length(tokens: array[int], text: array[int], position: int) -> int:
    """Length of the common suffix of `tokens` and text[:position], at most MAX_MATCH_LENGTH."""
    limit = min(MAX_MATCH_LENGTH, len(tokens), position)
    for length in range(limit):
        if tokens[-1 - length] != text[position - 1 - length]:
            return length
    return limit


def _agreement(num_votes: int, num_matches: int) -> int:
    """Agreement class of `num_votes` out of `num_matches`: an index of PRIORS."""
    if num_votes < num_matches:
        return 2 if 2 * num_votes >= num_matches else 0
    return 1 if num_matches == 1 else 3 if num_matches < 4 else 4


class AcceptanceRates:
    """Observed acceptance rates of draft tokens, by kind."""

    def __init__(self) -> None:
        self._num_drafted: Counter[PredictionKind] = Counter()
        self._num_accepted: Counter[PredictionKind] = Counter()

    def likelihood(self, kind: PredictionKind) -> float:
        """Estimated probability that a draft token of this kind is accepted."""
        prior = PRIORS[kind[1]] * PRIOR_WEIGHT
        return (self._num_accepted[kind] + prior) / (self._num_drafted[kind] + PRIOR_WEIGHT)

    def add(self, kind: PredictionKind, *, is_accepted: bool) -> None:
        """Count one draft token."""
        self._num_drafted[kind] += 1
        self._num_accepted[kind] += is_accepted
        if self._num_drafted[kind] >= DECAY_COUNT:
            self._num_drafted[kind] //= 2
            self._num_accepted[kind] //= 2


class _Prediction(NamedTuple):
    """A token that may be sampled next."""

    token: int
    kind: PredictionKind


@dataclass(slots=True)
class _DraftedRequest:
    """A running request. Its text is indexed when it is first drafted for, or when its first token arrives.

    num_shared_tokens: length of the common prefix of context and prompt. response: the context after that prefix.
    """

    trajectory: TrajectoryId
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    num_shared_tokens: int
    index: PromptIndex | None = None
    text: IndexedText = field(default_factory=lambda: IndexedText(0))
    predictions: list[_Prediction] = field(default_factory=list)


class Drafter:
    """Drafts tokens for the running requests of one engine.

    Args:
        max_length: Maximum length of a draft, in tokens.
        max_running: No drafts while more requests run; their texts are indexed all the same.
        end_token_ids: Tokens that end a response.
        max_indexed_tokens: Indexed tokens of all prompts above which ended responses are dropped when a text is added.
    """

    def __init__(
        self,
        max_length: int,
        max_running: int,
        end_token_ids: Collection[int] = (),
        max_indexed_tokens: int = MAX_INDEXED_TOKENS,
    ) -> None:
        self._max_length = max_length
        self._max_running = max_running
        self._end_token_ids = frozenset(end_token_ids)
        self._max_indexed_tokens = max_indexed_tokens
        self._requests: dict[str, _DraftedRequest] = {}
        self._pending_responses: deque[tuple[tuple[int, ...], TrajectoryId, tuple[int, ...]]] = deque(
            maxlen=MAX_PENDING_RESPONSES
        )
        """Responses from other engines that are not indexed yet: (prompt, trajectory, tokens)."""
        self.reset()

    @property
    def num_tokens(self) -> int:
        """Number of indexed tokens of all prompts."""
        return sum(index.num_tokens for index in self._indices.values())

    def reset(self) -> None:
        """Drop all texts, requests and acceptance rates."""
        self._requests.clear()
        self._pending_responses.clear()
        self._indices: OrderedDict[tuple[int, ...], PromptIndex] = OrderedDict()
        self._acceptance = AcceptanceRates()

    def begin(self, key: str, trajectory: TrajectoryId, prompt: Sequence[int], context: Sequence[int]) -> None:
        """Add a request that starts or continues. Thread-safe.

        Args:
            prompt: The trajectory's prompt, which selects the texts.
            context: All tokens that the request is sampled after. In a branch only its first ones are the prompt's.
        """
        differing_positions = (
            i for i, (prompt_token, token) in enumerate(zip(prompt, context, strict=False)) if prompt_token != token
        )
        num_shared_tokens = next(differing_positions, min(len(prompt), len(context)))
        response = tuple(context[num_shared_tokens:])
        self._requests[key] = _DraftedRequest(trajectory, tuple(prompt), response, num_shared_tokens)

    def add_response(self, prompt: Sequence[int], trajectory: TrajectoryId, tokens: Sequence[int]) -> None:
        """Add a response that was sampled elsewhere or earlier. Thread-safe."""
        self._pending_responses.append((tuple(prompt), trajectory, tuple(tokens)))

    @property
    def drafted_trajectories(self) -> tuple[TrajectoryId, ...]:
        """Trajectories for which drafts are made; empty while too many requests are running. Thread-safe."""
        trajectories = tuple(request.trajectory for request in tuple(self._requests.values()))
        return trajectories if len(trajectories) <= self._max_running else ()

    def num_known_tokens(self, key: str) -> int | None:
        """Number of known tokens of a request, context and sampled ones; None if the request is unknown."""
        request = self._requests.get(key)
        if request is None:
            return None
        return request.num_shared_tokens + len(request.response if request.index is None else request.text.tokens)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """Add tokens that a request has sampled, and count the draft tokens that were right. Ignores unknown
        requests."""
        request = self._requests.get(key)
        if request is None:
            return
        index = self._ensure_index(request)
        for (predicted_token, kind), token in zip(request.predictions, tokens, strict=False):
            self._acceptance.add(kind, is_accepted=predicted_token == token)
            if predicted_token != token:
                break
        request.predictions = []
        index.extend(request.text, tokens)

    def draft(self, key: str, limit: int) -> list[int]:
        """Up to `limit` tokens that a request is likely to sample next; often none."""
        request = self._requests.get(key)
        if request is None or len(self._requests) > self._max_running:
            return []
        if self._pending_responses:
            self._index_pending()
        match_length, matches = self._ensure_index(request).matches(request.text)
        predictions: list[_Prediction] = []
        count, likelihood = 0, 1.0
        while matches and len(predictions) < self._max_length:
            votes = Counter(text.tokens[position] for text, position in matches)
            token, num_votes = votes.most_common(1)[0]
            length = min(match_length + len(predictions), MAX_MATCH_LENGTH)
            kind = (length.bit_length(), _agreement(num_votes, len(matches)))
            predictions.append(_Prediction(token, kind))
            likelihood *= self._acceptance.likelihood(kind)
            if likelihood < MIN_LIKELIHOOD:
                break  # the first token that is not drafted is a prediction too, so that its kind's rate is learned
            count += 1
            if token in self._end_token_ids:
                break
            matches = [
                (text, position + 1)
                for text, position in matches
                if text.tokens[position] == token and position + 1 < len(text.tokens)
            ]
        request.predictions = predictions
        return [token for token, _ in predictions[: max(0, min(count, limit))]]

    def end(self, key: str) -> None:
        """Remove a request that has ended or was stopped; its text stays in the index. Ignores unknown requests."""
        request = self._requests.pop(key, None)
        if request is not None and request.index is not None:
            request.index.num_running -= 1

    def _index_pending(self) -> None:
        """Index the pending responses, except those of trajectories that run here."""
        running = {request.trajectory for request in tuple(self._requests.values())}
        while self._pending_responses:
            prompt, trajectory, tokens = self._pending_responses.popleft()
            if trajectory not in running:
                self._index_for(prompt).add_response(trajectory, tokens)
        self._evict()

    def _index_for(self, prompt: tuple[int, ...]) -> PromptIndex:
        """The index of a prompt, created if it is missing, which becomes the most recently used one."""
        index = self._indices.get(prompt)
        if index is None:
            index = self._indices[prompt] = PromptIndex(prompt)
        self._indices.move_to_end(prompt)
        return index

    def _ensure_index(self, request: _DraftedRequest) -> PromptIndex:
        """The index that holds a request's text, which is added to it if it is not indexed yet."""
        if request.index is None:
            request.index = self._index_for(request.prompt)
            request.text = request.index.update_response(request.trajectory, request.response)
            request.index.num_running += 1
            self._evict()
        return request.index

    def _evict(self) -> None:
        """Evict least recently used prompts while there are too many tokens; for a prompt with running requests, drop
        only its ended responses. If the running texts alone are too many, only where these are half of a prompt's
        tokens or less: else each added text would have all running ones indexed again."""
        excess = self.num_tokens - self._max_indexed_tokens
        if excess <= 0:
            return
        requests = tuple(self._requests.values())  # a copy: another thread may add requests
        num_running_tokens = Counter(
            {index: len(prompt) for prompt, index in self._indices.items() if index.num_running}
        )
        for request in requests:
            if request.index is not None:
                num_running_tokens[request.index] += len(request.text.tokens)
        exceeds_alone = num_running_tokens.total() > self._max_indexed_tokens
        for prompt, index in list(self._indices.items()):
            if excess <= 0:
                return
            num_ended_tokens = index.num_tokens - num_running_tokens[index]
            if not index.num_running:
                del self._indices[prompt]
                excess -= index.num_tokens
            elif num_ended_tokens >= (index.num_tokens / 2 if exceeds_alone else 1):
                new_index = PromptIndex(prompt)
                for request in requests:
                    if request.index is index:
                        request.text = new_index.update_response(request.trajectory, request.text.tokens)
                        request.index = new_index
                        new_index.num_running += 1
                self._indices[prompt] = new_index
                excess -= index.num_tokens - new_index.num_tokens
