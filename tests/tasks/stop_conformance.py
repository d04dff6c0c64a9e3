"""Conformance suite of stop criteria and scores for every engine with a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from staleflow.stores.in_flight.stop_criteria import StopCriteria, find_stop
from staleflow.stores.trajectory import FinishReason, PolicyVersion, TrajectoryId
from staleflow.tasks.engines.base import Engine, SampledTokens
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from tests.tasks.engine_conformance import collect, logprobs_of, request, sample_until, tokens_of

PROMPT = (3, 10, 14, 7)


def tokens_to_stop(texts: ChatTokenizer, tokens: Sequence[int], strings: Sequence[str]) -> int:
    """Return the number of tokens up to the one that completes a stop string; 0 if none does."""
    ends = (n for n in range(1, len(tokens) + 1) if find_stop(texts.text(tokens[:n]), strings))
    return next(ends, 0)


def check_scores(engine: Engine, sequences: Sequence[list[int]], reference: Callable[..., list[float]]) -> None:
    """Check the scores of sequences: logprobs against the reference, the most likely tokens against greedy sampling."""
    for tokens, scores in zip(sequences, engine.score(sequences), strict=True):
        np.testing.assert_allclose(scores.logprobs, reference(tokens, 1), atol=2e-4)
        assert len(scores.top_tokens) == len(scores.top_logprobs) == len(tokens)
        engine.submit([request(i, tuple(tokens[: i + 1]), greedy=True, max_new_tokens=1) for i in range(len(tokens))])
        sampled = collect(engine, len(tokens))
        assert [tokens_of(sampled[i])[0] for i in range(len(tokens))] == list(scores.top_tokens)
        np.testing.assert_allclose(
            [logprobs_of(sampled[i])[0] for i in range(len(tokens))], scores.top_logprobs, atol=2e-4
        )


def greedy(engine: Engine) -> list[int]:
    engine.submit([request(900, greedy=True, max_new_tokens=60)])
    return tokens_of(collect(engine, 1)[900])


class StopTests:
    """Mixin for the engine suite."""

    def test_several_sequences_are_scored_together(self, engine: Engine, reference: Callable[..., list[float]]) -> None:
        check_scores(engine, [[3, 10, 14, 7, 5, 9], [11], [4, 3], [3, 10, 14, 7, 5, 8]], reference)
        longer = [[3 + i % 11 for i in range(n)] for n in (100, 120, 110, 90, 120, 100)]  # more than one forward pass
        for tokens, scores in zip(longer, engine.score(longer), strict=True):
            np.testing.assert_allclose(scores.logprobs, reference(tokens, 1), atol=2e-4)

    def test_a_turn_ends_with_the_token_that_completes_a_stop_string(
        self, engine: Engine, reference: Callable[..., list[float]], tiny_model: Path
    ) -> None:
        texts, strings = load_chat_tokenizer(str(tiny_model)), ("12", "+3;", "9", "=so", "4-")
        engine.submit([request(i, stop=StopCriteria(strings)) for i in range(20)])
        ended = collect(engine, 20)
        assert sum(check_end(texts, item, strings) for item in ended.values()) > 5
        for item in ended.values():
            tokens = tokens_of(item)
            np.testing.assert_allclose(logprobs_of(item), reference([*PROMPT, *tokens], 4), atol=2e-4)
        assert engine.load_statistics().running == 0

    def test_stop_strings_work_across_a_weight_update(
        self, engine: Engine, other_weights: tuple[Path, str], tiny_model: Path
    ) -> None:
        texts, strings = load_chat_tokenizer(str(tiny_model)), ("123", "9+", "=7=")
        finished = sample_until(
            engine, 3, [request(i, max_new_tokens=100, stop=StopCriteria(strings)) for i in range(20)]
        )
        engine.load(PolicyVersion(5), other_weights[0])
        ended = collect(engine, 20, finished)
        for item in ended.values():
            check_end(texts, item, strings, most=100)

    def test_a_stop_string_split_by_an_interrupt_ends_the_turn(self, engine: Engine, tiny_model: Path) -> None:
        """For every position of the cut; tokens of the previous turn do not count."""
        texts, whole = load_chat_tokenizer(str(tiny_model)), greedy(engine)
        stop = StopCriteria((texts.text(whole[:5]),))
        assert tokens_to_stop(texts, whole, stop.strings) == 5
        for cut in (1, 3, 4):
            for in_turn in (cut, 0):
                name = 10 * cut + in_turn
                engine.submit(
                    [
                        request(
                            name, (*PROMPT, *whole[:cut]), greedy=True, stop=stop, num_current_turn_tokens=in_turn,
                            num_response_tokens=cut, max_new_tokens=60 - cut,
                        )
                    ]
                )  # fmt: skip
                (ended,) = collect(engine, 1).values()
                tokens = [*whole[:cut], *tokens_of(ended)]
                assert tokens == whole[: len(tokens)]
                assert len(tokens) == 5 if in_turn else len(tokens) > 5

    def test_a_turn_resubmitted_with_its_stop_string_ends_at_once(self, engine: Engine, tiny_model: Path) -> None:
        texts, whole = load_chat_tokenizer(str(tiny_model)), greedy(engine)
        stop = StopCriteria((texts.text(whole[:5]),))
        engine.submit([request(0, (*PROMPT, *whole[:5]), stop=stop, num_current_turn_tokens=5, num_response_tokens=5)])
        (ended,) = collect(engine, 1).values()
        assert (ended.start, ended.segments, ended.finish) == (5, (), FinishReason.STOP)

    def test_finish_reason_is_stop_when_the_last_allowed_token_completes_a_stop_string(
        self, engine: Engine, tiny_model: Path
    ) -> None:
        texts, whole = load_chat_tokenizer(str(tiny_model)), greedy(engine)
        for count, finish in ((5, FinishReason.STOP), (4, FinishReason.LENGTH)):
            stop = StopCriteria((texts.text(whole[:5]),))
            engine.submit([request(count, greedy=True, stop=stop, max_new_tokens=count)])
            (ended,) = collect(engine, 1).values()
            assert (tokens_of(ended), ended.finish) == (whole[:count], finish)

    def test_a_stop_token_id_is_the_last_token_of_the_turn(self, engine: Engine) -> None:
        engine.submit([request(i, stop=StopCriteria(token_ids=(7, 9, 12))) for i in range(20)])
        stopped = 0
        for item in collect(engine, 20).values():
            tokens = tokens_of(item)
            assert not {7, 9, 12} & set(tokens[:-1])
            assert (item.finish is FinishReason.STOP) == (tokens[-1] in (1, 7, 9, 12))
            stopped += tokens[-1] in (7, 9, 12)
        assert stopped > 5
        engine.submit([request(100, greedy=True)])  # others' ends are not this one's
        assert tokens_of(collect(engine, 1)[TrajectoryId(100)]) == greedy(engine)[:24]


def check_end(texts: ChatTokenizer, ended: SampledTokens, strings: Sequence[str], most: int = 24) -> bool:
    """Check the finish reason of a turn; returns whether it ended by a stop string."""
    tokens = tokens_of(ended)
    count = tokens_to_stop(texts, tokens, strings)
    assert count in (0, len(tokens))
    assert (ended.finish is FinishReason.STOP) == bool(count or tokens[-1] == 1)
    assert ended.finish is FinishReason.STOP or len(tokens) == most
    return bool(count)
