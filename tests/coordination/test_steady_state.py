"""The steady state of an average instance, played out: against what must hold, and against whole simulated runs."""

from __future__ import annotations

import math
import random

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.coordination.forecast import LengthForecast
from staleflow.pipeline.coordination.pacing import Pacing
from staleflow.pipeline.coordination.running_means import Measured, RunningMean
from staleflow.pipeline.coordination.steady_state import AverageInstance, DrawnResponse, interval_s
from staleflow.pipeline.simulator.analysis import measure
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.stores.trajectory import GroupId
from staleflow.tasks.emulation.cost_model import CostModel

FLAT = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, b=0.0)
"""A decode step takes 10 ms, whatever is running."""
STEEP = CostModel(k1=0.0, k2=0.0, k3=0.001, k4=0.001, b=0.0)


def instance(**changes: object) -> AverageInstance:
    values: dict[str, object] = {
        "cost": FLAT,
        "eta": 0,
        "groups": 4,
        "group_size": 2,
        "max_running": 64,
        "kv_capacity": 10**6,
        "prompt_tokens": 10.0,
        "typical_tokens": 100.0,
        "train_s": 1.0,
        "pull_s": 0.0,
        "recomputes": False,
    }
    return AverageInstance(**{**values, **changes})  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(("eta", "seconds"), [(0, 11.0), (1, 5.5), (3, 2.75)])
def test_a_longest_response_may_take_all_intervals_under_the_bound(eta: int, seconds: float) -> None:
    """1000 steps of 10 ms and 1 s of training, in eta + 1 intervals; the others are short."""
    responses = [DrawnResponse(steps=1000.0 if i % 8 == 0 else 10.0) for i in range(8 * 20)]
    assert interval_s(instance(eta=eta), responses, math.inf) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("limit_s", [0.004, math.inf])
def test_no_environment_is_one_that_answers_at_once(eta: int, limit_s: float) -> None:
    rng = random.Random(eta)
    steps = [rng.lognormvariate(4.0, 1.0) for _ in range(200)]
    one = instance(cost=STEEP, eta=eta, max_running=8)
    none, at_once = ([DrawnResponse(steps=n, acting_s=acting_s) for n in steps] for acting_s in (0.0, 1e-12))
    assert interval_s(one, none, limit_s) == pytest.approx(interval_s(one, at_once, limit_s), rel=1e-9)


def test_training_is_the_least_interval_and_environments_count() -> None:
    short = [DrawnResponse(steps=10.0)] * 8
    assert interval_s(instance(eta=2, train_s=7.0), short, math.inf) == pytest.approx(7.0, rel=0.02)
    acting = [DrawnResponse(steps=10.0, acting_s=5.0)] * 8
    assert interval_s(instance(eta=0), acting, math.inf) == pytest.approx(1.0 + 0.1 + 5.0, rel=0.02)


def test_work_that_is_held_back_without_need_makes_steps_longer() -> None:
    """At bound 0 all of a batch is due by the next step: half of it at a time takes twice as long."""
    responses = [DrawnResponse(steps=100.0)] * 8
    flat = instance(cost=STEEP)
    free, held = interval_s(flat, responses, math.inf), interval_s(flat, responses, STEEP.step_s(4, 0))
    assert free == pytest.approx(1.0 + 100 * STEEP.step_s(8, 0))
    assert held == pytest.approx(1.0 + 200 * STEEP.step_s(4, 0))


def test_limits_of_the_instance_are_kept_and_pulls_cost_their_seconds() -> None:
    responses = [DrawnResponse(steps=100.0)] * 8
    assert interval_s(instance(max_running=2), responses, math.inf) == pytest.approx(1.0 + 4.0, rel=0.02)
    assert interval_s(instance(kv_capacity=200), responses, math.inf) == pytest.approx(1.0 + 4.0, rel=0.02)
    assert interval_s(instance(pull_s=3.0), responses, math.inf) == pytest.approx(1.0 + 1.0 + 3.0, rel=0.02)


LONG = "examples/longtail.toml"


def simulated_rate(*overrides: str, job: str = LONG) -> float:
    config = loading.load(job, ("rollout.on_pull=keep", "rollout.synchronization=greedy", *overrides))
    return measure(config, SimulatedRun(config, actor_settings.make_workload(config)).run()).steady_tokens_per_s


@pytest.mark.parametrize(
    ("workload", "eta", "loss"),
    [
        ("lognormal", 0, 0.1),  # work waits that nothing gains from
        ("bimodal", 1, 0.02),  # each response that waits may be one of the many long ones
    ],
)
def test_the_default_is_no_slower_than_plain_reservation_where_a_fixed_slack_is(
    workload: str, eta: int, loss: float
) -> None:
    setting = (f"staleness.eta={eta}", f"steps={8 if eta == 0 else 20}", f"workload.kind={workload}")
    if workload == "bimodal":
        setting = (*setting, "workload.median=1000", "simulation.train_s=65")
    plain = simulated_rate(*setting, "rollout.routing=least_requests")
    fixed = simulated_rate(*setting, "rollout.routing=deadline@1", "rollout.routing.pace_slack=1.0")
    assert fixed < (1 - loss) * plain, "else this tests nothing"
    assert simulated_rate(*setting, "rollout.routing=deadline") > 0.99 * plain


def planned(eta: int, lengths: list[int], interval_s: float = 0.0, train_s: float = 20.0) -> Pacing:
    """What a run of four instances plans once it has seen these lengths, and steps that took `interval_s`."""
    cost = CostModel(k1=3.35e-08, k2=0.0064, k3=0.0001231, k4=0.0028, b=0.0027)
    forecast = LengthForecast(16_000, rare=1 / 256)
    for i, length in enumerate(lengths):
        forecast.finished(GroupId(i), length, 0.0)
    pacing = Pacing(cost, forecast, eta=eta, groups=32, group_size=8, slack=0.0, recomputes=False)
    pacing.step_started(0, 0.0)
    pacing.step_finished(train_s)
    measured = Measured(prompt_tokens=RunningMean(500.0), interval_s=RunningMean(interval_s))
    pacing.replan(4, 256, 10**6, measured)
    return pacing


def test_a_limit_is_planned_only_where_it_makes_steps_shorter() -> None:
    bimodal = ([1000] * 17 + [15_000] * 3) * 50
    for eta in (0, 1):
        interval = planned(eta, bimodal).plan.interval_s
        assert planned(eta, bimodal, interval).plan.step_s == math.inf
    again = [planned(2, bimodal).plan for _ in range(2)]
    assert again[0] == again[1], "the same is planned from the same"
    unknown = planned(1, [])
    assert unknown.plan.step_s == math.inf
    assert math.isfinite(unknown.plan.interval_s)


def test_a_limit_holds_only_while_steps_take_as_long_as_was_played() -> None:
    """A cost model that is not the engine's promises what does not come."""
    config = loading.load(LONG, ("workload.kind=agentic", "workload.tool_s=0"))
    workload = actor_settings.make_workload(config)
    turns = [workload.turns(group, member) for group in range(256) for member in range(8)]
    lengths = [min(16_000, sum(turn.tokens + turn.tool_tokens for turn in response)) for response in turns]
    promised = planned(1, lengths, train_s=80.0).plan.interval_s
    assert math.isfinite(planned(1, lengths, promised, train_s=80.0).plan.step_s)
    for wrong in (0.7 * promised, 1.4 * promised):
        assert planned(1, lengths, wrong, train_s=80.0).plan.step_s == math.inf
