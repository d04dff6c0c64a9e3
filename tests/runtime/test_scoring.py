"""Scoring: complete groups are sent in one call, and slow work is divided among reward workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from staleflow.pipeline.coordination.events import TrajectoryScored
from staleflow.pipeline.runtime.scoring import MAX_GROUPS_COUNTED, MAX_HOLD_S, ScoreQueue
from staleflow.stores.trajectory import TrajectoryId
from tests.support import virtual_time
from tests.support.bodies import Body


class RecordingRewardWorkers:
    """Reward workers that take `seconds` per response. calls: (time, worker, responses) of each call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[tuple[float, str, tuple[int, ...]]] = []

    async def ask(
        self, name: str, method: str, server: object, batch: tuple[int, ...], num_tokens: Any, **limits: Any
    ) -> Any:
        assert method == "score"
        self.calls.append((round(asyncio.get_running_loop().time(), 3), name, batch))
        await asyncio.sleep(self.seconds * len(batch))
        return [(trajectory, 1.0, "") for trajectory in batch]

    async def move_reward_actor(self, name: str) -> None:
        await asyncio.sleep(20.0)


def score_responses(
    body: Body, puts: list[tuple[float, int]], *overrides: str, seconds: float = 0.001, moved: str = ""
) -> Any:
    """Submit responses at these intervals; returns the reward workers and the time of each score. moved: a worker that
    is moved meanwhile."""
    config, judges, scored_at = body.config("batch.group_size=4", *overrides), RecordingRewardWorkers(seconds), {}

    async def work() -> None:
        time = asyncio.get_running_loop().time

        def tell(event: TrajectoryScored) -> None:
            scored_at[int(event.trajectory)] = time()

        scoring = ScoreQueue(config, judges, tell)  # type: ignore[arg-type]  # all of Actors that it uses here
        tasks = [asyncio.ensure_future(work) for work in scoring.coroutines()]
        if moved:
            tasks.append(asyncio.ensure_future(scoring.move(moved)))
        for pause_s, trajectory in puts:
            await asyncio.sleep(pause_s)
            scoring.put(TrajectoryId(trajectory), 1)
        await asyncio.sleep(60.0)
        assert len(scoring._num_sampled_by_group) <= MAX_GROUPS_COUNTED
        assert not scoring._num_tokens, "scored responses are forgotten"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    virtual_time.run(work())
    assert sorted(scored_at) == sorted(trajectory for _, trajectory in puts)
    return judges, scored_at


def test_a_complete_group_is_scored_in_one_call_at_once(body: Body) -> None:
    judges, _ = score_responses(body, [(1.0, 8), (0.005, 9), (0.005, 10), (0.005, 11)])
    assert judges.calls == [(1.015, "reward-0", (8, 9, 10, 11))]


def test_a_response_waits_a_limited_time_for_its_group(body: Body) -> None:
    judges, _ = score_responses(body, [(1.0, 8), (0.5, 9), (0.001, 10), (0.5, 11)])
    assert [(at, batch) for at, _, batch in judges.calls] == [
        (pytest.approx(1.0 + MAX_HOLD_S), (8,)),
        (pytest.approx(1.5 + MAX_HOLD_S), (9, 10)),
        (pytest.approx(2.001), (11,)),
    ]


def test_waiting_responses_are_scored_with_a_complete_group(body: Body) -> None:
    judges, _ = score_responses(body, [(1.0, 0), (0.0, 1), (0.0, 2), (1.0, 20), (0.0, 3)])
    assert [batch for _, _, batch in judges.calls] == [(0, 1, 2), (20, 3)]


def test_responses_are_divided_among_idle_workers(body: Body) -> None:
    judges, scored_at = score_responses(body, [(1.0, 0), (0.0, 1), (0.0, 2), (0.0, 3)], "reward.workers=4", seconds=2.0)
    assert len({name for _, name, _ in judges.calls}) == 4
    assert max(scored_at.values()) == pytest.approx(3.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_moved_takes_no_responses_meanwhile(body: Body, workers: int) -> None:
    puts = [(1.0, 0), (0.0, 1), (0.0, 2), (0.0, 3), (1.0, 4), (0.0, 5), (0.0, 6), (0.0, 7)]
    judges, _ = score_responses(body, puts, f"reward.workers={workers}", moved="reward-0")
    first = [name for at, name, _ in judges.calls if at < 20.0]
    assert set(first) == {f"reward-{i}" for i in range(1, workers)}
    assert sum(len(batch) for at, _, batch in judges.calls if at < 20.0) == 8 * (workers - 1)


def test_incomplete_groups_are_forgotten(body: Body) -> None:
    score_responses(body, [(0.0, 4 * group) for group in range(MAX_GROUPS_COUNTED + 10)], seconds=0.0)
