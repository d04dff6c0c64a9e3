"""Whole runs with several task sources."""

from __future__ import annotations

from collections import Counter

from staleflow.pipeline.coordination.mixture import MAX_USELESS_GROUPS
from staleflow.stores.trajectory import Fate
from tests.support.bodies import Body, Run
from tests.support.scripted import World, response

LENGTH, MOST = 24, 500
"""Tokens of each response, which identify it among the first trajectories of the run."""


def test_a_source_that_always_fails_is_named_and_does_not_stall_the_others(body: Body) -> None:
    """All members of its groups have equal rewards, so the groups are filtered; batches keep their size."""
    runs: list[Run] = []
    trajectories = {" ".join(map(str, response(i, LENGTH))): i for i in range(MOST)}

    def reward(text: str) -> float:
        trajectory = trajectories[text.strip()]
        sources = {group: source for group, source, _ in runs[0].driver._coordinator.mixture.tasks_in_flight}
        return 0.0 if sources[trajectory // 2] == 1 else float(trajectory % 2)

    async def meanwhile(run: Run) -> None:
        runs.append(run)

    run = body.run(
        "steps=30",
        "batch.filtering=no_signal",
        "batch.groups_per_step=4",
        "task.sources.good.ratio=1",
        "task.sources.failing.ratio=1",
        "task.sources.other.ratio=2",
        world=World(reward=reward, length=lambda trajectory: LENGTH),
        meanwhile=meanwhile,
    )
    assert run.error is None
    (note,) = [note for note in run.outcomes.notes if note.startswith("task ")]
    assert note.startswith("task 'failing' gets one draw in 16")
    trained = [row for row in run.store.trajectories() if row.fate is Fate.CONSUMED]
    assert set(Counter(row.step for row in trained).values()) == {8}
    good, failing, other = run.records[-1].ledger.sources
    assert (failing.num_trained, good.num_trained + other.num_trained) == (0, 120)
    assert abs(good.num_trained - 40) <= 4
    assert MAX_USELESS_GROUPS <= failing.num_drawn < 2 * MAX_USELESS_GROUPS
    shares = [view.trained_share for view in run.outcomes.sources]
    assert shares == [good.num_trained / 120, 0.0, other.num_trained / 120]
    assert run.outcomes.steps[-1]["task/failing/trained_share"] == 0.0
