"""From the request of an agent to token ids and back: messages are encoded exactly, and replies are the stored
tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.stores.errors import ConfigError
from staleflow.stores.in_flight.spool_entries import ObservationDelivered, RewardDelivered, decode, encode
from staleflow.stores.trajectory import (
    EnvSpan,
    FinishReason,
    GroupId,
    Span,
    Trajectory,
    TrajectoryId,
)
from staleflow.tasks.actors.episode_states import newest_turn
from staleflow.tasks.actors.observation_encoder import ObservationEncoder, ObservationTokens, RenderError
from staleflow.tasks.actors.server_messages import ObservationItem
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer
from staleflow.tasks.rendering.task_source import Message, Task
from staleflow.tasks.rendering.turn_params import TurnParams, role_of, split_params
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.sources.prompts import PromptSettings, TokenizedPrompts
from staleflow.tasks.sources.task_sources import NamedSourceSettings, SourceSettings
from tests.stores.test_in_flight import drawn, flight, routed
from tests.stores.test_in_flight_turns import ID, sampled
from tests.support.segments import sampled_segment
from tests.tasks.branching import branching_row
from tests.tasks.chat_models import chat_tokenizer

WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "add"}}])


@given(kinds=st.lists(st.sampled_from("sg"), min_size=1, max_size=8), data=st.data())
def test_an_agent_receives_the_stored_ids_and_logprobs_bit_for_bit(kinds: list[str], data: st.DataObject) -> None:
    """For turns of several segments, versions and instances, after env tokens or directly after the prompt."""
    floats = st.floats(-50, 0, width=32)
    spans: list[Span] = []
    for version, kind in enumerate([*kinds, "s"]):
        count = data.draw(st.integers(1, 4))
        tokens = np.asarray(data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)), np.int32)
        if kind == "g":
            spans.append(EnvSpan(role="user", tokens=tokens))
            continue
        logprobs = np.asarray(data.draw(st.lists(floats, min_size=count, max_size=count)), np.float32)
        spans.append(sampled_segment(tokens, logprobs, version=version))
    t = Trajectory(
        id=TrajectoryId(0), group=GroupId(0), prompt_tokens=np.asarray([5, 6], np.int32), spans=tuple(spans),
        finish=FinishReason.LENGTH,
    )  # fmt: skip
    turn = newest_turn(t, "text")
    assert [*turn.prompt_tokens, *turn.tokens] == [5, 6, *t.response_tokens.tolist()]
    assert turn.tokens == tuple(t.turns[-1].tolist())
    wire = json.loads(json.dumps(turn.logprobs))
    assert np.asarray(wire, np.float32).tobytes() == t.logprobs[-len(turn.tokens) :].tobytes()
    assert turn.truncated
    assert not newest_turn(replace(t, finish=FinishReason.STOP), "").truncated


def prompts(folder: Path, name: str = "smollm2", template: str = "", *, chat: bool = True) -> TokenizedPrompts:
    rows = (json.dumps({"prompt": f"unused {i}", "answer": ""}) + "\n" for i in range(20))
    (folder / "rows.jsonl").write_text("".join(rows))
    tokenizer = chat_tokenizer(name)
    tokenizer.chat_template = template or tokenizer.chat_template
    settings = PromptSettings(
        tokenizer=name,
        source=SourceSettings(task=TaskConfig(source=f"jsonl:{folder / 'rows.jsonl'}", chat=chat), seed=0),
        max_new_tokens=10, context_length=10_000, kv_tokens=10_000, num_held_out=0,
    )  # fmt: skip
    return TokenizedPrompts(settings, ChatTokenizer(tokenizer))


def task(*messages: Message, directions: TurnParams | None = None) -> Task:
    return Task(prompt=(directions or TurnParams()).prepend_to(messages), record={})


def test_token_ids_of_an_agent_are_used_unchanged(tmp_path: Path) -> None:
    result = prompts(tmp_path)
    ids = (3, 200, 7)
    assert result.encode(task(directions=TurnParams(token_ids=ids))) == ids
    text = TurnParams(token_ids=(9, 9), max_tokens=4).prepend_to(())
    assert result.bridge_tokens([1], [2], text) == [9, 9]
    assert role_of(text) == "agent"
    assert split_params(text)[0].max_tokens == 4


def test_tool_definitions_are_rendered_by_the_template_or_rejected(tmp_path: Path) -> None:
    asked = task(Message("user", "1 + 2"), directions=TurnParams(tools=TOOLS))
    result = prompts(tmp_path, template=WITH_TOOLS)
    text = ChatTokenizer(chat_tokenizer("smollm2")).text(result.encode(asked), keep_special=True)
    assert text.startswith('<|im_start|>system\n[{"type": "function"')
    assert text.endswith("<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match="the chat template leaves out the definitions of tools"):
        prompts(tmp_path).encode(asked)


def test_a_single_user_message_needs_no_chat_template(tmp_path: Path) -> None:
    result = prompts(tmp_path, chat=False)
    assert result.encode(task(Message("user", "the in"))) == result.encode(Task(prompt="the in", record={}))
    with pytest.raises(ConfigError, match=r"a prompt is a list of messages; set task\.chat = true"):
        result.encode(task(Message("system", "x"), Message("user", "y")))


def make_encoder(tokenized_prompts: TokenizedPrompts) -> ObservationEncoder:
    return ObservationEncoder(tokenized_prompts, frozenset({0}))


def whole_context(t: Trajectory) -> list[int]:
    return [*t.prompt_tokens.tolist(), *t.response_tokens.tolist()]


def observation_item(t: Trajectory, directions: TurnParams, *messages: Message) -> ObservationItem:
    return ObservationItem(
        trajectory=t.id,
        num_tokens=t.num_tokens,
        route_number=1,
        messages=directions.prepend_to(messages),
        seconds=0.1,
        replayed=(),
    )


def after_two_turns(tokenized_prompts: TokenizedPrompts) -> Trajectory:
    """Return a trajectory with the prompt "one", a turn of two tokens, the bridge of "two", and a turn of three
    tokens."""
    prompt = tokenized_prompts.encode(task(Message("user", "one")))
    t = Trajectory(id=TrajectoryId(0), group=GroupId(0), prompt_tokens=np.asarray(prompt, np.int32))
    for ids in ([40, 41], [50, 51, 52]):
        t = replace(t, spans=(*t.spans, sampled_segment(ids)), finish=FinishReason.STOP)
        if len(t.spans) == 1:
            observation = make_encoder(tokenized_prompts).encode(
                t, observation_item(t, TurnParams(), Message("user", "two")), 1000
            )
            assert isinstance(observation, ObservationTokens)
            assert observation.parent_end is None
            t = replace(t, spans=(*t.spans, EnvSpan(role="user", tokens=np.asarray(observation.tokens, np.int32))))
    return t


def test_a_branch_after_a_turn_has_the_bridge_of_that_turn(tmp_path: Path) -> None:
    result = prompts(tmp_path)
    t = after_two_turns(result)
    observation = make_encoder(result).encode(
        t, observation_item(t, TurnParams(after_turn=1), Message("user", "two")), 1000
    )
    assert isinstance(observation, ObservationTokens)
    assert observation.tokens == t.spans[1].tokens.tolist()
    assert observation.parent_end == len(t.prompt_tokens) + 2
    went_on = make_encoder(result).encode(
        t, observation_item(t, TurnParams(after_turn=2), Message("user", "two")), 1000
    )
    assert went_on == make_encoder(result).encode(t, observation_item(t, TurnParams(), Message("user", "two")), 1000)


def test_replayed_observations_must_have_the_stored_tokens(tmp_path: Path) -> None:
    result = prompts(tmp_path)
    item = observation_item(t := after_two_turns(result), TurnParams(), Message("user", "three"))
    for text, differs in (("two", False), ("2", True)):
        replayed = replace(item, replayed=((Message("user", text),),))
        assert (make_encoder(result).encode(t, replayed, 1000) == "differs") is differs


def test_a_rerendered_conversation_keeps_the_shared_prefix(tmp_path: Path) -> None:
    result = prompts(tmp_path)
    t = after_two_turns(result)
    anew = TurnParams(after_turn=0)
    other = [Message("user", "one"), Message("assistant", "never said"), Message("user", "two")]
    observation = make_encoder(result).encode(t, observation_item(t, anew, *other), 1000)
    assert isinstance(observation, ObservationTokens)
    assert observation.parent_end is not None
    ids = list(result.encode(task(*other)))
    assert [*whole_context(t)[: observation.parent_end], *observation.tokens] == ids
    assert observation.parent_end >= len(t.prompt_tokens)
    # The prompt once more, and the token ids of all so far and more.
    assert make_encoder(result).encode(t, observation_item(t, anew, Message("user", "one")), 1000) == (
        [],
        len(t.prompt_tokens),
    )
    ids = [*whole_context(t)[:-1], 7, 8]
    assert make_encoder(result).encode(t, observation_item(t, replace(anew, token_ids=tuple(ids))), 1000) == (
        [7, 8],
        len(ids) - 2,
    )
    ids = [*whole_context(t), 7]
    assert make_encoder(result).encode(t, observation_item(t, replace(anew, token_ids=tuple(ids))), 1000) == ([7], None)
    assert (
        make_encoder(result).encode(t, observation_item(t, anew, *other), t.num_tokens + len(observation.tokens))
        == "full"
    )


NO_SYSTEM_LATER = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_messages_rejected_by_the_template_are_an_error_of_their_episode(tmp_path: Path) -> None:
    result = prompts(tmp_path, template=NO_SYSTEM_LATER)
    t = after_two_turns(result)
    anew = observation_item(t, TurnParams(after_turn=0), Message("user", "x"), Message("system", "be brief"))
    observation = make_encoder(result).encode(t, anew, 1000)
    assert isinstance(observation, RenderError)
    assert "the chat template fails on messages of user, system: " in observation.error
    assert "system comes first" in observation.error


ALTERNATING = (
    "{% for m in messages %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_messages_that_continue_a_conversation_wrongly_are_an_error_of_an_agents_episode(tmp_path: Path) -> None:
    """They ended the run. An environment's messages are alike in all episodes."""
    result = prompts(tmp_path, template=ALTERNATING)
    t = after_two_turns(result)
    twice = observation_item(t, TurnParams(), Message("user", "x"), Message("user", "y"))
    assert isinstance(make_encoder(result).encode(t, twice, 1000), RenderError)
    with pytest.raises(ConfigError, match="roles must alternate"):
        ObservationEncoder(result).encode(t, twice, 1000)
    with pytest.raises(ConfigError, match="roles must alternate"):
        make_encoder(result).encode(replace(t, source=1), twice, 1000)  # an environment beside the agent


def test_the_sources_of_agents_are_known_by_their_numbers(tmp_path: Path) -> None:
    settings = prompts(tmp_path)._settings
    named = [
        NamedSourceSettings(
            name=source, settings=SourceSettings(task=TaskConfig(source=source), seed=0), num_held_out=0,
            max_new_tokens=10, reward="",
        )
        for source in ("python:games.py:Game", "agent:agents.py:play")
    ]  # fmt: skip
    assert replace(settings, sources=tuple(named)).agent_sources == {1}
    assert replace(settings, source=named[1].settings).agent_sources == {0}
    assert settings.agent_sources == set()


def test_an_empty_conversation_is_an_error_of_its_episode(tmp_path: Path) -> None:
    """A model cannot continue an empty context."""
    result = prompts(tmp_path, chat=False)
    t = after_two_turns(result)
    observation = make_encoder(result).encode(
        t, observation_item(t, TurnParams(after_turn=0), Message("user", "")), 1000
    )
    assert observation == RenderError("the request's conversation has no tokens; send a message with a text")


def test_without_a_template_a_conversation_is_its_concatenated_texts(tmp_path: Path) -> None:
    result = prompts(tmp_path, chat=False)
    other = [Message("user", "the in"), Message("assistant", " a"), Message("user", " on")]
    assert result.render(other) == list(result.encode(task(Message("user", "the in a on"))))


def test_newest_turn_of_a_branch_has_the_context_of_the_branch(tmp_path: Path) -> None:
    t = branching_row().trajectory
    turn = newest_turn(t, "")
    assert (turn.prompt_tokens, turn.tokens) == ((0, 1, 2, 3, 4, 5, 6, 15), (16, 17))


def test_branches_and_auxiliary_turns_survive_the_spool() -> None:
    state = flight()
    state.apply(drawn(0))
    state.apply(routed(0, 1))
    assert state.apply(sampled(1, 0, [0, 0]))
    entry = ObservationDelivered(
        trajectory=ID, start=2, role="user", tokens=np.asarray([7], np.int32), seconds=0.1, at_s=4.0, parent_end=1,
        is_next_turn_auxiliary=True,
    )  # fmt: skip
    read = decode(encode(entry))
    assert isinstance(read, ObservationDelivered)
    assert (read.parent_end, read.is_next_turn_auxiliary, read.max_turn_tokens) == (1, True, 0)
    assert state.apply(read)
    state.apply(routed(0, 2))
    assert state.apply(sampled(2, 3, [0, 0]))
    assert state.live[ID].num_sampled == 4
    assert state.live[ID].branches == ((len(state.live[ID].prompt_tokens) + 2, 1),)
    first, second = state.live[ID].segments
    scored = RewardDelivered(trajectory=ID, num_tokens=5, reward=1.0, parts={}, error="", at_s=5.0)
    assert state.apply(scored)
    t = state.live[ID]
    assert [s.tokens.tolist() for s in t.segments] == [first.tokens.tolist()]
    assert [(s.role, s.tokens.tolist()) for s in t.spans if isinstance(s, EnvSpan)] == [
        ("user", [7]), ("auxiliary", second.tokens.tolist()),
    ]  # fmt: skip
    assert len(t.turns) == 1
