"""The draft corpus of the trajectory server: responses to the same prompt that instances draft from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.pipeline.config import actor_settings
from staleflow.stores.errors import ActorLost
from staleflow.stores.in_flight.in_flight_state import InFlightState
from staleflow.stores.in_flight.spool_entries import (
    GroupDrawn,
    ObservationDelivered,
    TokensDelivered,
    TrajectoriesRouted,
)
from staleflow.stores.trajectory import (
    EndedTrajectory,
    Fate,
    FinishReason,
    GroupId,
    InstanceId,
    PolicyVersion,
    Trajectory,
    TrajectoryId,
)
from staleflow.tasks.actors import draft_corpus
from staleflow.tasks.actors.draft_corpus import DraftCorpus, NewResponses, ResponseKey
from staleflow.tasks.actors.rollout_instance import DRAFT_FETCH_S
from staleflow.tasks.engines.base import PromptResponses
from tests.support import virtual_time
from tests.support.bodies import Body
from tests.support.route_items import route_item
from tests.support.scripted import VirtualEngine, VirtualRolloutInstance, VirtualSettings, World, response, server_class
from tests.support.segments import sampled_segment

RUN = virtual_time.run

PROMPT, OTHER = (3, 10, 14), (3, 10, 15)
NOTHING: frozenset[ResponseKey] = frozenset()


def flight(**finished: Sequence[int]) -> InFlightState:
    """A group of four members with PROMPT. `t1=tokens` means that member 1 has finished with these tokens."""
    state = InFlightState(group_size=4)
    state.apply(GroupDrawn(group=GroupId(0), prompt_tokens=np.asarray(PROMPT, np.int32), at_s=0.0))
    state.apply(TrajectoriesRouted(routed=tuple((TrajectoryId(i), 1) for i in range(4)), at_s=0.0))
    for name, tokens in finished.items():
        deliver(state, int(name[1:]), tokens, FinishReason.STOP)
    return state


def deliver(state: InFlightState, trajectory: int, tokens: Sequence[int], finish: FinishReason, start: int = 0) -> None:
    entry = TokensDelivered(
        trajectory=TrajectoryId(trajectory), route_number=1, start=start, segments=(sampled_segment(tokens),),
        finish=finish, at_s=1.0, attempt=0,
    )  # fmt: skip
    assert state.apply(entry)


def stored_row(trajectory: int, tokens: Sequence[int], prompt: tuple[int, ...] = PROMPT) -> EndedTrajectory:
    t = Trajectory(
        id=TrajectoryId(trajectory), group=GroupId(trajectory // 4), prompt_tokens=np.asarray(prompt, np.int32),
        spans=(sampled_segment(tokens),) if len(tokens) else (), v_traj=PolicyVersion(0),
    )  # fmt: skip
    return EndedTrajectory(trajectory=t, fate=Fate.CONSUMED, reason=None, step=0, loss_mask=True)  # type: ignore[arg-type]  # a plain number is one


def other_responses(
    corpus: DraftCorpus, *running: int, known_keys: frozenset[ResponseKey] = NOTHING
) -> dict[int, tuple[int, ...]]:
    answer = corpus.new_responses([TrajectoryId(i) for i in running], known_keys)
    assert {
        (i, len(tokens)) for found in answer.responses for i, tokens in found.responses
    } | known_keys >= answer.known_keys
    return {int(i): tokens for found in answer.responses for i, tokens in found.responses}


def test_draft_corpus_returns_finished_siblings_and_earlier_epochs() -> None:
    state = flight(t1=(5, 6, 7))
    deliver(state, 2, (5, 6), FinishReason.UNFINISHED)
    corpus = DraftCorpus(state, 1000)
    corpus.add([stored_row(-80, (8, 9)), stored_row(-70, (8, 8), prompt=OTHER), stored_row(-60, ())])
    assert other_responses(corpus, 0) == {1: (5, 6, 7), -80: (8, 9)}
    assert [item.prompt for item in corpus.new_responses([TrajectoryId(0), TrajectoryId(3)], NOTHING).responses] == [
        PROMPT
    ]
    assert other_responses(corpus, 77) == {}


def test_draft_corpus_returns_each_response_once() -> None:
    state = flight(t1=(5, 6, 7))
    corpus = DraftCorpus(state, 1000)
    first = corpus.new_responses([TrajectoryId(0)], NOTHING)
    assert first.known_keys == {(1, 3)}
    again = corpus.new_responses([TrajectoryId(0)], first.known_keys | {(TrajectoryId(500), 1)})
    assert again.responses == []
    assert again.known_keys == {(1, 3)}
    deliver(state, 2, (5, 9), FinishReason.STOP)
    assert other_responses(corpus, 0, known_keys=again.known_keys) == {2: (5, 9)}


def test_draft_corpus_returns_a_response_again_once_it_is_longer() -> None:
    """An instance may not ask between two of the turns."""
    state = flight(t1=(5, 6))
    corpus = DraftCorpus(state, 1000)
    first = corpus.new_responses([TrajectoryId(0)], NOTHING)
    observation = ObservationDelivered(
        trajectory=TrajectoryId(1), start=2, tokens=np.asarray([8], np.int32), role="tool", seconds=0.0, at_s=2.0
    )
    assert state.apply(observation)
    deliver(state, 1, (9,), FinishReason.STOP, start=3)
    assert other_responses(corpus, 0, known_keys=first.known_keys) == {1: (5, 6, 8, 9)}


def test_draft_corpus_returns_siblings_of_every_group_with_the_prompt() -> None:
    state = flight(t1=(5, 6, 7))
    state.apply(GroupDrawn(group=GroupId(1), prompt_tokens=np.asarray(PROMPT, np.int32), at_s=0.0))
    state.apply(TrajectoriesRouted(routed=tuple((TrajectoryId(i), 1) for i in range(4, 8)), at_s=0.0))
    deliver(state, 5, (8, 9), FinishReason.STOP)
    corpus = DraftCorpus(state, 1000)
    assert other_responses(corpus, 0, 4) == other_responses(corpus, 4, 0) == {1: (5, 6, 7), 5: (8, 9)}


def test_draft_corpus_limits_the_responses_of_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_corpus, "MAX_RESPONSES_PER_REPLY", 2)
    corpus = DraftCorpus(flight(t1=(5,), t2=(6,), t3=(7,)), 1000)
    first = corpus.new_responses([TrajectoryId(0)], NOTHING)
    assert len(first.known_keys) == 2
    assert other_responses(corpus, 0, known_keys=first.known_keys).keys() == {1, 2, 3} - {
        i for i, _ in first.known_keys
    }


def test_draft_corpus_size_is_bounded() -> None:
    corpus = DraftCorpus(flight(), 100)
    for i in range(200):
        corpus.add(
            [stored_row(1000 + i, range(7), prompt=(3, 10, 14 + i % 5)), stored_row(1000 + i, range(8), prompt=PROMPT)]
        )
        held = [tokens for element in corpus._stored_responses.values() for tokens in element.values()]
        assert sum(len(tokens) for tokens in held) == corpus._num_tokens <= 100
        assert sum(tokens.nbytes for tokens in held) == 4 * corpus._num_tokens
    assert max(other_responses(corpus, 0)) == 1199, "the latest are remembered"
    none = DraftCorpus(flight(t1=(5,)), 0)
    none.add([stored_row(1000, range(7))])
    assert other_responses(none, 0) == {}


def test_draft_corpus_evicts_the_least_recently_stored_prompt() -> None:
    corpus = DraftCorpus(flight(), 20)
    rows = ((1000, 7, PROMPT), (1001, 7, OTHER), (1002, 6, PROMPT), (1003, 3, (9,)))
    corpus.add([stored_row(i, range(count), prompt) for i, count, prompt in rows])
    assert other_responses(corpus, 0).keys() == {1000, 1002}


def test_draft_corpus_keeps_the_latest_responses_of_a_prompt() -> None:
    corpus = DraftCorpus(flight(), 1000)
    for i in range(3 * draft_corpus.MAX_RESPONSES_PER_PROMPT):
        corpus.add([stored_row(1000 + i, range(2))])
        count = sum(len(responses) for responses in corpus._stored_responses.values())
        assert count == min(i + 1, draft_corpus.MAX_RESPONSES_PER_PROMPT)
    assert corpus._num_tokens == 2 * draft_corpus.MAX_RESPONSES_PER_PROMPT
    assert set(other_responses(corpus, 0)) == {
        1000 + i for i in range(2 * draft_corpus.MAX_RESPONSES_PER_PROMPT, 3 * draft_corpus.MAX_RESPONSES_PER_PROMPT)
    }


def test_draft_corpus_of_a_resumed_run_loads_the_latest_stored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_corpus, "ROWS_PER_READ", 3)
    rows = [stored_row(1000 + i, range(10)) for i in range(20)]

    class Store:
        def summary(self) -> Any:
            return type("Summary", (), {"num_rows": len(rows)})

        def trajectories_in_range(self, first: int, last: int) -> list[EndedTrajectory]:
            return rows[first:last]

    assert len(draft_corpus._latest_rows(Store(), 90)) == 9, "three reads"  # type: ignore[arg-type]  # not a whole store
    assert set(other_responses(DraftCorpus(flight(), 75, Store()), 0)) == set(range(1013, 1020))  # type: ignore[arg-type]  # not a whole store
    del rows[-1]
    assert len(draft_corpus._latest_rows(Store(), 1000)) == 19, "one row in the last read"  # type: ignore[arg-type]  # not a whole store


class DraftingEngine(VirtualEngine):
    """An engine that drafts for all running requests."""

    learned: list[PromptResponses]

    def drafting_trajectories(self) -> tuple[TrajectoryId, ...]:
        return tuple(self._requests)

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        self.learned = [*getattr(self, "learned", []), *responses]


class DraftingSettings(VirtualSettings):
    def build(self, instance: InstanceId, threads: int) -> DraftingEngine:
        return DraftingEngine(self.world, instance)


def engine(instance: VirtualRolloutInstance) -> DraftingEngine:
    drafting: object = instance._engine
    assert isinstance(drafting, DraftingEngine)
    return drafting


async def test_a_server_lost_during_a_draft_request_fails_nothing(tmp_path: Path) -> None:
    world = World(length=lambda trajectory: 9)

    class Lost(server_class(world)):  # type: ignore[misc]  # a class that a function makes
        async def draft_responses(self, *_: object) -> NewResponses:
            raise ActorLost("connection closed", "server")

    config = Body(tmp_path).config("batch.group_size=2")
    server = Lost(actor_settings.server_settings(config, tmp_path / "store", 128), 0.0)
    instance = VirtualRolloutInstance(DraftingSettings(world), InstanceId("one"), 1, 30.0, 0.0, True)
    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1),))
    assert len(await instance.next_events(server, 9.0)) == 1


async def test_draft_requests_are_rate_limited(tmp_path: Path) -> None:
    requests: list[float] = []
    world = World(length=lambda trajectory: 90)

    class Counting(server_class(world)):  # type: ignore[misc]  # a class that a function makes
        async def draft_responses(self, *args: Any) -> NewResponses:
            requests.append(asyncio.get_running_loop().time())
            answer: NewResponses = await super().draft_responses(*args)
            return answer

    config = Body(tmp_path).config("batch.group_size=2")
    server = Counting(replace(actor_settings.server_settings(config, tmp_path / "store", 128), serves_drafts=True), 0.0)
    instance = VirtualRolloutInstance(DraftingSettings(world), InstanceId("one"), 1, 30.0, 0.0, True)
    await server.draw(0, 1)
    await instance.route(server, (route_item(0, 1),))
    while asyncio.get_running_loop().time() < 3.3:
        await instance.next_events(server, 0.1)
    gaps = np.diff(requests)
    assert len(gaps) == 3 and gaps.min() >= DRAFT_FETCH_S


async def test_an_instance_drafts_from_siblings_finished_on_another_instance(tmp_path: Path) -> None:
    world = World(length=lambda trajectory: 9 if trajectory == 0 else 90)
    config = Body(tmp_path).config("batch.group_size=2")
    settings = actor_settings.server_settings(config, tmp_path / "store", 128)
    server = server_class(world)(replace(settings, serves_drafts=True), 0.0)
    first, second = (
        VirtualRolloutInstance(made(world), InstanceId(name), 1, 30.0, 0.0, drafts)
        for made, name, drafts in ((DraftingSettings, "one", True), (DraftingSettings, "two", False))
    )
    await server.draw(0, 1)
    await first.route(server, (route_item(1, 1),))
    await second.route(server, (route_item(0, 1),))
    assert await first.next_events(server, 1.5) == []
    assert len(await second.next_events(server, 5.0)) == 1
    assert await first.next_events(server, 0.1) == []
    three = VirtualRolloutInstance(DraftingSettings(world), InstanceId("three"), 1, 30.0, 0.0, True)
    await three.route(server, (route_item(1, 2),))
    for instance in (first, three):
        (learned,) = engine(instance).learned
        assert learned.responses == ((0, tuple(response(0, 9))),)
    assert len(await first.next_events(server, 9.0)) == 1
    assert len(engine(first).learned) == 1, "it is sent once"
    assert not hasattr(second._engine, "learned")
