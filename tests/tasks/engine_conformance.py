"""Conformance suite of rollout engines. Subclass it and provide `engine`, `reference` and two sets of weights."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.errors import ActorLost, ProtocolViolation, StoreError
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.engines.base import Engine, EngineLoad, FailedRequest, Request, SampledTokens
from tests.tasks.brake import BRAKE

PATIENCE_S = 60.0
MANY = 128
"""Number of requests that an engine cannot finish before a test on a busy machine looks at it."""


def call_in_thread(ask: Callable[[], None]) -> None:
    """Call `ask` in another thread and wait for it. Raises AssertionError if it does not return within 20 s."""
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert not asking.is_alive(), "it waits for the load"


def collect(engine: Engine, count: int, done: dict[int, SampledTokens] | None = None) -> dict[int, SampledTokens]:
    """Wait until `count` requests have finished, including those in `done`."""
    BRAKE.off()
    done = {} if done is None else done
    deadline = time.monotonic() + PATIENCE_S
    while len(done) < count:
        assert time.monotonic() < deadline, f"{len(done)} of {count} ended"
        for event in engine.events(0.5):
            assert isinstance(event, SampledTokens), event
            assert event.trajectory not in done, "ended twice"
            done[event.trajectory] = event
    return done


def tokens_of(sampled: SampledTokens) -> list[int]:
    return [int(t) for s in sampled.segments for t in s.tokens]


def logprobs_of(sampled: SampledTokens) -> list[float]:
    return [float(x) for s in sampled.segments for x in s.logprobs]


def request(i: int, prompt: tuple[int, ...] = (3, 10, 14, 7), **changes: Any) -> Request:
    values: dict[str, Any] = {"route_number": 1, "tokens": prompt, "max_new_tokens": 24}
    return Request(trajectory=TrajectoryId(i), **(values | changes))


def model_settings(model: Path) -> dict[str, Any]:
    """Return the settings of an engine with a model for this suite."""
    return {
        "model": str(model), "dtype": "float32", "device": "cpu", "temperature": 1.0, "max_running": 32,
        "kv_tokens": 4096, "page_tokens": 32, "max_batch_tokens": 512, "eos": (1,), "seed": 0,
    }  # fmt: skip


def sample_until(engine: Engine, least: int, requests: Sequence[Request] = ()) -> dict[int, SampledTokens]:
    """Submit requests and run them until one has at least this many tokens; returns the finished ones. The engine is
    then paused until `collect` or this function is called. Fails at once if all requests have finished."""
    BRAKE.on(least, max((item.num_response_tokens for item in requests), default=None))
    engine.submit(requests)
    deadline = time.monotonic() + PATIENCE_S
    done: dict[int, SampledTokens] = {}
    while not any(n >= least for _, n in engine.load_statistics().progress):
        done |= {e.trajectory: e for e in engine.events(0.0) if isinstance(e, SampledTokens)}
        lengths = {trajectory: len(tokens_of(sampled)) for trajectory, sampled in done.items()}
        assert not requests or len(done) < len(requests), f"all have ended before {least} tokens were seen: {lengths}"
        assert time.monotonic() < deadline, (
            f"no request has {least} tokens: {engine.load_statistics()}; ended: {lengths}"
        )
        time.sleep(0.001)
    return done


class EngineTests:
    """The conformance suite. Token 1 ends a response."""

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def reference(self) -> Callable[..., list[float]]:
        """Function (tokens, first, weights or None) -> logprobs of tokens[first:], by a plain forward pass."""
        raise NotImplementedError

    def kill(self, engine: Engine) -> None:
        """End the decoding of the engine as an internal error would."""
        raise NotImplementedError

    def hang(self, engine: Engine) -> AbstractContextManager[None]:
        """Block the decoding of the engine for a while, as a kernel that never returns would."""
        raise NotImplementedError

    def during_load(self, engine: Engine, ask: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `ask` in another thread, and wait for it, while the engine replaces its weights."""
        raise NotImplementedError

    @pytest.fixture
    def other_weights(self, tmp_path: Path) -> tuple[Path, str]:
        """A published file of other weights and its fingerprint."""
        raise NotImplementedError

    def test_each_request_finishes_once_with_correct_logprobs(
        self, engine: Engine, reference: Callable[..., list[float]]
    ) -> None:
        engine.submit([request(i) for i in range(20)])
        for sampled in collect(engine, 20).values():
            tokens = tokens_of(sampled)
            assert 0 < len(tokens) <= 24
            assert (sampled.finish is FinishReason.STOP) == (tokens[-1] == 1)
            assert sampled.finish is FinishReason.STOP or len(tokens) == 24
            assert {s.version for s in sampled.segments} == {0}
            expected = reference([3, 10, 14, 7, *tokens], 4)
            np.testing.assert_allclose(logprobs_of(sampled), expected, atol=2e-4)
        assert engine.load_statistics().running == 0

    def test_greedy_sampling_is_deterministic_and_random_sampling_varies(self, engine: Engine) -> None:
        engine.submit([request(i) for i in range(8)])
        assert len({tuple(tokens_of(s)) for s in collect(engine, 8).values()}) > 1
        engine.submit([request(100 + i, greedy=True) for i in range(4)])
        assert len({tuple(tokens_of(s)) for s in collect(engine, 4).values()}) == 1

    def test_interrupted_and_continued_equals_uninterrupted(self, engine: Engine) -> None:
        whole = request(0, max_new_tokens=60, greedy=True)
        engine.submit([whole])
        expected = tokens_of(collect(engine, 1)[0])
        sample_until(engine, 3, [request(1, max_new_tokens=60, greedy=True)])
        (part,) = engine.interrupt([TrajectoryId(1)])
        assert part.finish is FinishReason.UNFINISHED
        first = tokens_of(part)
        assert 3 <= len(first) < len(expected)
        assert first == expected[: len(first)]
        engine.submit(
            [
                request(
                    1,
                    prompt=(3, 10, 14, 7, *first),
                    route_number=2,
                    max_new_tokens=60 - len(first),
                    num_response_tokens=len(first),
                    greedy=True,
                )
            ]
        )
        rest = collect(engine, 1)[1]
        assert rest.route_number == 2
        assert first + tokens_of(rest) == expected

    def test_weights_loaded_mid_request_split_the_response_into_versioned_segments(
        self, engine: Engine, reference: Callable[..., list[float]], other_weights: tuple[Path, str]
    ) -> None:
        path, fingerprint = other_weights
        finished = sample_until(engine, 3, [request(i, max_new_tokens=100) for i in range(20)])
        loaded = engine.load(PolicyVersion(5), path)
        assert (loaded.fingerprint, engine.version) == (fingerprint, 5)
        assert loaded.weights.outcome == "verified", loaded.weights.line
        mixed = 0
        for sampled in collect(engine, 20, finished).values():
            versions = [s.version for s in sampled.segments]
            assert versions in ([0], [0, 5], [5])
            mixed += versions == [0, 5]
            tokens, at = [3, 10, 14, 7], 4
            for part in sampled.segments:
                tokens += part.tokens.tolist()
                expected = reference(tokens, at, path if part.version == 5 else None)
                np.testing.assert_allclose(part.logprobs, expected, atol=2e-4)
                at = len(tokens)
            assert len(tokens) - 4 <= 100
        assert mixed

    def test_aborted_requests_produce_no_events(self, engine: Engine) -> None:
        finished = sample_until(engine, 1, [request(i, max_new_tokens=100) for i in range(12)])
        aborted = [TrajectoryId(i) for i in (0, 2, 4) if i not in finished]
        engine.abort([*aborted, TrajectoryId(77)])
        collect(engine, 12 - len(aborted), finished)
        # One of the three may have finished just before.
        assert set(finished) >= set(range(12)) - set(aborted)
        assert engine.events(0.1) == []

    def test_the_request_with_the_newest_route_number_is_sampled_once(self, engine: Engine) -> None:
        engine.submit([request(i, max_new_tokens=60) for i in range(4)])
        engine.submit([request(i, max_new_tokens=60) for i in range(4)])
        engine.submit([request(0, max_new_tokens=60, route_number=route_number) for route_number in (3, 2)])
        finished = collect(engine, 4)
        assert {int(i): sampled.route_number for i, sampled in finished.items()} == {0: 3, 1: 1, 2: 1, 3: 1}
        assert engine.events(0.2) == []

    def test_a_probe_uses_the_loaded_weights_while_requests_run(
        self, engine: Engine, reference: Callable[..., list[float]], other_weights: tuple[Path, str]
    ) -> None:
        path, _ = other_weights
        probe = [3, 10, 14, 7, 5, 9, 11, 4]
        finished = sample_until(engine, 3, [request(i, max_new_tokens=100) for i in range(20)])
        assert engine.score([probe])[0].logprobs == pytest.approx(reference(probe, 1), abs=2e-4)
        engine.load(PolicyVersion(5), path)
        assert engine.score([probe])[0].logprobs == pytest.approx(reference(probe, 1, path), abs=2e-4)
        assert set(collect(engine, 20, finished)) == set(range(20))

    def test_load_statistics(self, engine: Engine) -> None:
        finished = sample_until(engine, 2, [request(i, max_new_tokens=100) for i in range(12)])
        load = engine.load_statistics()
        assert 0 < load.running <= 12 - len(finished)
        assert load.kv_tokens >= load.running * 4
        assert len(load.progress) == load.running
        sampled = sum(len(tokens_of(s)) for s in collect(engine, 12, finished).values())
        after = engine.load_statistics()
        assert (after.running, after.kv_tokens) == (0, 0)
        assert after.tokens_sampled == sampled
        assert after.busy_s > 0

    def test_progress_includes_prior_tokens(self, engine: Engine) -> None:
        sample_until(engine, 1001, [request(i, num_response_tokens=1000, max_new_tokens=100) for i in range(12)])
        assert all(n >= 1000 for _, n in engine.load_statistics().progress)
        engine.interrupt([TrajectoryId(i) for i in range(12)])
        assert engine.load_statistics().progress == ()

    def test_peek_returns_the_tokens_sampled_so_far(self, engine: Engine, other_weights: tuple[Path, str]) -> None:
        path, _ = other_weights
        finished = sample_until(engine, 5, [request(i, max_new_tokens=100, num_response_tokens=2) for i in range(20)])
        engine.load(PolicyVersion(5), path)
        finished |= sample_until(engine, 8)
        seen = {s.trajectory: s for s in engine.peek()}
        again = {s.trajectory: s for s in engine.peek()}
        assert seen
        whole = collect(engine, 20, finished)
        for trajectory, part in seen.items():
            count = len(tokens_of(part))
            assert (part.route_number, part.start, part.finish) == (1, 2, FinishReason.UNFINISHED)
            assert tokens_of(part) == tokens_of(whole[trajectory])[:count]
            assert logprobs_of(part) == logprobs_of(whole[trajectory])[:count]
            versions = [s.version for s in whole[trajectory].segments for _ in s.tokens]
            assert [s.version for s in part.segments for _ in s.tokens] == versions[:count]
            assert trajectory not in again or len(tokens_of(again[trajectory])) >= count
        assert max(len(tokens_of(part)) for part in seen.values()) >= 5
        assert engine.peek() == []

    def test_mismatched_weights_are_rejected_before_loading(self, engine: Engine, tmp_path: Path) -> None:
        import torch
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(2)}, tmp_path / "bad.safetensors")
        with pytest.raises(StoreError, match="tensors differ"):
            engine.load(PolicyVersion(9), tmp_path / "bad.safetensors")
        assert engine.version == 0
        engine.submit([request(0)])
        collect(engine, 1)

    def test_reset_clears_requests_and_statistics_but_not_weights(
        self, engine: Engine, reference: Callable[..., list[float]], other_weights: tuple[Path, str]
    ) -> None:
        path, fingerprint = other_weights
        engine.load(PolicyVersion(3), path)
        sample_until(engine, 1, [request(i, max_new_tokens=100, keep_kv=True) for i in range(6)])
        engine.reset(InstanceId("another"))
        load = engine.load_statistics()
        assert (load.version, engine.version, load.running, load.progress) == (0, 0, 0, ())
        assert (load.tokens_sampled, load.prefilled_tokens, load.cached_tokens, load.kept_tokens) == (0, 0, 0, 0)
        assert load.busy_s == pytest.approx(0, abs=0.05)
        assert engine.events(0.1) == []
        assert engine.interrupt([TrajectoryId(i) for i in range(6)]) == []

        engine.submit([request(i) for i in range(6)])  # under the route number of before
        for sampled in collect(engine, 6).values():
            assert {(s.version, s.instance) for s in sampled.segments} == {(0, "another")}
            tokens = tokens_of(sampled)
            np.testing.assert_allclose(logprobs_of(sampled), reference([3, 10, 14, 7, *tokens], 4, path), atol=2e-4)
        assert engine.load(PolicyVersion(3), path).fingerprint == fingerprint

    def test_every_method_of_a_crashed_engine_raises_actor_lost(
        self, engine: Engine, other_weights: tuple[Path, str]
    ) -> None:
        finished = sample_until(engine, 1, [request(i, max_new_tokens=100) for i in range(4)])
        BRAKE.off()
        self.kill(engine)
        with pytest.raises(ActorLost, match="rollout-0"):
            collect(engine, 4, finished)
        for verb in (
            lambda: engine.submit([request(9)]),
            lambda: engine.interrupt([TrajectoryId(0)]),
            lambda: engine.abort([TrajectoryId(1)]),
            lambda: engine.load(PolicyVersion(5), other_weights[0]),
            lambda: engine.reset(InstanceId("rollout-0")),
            lambda: engine.score([[3, 10, 14]]),
            engine.load_statistics,
            engine.peek,
        ):
            with pytest.raises(ActorLost, match="rollout-0"):
                verb()

    def test_a_hung_engine_still_reports_its_load(self, engine: Engine) -> None:
        finished = sample_until(engine, 1, [request(i, max_new_tokens=100) for i in range(MANY)])
        BRAKE.off()  # the hang is one of a pass
        with self.hang(engine):
            finished |= {e.trajectory: e for e in engine.events(0.1) if isinstance(e, SampledTokens)}
            before = engine.load_statistics()
            assert engine.events(0.2) == []
            after = engine.load_statistics()
        assert after.running == before.running == MANY - len(finished) > 0
        assert (after.tokens_sampled, after.progress) == (before.tokens_sampled, before.progress)
        collect(engine, MANY, finished)

    def test_an_engine_responds_while_it_loads_weights(self, engine: Engine, other_weights: tuple[Path, str]) -> None:
        """Replacing the weights of a large model takes seconds."""
        finished = sample_until(engine, 1, [request(i, max_new_tokens=100) for i in range(MANY)])
        answered: list[tuple[int, int]] = []

        def ask() -> None:
            finished.update({e.trajectory: e for e in engine.events(0.05) if isinstance(e, SampledTokens)})
            load = engine.load_statistics()
            answered.append((load.running, load.tokens_sampled))

        with self.during_load(engine, ask):
            engine.load(PolicyVersion(5), other_weights[0])
        assert len(answered) == 1 and answered[0][0] <= MANY
        collect(engine, MANY, finished)
        assert engine.load_statistics().version == 5

    def test_random_interrupts_aborts_and_updates_lose_no_request(
        self, engine: Engine, other_weights: tuple[Path, str]
    ) -> None:
        """Each of 1,000 requests ends exactly once: finished, interrupted or aborted."""
        rng = random.Random(0)
        path, _ = other_weights
        waiting: set[int] = set()
        ended: set[int] = set()
        fresh, version = 0, 0
        while len(ended) < 1000:
            if fresh < 1000 and len(waiting) < 60:
                new = [request(fresh + i, max_new_tokens=rng.randint(1, 40)) for i in range(min(40, 1000 - fresh))]
                fresh += len(new)
                waiting |= {r.trajectory for r in new}
                engine.submit(new)
            for event in engine.events(0.02):
                assert not isinstance(event, FailedRequest), event
                assert event.trajectory in waiting
                waiting.remove(event.trajectory)
                ended.add(event.trajectory)
            some = rng.sample(sorted(waiting), min(len(waiting), 3))
            if rng.random() < 0.3:
                for part in engine.interrupt([TrajectoryId(i) for i in some]):
                    waiting.remove(part.trajectory)
                    ended.add(part.trajectory)
            elif rng.random() < 0.2:
                engine.abort([TrajectoryId(i) for i in some])
                waiting -= set(some)
                ended |= set(some)
            if rng.random() < 0.1:
                version += 1
                engine.load(PolicyVersion(version), path)
        assert ended == set(range(1000))
        assert engine.events(0.2) == []


PROMPT = tuple(4 + i % 10 for i in range(40))
"""More than a page, so that engines that share whole pages share one."""
GIVEN = (7, 5, 9, 11, 4)
"""Env tokens between turns."""


class ReusingEngineTests(EngineTests):
    """Suite for engines that cache the context of the previous turn."""

    page_tokens = 1
    """Maximum number of tokens at the end of a context, including the last one, that are not cached."""

    def turn(self, engine: Engine, tokens: tuple[int, ...], route_number: int) -> list[int]:
        """Run a turn of trajectory 0 with these tokens after its prompt."""
        more = {
            "route_number": route_number,
            "num_response_tokens": len(tokens) - len(PROMPT),
            "keep_kv": True,
            "greedy": True,
        }
        engine.submit([request(0, tokens, max_new_tokens=16, **more)])
        self.sampled = collect(engine, 1)[TrajectoryId(0)]
        return tokens_of(self.sampled)

    def counts(self, engine: Engine) -> tuple[int, int]:
        load = engine.load_statistics()
        return load.prefilled_tokens, load.cached_tokens

    def check_logprobs(self, reference: Callable[..., list[float]], context: tuple[int, ...], *weights: Path) -> None:
        """Compare the logprobs of the last turn with those of the whole context computed at once."""
        expected = reference([*context, *tokens_of(self.sampled)], len(context), *weights)
        np.testing.assert_allclose(logprobs_of(self.sampled), expected, atol=2e-4)

    def test_a_later_turn_prefills_only_new_tokens(self, engine: Engine, reference: Callable[..., list[float]]) -> None:
        context, held, before, whole = PROMPT, 0, 0, 0
        for route_number in (1, 2, 3):
            tokens = self.turn(engine, context, route_number)
            prefilled, cached = self.counts(engine)
            whole += len(context)
            assert prefilled + cached == whole
            assert held - self.page_tokens <= cached - before <= held
            self.check_logprobs(reference, context)
            before, held = cached, len(context) + len(tokens)
            context = (*context, *tokens, *GIVEN)

    def test_cache_of_other_weights_is_not_reused(
        self, engine: Engine, reference: Callable[..., list[float]], other_weights: tuple[Path, str]
    ) -> None:
        path, _ = other_weights
        first = self.turn(engine, PROMPT, 1)
        engine.load(PolicyVersion(5), path)
        context = (*PROMPT, *first, *GIVEN)
        self.turn(engine, context, 2)
        assert self.counts(engine) == (len(PROMPT) + len(context), 0)
        self.check_logprobs(reference, context, path)

    def test_cache_of_a_different_context_is_not_reused(
        self, engine: Engine, reference: Callable[..., list[float]]
    ) -> None:
        """The contexts have equal length and equal last tokens, as after a restart of the trajectory."""
        first = self.turn(engine, PROMPT, 1)
        context = (PROMPT[0], PROMPT[1] + 1, *PROMPT[2:], *first, *GIVEN)
        self.turn(engine, context, 2)
        assert self.counts(engine) == (len(PROMPT) + len(context), 0)
        self.check_logprobs(reference, context)


class SleepingEngineTests(EngineTests):
    """Suite for engines that can free their device."""

    def test_an_engine_serves_new_weights_after_sleep(
        self, engine: Engine, reference: Callable[..., list[float]], other_weights: tuple[Path, str]
    ) -> None:
        path, fingerprint = other_weights
        engine.submit([request(0)])
        collect(engine, 1)
        engine.sleep()
        engine.sleep()
        assert engine.load_statistics().running == 0
        assert engine.load(PolicyVersion(5), path).fingerprint == fingerprint
        engine.submit([request(1)])
        sampled = collect(engine, 1)[TrajectoryId(1)]
        assert {s.version for s in sampled.segments} == {5}
        expected = reference([*request(1).tokens, *tokens_of(sampled)], len(request(1).tokens), path)
        np.testing.assert_allclose(logprobs_of(sampled), expected, atol=2e-4)

    def test_sleep_is_rejected_while_a_request_runs(self, engine: Engine) -> None:
        sample_until(engine, 3, [request(0, max_new_tokens=3000)])
        with pytest.raises(ProtocolViolation, match="is put to sleep while it runs 1 request"):
            engine.sleep()
        engine.interrupt([TrajectoryId(0)])
        engine.sleep()


def check_drafts(engine: Engine) -> None:
    """Check that an engine with at most 3 tokens per draft makes some of several and none longer, and that a reset
    clears its counts. Emulated drafts are all of 3 tokens."""
    sample_until(engine, 40, [request(0, max_new_tokens=3000)])
    BRAKE.off()
    load = _load_after_drafts(engine, 40)
    assert load.drafts < load.drafted_tokens <= 3 * load.drafts + 2
    assert engine.drafting_trajectories() in ((TrajectoryId(0),), ())  # of the emulated engine, none
    engine.interrupt([TrajectoryId(0)])
    engine.reset(InstanceId("rollout-1"))
    load = engine.load_statistics()
    assert (load.drafts, load.drafted_tokens, load.accepted_tokens) == (0, 0, 0)


def _load_after_drafts(engine: Engine, least: int) -> EngineLoad:
    """Return the engine load once this many drafts have been verified."""
    deadline = time.monotonic() + PATIENCE_S
    while (load := engine.load_statistics()).drafts < least:
        assert time.monotonic() < deadline, load
        time.sleep(0.001)
    return load
