"""From an agent's request to token ids and back: what it is told is stored, and what it says is given exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stores.errors import ConfigError
from stores.spool_entries import AnswerGiven, decode, encode
from stores.trajectory import (
    FinishReason,
    Given,
    GroupId,
    InstanceId,
    PolicyVersion,
    Segment,
    Span,
    Trajectory,
    TrajectoryId,
)
from tasks.actors.given_answers import newest_turn
from tasks.directions import Directions, role_of, split
from tasks.environments import SourceSettings
from tasks.prompts import PromptSettings, TokenizedPrompts
from tasks.task_source import Message, Task
from tasks.texts import TokenizerTexts
from tests.stores.test_in_flight import drawn, flight, resumed, routed
from tests.stores.test_in_flight_turns import ID, sampled
from tests.tasks.chat_models import chat_tokenizer

WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "add"}}])


@given(kinds=st.lists(st.sampled_from("sg"), min_size=1, max_size=8), data=st.data())
def test_an_agent_is_told_the_stored_ids_and_logprobs_bit_for_bit(kinds: list[str], data: st.DataObject) -> None:
    """Turns of several segments, of several versions and instances, after given tokens or right after the prompt."""
    floats = st.floats(-50, 0, width=32)
    spans: list[Span] = []
    for version, kind in enumerate([*kinds, "s"]):
        count = data.draw(st.integers(1, 4))
        tokens = np.asarray(data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)), np.int32)
        if kind == "g":
            spans.append(Given(role="user", tokens=tokens))
            continue
        logprobs = np.asarray(data.draw(st.lists(floats, min_size=count, max_size=count)), np.float32)
        spans.append(
            Segment(version=PolicyVersion(version), instance=InstanceId("a"), tokens=tokens, logprobs=logprobs)
        )
    t = Trajectory(
        id=TrajectoryId(0), group=GroupId(0), prompt_tokens=np.asarray([5, 6], np.int32), spans=tuple(spans),
        finish=FinishReason.LENGTH,
    )  # fmt: skip
    told = newest_turn(t, "text")
    assert [*told.before, *told.tokens] == [5, 6, *t.response_tokens.tolist()]
    assert told.tokens == tuple(t.turns[-1].tolist())
    wire = json.loads(json.dumps(told.logprobs))
    assert np.asarray(wire, np.float32).tobytes() == t.logprobs[-len(told.tokens) :].tobytes()
    assert told.cut
    assert not newest_turn(replace(t, finish=FinishReason.STOP), "").cut


def prompts(folder: Path, name: str = "smollm2", template: str = "", *, chat: bool = True) -> TokenizedPrompts:
    rows = (json.dumps({"prompt": f"unused {i}", "answer": ""}) + "\n" for i in range(20))
    (folder / "rows.jsonl").write_text("".join(rows))
    tokenizer = chat_tokenizer(name)
    tokenizer.chat_template = template or tokenizer.chat_template
    settings = PromptSettings(
        tokenizer=name, source=SourceSettings(source=f"jsonl:{folder / 'rows.jsonl'}", options={}, seed=0),
        template="{prompt}", chat=chat, system="", max_new_tokens=10, context=10_000, kv_tokens=10_000, held_out=0,
    )  # fmt: skip
    return TokenizedPrompts(settings, TokenizerTexts(tokenizer))


def task(*messages: Message, directions: Directions | None = None) -> Task:
    return Task(prompt=(directions or Directions()).before(messages), record={})


def test_token_ids_of_an_agent_are_taken_as_they_are(tmp_path: Path) -> None:
    found = prompts(tmp_path)
    ids = (3, 200, 7)
    assert found.encode(task(directions=Directions(token_ids=ids))) == ids
    said = Directions(token_ids=(9, 9), max_tokens=4).before(())
    assert found.given([1], [2], said, 1) == [9, 9]
    assert role_of(said) == "agent"
    assert split(said)[0].max_tokens == 4


def test_definitions_of_tools_are_rendered_by_the_template_or_refused(tmp_path: Path) -> None:
    asked = task(Message("user", "1 + 2"), directions=Directions(tools=TOOLS))
    found = prompts(tmp_path, template=WITH_TOOLS)
    text = TokenizerTexts(chat_tokenizer("smollm2")).text(found.encode(asked), special=True)
    assert text.startswith('<|im_start|>system\n[{"type": "function"')
    assert text.endswith("<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match="the chat template leaves out the definitions of tools"):
        prompts(tmp_path).encode(asked)


def test_without_a_template_one_message_is_a_text(tmp_path: Path) -> None:
    found = prompts(tmp_path, chat=False)
    assert found.encode(task(Message("user", "the in"))) == found.encode(Task(prompt="the in", record={}))
    with pytest.raises(ConfigError, match=r"a prompt is a list of messages; set task\.chat = true"):
        found.encode(task(Message("system", "x"), Message("user", "y")))


def test_a_turns_limit_is_spooled_with_the_answer_before_it() -> None:
    held = flight()
    held.apply(drawn(0))
    held.apply(routed(0, 1))
    assert held.apply(sampled(1, 0, [0, 0]))
    entry = AnswerGiven(
        trajectory=ID, first=2, role="user", tokens=np.asarray([7], np.int32), seconds=0.1, at_s=4.0, turn_tokens=5
    )
    read = decode(encode(entry))
    assert isinstance(read, AnswerGiven)
    assert held.apply(read)
    assert held.turn_tokens == {ID: 5}
    assert held.after(resumed(0)).turn_tokens == {}
    # The next turn's answer says none.
    held.apply(routed(0, 2))
    assert held.apply(sampled(2, 3, [0]))
    assert held.apply(replace(entry, first=4, turn_tokens=0))
    assert held.turn_tokens == {}
    plain = decode(encode(replace(entry, turn_tokens=0)))
    assert isinstance(plain, AnswerGiven)
    assert plain.turn_tokens == 0
