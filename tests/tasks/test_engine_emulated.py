"""The emulated engine under the conformance suite; its time follows the cost model."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.emulation.batch_simulator import DraftSettings
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.emulation.workload import RandomWorkload, WorkloadConfig
from staleflow.tasks.engines.base import Engine, Request, SampledTokens
from staleflow.tasks.engines.emulated_engine import Clock, EmulatedEngine, emulated_logprobs, emulated_weights
from staleflow.tasks.engines.engine_settings import EmulatedSettings
from staleflow.tasks.settings.choice_names import REWARD_TOKEN
from tests.tasks.brake import BRAKE, brake, check_brake  # noqa: F401  used by name
from tests.tasks.engine_conformance import (
    PATIENCE_S,
    ReusingEngineTests,
    SleepingEngineTests,
    call_in_thread,
    check_drafts,
    collect,
    request,
    sample_until,
    tokens_of,
)

COST = CostModel(k1=0.0, k2=0.004, k3=0.00005, k4=0.001, b=0.002, prefill=0.00001)


def workload(max_tokens: int = 100, **changes: Any) -> RandomWorkload:
    values: dict[str, Any] = {
        "kind": "lognormal", "prompt_tokens": 4, "median": 30.0, "sigma": 0.6, "long_share": 0.1, "long_ratio": 4.0,
        "exponent": 1.5, "turns": 3.0, "tool_s": 1.0, "tool_tokens": 5, "group_correlation": 0.0, "signal_share": 1.0,
    }  # fmt: skip
    return RandomWorkload(WorkloadConfig(**(values | changes)), members_per_group=4, max_tokens=max_tokens, seed=0)


def settings(**changes: Any) -> EmulatedSettings:
    values: dict[str, Any] = {
        "cost": COST, "workload": workload(), "members_per_group": 4, "kv_tokens": 4096, "max_running": 32,
        "pull_s": 0.005, "keep_cache": False, "time_scale": 2.0,
    }  # fmt: skip
    return EmulatedSettings(**(values | changes))


MAX_PASSED_S = 0.002
"""Maximum time that passes for an engine between two looks at its clock, so that on a busy machine a response does not
start and finish in between."""


class FaultyClock(Clock):
    """A clock that can be stopped and that can fail."""

    def __init__(self) -> None:
        self._looked = threading.Lock()
        self._passed_s = 0.0
        self._last_s = super().now()
        self._stopped = False
        self._broken = False
        self._waiting: threading.Condition | None = None

    def now(self) -> float:
        with self._looked:
            last_s, self._last_s = self._last_s, super().now()
            if not self._stopped and not BRAKE.stops_time:
                self._passed_s += min(self._last_s - last_s, MAX_PASSED_S)
            return self._passed_s

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self._waiting = changed
        if self._broken:
            raise RuntimeError("no more time")
        super().wait(changed, min(seconds, MAX_PASSED_S))

    def stop(self) -> None:
        self.now()
        self._stopped = True

    def go_on(self) -> None:
        self.now()
        self._stopped = False
        self._wake()

    def fail(self) -> None:
        """Raise in the engine thread, which is the only one that waits."""
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            with self._waiting:
                self._waiting.notify_all()


class TestEmulatedEngine(SleepingEngineTests, ReusingEngineTests):
    @pytest.fixture
    def clock(self) -> FaultyClock:
        return FaultyClock()

    @pytest.fixture
    def engine(self, clock: FaultyClock) -> Iterator[EmulatedEngine]:
        engine = EmulatedEngine(settings(), InstanceId("rollout-0"), clock)
        yield engine
        engine.close()

    @pytest.fixture(autouse=True)
    def faults(self, clock: FaultyClock) -> None:
        self._clock = clock

    def test_the_brake_stops_the_engine_between_tokens(self, engine: Engine, clock: FaultyClock) -> None:
        requests = [request(i, max_new_tokens=40) for i in range(4)]
        sample_until(engine, 3, requests)
        check_brake(engine, requests, lambda: clock._passed_s)

    def kill(self, engine: Engine) -> None:
        self._clock.fail()

    @contextmanager
    def hang(self, engine: Engine) -> Iterator[None]:
        """Stop the clock."""
        self._clock.stop()
        yield
        self._clock.go_on()

    @contextmanager
    def during_load(self, engine: Engine, ask: Callable[[], None]) -> Iterator[None]:
        """Called in place of the sleep for the load duration."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("staleflow.tasks.engines.emulated_engine.time.sleep", lambda seconds: call_in_thread(ask))
            yield

    @pytest.fixture
    def reference(self) -> Callable[..., list[float]]:
        return lambda tokens, first, weights=None: emulated_logprobs(np.asarray(tokens[first:], np.int32)).tolist()

    @pytest.fixture
    def other_weights(self, tmp_path: Path) -> tuple[Path, str]:
        named = emulated_weights(5)
        folder = WeightFolder(tmp_path / "weights")
        held = folder.publish(PolicyVersion(5), named)
        return folder.path(PolicyVersion(5)), held


def test_response_lengths_and_rewards_follow_the_workload() -> None:
    with closing(EmulatedEngine(settings(time_scale=50.0), InstanceId("i"))) as engine:
        engine.submit([request(i, max_new_tokens=100) for i in range(40)])
        for trajectory, sampled in collect(engine, 40).items():
            group, member = divmod(trajectory, 4)
            tokens = tokens_of(sampled)
            assert len(tokens) == workload().turns(group, member)[0].tokens
            assert sampled.finish is FinishReason.STOP
            assert tokens[0] == REWARD_TOKEN + workload().reward(group, member)


def test_requests_end_with_their_turn_and_the_next_turn_continues() -> None:
    acting = workload(kind="agentic")
    with closing(EmulatedEngine(settings(time_scale=50.0, workload=acting), InstanceId("i"))) as engine:
        for trajectory in range(6):
            tokens = 0
            for turn in acting.turns(*divmod(trajectory, 4)):
                engine.submit(
                    [
                        request(
                            trajectory,
                            (3, 10, 14, 7) + (5,) * tokens,
                            num_response_tokens=tokens,
                            max_new_tokens=100,
                            keep_kv=True,
                        )
                    ]
                )
                (sampled,) = collect(engine, 1).values()
                assert (sampled.start, len(tokens_of(sampled))) == (tokens, turn.tokens)
                assert sampled.finish is FinishReason.STOP
                assert engine.load_statistics().kept_tokens >= 4 + tokens + turn.tokens
                tokens += turn.tokens + turn.tool_tokens


def test_busy_time_follows_the_cost_model() -> None:
    """One request alone takes at least its number of tokens times the step time. The upper limit is measured by
    benchmarks/reality.py overhead."""
    with closing(EmulatedEngine(settings(), InstanceId("i"))) as engine:
        begin = time.monotonic()
        engine.submit([request(0, max_new_tokens=20)])
        length = len(tokens_of(collect(engine, 1)[0]))
        assert time.monotonic() - begin >= (COST.decode_s(1, 4, length) + 4 * COST.prefill) / 2.0
        assert engine.load_statistics().busy_s == pytest.approx((COST.decode_s(1, 4, length) + 4 * COST.prefill) / 2.0)


def test_modules_for_a_weight_update_are_imported_at_startup(tmp_path: Path) -> None:
    """Imports take seconds on a busy machine and would delay the first pull."""
    folder = WeightFolder(tmp_path / "weights")
    folder.publish(PolicyVersion(0), emulated_weights(0))
    script = (
        "import pickle, sys; from pathlib import Path; from staleflow.stores.trajectory import InstanceId; "
        "from staleflow.tasks.engines import emulated_engine; settings = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "engine = emulated_engine.build(settings, InstanceId('i'), 1); before = set(sys.modules); "
        "engine.load(0, Path(sys.argv[2])); engine.close(); print(sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", script, pickle.dumps(settings()).hex(), str(folder.path(PolicyVersion(0)))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_versions_are_served_side_by_side(tmp_path: Path) -> None:
    """A request finishes under its first version and no context is computed again."""
    engine = EmulatedEngine(settings(time_scale=1.0, num_served_versions=2), InstanceId("i"))
    folder = WeightFolder(tmp_path / "weights")

    def load(version: int) -> None:
        folder.publish(PolicyVersion(version), emulated_weights(version))
        engine.load(PolicyVersion(version), folder.path(PolicyVersion(version)))
        assert engine.version == version

    try:
        engine.submit([request(0, max_new_tokens=20), request(1, max_new_tokens=8, keep_kv=True)])
        load(1)
        engine.submit([request(2, max_new_tokens=20)])
        finished = collect(engine, 3)
        assert {i: {s.version for s in one.segments} for i, one in finished.items()} == {0: {0}, 1: {0}, 2: {1}}
        cached = engine.load_statistics().cached_tokens
        before = tokens_of(finished[1])
        context = (3, 10, 14, 7, *before, 50, 51)
        turn = request(
            1,
            prompt=context,
            route_number=2,
            max_new_tokens=9,
            num_response_tokens=len(before) + 2,
            version=PolicyVersion(0),
        )
        engine.submit([turn])
        again = collect(engine, 1)[1]
        assert {s.version for s in again.segments} == {0}
        assert engine.load_statistics().cached_tokens - cached == 4 + len(before)
        load(2)
        engine.submit([request(3, version=PolicyVersion(0)), request(4)])
        late = collect(engine, 2)
        assert [{s.version for s in late[i].segments} for i in (3, 4)] == [{1}, {2}]
    finally:
        engine.close()


def test_a_load_waits_for_requests_that_were_submitted_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = EmulatedEngine._submit

    def submit_late(engine: EmulatedEngine, requests: Sequence[Request]) -> None:
        time.sleep(0.05)
        submit(engine, requests)

    monkeypatch.setattr(EmulatedEngine, "_submit", submit_late)
    folder = WeightFolder(tmp_path / "weights")
    with closing(EmulatedEngine(settings(num_served_versions=2), InstanceId("i"))) as engine:
        engine.submit([request(0)])
        folder.publish(PolicyVersion(1), emulated_weights(1))
        engine.load(PolicyVersion(1), folder.path(PolicyVersion(1)))
        assert {s.version for s in collect(engine, 1)[0].segments} == {0}


def test_cached_tokens_are_released_after_the_last_turn_or_an_abort() -> None:
    """Nothing is cached for a trajectory without further turns."""
    with closing(EmulatedEngine(settings(time_scale=50.0), InstanceId("i"))) as engine:
        engine.submit([request(i, max_new_tokens=20, keep_kv=i > 0) for i in range(3)])
        finished = collect(engine, 3)
        values = {i: 4 + len(tokens_of(sampled)) for i, sampled in finished.items()}
        assert engine.load_statistics().kept_tokens == values[1] + values[2]
        engine.abort([TrajectoryId(1)])
        assert engine.load_statistics().kept_tokens == values[2]


def test_a_newer_route_may_come_after_the_last_step_of_the_request_it_replaces() -> None:
    """A command takes effect at the end of the present step, at which a request may end."""
    clock = FaultyClock()
    clock.stop()
    with closing(EmulatedEngine(settings(), InstanceId("i"), clock)) as engine:
        engine.submit([request(0, max_new_tokens=1)])
        engine.interrupt([])  # after it, requests submitted before are in the batch
        clock._passed_s = COST.step_s(1, 4) / 4
        engine.submit([request(1, max_new_tokens=1), request(0, max_new_tokens=5, route_number=2)])
        clock.go_on()
        lengths: dict[tuple[int, int], int] = {}
        while len(lengths) < 3 and (events := engine.events(PATIENCE_S)):
            for event in events:
                assert isinstance(event, SampledTokens)
                lengths[event.trajectory, event.route_number] = len(tokens_of(event))
        assert lengths == {(0, 1): 1, (1, 1): 1, (0, 2): 5}
        assert engine.load_statistics().kept_tokens == 0


def test_a_response_of_one_token_is_its_reward() -> None:
    short = workload(median=1.0, sigma=0.0, long_share=0.0)
    with closing(EmulatedEngine(settings(workload=short), InstanceId("i"))) as engine:
        engine.submit([request(i) for i in range(8)])
        for trajectory, sampled in collect(engine, 8).items():
            assert sampled.finish is FinishReason.STOP
            assert tokens_of(sampled) == [REWARD_TOKEN + short.reward(*divmod(trajectory, 4))]


def test_requests_outside_the_batch_are_counted() -> None:
    clock = FaultyClock()
    clock.stop()
    with closing(EmulatedEngine(settings(max_running=2), InstanceId("i"), clock)) as engine:
        engine.submit([request(i) for i in range(10)])
        engine.interrupt([])  # after it, they are in the batch
        load = engine.load_statistics()
        assert (load.running, load.waiting, load.preemptions) == (10, 8, 0)


def test_preemptions_are_counted() -> None:
    long = workload(median=20.0, sigma=0.0, long_share=0.0)
    with closing(EmulatedEngine(settings(kv_tokens=30, workload=long, time_scale=50.0), InstanceId("i"))) as engine:
        engine.submit([request(i, max_new_tokens=20) for i in range(2)])
        collect(engine, 2)
        assert engine.load_statistics().preemptions == 1


def test_sleep_drops_cached_contexts() -> None:
    with closing(EmulatedEngine(settings(), InstanceId("i"))) as engine:
        engine.submit([request(0, max_new_tokens=5, keep_kv=True)])
        collect(engine, 1)
        assert engine.load_statistics().kept_tokens == 9
        engine.sleep()
        assert engine.load_statistics().kept_tokens == 0


def test_drafts_have_at_most_the_tokens_of_the_settings() -> None:
    drafting = DraftSettings(length=3, max_running=1000, acceptance=0.5)
    long = workload(median=3000.0, sigma=0.0, max_tokens=3000)
    engine = EmulatedEngine(settings(drafting=drafting, workload=long, time_scale=1.0), InstanceId("rollout-0"))
    check_drafts(engine)
    engine.close()


class TestDraftingEmulatedEngine(TestEmulatedEngine):
    """The conformance suite with drafts for every request at every step."""

    @pytest.fixture
    def engine(self, clock: FaultyClock) -> Iterator[EmulatedEngine]:
        drafting = DraftSettings(length=4, max_running=1000, acceptance=0.6)
        engine = EmulatedEngine(settings(drafting=drafting), InstanceId("rollout-0"), clock)
        yield engine
        engine.close()
