"""The response drafter: what it proposes, from which texts, and what it evicts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from staleflow.stores.trajectory import TrajectoryId
from staleflow.tasks.engines.response_drafter import MAX_PENDING_RESPONSES, Drafter, IndexedText, PromptIndex

PROMPT = (3, 10, 14, 7)
RESPONSE = (20, 21, 22, 23, 24, 25, 26, 27)


def drafter(**changes: int) -> Drafter:
    arguments: dict[str, Any] = {"max_length": 4, "max_running": 100, **changes}
    return Drafter(**arguments)


def begin_request(
    text_drafter: Drafter, key: str, response: tuple[int, ...] = (), trajectory: int | None = None
) -> None:
    """Start a request for PROMPT that has sampled these tokens."""
    text_drafter.begin(key, TrajectoryId(int(key) if trajectory is None else trajectory), PROMPT, PROMPT)
    text_drafter.extend(key, response)


def test_a_draft_follows_a_sibling_with_the_same_tokens() -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", RESPONSE)
    begin_request(text_drafter, "1", (50, 22, 23))
    assert text_drafter.draft("1", 4) == [24]  # one place alone is not followed far before it has proved right
    text_drafter.extend("1", (24,))
    assert text_drafter.draft("1", 4)[:1] == [25]
    text_drafter.extend("1", (60,))
    assert text_drafter.draft("1", 4) == []


def test_drafts_follow_finished_responses_of_the_same_prompt_only() -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", RESPONSE)
    text_drafter.end("0")
    text_drafter.begin("1", TrajectoryId(1), (5, 6), (5, 6))
    text_drafter.extend("1", RESPONSE[:3])
    begin_request(text_drafter, "2", RESPONSE[:3])
    assert text_drafter.draft("1", 4) == []
    assert text_drafter.draft("2", 4)[:1] == [23]


def test_a_draft_follows_earlier_tokens_of_its_own_context() -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", (3, 10))
    assert text_drafter.draft("0", 4)[:1] == [14]
    begin_request(text_drafter, "1", (80, 81, 82, 80, 81))
    assert text_drafter.draft("1", 4)[:1] == [82]


def test_the_longest_match_decides_and_among_equals_the_majority() -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", (1, 2, 3, 30))
    for key in ("1", "2", "3"):
        begin_request(text_drafter, key, (9, 2, 3, 40))
    begin_request(text_drafter, "4", (8, 2, 3))
    assert text_drafter.draft("4", 4)[:1] == [40]
    begin_request(text_drafter, "5", (1, 2, 3))
    assert text_drafter.draft("5", 4)[:1] == [30]


def test_a_draft_respects_the_length_limit_and_the_end_token() -> None:
    text_drafter = drafter(end_token_ids=(26,), max_length=16)  # type: ignore[arg-type]
    for key in "01234567":
        begin_request(text_drafter, key, RESPONSE)
    begin_request(text_drafter, "8", RESPONSE[:3])
    for _ in range(3):
        text_drafter.extend("8", (text_drafter.draft("8", 16)[0],))
    assert text_drafter.draft("8", 0) == []
    assert text_drafter.draft("8", -3) == []
    begin_request(text_drafter, "9", RESPONSE[:2])
    assert text_drafter.draft("9", 2) == [22, 23]
    assert text_drafter.draft("9", 16) == [22, 23, 24, 25, 26]


def test_rejected_drafts_stop_and_resume_when_accepted_again() -> None:
    one, rng = drafter(), random.Random(0)
    begin_request(one, "0", RESPONSE)

    def drafts(sampled_too: bool) -> list[list[int]]:
        results = []
        for _ in range(100):
            key = str(rng.randrange(1, 1 << 30))
            begin_request(one, key, RESPONSE[:3])
            results.append(one.draft(key, 4))
            one.extend(key, (RESPONSE[3] if sampled_too else 1000 + rng.randrange(10**6),))
            one.end(key)
        return results

    # Each sampled text differs, so only the place that was drafted from recurs.
    assert drafts(sampled_too=True)[-1]
    given_up = drafts(sampled_too=False)
    assert given_up[0]
    assert not given_up[-1]
    assert drafts(sampled_too=True)[-1]


def test_drafting_stops_above_max_running() -> None:
    text_drafter = drafter(max_running=2)
    begin_request(text_drafter, "0", RESPONSE)
    begin_request(text_drafter, "1", RESPONSE[:4])
    begin_request(text_drafter, "2")
    assert text_drafter.draft("1", 4) == []
    text_drafter.end("2")
    assert text_drafter.draft("1", 4)[:1] == [24]


def test_a_request_resubmitted_under_a_new_key_extends_its_text() -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", RESPONSE)
    text_drafter.end("0")
    text_drafter.begin("7", TrajectoryId(0), PROMPT, (*PROMPT, *RESPONSE))
    assert text_drafter.num_known_tokens("7") == len(PROMPT) + len(RESPONSE)
    text_drafter.extend("7", (1, 2))
    assert text_drafter.num_known_tokens("7") == len(PROMPT) + len(RESPONSE) + 2
    assert text_drafter.num_tokens == len(PROMPT) + len(RESPONSE) + 2
    text_drafter.begin("8", TrajectoryId(0), PROMPT, (*PROMPT, 77))  # its episode began again
    assert text_drafter.draft("8", 4) == []
    assert text_drafter.num_tokens == len(PROMPT) + len(RESPONSE) + 3


@pytest.mark.parametrize("num_kept", [len(PROMPT), 2, 0])
def test_a_branch_is_drafted_from_responses_to_its_prompt(num_kept: int) -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", RESPONSE)
    context = (*PROMPT[:num_kept], 90, 91, *RESPONSE[:3])  # its context was not sampled by its trajectory
    text_drafter.begin("1", TrajectoryId(1), PROMPT, context)
    assert text_drafter.draft("1", 4)[:1] == [RESPONSE[3]]
    assert text_drafter.num_known_tokens("1") == len(context)
    text_drafter.extend("1", RESPONSE[3:5])
    assert text_drafter.num_known_tokens("1") == len(context) + 2
    text_drafter.end("1")
    begin_request(text_drafter, "2", (90, 91))
    assert text_drafter.draft("2", 4)[:1] == [RESPONSE[0]]


def test_drafts_follow_responses_added_from_other_instances() -> None:
    text_drafter = drafter()
    text_drafter.add_response(PROMPT, TrajectoryId(90), RESPONSE)
    text_drafter.add_response((5, 6), TrajectoryId(91), (22, 30))
    begin_request(text_drafter, "0", RESPONSE[:3])
    assert text_drafter.draft("0", 4)[:1] == [23]
    text_drafter.add_response(PROMPT, TrajectoryId(90), RESPONSE)
    begin_request(text_drafter, "1", RESPONSE[:4])
    before = text_drafter.num_tokens
    assert text_drafter.draft("1", 4)[:1] == [24]
    assert text_drafter.num_tokens == before, "it is known"
    text_drafter.add_response(PROMPT, TrajectoryId(90), (*RESPONSE, 28))
    assert text_drafter.draft("1", 4)[:1] == [24]
    assert text_drafter.num_tokens == before + 1, "it continued elsewhere"


def test_added_responses_of_running_trajectories_are_ignored() -> None:
    text_drafter = drafter()
    begin_request(text_drafter, "0", RESPONSE[:3])
    text_drafter.add_response(PROMPT, TrajectoryId(0), RESPONSE)
    assert text_drafter.draft("0", 4) == []
    assert text_drafter.num_known_tokens("0") == len(PROMPT) + 3


def test_added_responses_are_bounded_and_cleared_by_reset() -> None:
    text_drafter = drafter(max_indexed_tokens=100)
    begin_request(text_drafter, "0", RESPONSE[:3])
    for i in range(1, 100):
        text_drafter.add_response(PROMPT, TrajectoryId(i), [i * 20 + at for at in range(15)])
        text_drafter.draft("0", 4)
        assert text_drafter.num_tokens <= 100
    assert text_drafter.num_known_tokens("0") == len(PROMPT) + 3
    for i in range(200, 300 + MAX_PENDING_RESPONSES):
        text_drafter.add_response(PROMPT, TrajectoryId(i), RESPONSE)
    assert len(text_drafter._pending_responses) == MAX_PENDING_RESPONSES
    text_drafter.reset()
    begin_request(text_drafter, "1", RESPONSE[:3])
    assert text_drafter.draft("1", 4) == []


def test_drafted_trajectories_are_the_running_ones_up_to_max_running() -> None:
    text_drafter = drafter(max_running=2)
    assert list(text_drafter.drafted_trajectories) == []
    begin_request(text_drafter, "0")
    begin_request(text_drafter, "1")
    assert list(text_drafter.drafted_trajectories) == [0, 1]
    begin_request(text_drafter, "2")
    assert list(text_drafter.drafted_trajectories) == []


def test_unknown_keys_have_no_drafts() -> None:
    text_drafter = drafter()
    text_drafter.extend("0", (1,))
    text_drafter.end("0")
    assert text_drafter.draft("0", 4) == []
    assert text_drafter.num_known_tokens("0") is None


@pytest.mark.parametrize("prompts", [1, 50])
def test_indexed_tokens_are_bounded_and_running_requests_are_never_evicted(prompts: int) -> None:
    one, rng = drafter(max_indexed_tokens=2000), random.Random(1)
    begin_request(one, "0", RESPONSE)
    for i in range(1, 500):
        prompt = (*PROMPT, i % prompts)
        one.begin(str(i), TrajectoryId(i), prompt, prompt)
        one.extend(str(i), [rng.randrange(100) for _ in range(20)])
        if i > 10:
            one.end(str(i - 10))
        assert one.num_tokens <= 2000 + 25
    begin_request(one, "1000", RESPONSE[:3])
    assert one.draft("1000", 4)[:1] == [23]


def test_running_texts_above_the_limit_are_not_indexed_again_for_each_ended_response() -> None:
    one, indices, num_running_tokens = drafter(max_indexed_tokens=100), [], len(PROMPT) + 200
    begin_request(one, "0", tuple(range(200)))
    for i in range(1, 40):
        begin_request(one, str(i), RESPONSE)
        one.end(str(i))
        indices.append(one._requests["0"].index)
        assert one.num_tokens <= 2 * num_running_tokens + len(RESPONSE)
    assert len(set(indices)) == 2
    assert one.num_tokens < num_running_tokens + 39 * len(RESPONSE)


def test_a_request_may_begin_in_another_thread_during_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict changed during iteration would end the decode thread and the engine."""
    one, response = drafter(max_indexed_tokens=60), PromptIndex.update_response

    def begins_one_meanwhile(texts: PromptIndex, trajectory: TrajectoryId, tokens: Sequence[int]) -> IndexedText:
        one.begin(f"9{trajectory}", TrajectoryId(900 + trajectory), PROMPT, PROMPT)
        return response(texts, trajectory, tokens)

    for key in ("0", "1", "2"):
        begin_request(one, key, RESPONSE)
    one.end("2")
    monkeypatch.setattr(PromptIndex, "update_response", begins_one_meanwhile)
    begin_request(one, "3", tuple(range(100, 140)))
    begin_request(one, "4", RESPONSE[:3])
    assert one.num_tokens <= 100
    assert one.draft("4", 4)[:1] == [23]


def test_drafts_match_a_brute_force_search() -> None:
    """The search looks for the longest match and the majority of its continuations."""
    rng = random.Random(2)
    texts = [tuple(rng.randrange(6) for _ in range(12)) for _ in range(30)]
    text_drafter = drafter()
    for i, text in enumerate(texts):
        begin_request(text_drafter, str(i), text)
    for i in range(30, 130):
        end = tuple(rng.randrange(6) for _ in range(5))
        begin_request(text_drafter, str(i), end)
        match, places = text_drafter._requests[str(i)].index.matches(text_drafter._requests[str(i)].text)  # type: ignore[union-attr]
        own = [PROMPT, *texts, *(text_drafter._requests[str(j)].text.tokens.tolist() for j in range(30, i)), end]
        best = max((shared(end, text[:at]) for text in map(tuple, own) for at in range(2, len(text))), default=0)
        assert match == best if places else match == 0
        assert all(shared(end, tuple(text.tokens[:at])) == match for text, at in places)


def shared(end: tuple[int, ...], before: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(end), len(before)) and end[-1 - count] == before[-1 - count]:
        count += 1
    return count
