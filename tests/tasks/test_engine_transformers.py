from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.model_families import make_family_model
from staleflow.stores.errors import ActorLost, WeightsRefused
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.engines.base import Engine
from staleflow.tasks.engines.engine_settings import Speculation, TransformersSettings
from staleflow.tasks.engines.row_attention import RowPass
from staleflow.tasks.engines.row_storage import Buckets
from staleflow.tasks.engines.transformers import TransformersEngine, load_model
from tests.tasks.adapter_conformance import LORA, SERVED, AdapterEngineTests, AdapterVersions
from tests.tasks.brake import brake, brake_of_transformers, check_brake  # noqa: F401  used by name
from tests.tasks.engine_conformance import (
    GIVEN,
    PATIENCE_S,
    PROMPT,
    ReusingEngineTests,
    SleepingEngineTests,
    call_in_thread,
    collect,
    logprobs_of,
    model_settings,
    request,
    sample_until,
    tokens_of,
)
from tests.tasks.stop_conformance import StopTests


def settings(model: Path, **changes: Any) -> TransformersSettings:
    return TransformersSettings(**(model_settings(model) | changes))


class TestTransformersEngine(SleepingEngineTests, StopTests, ReusingEngineTests):
    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[TransformersEngine]:
        torch.set_num_threads(1)
        engine = TransformersEngine(settings(tiny_model), InstanceId("rollout-0"))
        yield engine
        engine.close()

    def test_the_brake_stops_the_engine_between_tokens(self, engine: Engine) -> None:
        requests = [request(0, max_new_tokens=40, greedy=True)]
        sample_until(engine, 3, requests)
        check_brake(engine, requests, lambda: engine.load_statistics().progress)

    def kill(self, engine: Engine) -> None:
        def fail() -> None:
            raise RuntimeError("a kernel failed")

        assert isinstance(engine, TransformersEngine)
        engine._step = fail  # type: ignore[method-assign]

    @contextmanager
    def hang(self, engine: Engine) -> Iterator[None]:
        assert isinstance(engine, TransformersEngine)
        step, hangs, goes_on = engine._step, threading.Event(), threading.Event()

        def stand_still() -> None:
            hangs.set()
            goes_on.wait(60.0)
            step()

        engine._step = stand_still  # type: ignore[method-assign]
        assert hangs.wait(60.0)
        yield
        engine._step = step  # type: ignore[method-assign]
        goes_on.set()

    @contextmanager
    def during_load(self, engine: Engine, ask: Callable[[], None]) -> Iterator[None]:
        assert isinstance(engine, TransformersEngine)
        replace = engine._replace_weights

        def asked(*args: Any) -> None:
            call_in_thread(ask)
            replace(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_replace_weights", asked)
            yield

    @pytest.fixture
    def reference(self, tiny_model: Path) -> Callable[..., list[float]]:
        return lambda tokens, first, weights=None: plain_logprobs(tiny_model, tokens, first, weights)

    @pytest.fixture
    def other_weights(self, tiny_model: Path, tmp_path: Path) -> tuple[Path, str]:
        return changed_weights(tiny_model, tmp_path)

    def test_weights_that_fail_to_load_halfway_end_the_instance(
        self, engine: Engine, other_weights: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise it would go on with weights of two versions."""
        published = weight_folder.read(other_weights[0])
        last = list(published)[-1]
        monkeypatch.setattr(weight_folder, "read", lambda path: published | {last: published[last].to("meta")})
        with pytest.raises(WeightsRefused, match=r"rollout-0: version 5 cannot be loaded: "):
            engine.load(PolicyVersion(5), other_weights[0])
        with pytest.raises(ActorLost, match="rollout-0"):
            engine.events(1.0)

    def test_an_engine_that_cannot_stop_a_replaced_request_is_lost(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`submit` does not wait for the result, so only the engine's end can report it."""

        def fail(requests: object) -> None:
            raise ActorLost("rollout-0: vLLM could not stop requests")

        monkeypatch.setattr(engine, "_remove", fail)
        sample_until(engine, 1, [request(0, max_new_tokens=40)])
        engine.submit([request(0, max_new_tokens=40, route_number=2)])
        with pytest.raises(ActorLost, match="could not stop requests"):
            engine.events(PATIENCE_S)

    def test_a_request_may_set_its_temperature(self, engine: Engine, tiny_model: Path) -> None:
        engine.submit([request(1), request(2, temperature=2.0), request(3, greedy=True)])
        by_id = collect(engine, 3)
        for number, temperature in ((1, 1.0), (2, 2.0)):
            tokens = [*request(number).tokens, *tokens_of(by_id[number])]
            expected = plain_logprobs(tiny_model, tokens, len(request(number).tokens), None, temperature=temperature)
            assert logprobs_of(by_id[number]) == pytest.approx(expected, abs=2e-4)

    def test_temperature_is_in_the_logprobs(self, tiny_model: Path) -> None:
        with closing(TransformersEngine(settings(tiny_model, temperature=2.0), InstanceId("i"))) as engine:
            engine.submit([request(0)])
            (segment,) = collect(engine, 1)[0].segments
        tokens = [3, 10, 14, 7, *segment.tokens.tolist()]
        expected = plain_logprobs(tiny_model, tokens, 4, None, temperature=2.0)
        assert segment.logprobs.tolist() == pytest.approx(expected, abs=2e-4)


class TestKeptContexts:
    """An engine with eight cache pages. No response ends before 16 tokens."""

    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[TransformersEngine]:
        torch.set_num_threads(1)
        engine = TransformersEngine(settings(tiny_model, eos=(), kv_tokens=256), InstanceId("rollout-0"))
        yield engine
        engine.close()

    def turn(self, engine: Engine, trajectory: int, context: tuple[int, ...], **changes: Any) -> list[int]:
        more: dict[str, Any] = {"keep_kv": True, "greedy": True, "max_new_tokens": 16}
        engine.submit([request(trajectory, context, **(more | changes))])
        return tokens_of(collect(engine, 1)[TrajectoryId(trajectory)])

    def prompt(self, trajectory: int) -> tuple[int, ...]:
        return (4 + trajectory, *PROMPT[1:])

    def cached(self, engine: Engine, trajectory: int, context: tuple[int, ...]) -> int:
        """Return the number of tokens of this context that the next turn finds cached."""
        before = engine.load_statistics().cached_tokens
        self.turn(engine, trajectory, (*context, *GIVEN), route_number=2, keep_kv=False)
        return engine.load_statistics().cached_tokens - before

    def test_tokens_and_logprobs_match_a_recomputed_context(self, engine: Engine) -> None:
        context = PROMPT
        for route_number in (1, 2, 3):
            ids: list[list[int]] = []
            logprobs: list[list[float]] = []
            for trajectory in (0, 1):
                again = request(
                    trajectory,
                    context,
                    route_number=route_number,
                    max_new_tokens=16,
                    keep_kv=not trajectory,
                    greedy=True,
                )
                engine.submit([again])
                sampled = collect(engine, 1)[again.trajectory]
                ids.append(tokens_of(sampled))
                logprobs.append(logprobs_of(sampled))
            assert ids[0] == ids[1]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
            context = (*context, *ids[0], *GIVEN)
        load = engine.load_statistics()
        assert load.cached_tokens == len(PROMPT) + 15 + len(PROMPT) + 36
        assert load.kept_tokens == len(context) - len(GIVEN) - 1

    def test_contexts_are_cached_for_returning_trajectories_until_aborted(self, engine: Engine) -> None:
        contexts = {i: (*self.prompt(i), *self.turn(engine, i, self.prompt(i), keep_kv=i > 0)) for i in range(3)}
        assert engine.load_statistics().kept_tokens == 2 * 55
        engine.abort([TrajectoryId(1)])
        assert self.cached(engine, 1, contexts[1]) == 0
        assert engine.load_statistics().kept_tokens == 55
        assert self.cached(engine, 2, contexts[2]) == 55
        assert engine.load_statistics().kept_tokens == 0

    def test_the_oldest_cached_contexts_are_evicted_for_running_requests(self, engine: Engine) -> None:
        """Three contexts use six of eight pages. The new request needs three more pages and some free ones to start."""
        contexts = {i: (*self.prompt(i), *self.turn(engine, i, self.prompt(i))) for i in range(3)}
        assert engine.load_statistics().kept_tokens == 3 * 55
        before = engine.load_statistics().prefilled_tokens
        self.turn(engine, 7, PROMPT + PROMPT[:20], keep_kv=False)
        load = engine.load_statistics()
        assert (load.kept_tokens, load.prefilled_tokens - before) == (2 * 55, 60)
        assert [self.cached(engine, i, contexts[i]) for i in (2, 1, 0)] == [55, 55, 0]

    def test_simultaneous_returning_turns_evict_cached_contexts_and_finish(self, engine: Engine) -> None:
        """Each context has two pages and needs three: cached contexts of waiting requests are evicted, and all requests
        finish."""
        contexts = {i: (*self.prompt(i), *self.turn(engine, i, self.prompt(i))) for i in range(4)}
        engine.submit(
            [
                request(i, (*context, *PROMPT[:30]), route_number=2, max_new_tokens=16, keep_kv=True, greedy=True)
                for i, context in contexts.items()
            ]
        )
        assert set(collect(engine, 4)) == set(range(4))
        load = engine.load_statistics()
        assert load.running == 0 and load.cached_tokens > 0

    def test_new_requests_start_after_preempted_requests_are_interrupted(self, engine: Engine) -> None:
        """Preempted requests run before new ones, and a new one must not wait for a request that is gone."""
        assert isinstance(engine, TransformersEngine)
        engine.submit([request(i, self.prompt(i), max_new_tokens=80) for i in range(6)])
        deadline = time.monotonic() + 60
        while not engine.load_statistics().preemptions:
            assert time.monotonic() < deadline, "nothing was preempted"
            time.sleep(0.0005)
        engine.interrupt([TrajectoryId(i) for i in range(6)])
        engine.events(0.0)
        engine.submit([request(7)])
        assert set(collect(engine, 1)) == {7}


def changed_weights(folder: Path, tmp_path: Path) -> tuple[Path, str]:
    """Return other weights for the same model, published as version 5, and their fingerprint."""
    model = load_model(str(folder), "float32", "cpu", "sdpa")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    named = dict(model.named_parameters())
    weight_folder = WeightFolder(tmp_path / "weights")
    held = weight_folder.publish(PolicyVersion(5), named)
    return weight_folder.path(PolicyVersion(5)), held


def plain_logprobs(
    folder: Path, tokens: list[int], first: int, weights: Path | None, temperature: float = 1.0
) -> list[float]:
    """Return the logprobs by one forward pass of the plain model."""
    model = load_model(str(folder), "float32", "cpu", "eager")
    if weights is not None:
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in weight_folder.read(weights).items():
                named[name].copy_(tensor)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    return [float(table[i - 1, tokens[i]]) for i in range(first, len(tokens))]


def test_kept_cache_of_old_weights_is_private_to_its_running_request(tiny_model: Path, tmp_path: Path) -> None:
    """Neither other requests nor the next turn of the trajectory use it: a cached context must be of one version."""
    torch.set_num_threads(1)
    path, _ = changed_weights(tiny_model, tmp_path)
    with closing(TransformersEngine(settings(tiny_model, keep_cache=True, eos=()), InstanceId("i"))) as engine:
        sample_until(engine, 5, [request(0, PROMPT, max_new_tokens=50, keep_kv=True)])
        engine.load(PolicyVersion(5), path)
        engine.submit([request(1, PROMPT, max_new_tokens=8)])
        finished = collect(engine, 2)
        load = engine.load_statistics()
        assert (load.prefilled_tokens, load.kept_tokens) == (2 * len(PROMPT), 0)
        context = (*PROMPT, *tokens_of(finished[0]), *GIVEN)
        engine.submit([request(0, context, route_number=2, max_new_tokens=8)])
        later = collect(engine, 1)[TrajectoryId(0)]
    assert [s.version for s in finished[0].segments] == [0, 5]
    for before, sampled in ((PROMPT, finished[1]), (context, later)):
        exact = plain_logprobs(tiny_model, [*before, *tokens_of(sampled)], len(before), path)
        assert logprobs_of(sampled) == pytest.approx(exact, abs=1e-5)
    # The old cache shows in the one that kept it: its logprobs are of neither version alone.
    first = len(PROMPT) + len(finished[0].segments[0].tokens)
    of_new = plain_logprobs(tiny_model, [*PROMPT, *tokens_of(finished[0])], first, path)
    assert max(abs(a - b) for a, b in zip(finished[0].segments[1].logprobs, of_new, strict=True)) > 1e-3


def test_a_shared_prompt_is_prefilled_once_for_running_and_waiting_requests(tiny_model: Path) -> None:
    torch.set_num_threads(1)
    with closing(
        TransformersEngine(settings(tiny_model, max_running=3, max_batch_tokens=16), InstanceId("i"))
    ) as engine:
        engine.submit([request(i, PROMPT) for i in range(8)])
        for sampled in collect(engine, 8).values():
            exact = plain_logprobs(tiny_model, [*PROMPT, *tokens_of(sampled)], len(PROMPT), None)
            assert logprobs_of(sampled) == pytest.approx(exact, abs=1e-5)
        load = engine.load_statistics()
        assert (load.prefilled_tokens, load.cached_tokens) == (len(PROMPT) + 7, 7 * (len(PROMPT) - 1))


def test_a_context_larger_than_the_cache_fails_alone(tiny_model: Path) -> None:
    torch.set_num_threads(1)
    with closing(TransformersEngine(settings(tiny_model, eos=(), kv_tokens=64), InstanceId("i"))) as engine:
        engine.submit(
            [request(0, PROMPT + PROMPT), request(1, PROMPT, max_new_tokens=60), request(2, max_new_tokens=9)]
        )
        ended: dict[int, Any] = {}
        while len(ended) < 3:
            ended |= {event.trajectory: event for event in engine.events(0.5)}
    assert ended[0].error == "rollout.engine.kv_tokens = 64 is too small for 80 tokens"
    assert "is too small for 65 tokens" in ended[1].error
    assert len(tokens_of(ended[2])) == 9


@pytest.mark.parametrize("part", ["stop check", "drafter"])
def test_a_request_that_cannot_be_started_fails_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Whatever raises; the other requests of the call are sampled."""
    torch.set_num_threads(1)
    speculation = Speculation(num_speculative_tokens=2)
    with closing(TransformersEngine(settings(tiny_model, speculation=speculation), InstanceId("i"))) as engine:
        errors = [RuntimeError("it broke")]

        def fail_once(*_: object) -> None:
            if errors:
                raise errors.pop()

        owner, method = (engine._stop_check_maker, "make_check") if part == "stop check" else (engine._drafter, "begin")
        monkeypatch.setattr(owner, method, fail_once)
        engine.submit([request(0), request(1)])
        ended: dict[int, Any] = {}
        for _ in range(40):
            ended |= {event.trajectory: event for event in engine.events(0.5)}
            if len(ended) == 2:
                break
        assert ended.keys() == {0, 1}
        assert ended[0].error == "it broke"
        assert tokens_of(ended[1])
        assert engine.load_statistics().running == 0


def adapter_engine(model: Path) -> TransformersEngine:
    torch.set_num_threads(1)
    return TransformersEngine(settings(model, lora=LORA, num_served_versions=SERVED), InstanceId("rollout-0"))


class TestServedAdapters(AdapterEngineTests):
    @pytest.fixture
    def engine(self, tiny_model: Path) -> Iterator[TransformersEngine]:
        engine = adapter_engine(tiny_model)
        yield engine
        engine.close()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_adapters_of_a_model_with_latent_attention_are_served_side_by_side(family: str, tmp_path: Path) -> None:
    """Its layers also compute keys and values of cached tokens, which must get the adapter of their own version."""
    make_family_model(family, tmp_path / "model")
    versions = AdapterVersions(tmp_path / "model", tmp_path / "published")
    with closing(adapter_engine(tmp_path / "model")) as engine:
        AdapterEngineTests().test_versions_are_sampled_side_by_side(engine, versions)


def test_repeated_masks_belong_to_a_list_that_lives_and_to_a_dtype() -> None:
    """Another list could get the id of one that was freed."""
    row_pass = RowPass([], Buckets([], 1), {}, set(), torch.device("cpu"))
    masks = [torch.zeros(1, 1, 1, 2)]
    mask = weakref.ref(masks[0])
    for dtype in (torch.float32, torch.float64):
        (repeated,) = row_pass._repeat_masks(masks, 2, dtype)
        assert (repeated.shape, repeated.dtype) == ((1, 1, 2, 2), dtype)
    del masks
    assert mask() is not None
