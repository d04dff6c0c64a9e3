"""Drafts for speculative sampling: what is likely to come next, by the texts that are known of the same prompt.

Known of a prompt are: itself, the responses to it that run here, those that ended here in any epoch, and what `learn`
was told of. A draft goes on as those places go on that share the longest end with the response so far; they vote, token
by token. It ends where it is no longer likely enough to be sampled.

Invariants: a draft never changes what is sampled, only in how many decode steps: an engine keeps a drafted token only
where the policy samples it (docs/speculation.md). Memory is bounded. Pure. All but `begin`, `add_response` and
`running` is called by the thread that decodes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from staleflow.stores.trajectory import TrajectoryId

MATCH = 2
"""Tokens that another place must share with a response's end. Places are found by them."""
LONGEST_MATCH = 16
"""Tokens beyond which a longer match counts as no better."""
PLACES = 16
"""Places that vote at most, the latest ones."""
LIKELY = 0.3
"""Least probability that a drafted token and all before it are sampled. To verify one token more should cost less than
this share of a step's time; where it costs more, there should be no drafts at all (most_running)."""
PRIORS = (0.2, 0.45, 0.5, 0.7, 0.85)
"""Probability of a drafted token by how its places agree (`_agreement`), as long as nothing is known of it."""
PRIOR_WEIGHT = 8
"""DraftOutcomes after which what was observed weighs as much as the prior."""
REMEMBERED = 1000
"""DraftOutcomes of a kind at which all so far begin to count half: responses change as the policy learns."""
MOST_TOKENS = 500_000
"""Tokens that are known of all prompts together; one takes 12 to 150 bytes, the more the less it repeats others."""
NOWHERE = -1
_LOW = (1 << 32) - 1

Kind = tuple[int, int]
"""Drafted tokens of one kind have matches of similar length, and places that agree alike."""


@dataclass(slots=True)
class Text:
    """Tokens of a prompt or of a response. before: by token, the last place before it with the same MATCH tokens."""

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    before: array[int] = field(default_factory=lambda: array("q"))


class PromptIndex:
    """The texts known of one prompt. A place is between two tokens of a text: text.number << 32 | tokens before it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.num_tokens = 0
        self.running = 0
        """Requests that extend texts of it."""
        self._texts: list[Text] = []
        self._latest: dict[int, int] = {}  # by two tokens, the last place after them
        self._responses: dict[TrajectoryId, Text] = {}
        self.extend(self._new(), prompt)

    @property
    def has_ended_ones(self) -> bool:
        """Whether there is more than what runs and the prompt."""
        return len(self._texts) > 1 + self.running

    def response(self, trajectory: TrajectoryId, tokens: Sequence[int]) -> Text:
        """The text of a trajectory's response, which is these tokens so far. One that it had before goes on."""
        text = self._responses.get(trajectory)
        if text is None or text.tokens.tolist() != list(tokens[: len(text.tokens)]):
            text = self._responses[trajectory] = self._new()
        self.extend(text, tokens[len(text.tokens) :])
        return text

    def add_response(self, trajectory: TrajectoryId, tokens: Sequence[int]) -> None:
        """Add a response of which nothing runs here, unless as much of it is known."""
        known = self._responses.get(trajectory)
        if known is None or len(known.tokens) < len(tokens):
            self.response(trajectory, tokens)

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        self.num_tokens += len(tokens)
        for token in tokens:
            place = NOWHERE
            if text.tokens:
                pair = text.tokens[-1] << 32 | token
                place = self._latest.get(pair, NOWHERE)
                self._latest[pair] = text.number << 32 | len(text.tokens) + 1
            text.tokens.append(token)
            text.before.append(place)

    def matches(self, text: Text) -> tuple[int, list[tuple[Text, int]]]:
        """The length of the longest match with a text's end, and the places of such matches: (text, tokens before it).
        Only places after which a token is known."""
        longest = 0
        places: list[tuple[Text, int]] = []
        place = self._latest[text.tokens[-2] << 32 | text.tokens[-1]] if len(text.tokens) >= MATCH else NOWHERE
        for _ in range(2 * PLACES):
            if place == NOWHERE:
                break
            other, position = self._texts[place >> 32], place & _LOW
            place = other.before[position - 1]
            if position == len(other.tokens):
                continue
            length = _shared(text.tokens, other.tokens, position)
            if length > longest:
                longest, places = length, []
            if length == longest and len(places) < PLACES:
                places.append((other, position))
        return longest, places

    def _new(self) -> Text:
        self._texts.append(Text(len(self._texts)))
        return self._texts[-1]


def _shared(tokens: array[int], others: array[int], position: int) -> int:
    """Tokens that the end of the first and the others before a position share, at most LONGEST_MATCH."""
    most = min(LONGEST_MATCH, len(tokens), position)
    for length in range(most):
        if tokens[-1 - length] != others[position - 1 - length]:
            return length
    return most


def _agreement(votes: int, places: int) -> int:
    """How so many of these places agree: an index of PRIORS."""
    if votes < places:
        return 2 if 2 * votes >= places else 0
    return 1 if places == 1 else 3 if places < 4 else 4


class DraftOutcomes:
    """How often drafted tokens of a kind were sampled."""

    def __init__(self) -> None:
        self._seen: Counter[Kind] = Counter()
        self._sampled: Counter[Kind] = Counter()

    def likelihood(self, kind: Kind) -> float:
        prior = PRIORS[kind[1]] * PRIOR_WEIGHT
        return (self._sampled[kind] + prior) / (self._seen[kind] + PRIOR_WEIGHT)

    def add(self, kind: Kind, *, sampled: bool) -> None:
        self._seen[kind] += 1
        self._sampled[kind] += sampled
        if self._seen[kind] >= REMEMBERED:
            self._seen[kind] //= 2
            self._sampled[kind] //= 2


class _Expected(NamedTuple):
    """A token that may be sampled next."""

    token: int
    kind: Kind


@dataclass(slots=True)
class _DraftedRequest:
    """A running request: as it began, and its texts from its first token on. response: what it is sampled after, but
    for the num_kept first tokens, which are its prompt's."""

    trajectory: TrajectoryId
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    num_kept: int
    texts: PromptIndex | None = None
    text: Text = field(default_factory=lambda: Text(0))
    expected: list[_Expected] = field(default_factory=list)


class Drafter:
    """Drafts for the running requests of an engine. length: most tokens of a draft; it may be changed at any time, and
    with 0 there are none. most_running: no drafts while more requests run. ends: tokens that end a response."""

    def __init__(
        self, length: int, most_running: int, ends: Collection[int] = (), most_tokens: int = MOST_TOKENS
    ) -> None:
        self.most = length
        self._most_running = most_running
        self._ends = frozenset(ends)
        self._most_tokens = most_tokens
        self._running: dict[str, _DraftedRequest] = {}
        self._told: deque[tuple[tuple[int, ...], TrajectoryId, tuple[int, ...]]] = deque()
        """Prompts with responses of other places, not taken in yet."""
        self.forget_all()

    @property
    def num_tokens(self) -> int:
        """Tokens known of all prompts."""
        return sum(texts.num_tokens for texts in self._prompts.values())

    def forget_all(self) -> None:
        """Forget all texts and requests, and how drafts fared."""
        self._running.clear()
        self._told.clear()
        self._prompts: OrderedDict[tuple[int, ...], PromptIndex] = OrderedDict()
        self._outcomes = DraftOutcomes()

    def begin(self, key: str, trajectory: TrajectoryId, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """A request begins or goes on. prompt: its trajectory's, by which texts are found. tokens: all that it is
        sampled after; in a branch only the first of them are the prompt's. May be called by any thread."""
        differs = (i for i, (of_prompt, token) in enumerate(zip(prompt, tokens, strict=False)) if of_prompt != token)
        kept = next(differs, min(len(prompt), len(tokens)))
        self._running[key] = _DraftedRequest(trajectory, tuple(prompt), tuple(tokens[kept:]), kept)

    def add_response(self, prompt: Sequence[int], trajectory: TrajectoryId, tokens: Sequence[int]) -> None:
        """Take in a response to a prompt, sampled elsewhere or long ago. May be called by any thread."""
        self._told.append((tuple(prompt), trajectory, tuple(tokens)))

    @property
    def running(self) -> tuple[TrajectoryId, ...]:
        """The trajectories that drafts are made for; none while too many run. May be called by any thread."""
        running = tuple(request.trajectory for request in tuple(self._running.values()))
        return running if self.most and len(running) <= self._most_running else ()

    def length(self, key: str) -> int | None:
        """Tokens known of what a request is sampled after, and of what it sampled; None if it is unknown."""
        running = self._running.get(key)
        if running is None:
            return None
        return running.num_kept + (len(running.response) if running.texts is None else len(running.text.tokens))

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """Add tokens that a request has sampled. Unknown ones are ignored."""
        running = self._running.get(key)
        if running is None:
            return
        texts = self._texts(running)
        for (expected, kind), token in zip(running.expected, tokens, strict=False):
            self._outcomes.add(kind, sampled=expected == token)
            if expected != token:
                break
        running.expected = []
        texts.extend(running.text, tokens)

    def draft(self, key: str, most: int) -> list[int]:
        """At most so many tokens that a request is likely to sample next; often none."""
        running = self._running.get(key)
        if running is None or not self.most or len(self._running) > self._most_running:
            return []
        if self._told:
            self._take_in()
        match, places = self._texts(running).matches(running.text)
        expected: list[_Expected] = []
        count, likelihood = 0, 1.0
        while places and len(expected) < self.most:
            votes = Counter(text.tokens[position] for text, position in places)
            token, agreeing = votes.most_common(1)[0]
            kind = (min(match + len(expected), LONGEST_MATCH).bit_length(), _agreement(agreeing, len(places)))
            expected.append(_Expected(token, kind))
            likelihood *= self._outcomes.likelihood(kind)
            if likelihood < LIKELY:
                break  # the first that is not drafted is expected all the same: so its kind's outcomes are learned
            count += 1
            if token in self._ends:
                break
            places = [
                (text, position + 1)
                for text, position in places
                if text.tokens[position] == token and position + 1 < len(text.tokens)
            ]
        running.expected = expected
        return [token for token, _ in expected[: max(0, min(count, most))]]

    def end(self, key: str) -> None:
        """A request has ended or was stopped; what it has sampled stays known. Unknown ones are ignored."""
        running = self._running.pop(key, None)
        if running is not None and running.texts is not None:
            running.texts.running -= 1

    def _take_in(self) -> None:
        """Add what was told to the texts of its prompts."""
        running = {request.trajectory for request in tuple(self._running.values())}
        while self._told:
            prompt, trajectory, tokens = self._told.popleft()
            if trajectory not in running:
                self._of(prompt).add_response(trajectory, tokens)
        self._forget()

    def _of(self, prompt: tuple[int, ...]) -> PromptIndex:
        """The texts of a prompt, which is the one that is used last now."""
        texts = self._prompts.get(prompt)
        if texts is None:
            texts = self._prompts[prompt] = PromptIndex(prompt)
        self._prompts.move_to_end(prompt)
        return texts

    def _texts(self, running: _DraftedRequest) -> PromptIndex:
        if running.texts is None:
            running.texts = self._of(running.prompt)
            running.text = running.texts.response(running.trajectory, running.response)
            running.texts.running += 1
            self._forget()
        return running.texts

    def _forget(self) -> None:
        """Forget the prompts that began least recently while too much is known; of one that runs, what has ended."""
        excess = self.num_tokens - self._most_tokens
        for prompt, texts in list(self._prompts.items()):
            if excess <= 0:
                return
            if not texts.running:
                del self._prompts[prompt]
                excess -= texts.num_tokens
            elif texts.has_ended_ones:
                fresh = PromptIndex(prompt)
                for request in tuple(self._running.values()):  # another thread may add to them
                    if request.texts is texts:
                        request.text = fresh.response(request.trajectory, request.text.tokens)
                        request.texts = fresh
                        fresh.running += 1
                self._prompts[prompt] = fresh
                excess -= texts.num_tokens - fresh.num_tokens
