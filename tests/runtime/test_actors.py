"""The actors of a run: placement, timeouts, weight verification and replacement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.runtime.step_records import RecordBuilder
from staleflow.pipeline.runtime.weight_verification import (
    DRIFT_FACTOR,
    MAX_INITIAL_DRIFT,
    PROBE_TOKENS,
    WeightVerification,
)
from staleflow.stores.errors import ActorLost, ConfigError, StoreError, TransferFailed, WeightsRefused
from staleflow.stores.trajectory import InstanceId, PolicyVersion
from staleflow.tasks.actors.trainer import PublishedStep
from tests.support import virtual_time
from tests.support.bodies import Body, Stage
from tests.support.in_process import Fault
from tests.support.scripted import World

RUN = virtual_time.run

INSTANCES_APART = ("one", "one", "one", "two", "two")
"""Hosts of server, trainer, reward worker and two instances in order of placement."""
V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)


def first(stage: Stage) -> Any:
    """Return the first instance."""
    return stage.actors.instances[InstanceId("rollout-0")]


# -- placing -------------------------------------------------------------------------------------------------------


async def test_every_role_has_a_process_and_each_host_has_one_parameter_server(body: Body) -> None:
    async with body.placed("reward.workers=2", hosts=("one", "two")) as stage:
        roles = sorted(p.role for p in stage.workers.placed.values())
        assert roles == ["parameters", "parameters", "reward", "reward", "rollout", "rollout", "server", "trainer"]
        heavy = [p for p in stage.workers.placed.values() if p.role in ("rollout", "trainer")]
        assert len({p.address for p in heavy}) == 3
        server = stage.workers.placed["server"]
        assert stage.workers.placed[f"parameters-{server.host}"].address == server.address, "not beside a heavy one"
        assert set(stage.actors.instances) == {"rollout-0", "rollout-1"}


async def test_a_parameter_server_in_a_lost_process_is_replaced(body: Body) -> None:
    """The new one is placed beside a live actor."""
    async with body.placed(hosts=INSTANCES_APART) as stage:
        beside = stage.workers.placed["parameters-two"].address
        lost, other = sorted(stage.actors.instances.values(), key=lambda i: i.placed_actor.address != beside)
        assert lost.placed_actor.address == beside
        stage.actors.record_loss(lost.id, ActorLost(lost.id))
        assert "parameters-two" not in stage.workers.placed
        stage.publish(V1)
        await stage.actors.pull(other, V1)
        assert stage.workers.placed["parameters-two"].address == other.placed_actor.address


async def test_a_parameter_server_that_times_out_is_placed_in_another_process(body: Body) -> None:
    silent = [Fault(actor="parameters-one", method="ensure_version", nth=3, silent="before")]
    async with body.placed(faults=silent) as stage:
        server = stage.workers.placed["server"]
        assert stage.workers.placed["parameters-one"].address == server.address
        stage.publish(V1)
        await stage.actors.pull(first(stage), V1)
        assert first(stage).version == V1
        assert stage.workers.placed["parameters-one"].address == stage.workers.placed["trainer"].address


async def test_an_environment_host_placed_after_a_loss_is_a_replacement(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its endpoint then asks clients of the lost one to retry."""
    settings, replaces = actor_settings.environment_settings, list[bool]()

    def noted(config: RunConfig, *, is_replacement: bool) -> Any:
        replaces.append(is_replacement)
        return settings(config, is_replacement=is_replacement)

    monkeypatch.setattr(actor_settings, "environment_settings", noted)
    async with body.placed("task.multi_turn=yes", "workload.kind=agentic") as stage:
        stage.actors.record_loss("environment-0", ActorLost("environment-0 is gone"))
        await stage.actors.place_environment("environment-0")
        assert replaces == [False, True]


async def test_start_progress_names_the_first_missing_actors(body: Body) -> None:
    async with body.placed("reward.workers=3") as stage:
        assert stage.actors.start_progress == f"all 7 ready, {stage.actors._trainer_activity}"
        names = ("rollout-0", "rollout-1", "reward-0", "reward-1", "reward-2")
        lines = []
        for name in names:
            stage.workers.placed.pop(name)
            lines.append(stage.actors.start_progress)
        assert lines == [
            "6 of 7 ready, waiting for rollout-0",
            "5 of 7 ready, waiting for rollout-0, rollout-1",
            "4 of 7 ready, waiting for reward-0, rollout-0, rollout-1",
            "3 of 7 ready, waiting for reward-0, reward-1, rollout-0, rollout-1",
            "2 of 7 ready, waiting for reward-0, reward-1, reward-2, rollout-0 and 1 more",
        ]


@pytest.mark.parametrize(("missing", "loading"), [("server", ""), ("trainer", " (loading none)"),
                                                  ("rollout-1", " (loading none)")])  # fmt: skip
async def test_start_progress_states_what_is_loading(body: Body, missing: str, loading: str) -> None:
    async with body.placed("rollout.engine.name=transformers", "model.path=none") as stage:
        stage.workers.placed.pop(missing)
        assert stage.actors.start_progress == f"4 of 5 ready, waiting for {missing}{loading}"


async def test_a_missing_teacher_loads_the_reference(body: Body) -> None:
    overrides = ("model.path=none", "teacher.instances=1", "training.kl={coefficient=1.0, reference='other'}")
    async with body.placed("rollout.engine.name=transformers", *overrides) as stage:
        stage.workers.placed.pop("teacher-0")
        assert stage.actors.start_progress.endswith("waiting for teacher-0 (loading other)")
        stage.workers.placed.pop("trainer")
        assert stage.actors.start_progress.endswith("waiting for trainer, teacher-0 (loading none, other)")


# -- calling -------------------------------------------------------------------------------------------------------


SILENT_SERVER = "server did not answer within 3 s (deadlines.call_s)"


@pytest.mark.parametrize(
    ("limits", "seconds", "message"),
    [
        ({}, 3, SILENT_SERVER),
        ({"deadline": "train_s"}, 40, "server did not answer within 40 s (deadlines.train_s)"),
        ({"deadline": "call_s", "within_s": 4.0}, 4, "server did not answer within 4 s (deadlines.call_s)"),
        ({"within_s": 7.0}, 7, "server did not answer within 7 s"),
    ],
)
async def test_a_call_times_out_and_names_its_setting(
    body: Body, limits: dict[str, Any], seconds: float, message: str
) -> None:
    async with body.placed(faults=[Fault(actor="server", method="held_out_notice", silent="before")]) as stage:
        begin = asyncio.get_running_loop().time()
        with pytest.raises(ActorLost) as caught:
            await stage.actors.ask("server", "held_out_notice", **limits)
        assert str(caught.value) == message
        assert asyncio.get_running_loop().time() - begin == pytest.approx(seconds)


async def test_a_call_to_a_dead_or_unknown_actor_raises_actor_lost(body: Body) -> None:
    async with body.placed() as stage:
        stage.workers.kill("server")
        with pytest.raises(ActorLost, match="server is gone: the worker holding this actor was lost"):
            await stage.actors.ask("server", "held_out_notice")
        with pytest.raises(ActorLost, match="nobody is gone"):
            await stage.actors.ask("nobody", "held_out_notice")


async def test_an_error_raised_by_a_method_passes_through(body: Body) -> None:
    full = StoreError("no space left")
    async with body.placed(faults=[Fault(actor="server", method="held_out_notice", error=full)]) as stage:
        with pytest.raises(StoreError) as caught:
            await stage.actors.ask("server", "held_out_notice")
        assert caught.value is full


async def test_a_long_call_ends_when_its_actor_is_recorded_as_lost(body: Body) -> None:
    async with body.placed(faults=[Fault(actor="trainer", method="version", nth=0, silent="before")]) as stage:
        stage.workers.nanny = False  # the hung process is not restarted
        begin = asyncio.get_running_loop().time()
        training = asyncio.ensure_future(stage.actors.ask("trainer", "version", deadline="train_s"))
        await asyncio.sleep(1.0)
        assert not training.done()
        stage.actors.record_loss("trainer", ActorLost("trainer is gone", "trainer"))
        with pytest.raises(ActorLost, match="trainer is gone"):
            await training
        assert asyncio.get_running_loop().time() - begin == pytest.approx(1.0)
        assert not stage.actors._loss_futures["trainer"]


async def test_has_spare_worker_asks_the_cluster(body: Body) -> None:
    async with body.placed() as stage:
        for count in (0, 1):
            stage.workers.num_spare = count
            assert await stage.actors.has_spare_worker() is (count > 0)


# -- weights -------------------------------------------------------------------------------------------------------


async def test_an_instance_has_the_new_version_after_the_pull(body: Body) -> None:
    async with body.placed(faults=[Fault(actor="rollout-0", method="pull", nth=2, late_s=2.0)]) as stage:
        stage.publish(V1)
        assert (first(stage).version, first(stage).fingerprint) == (V0, "weights-0")
        pull = asyncio.ensure_future(stage.actors.pull(first(stage), V1))
        await asyncio.sleep(1.0)
        assert first(stage).version == V0, "it is still loading"
        await pull
        assert (first(stage).version, first(stage).fingerprint) == (V1, "weights-1")


async def test_an_instance_with_different_weights_is_lost(body: Body) -> None:
    async with body.placed() as stage:
        stage.publish(V2)
        stage.world.loads_wrong = lambda instance, version: True
        with pytest.raises(
            WeightsRefused, match=r"rollout-0 .* version 2: 1 parts verified, .* 1 contradicted"
        ) as caught:
            await stage.actors.pull(first(stage), V2)
        assert caught.value.actor == "rollout-0"
        assert first(stage).version == V0


async def test_an_instance_with_wrong_logprobs_is_refused_and_named(body: Body) -> None:
    async with body.placed("rollout.logprob_drift_limit=0.2") as stage:
        stage.publish(V1)
        stage.world.drift = 0.25
        refused: list[int] = []
        stage.actors.verification.on_refused = lambda: refused.append(len(stage.actors.verification.alarms))
        with pytest.raises(WeightsRefused):
            await stage.actors.pull(first(stage), V1)
        assert refused == [1], "the callback runs once the alarm is recorded"
        assert first(stage).version == V0
        (alarm,) = stage.actors.verification.alarms
        assert "rollout-0 is out of service at version 1: logprobs of the probe are 0.25 nats off" in alarm
        assert "rollout.logprob_drift_limit allows 0.2" in alarm


@pytest.mark.parametrize(
    ("prompts", "probe"),
    [([(5,)], (5,) * PROBE_TOKENS), ([(5,), (6,)], (5, 6)), ([range(100)], tuple(range(PROBE_TOKENS))), ([], ())],
)
def test_any_held_out_prompt_makes_a_probe(prompts: list[Sequence[int]], probe: tuple[int, ...]) -> None:
    """A sequence of one token has no logprobs to compare."""
    verification = WeightVerification(RunConfig(), context_length=256)
    verification.set_probe(prompts)
    assert verification.probe == probe


async def test_the_drift_limit_follows_the_difference_at_the_start(body: Body) -> None:
    """The limit is the rounding difference between engine and trainer before the first step, 0.5 nats at most."""
    async with body.placed(world=World(drift=0.1)) as stage:
        assert stage.actors.verification.drift_limit == pytest.approx(DRIFT_FACTOR * 0.1)
    async with body.placed(world=World(drift=MAX_INITIAL_DRIFT)) as stage:
        assert stage.actors.verification.drift_limit == DRIFT_FACTOR * MAX_INITIAL_DRIFT
    with pytest.raises(ConfigError, match=r"logprobs differ by 0\.6 nats on average, 0\.5 at most are allowed"):
        async with body.placed(world=World(drift=0.6)):
            pass


@pytest.mark.parametrize(("stored", "limit"), [(0.3, 0.3), (0.0, 0.5)])
async def test_a_resumed_run_uses_the_stored_drift_limit(body: Body, stored: float, limit: float) -> None:
    resumption = Resumption(version=V2, fingerprint="weights-2", drift_limit=stored)
    async with body.placed(resumption=resumption) as stage:
        assert stage.actors.verification.drift_limit == limit
        assert "logprobs" not in stage.workers.methods("rollout-0")


async def test_a_run_resumed_before_its_first_step_measures_its_drift_limit(body: Body) -> None:
    resumption = Resumption(version=V0, fingerprint="weights-0")
    async with body.placed(resumption=resumption, world=World(drift=0.1)) as stage:
        assert stage.actors.verification.drift_limit == pytest.approx(DRIFT_FACTOR * 0.1)


async def test_engines_of_an_earlier_start_are_not_measured_as_the_base_model(body: Body) -> None:
    """They may have the weights of an undone step. Without another engine the largest limit applies."""
    resumption = Resumption(version=V0, fingerprint="weights-0")
    taken_over = [Fault(actor=name, method="took_over", change=lambda _: True) for name in ("rollout-0", "rollout-1")]
    async with body.placed(resumption=resumption, world=World(drift=0.1), faults=taken_over[:1]) as stage:
        assert stage.actors.verification.drift_limit == pytest.approx(DRIFT_FACTOR * 0.1)
        assert "logprobs" not in stage.workers.methods("rollout-0")
    async with body.placed(resumption=resumption, world=World(drift=0.1), faults=taken_over) as stage:
        assert stage.actors.verification.drift_limit == MAX_INITIAL_DRIFT


async def test_versions_in_use_are_kept_on_every_host(body: Body) -> None:
    async with body.placed(hosts=INSTANCES_APART) as stage:
        first, second = stage.actors.instances.values()
        for version in range(1, 5):
            stage.publish(PolicyVersion(version))
        await stage.actors.pull(first, V1)
        await stage.actors.pull(second, V1)
        await stage.actors.pull(second, V2)
        await stage.actors.prune({PolicyVersion(3)})
        assert stage.world.weights == {"one": {1, 2, 3, 4}, "two": {1, 2}}
        await stage.actors.pull(first, V2)
        await stage.actors.prune(set())
        assert stage.world.weights == {"one": {2, 4}, "two": {2}}


# -- losing --------------------------------------------------------------------------------------------------------


async def test_a_replacement_has_a_new_name_and_the_newest_version(body: Body) -> None:
    async with body.placed() as stage:
        stage.publish(V2)
        stage.actors.clock.start(12.34)
        stage.actors.record_loss("rollout-0", ActorLost("rollout-0 is gone"))
        assert stage.actors.loss_messages == ["12.3 s: rollout-0 is gone"]
        assert list(stage.actors.instances) == ["rollout-1"]
        instance = await stage.actors.place_instance(0)
        assert (instance.id, instance.index, instance.version) == ("rollout-0.1", 0, V2)
        stage.actors.record_loss("rollout-0.1", ActorLost("again"))
        assert (await stage.actors.place_instance(0)).id == "rollout-0.2"
        assert list(stage.actors.instances) == ["rollout-1", "rollout-0.2"]


async def test_the_fourth_loss_of_an_instance_raises_and_other_instances_do_not_count(body: Body) -> None:
    async with body.placed() as stage:
        stage.actors.record_loss("rollout-1", ActorLost("other"))
        for name in ("rollout-0", "rollout-0.1", "rollout-0.2"):
            stage.actors.record_loss(name, ActorLost(f"{name} is gone"))
            await stage.actors.place_instance(0)
        with pytest.raises(ActorLost, match=r"rollout-0 was lost 4 times within an hour, last: rollout-0.3 is gone"):
            stage.actors.record_loss("rollout-0.3", ActorLost("rollout-0.3 is gone"))
        assert len(stage.actors.loss_messages) == 5


async def test_losses_older_than_an_hour_do_not_count(body: Body) -> None:
    """A run of weeks has more than four losses in total."""
    async with body.placed() as stage:
        for hour in range(8):
            name = f"rollout-0.{hour}" if hour else "rollout-0"
            stage.actors.clock.start(1300.0 * hour)
            stage.actors.record_loss(name, ActorLost(f"{name} is gone"))
            await stage.actors.place_instance(0)
        with pytest.raises(ActorLost, match=r"rollout-0 was lost 4 times within an hour, last: rollout-0.8 is gone"):
            stage.actors.record_loss("rollout-0.8", ActorLost("rollout-0.8 is gone"))


async def test_a_version_being_fetched_or_saved_is_kept(body: Body) -> None:
    """Newer versions may be published while it is on its way to a slow host or waits for the trainer."""
    slow_host = [Fault(actor="parameters-two", method="ensure_version", nth=2, late_s=1.0)]
    async with body.placed(hosts=INSTANCES_APART, faults=slow_host, world=World(save_s=2.0)) as stage:
        stage.publish(V1)
        stage.publish(V2)
        first, second = stage.actors.instances.values()
        fetching = asyncio.ensure_future(stage.actors.pull(second, V1))
        saving = asyncio.ensure_future(stage.actors.checkpoint("base", V0))
        await asyncio.sleep(0.0)
        await stage.actors.pull(first, V2)
        await stage.actors.prune(set())
        assert stage.world.weights["one"] == {0, 1, 2}
        assert await saving
        await fetching
        assert second.version == V1
        await stage.actors.prune(set())
        assert stage.world.weights["one"] == {1, 2}


async def test_a_version_that_no_host_has_is_skipped_for_the_newest(body: Body) -> None:
    """The version was on the host of a lost trainer, which resumed elsewhere from a later resume point."""
    gone = TransferFailed("version 1 cannot be fetched: parameters-one does not hand it on")
    async with body.placed(
        hosts=INSTANCES_APART, faults=[Fault(actor="parameters-two", method="ensure_version", nth=3, error=gone)]
    ) as stage:
        stage.publish(V1)
        stage.publish(V2)
        _, two = stage.actors.instances.values()
        assert await stage.actors.pull(two, V1) == V2
        assert (two.version, two.fingerprint) == (V2, "weights-2")


async def test_a_retired_instance_frees_its_worker(body: Body) -> None:
    async with body.placed() as stage:
        instance = first(stage)
        await stage.actors.retire(instance)
        assert instance.placed_actor.name not in stage.workers.placed
        assert instance.id not in stage.actors.instances


@pytest.mark.parametrize(
    ("name", "overrides"), [("reward-0", ()), ("environment-0", ("task.multi_turn=yes", "workload.kind=agentic"))]
)
async def test_a_moved_reward_actor_is_placed_again_and_its_process_released(
    body: Body, name: str, overrides: tuple[str, ...]
) -> None:
    async with body.placed(*overrides) as stage:
        before = stage.workers.placed[name].future
        await stage.actors.move_reward_actor(name)
        assert stage.workers.placed[name].future is not before
        assert before.dead
        stage.workers.placed.pop(name)
        await stage.actors.move_reward_actor(name)
        assert name in stage.workers.placed


async def test_only_a_reward_actor_is_at_the_address_of_its_worker(body: Body) -> None:
    async with body.placed() as stage:
        for name, placed in stage.workers.placed.items():
            assert stage.actors.reward_actor_at(placed.address) == (name if name.startswith("reward") else "")
        assert stage.actors.reward_actor_at("tcp://elsewhere:1") == ""


async def test_close_does_not_raise_when_actors_are_gone(body: Body) -> None:
    async with body.placed() as stage:
        stage.workers.kill("server")
        stage.workers.kill("rollout-1")
        await stage.actors.close()
        assert stage.workers.actor("rollout-0").engine.closed
        closed = [call.actor for call in stage.workers.calls if call.method == "close"]
        assert sorted(closed[:2]) == ["rollout-0", "rollout-1"]
        assert closed[2:4] == ["trainer", "reward-0"]
        assert sorted(closed[4:]) == ["parameters-one", "server"]


@pytest.mark.parametrize("prompts", [[], [(5, 6, 7)]])
def test_a_step_has_a_drift_only_if_logprobs_were_compared(prompts: list[Sequence[int]]) -> None:
    verification = WeightVerification(RunConfig(), context_length=256)
    verification.set_probe(prompts)
    ledger = SimpleNamespace(num_started=0, num_ended={}, next_step=0, version=0)
    records = RecordBuilder(
        cast(Any, SimpleNamespace(mixture=None, ledger=ledger)),
        cast(Any, SimpleNamespace(verification=verification, instances={})),
        [],
    )
    step = PublishedStep(version=PolicyVersion(1), metrics={}, fingerprint="", path="")
    assert ("probe_drift" in records.make_step_record(step).metrics) == bool(prompts)
