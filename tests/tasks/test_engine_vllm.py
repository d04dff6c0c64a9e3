"""vLLM under the conformance suite and tests of its integration. Runs where vllm is installed (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import ActorLost, ConfigError, WeightsRefused
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.tasks.engines.base import Engine, FailedRequest, SampledTokens
from tests.tasks.adapter_conformance import LORA, SERVED, AdapterEngineTests
from tests.tasks.engine_conformance import (
    GIVEN,
    PROMPT,
    ReusingEngineTests,
    call_in_thread,
    collect,
    logprobs_of,
    model_settings,
    request,
    sample_until,
    tokens_of,
)
from tests.tasks.stop_conformance import StopTests
from tests.tasks.test_engine_transformers import changed_weights, plain_logprobs

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from staleflow.tasks.engines.engine_settings import VllmSettings
from staleflow.tasks.engines.vllm import VllmEngine


def settings(model: Path, **changes: Any) -> VllmSettings:
    return VllmSettings(**(model_settings(model) | changes))


@contextmanager
def slow_steps(engine: VllmEngine) -> Iterator[None]:
    """Slow each step to at least 20 ms, so that running requests do not finish while weights load."""
    step = engine._engine.engine_core.get_output

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    engine._engine.engine_core.get_output = slow
    yield
    engine._engine.engine_core.get_output = step


class TestVllmEngine(StopTests, ReusingEngineTests):
    page_tokens = 32

    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[VllmEngine]:
        engine = VllmEngine(settings(tiny_model), InstanceId("rollout-0"))
        yield engine
        engine.close()

    def kill(self, engine: Engine) -> None:
        def fail() -> None:
            raise RuntimeError("a kernel failed")

        assert isinstance(engine, VllmEngine)
        engine._engine.engine_core.get_output = fail

    @contextmanager
    def during_load(self, engine: Engine, ask: Callable[[], None]) -> Iterator[None]:
        assert isinstance(engine, VllmEngine)
        load = engine._load

        def asked(*args: Any) -> None:
            call_in_thread(ask)
            load(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_load", asked)
            yield

    @contextmanager
    def hang(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine, VllmEngine)
        step, goes_on = engine._engine.engine_core.get_output, threading.Event()

        def stand_still() -> Any:
            goes_on.wait(60.0)
            return step()

        engine._engine.engine_core.get_output = stand_still
        time.sleep(0.1)  # the step at hand
        yield
        engine._engine.engine_core.get_output = step
        goes_on.set()

    @pytest.fixture
    def reference(self, tiny_model: Path) -> Callable[..., list[float]]:
        return lambda tokens, first, weights=None: plain_logprobs(tiny_model, tokens, first, weights)

    @pytest.fixture
    def other_weights(self, tiny_model: Path, tmp_path: Path) -> tuple[Path, str]:
        return changed_weights(tiny_model, tmp_path)

    def test_weights_that_fail_to_load_halfway_end_the_instance(
        self, engine: VllmEngine, other_weights: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from staleflow.tasks.engines import vllm_weights

        def torn(self: object, update: object) -> None:
            raise OSError("the file is gone")

        monkeypatch.setattr(vllm_weights.FileTransfer, "receive_weights", torn)
        with pytest.raises(WeightsRefused, match="the file is gone"):
            engine.load(PolicyVersion(5), other_weights[0])
        with pytest.raises(ActorLost, match="rollout-0"):
            engine.events(1.0)
        with pytest.raises(ActorLost, match="rollout-0"):
            engine.submit([request(0)])

    def test_the_cache_of_a_turn_with_a_weight_update_is_reused_by_the_next_turn(
        self, engine: VllmEngine, tiny_model: Path, other_weights: tuple[Path, str]
    ) -> None:
        """Running requests are prefilled again under the new weights, so their cache pages are valid."""
        path, _ = other_weights
        sample_until(engine, 3, [request(0, prompt=PROMPT, max_new_tokens=40, greedy=True)])
        with slow_steps(engine):
            engine.load(PolicyVersion(5), path)
        first = collect(engine, 1)[0]
        assert [s.version for s in first.segments] == [0, 5]
        before = engine.load_statistics().cached_tokens
        context = (*PROMPT, *tokens_of(first), *GIVEN)
        engine.submit(
            [
                request(
                    0, prompt=context, route_number=2, num_response_tokens=len(context) - len(PROMPT), max_new_tokens=8
                )
            ]
        )
        second = collect(engine, 1)[0]
        assert engine.load_statistics().cached_tokens - before == 64
        exact = plain_logprobs(tiny_model, [*context, *tokens_of(second)], len(context), path)
        assert logprobs_of(second) == pytest.approx(exact, abs=2e-4)

    def test_a_prompt_that_is_too_long_fails_alone(self, engine: VllmEngine) -> None:
        engine.submit([request(0, prompt=(3,) * 500), request(1)])
        ended = {e.trajectory: e for e in engine.events(10.0)}
        while len(ended) < 2:
            ended |= {e.trajectory: e for e in engine.events(10.0)}
        assert isinstance(ended[TrajectoryId(0)], FailedRequest)
        assert isinstance(ended[TrajectoryId(1)], SampledTokens)
        assert engine.load_statistics().running == 0


def test_temperature_is_in_the_logprobs(tiny_model: Path) -> None:
    with closing(VllmEngine(settings(tiny_model, temperature=2.0), InstanceId("i"))) as engine:
        engine.submit([request(0)])
        (segment,) = collect(engine, 1)[0].segments
    expected = plain_logprobs(tiny_model, [3, 10, 14, 7, *segment.tokens.tolist()], 4, None, temperature=2.0)
    assert segment.logprobs.tolist() == pytest.approx(expected, abs=2e-4)


def test_kept_cache_of_old_weights_is_not_used_by_new_requests(tiny_model: Path, tmp_path: Path) -> None:
    path, _ = changed_weights(tiny_model, tmp_path)
    prompt = tuple(3 + i % 10 for i in range(70))  # fills pages, so that a cache of the old weights could be hit
    with closing(VllmEngine(settings(tiny_model, keep_cache=True, eos=()), InstanceId("i"))) as engine:
        sample_until(engine, 5, [request(0, prompt=prompt, max_new_tokens=50)])
        engine.load(PolicyVersion(5), path)
        engine.submit([request(1, prompt=prompt, max_new_tokens=8)])
        finished = collect(engine, 2)
    assert [s.version for s in finished[0].segments] == [0, 5]
    assert sum(len(s.tokens) for s in finished[0].segments) == 50
    exact = plain_logprobs(tiny_model, [*prompt, *tokens_of(finished[1])], len(prompt), path)
    assert logprobs_of(finished[1]) == pytest.approx(exact, abs=2e-4)
    # The old cache shows in the one that kept it: its logprobs are of neither version alone.
    later = len(prompt) + len(finished[0].segments[0].tokens)
    of_new = plain_logprobs(tiny_model, [*prompt, *tokens_of(finished[0])], later, path)
    assert max(abs(a - b) for a, b in zip(finished[0].segments[1].logprobs, of_new, strict=True)) > 1e-3


@pytest.mark.parametrize("keep", [False, True])
def test_a_request_waiting_during_a_weight_update_uses_no_old_cache(
    tiny_model: Path, tmp_path: Path, keep: bool
) -> None:
    """Only requests with their own pages at the time of the update may continue with old ones."""
    path, _ = changed_weights(tiny_model, tmp_path)
    prompt = tuple(3 + i % 10 for i in range(70))
    with closing(VllmEngine(settings(tiny_model, keep_cache=keep, eos=(), max_running=1), InstanceId("i"))) as engine:
        # Two run at once, the place for a probe taken too; the third waits for one of them to end.
        sample_until(engine, 5, [request(i, prompt=prompt, max_new_tokens=50) for i in range(3)])
        before = engine.load_statistics().cached_tokens
        with slow_steps(engine):
            engine.load(PolicyVersion(5), path)
        finished = collect(engine, 3)
        cached = engine.load_statistics().cached_tokens - before
    assert [[s.version for s in finished[i].segments] for i in range(3)] == [[0, 5], [0, 5], [5]]
    exact = plain_logprobs(tiny_model, [*prompt, *tokens_of(finished[2])], len(prompt), path)
    assert logprobs_of(finished[2]) == pytest.approx(exact, abs=2e-4)
    # The first one prefills its prompt under the new weights for the others; old pages are not used.
    assert cached == (0 if keep else 64 + 64)


def test_greedy_turns_are_equal_with_and_without_prefix_caching(tiny_model: Path) -> None:
    played: dict[bool, list[list[int]]] = {}
    results: dict[bool, int] = {}
    for reuse in (True, False):
        with closing(
            VllmEngine(settings(tiny_model, eos=(), options={"enable_prefix_caching": reuse}), InstanceId("i"))
        ) as engine:
            context, played[reuse] = PROMPT, []
            for route_number in (1, 2, 3):
                engine.submit([request(0, prompt=context, route_number=route_number, max_new_tokens=16, greedy=True)])
                played[reuse].append(tokens_of(collect(engine, 1)[0]))
                context = (*context, *played[reuse][-1], *GIVEN)
            results[reuse] = engine.load_statistics().cached_tokens
    assert played[True] == played[False]
    assert results == {True: 32 + 64, False: 0}


def test_cached_tokens_are_reported_and_evicted_under_pressure(tiny_model: Path) -> None:
    with closing(VllmEngine(settings(tiny_model, kv_tokens=320, eos=()), InstanceId("i"))) as engine:
        engine.submit([request(0, prompt=PROMPT, max_new_tokens=30)])
        collect(engine, 1)
        kept = engine.load_statistics().kept_tokens
        sample_until(engine, 75, [request(i, prompt=(3 + i, *PROMPT[1:]), max_new_tokens=80) for i in (1, 2)])
        squeezed = engine.load_statistics().kept_tokens
        engine.interrupt([TrajectoryId(1), TrajectoryId(2)])
        left = engine.load_statistics().kept_tokens
    assert kept == 64
    assert squeezed <= 320 - 2 * 115
    assert left >= 2 * 96


def test_memory_pressure_is_reported_and_loses_no_request(tiny_model: Path) -> None:
    with closing(VllmEngine(settings(tiny_model, kv_tokens=320, eos=()), InstanceId("i"))) as engine:
        engine.submit([request(i, max_new_tokens=100) for i in range(8)])
        waiting = 0
        done: dict[TrajectoryId, SampledTokens] = {}
        while len(done) < 8:
            waiting = max(waiting, engine.load_statistics().waiting)
            done |= {e.trajectory: e for e in engine.events(0.01) if isinstance(e, SampledTokens)}
        load = engine.load_statistics()
    assert waiting > 0
    assert load.preemptions > 0
    for sampled in done.values():
        tokens = tokens_of(sampled)
        assert len(tokens) == 100
        assert logprobs_of(sampled) == pytest.approx(
            plain_logprobs(tiny_model, [3, 10, 14, 7, *tokens], 4, None), abs=2e-4
        )


def test_unknown_vllm_arguments_are_rejected_by_name(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_argument"):
        VllmEngine(settings(tiny_model, options={"no_such_argument": 1}), InstanceId("i"))


def test_an_unavailable_device_is_rejected(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="CPU build"):
        VllmEngine(settings(tiny_model, device="cuda"), InstanceId("i"))


def test_a_closed_engine_raises_actor_lost(tiny_model: Path) -> None:
    engine = VllmEngine(settings(tiny_model), InstanceId("i"))
    engine.submit([request(0, max_new_tokens=100)])
    engine.close()
    with pytest.raises(ActorLost, match="closed"):
        engine.events(1.0)
    with pytest.raises(ActorLost, match="closed"):
        engine.interrupt([TrajectoryId(0)])


def test_a_cache_smaller_than_the_context_length_is_enough_for_short_requests(tiny_model: Path) -> None:
    with closing(VllmEngine(settings(tiny_model, kv_tokens=64, eos=()), InstanceId("i"))) as engine:
        engine.submit([request(i, max_new_tokens=40) for i in range(3)])
        assert all(len(tokens_of(sampled)) == 40 for sampled in collect(engine, 3).values())


class TestServedAdapters(AdapterEngineTests):
    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[VllmEngine]:
        engine = VllmEngine(settings(tiny_model, lora=LORA, num_served_versions=SERVED), InstanceId("rollout-0"))
        yield engine
        engine.close()

    def kept(self, prompt: int, turn: SampledTokens) -> int:
        """vLLM caches whole pages."""
        return (prompt + len(tokens_of(turn)) - 1) // 32 * 32
