"""Episodes that are played to evaluate a model: turn by turn, all side by side, while nothing else is sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.schema import RunConfig
from pipeline.runtime.background import side_by_side
from tasks.directions import directions_of, split
from tasks.scoring import ScoredResponse

if TYPE_CHECKING:  # else whoever only reads evaluations would load torch
    from pipeline.runtime.acting import Acting
    from pipeline.runtime.actors import Actors
    from pipeline.runtime.instance_handle import InstanceHandle
    from pipeline.runtime.membership import Membership
    from tasks.actors.environment_host import PlayItem
    from tasks.actors.rollout_instance import Evaluated
    from tasks.episodes.answers import Answer, EpisodeKey
    from tasks.prompts import HeldOut

NO_RESPONSE = ScoredResponse(reward=0.0, error="the engine gave no response")


@dataclass(slots=True)
class _Played:
    """An episode. context: prompt and response so far; turn: the newest one, not yet in it; sampled: with its
    logprobs."""

    prompt: HeldOut
    key: EpisodeKey
    context: tuple[int, ...]
    turn: tuple[int, ...] = ()
    turns: tuple[str, ...] = ()
    sampled: Evaluated | None = None
    score: ScoredResponse | None = None
    turn_tokens: int = 0
    """Most of the next turn, if the environment has said so; else 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the response so far."""
        return len(self.context) - len(self.prompt.tokens)

    def item(self, *, cut: bool) -> PlayItem:
        """What an environment host is asked to play."""
        from tasks.actors.environment_host import PlayItem
        from tasks.endpoint.turns import SampledTurn

        newest = None
        if self.sampled is not None and self.turn:
            newest = SampledTurn(
                before=self.context,
                tokens=self.turn,
                logprobs=self.sampled.logprobs,
                text=self.turns[-1],
                cut=self.sampled.cut,
            )
        return PlayItem(key=self.key, record=self.prompt.record, turns=self.turns, cut=cut, newest=newest)

    def end(self, answer: Answer) -> None:
        self.score = ScoredResponse(
            reward=0.0 if answer.error else answer.reward, parts=dict(answer.parts), error=answer.error
        )


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays held-out episodes with a run's instances and environment hosts."""

    actors: Actors
    membership: Membership
    acting: Acting
    config: RunConfig

    async def play(self, prompts: Sequence[HeldOut], greedy: bool, version: int) -> list[ScoredResponse]:
        """The rewards of an episode for each prompt, in their order. version: of the weights, so that each evaluation
        has episodes of its own."""
        from tasks.episodes.answers import EpisodeKey

        episodes = [
            _Played(
                p,
                EpisodeKey(task=i, held_out=True, member=int(greedy), attempt=version),
                p.tokens,
                turn_tokens=directions_of(p.record).max_tokens,
            )
            for i, p in enumerate(prompts)
        ]
        while going := [e for e in episodes if e.score is None]:
            await self._sample(going, greedy)
            await self._act([e for e in going if e.score is None])
        return [e.score or NO_RESPONSE for e in episodes]

    async def _sample(self, going: list[_Played], greedy: bool) -> None:
        """Have the model take a turn in each episode."""
        limit_s = self.config.deadlines.train_s
        places = [instance.index for instance in self.actors.instances.values()]
        shares = [going[i :: len(places)] for i in range(len(places))]

        def taking(share: list[_Played]) -> Callable[[InstanceHandle], Awaitable[list[Evaluated]]]:
            contexts, after = [e.context for e in share], [e.num_tokens for e in share]
            most = [e.turn_tokens for e in share]
            return lambda one: self.actors.ask(
                one.placed.name, "evaluate", contexts, greedy, limit_s, after, most, within_s=limit_s
            )

        pairs = [(place, share) for place, share in zip(places, shares, strict=True) if share]
        found = await side_by_side(*(self.membership.while_resting(place, taking(share)) for place, share in pairs))
        for (_, share), taken in zip(pairs, found, strict=True):
            for episode, turn in zip(share, taken, strict=True):
                if turn.tokens is None:
                    episode.score = NO_RESPONSE
                else:
                    episode.turn, episode.sampled = turn.tokens, turn

    async def _act(self, going: list[_Played]) -> None:
        """Have the environments answer, and give what they say to the model."""
        limit_s, room = self.config.deadlines.train_s, self.config.rollout.max_new_tokens
        texts = await self.actors.ask("server", "decode", [e.turn for e in going], within_s=limit_s)
        items = []
        for episode, text in zip(going, texts, strict=True):
            episode.turns += (text,)
            full = episode.num_tokens + len(episode.turn) >= room
            items.append(episode.item(cut=full))
        answers = await self.acting.play(items, limit_s)
        told = []
        for episode, answer in zip(going, answers, strict=True):
            if answer.ended:
                episode.end(answer)
            else:
                episode.turn_tokens = split(answer.messages)[0].max_tokens
                told.append((episode, (episode.context, episode.turn, answer.messages, len(episode.turns))))
        given = await self.actors.ask("server", "bridge", [turn for _, turn in told], within_s=limit_s)
        ends = []
        for (episode, _), ids in zip(told, given, strict=True):
            episode.context += (*episode.turn, *ids)
            episode.sampled = None
            if episode.num_tokens >= room:
                ends.append((episode, episode.item(cut=True)))
        ended = await self.acting.end([item for _, item in ends], limit_s)
        for (episode, _), answer in zip(ends, ended, strict=True):
            episode.end(answer)
