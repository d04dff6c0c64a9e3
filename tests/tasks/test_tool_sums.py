"""The example of a job with a tool: the calls in its prompts have the results of the calculator."""

from __future__ import annotations

from examples.tool_sums import ToolSums
from staleflow.pipeline.config import actor_settings, loading
from staleflow.tasks.episodes.step_results import EpisodeKey
from staleflow.tasks.rendering.task_source import Message, prompt_of
from tests.support.games import host_episode

JOB = "examples/tools.toml"


async def test_tool_results_in_the_example_prompts_match_the_calculator() -> None:
    settings = actor_settings.episode_settings(loading.load(JOB, ()))
    assert settings is not None
    task = settings.source.build().task(3)
    prompt = prompt_of(task.record["prompt"])
    assert not isinstance(prompt, str)
    *shown, asked = prompt
    assert isinstance(asked, Message) and asked.role == "user"
    examples = [shown[i : i + 4] for i in range(0, len(shown), 4)]
    assert len(examples) == 2
    async with host_episode(settings) as (episodes, _):
        await episodes.check()
        for number, (_, call, given, answer) in enumerate(examples):
            assert isinstance(call, Message) and isinstance(answer, Message)
            key = EpisodeKey(group=3, member=number)
            first = await episodes.step(key, task.record, [call.content], truncated=False)
            assert (first.ended, first.messages) == (False, (given,))
            last = await episodes.step(key, task.record, [call.content, answer.content], truncated=False)
            assert (last.ended, last.reward) == (True, 0.0)  # correct there, but not the task here
        right = task.record["answer"]
        told = await episodes.step(EpisodeKey(group=3, member=2), task.record, [f"It is {right}"], truncated=False)
        assert (told.ended, told.reward) == (True, 1.0)


def test_held_out_sums_are_never_trained() -> None:
    sums = ToolSums({}, 1)
    requests = {held: {str(sums.record(i, held)["prompt"][-1]) for i in range(300)} for held in (False, True)}
    assert len(requests[False]) > 200 and not requests[False] & requests[True]
    assert sums.record(5, False) == ToolSums({}, 1).record(5, False) != ToolSums({}, 2).record(5, False)
