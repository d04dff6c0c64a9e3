"""A run that is stopped at any moment.

Each run is checked with `Run.check` or `Run.check_kept`: conservation, the staleness bound, the order of tokens, and a
journal that replays to the same commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from staleflow.pipeline.runtime.membership import FLUSH_TIMEOUT_S
from staleflow.stores.trajectory import AbortReason
from tests.support.bodies import Body, Run
from tests.support.driver_runs import (
    until,
)
from tests.support.in_process import Fault
from tests.support.scripted import World


def test_a_stop_during_training_stores_the_finished_step(body: Body) -> None:
    stopping: Any = None

    def stop() -> None:
        stopping.driver.stop("interrupted")

    async def meanwhile(run: Run) -> None:
        nonlocal stopping
        stopping = run

    faults = [Fault(actor="trainer", method="train", nth=2, act=stop)]
    run = body.run("steps=9", faults=faults, meanwhile=meanwhile)
    assert run.error is None
    assert not run.stopped_at_once
    assert run.outcomes.stop_reason == "interrupted"
    assert [(r.kind, r.step) for r in run.records] == [("step", 0), ("step", 1), ("end", 2)]
    assert run.workers.actor("trainer").saved[-1].endswith("step-000002")
    run.check_kept()
    given_up = [row for row in run.store.trajectories() if row.reason is AbortReason.RUN_ENDED]
    assert given_up, "trajectories in flight are stored as aborted"
    assert run.records[-1].ledger.num_live == 0


def test_a_stop_takes_effect_when_the_next_batch_is_ready(body: Body) -> None:
    """With training slower than sampling, a batch is ready whenever a step ends."""

    async def meanwhile(run: Run) -> None:
        await until(run, lambda: run.workers.methods("trainer").count("train") == 3)
        run.driver.stop("interrupted")

    run = body.run("steps=9", world=World(train_s=9.0, length=lambda _: 5), meanwhile=meanwhile)
    assert run.outcomes.stop_reason == "interrupted"
    assert [(r.kind, r.step) for r in run.records] == [("step", 0), ("step", 1), ("step", 2), ("end", 3)]
    assert run.workers.methods("trainer").count("train") == 3
    run.check_kept()


def stop_while_sampling(body: Body, *overrides: str, faults: Sequence[Fault] = ()) -> tuple[Run, float]:
    """Stop a run that samples. Returns the run, and the seconds from the stop to its end."""
    when = 0.0

    async def meanwhile(run: Run) -> None:
        nonlocal when
        await until(run, lambda: "route" in run.workers.methods("rollout-0"))
        when = asyncio.get_running_loop().time()
        run.driver.stop("terminated")

    run = body.run(*overrides, world=World(length=lambda _: 90), faults=faults, meanwhile=meanwhile)
    run.check_kept()
    assert run.error is None
    return run, run.ended_s - when


def test_a_stop_outside_training_ends_the_run_within_a_second(body: Body) -> None:
    run, seconds = stop_while_sampling(body)
    assert run.outcomes.stop_reason == "terminated"
    assert [r.kind for r in run.records] == ["end"]
    assert seconds < 1.1


def test_a_stop_waits_for_a_silent_instance_for_the_flush_timeout_only(body: Body) -> None:
    faults = [Fault(actor="rollout-0", method="flush", silent="before")]
    _, seconds = stop_while_sampling(body, "deadlines.call_s=60", faults=faults)
    assert seconds < FLUSH_TIMEOUT_S + 1.1


def test_a_second_stop_does_not_wait_for_the_training_step(body: Body) -> None:
    when = 0.0

    async def meanwhile(run: Run) -> None:
        nonlocal when
        await until(run, lambda: "train" in run.workers.methods("trainer"))
        run.driver.stop("interrupted")
        await asyncio.sleep(2.0)
        assert run.ended_s == 0.0, "the first stop waits for the step"
        run.driver.stop("interrupted again")
        when = asyncio.get_running_loop().time()

    run = body.run(world=World(train_s=30.0), meanwhile=meanwhile)
    assert run.stopped_at_once
    assert run.outcomes.stop_reason == "interrupted"
    assert run.ended_s - when < 0.1
    assert run.records == []


def test_a_stop_while_the_last_commit_is_written_ends_the_run_at_once(body: Body) -> None:
    """No task is left behind, which the virtual clock's loop would report."""

    async def meanwhile(run: Run) -> None:
        await until(run, lambda: run.workers.methods("server").count("commit") == 2)
        await asyncio.sleep(0.3)
        run.driver.stop("interrupted")

    late = Fault(actor="server", method="commit", nth=2, late_s=20.0)
    run = body.run("steps=1", faults=[late], meanwhile=meanwhile)
    assert run.stopped_at_once
    run.check_kept()


def test_a_stop_during_start_ends_the_run_at_once(body: Body) -> None:
    async def meanwhile(run: Run) -> None:
        await asyncio.sleep(0.5)
        run.driver.stop("interrupted")

    run = body.run(meanwhile=meanwhile)
    assert run.stopped_at_once
    assert run.ended_s < 0.6
    assert run.workers.placed == {}
