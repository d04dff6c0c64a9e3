"""Tokens between turns: sampled tokens are unchanged, and the tokens around them are those of the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.bridging import PlainBridge, RendererBridge, TemplateBridge, make_bridge
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer, known_renderer, load_chat_tokenizer
from staleflow.tasks.rendering.task_source import Message
from tests.tasks.chat_models import MODELS, chat_tokenizer

TEXTS = {name: ChatTokenizer(chat_tokenizer(name)) for name in MODELS}
WORDS = st.text("the in12\n<>/é", max_size=12)


def bridge_text(name: str, ids: list[int]) -> str:
    return TEXTS[name].text(ids, keep_special=True)


def end_of(name: str) -> int:
    (found,) = TEXTS[name].ids(MODELS[name][3])
    return found


@pytest.mark.parametrize("name", ["smollm2", "llama3", "mistral", "qwen3"])
@given(data=st.data())
def test_prompt_turn_and_bridge_tokens_match_the_chat_template(name: str, data: st.DataObject) -> None:
    """Turns are drawn as tokens, not as texts, because a text has several tokenizations."""
    texts = TEXTS[name]
    bridge = TemplateBridge(texts)
    role = "tool" if name == "qwen3" else "user"
    conversation = [Message("user", data.draw(WORDS) + "?")]
    ids = list(texts.ids(texts.chat_text(conversation)))
    spans: list[list[int]] = [list(ids)]
    for _ in range(data.draw(st.integers(1, 4))):
        turn = data.draw(st.lists(st.integers(0, 255), max_size=8))
        says = texts.text(turn, keep_special=True)
        if "\ufffd" in says or (name == "llama3" and says != says.strip()):
            turn, says = [], ""
        closed = data.draw(st.booleans())
        turn = [*turn, end_of(name)] if closed else turn
        one = Message(role, f"{data.draw(WORDS)}!")
        given_ids = bridge.ids(ids, turn, [one])
        spans += [turn, given_ids]
        ids = [*ids, *turn, *given_ids]
        conversation += [Message("assistant", says), one]
        assert bridge_text(name, given_ids).count(MODELS[name][3]) == (0 if name == "mistral" else 1) + (not closed)
    assert ids == [token for span in spans for token in span]
    assert bridge_text(name, ids) == texts.chat_text(conversation)


def test_the_bridge_closes_an_unfinished_turn_and_leaves_a_finished_one() -> None:
    texts, bridge = TEXTS["smollm2"], TemplateBridge(TEXTS["smollm2"])
    messages = list(texts.ids("in the"))
    hears = [Message("environment", "higher")]
    rest = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert bridge_text("smollm2", bridge.ids([], messages, hears)) == f"<|im_end|>{rest}"
    (closes,), (other,) = texts.ids("<|im_end|>"), texts.ids("<|endoftext|>")
    assert bridge_text("smollm2", bridge.ids([], [*messages, closes], hears)) == rest
    assert bridge_text("smollm2", bridge.ids([], [*messages, other], hears)) == rest
    assert bridge_text("smollm2", bridge.ids([], [], hears)) == f"<|im_end|>{rest}"


def test_a_newline_at_the_end_of_a_turn_is_not_an_end_token() -> None:
    """The template closes turns by text; a newline sampled by the model is content."""
    tokenizer = chat_tokenizer("smollm2")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    texts = ChatTokenizer(tokenizer)
    result = TemplateBridge(texts).ids([], texts.ids("in\n"), [Message("user", "go")])
    assert texts.text(result) == "\nuser: go\nassistant: "


def test_unsupported_roles_and_sequences_of_messages_are_rejected() -> None:
    two = [Message("tool", "1"), Message("tool", "2")]
    qwen = TemplateBridge(TEXTS["qwen3"]).ids([], [end_of("qwen3")], two)
    wrapped = "".join(f"\n<tool_response>\n{i}\n</tool_response>" for i in (1, 2))
    assert bridge_text("qwen3", qwen) == f"\n<|im_start|>user{wrapped}<|im_end|>\n<|im_start|>assistant\n"
    mistral = TemplateBridge(TEXTS["mistral"]).ids([], [end_of("mistral")], [Message("tool", "1")])
    assert bridge_text("mistral", mistral) == "[INST] 1 [/INST]"
    with pytest.raises(ConfigError, match=r"^task\.chat = true: the chat template fails on messages of user, ass"):
        TemplateBridge(TEXTS["mistral"]).ids([], [end_of("mistral")], two)


def test_templates_that_drop_thoughts_accept_tool_messages_but_not_user_messages() -> None:
    bridge = TemplateBridge(TEXTS["qwen3"])
    bridge.check(["tool"])
    for role in ("user", "environment"):
        with pytest.raises(ConfigError) as caught:
            bridge.check([role])
        assert str(caught.value).startswith(
            "task.chat = true: the chat template drops the <think> parts of earlier turns when a message of role user "
            "follows, so the model would not go on from what it sampled; put a template that only appends"
        )
    with pytest.raises(ConfigError, match=r"^task\.chat = true: the chat template drops"):
        bridge.ids([], [], [Message("environment", "go")])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}[{{ messages|length }}]{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }};{% endfor %}",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_rejected(template: str) -> None:
    tokenizer = chat_tokenizer("smollm2")
    tokenizer.chat_template = template
    why = "^task.* renders earlier turns in another way when a message of role user follows, so the model would not"
    with pytest.raises(ConfigError, match=why):
        TemplateBridge(ChatTokenizer(tokenizer)).ids([], [], [Message("user", "go")])


def test_without_a_chat_template_messages_are_texts() -> None:
    texts = TEXTS["smollm2"]
    bridge = make_bridge(texts, "anything", chat=False, observation_template="\n{observation}\n> ")
    assert isinstance(bridge, PlainBridge)
    bridge.check(["user", "tool"])
    messages = [Message("environment", "higher {observation}"), Message("tool", "2")]
    assert texts.text(bridge.ids([1], [2], messages)) == "\nhigher {observation}\n> \n2\n> "


@pytest.mark.parametrize(
    ("name", "model", "role"), [("qwen3", "Qwen/Qwen3-8B", "tool"), ("llama3", "Llama-3.2-1B-Instruct", "user")]
)
def test_renderer_bridges_match_template_bridges(name: str, model: str, role: str) -> None:
    pytest.importorskip("renderers")
    texts = TEXTS[name]
    bridge = make_bridge(texts, model, chat=True, observation_template="{observation}")
    assert isinstance(bridge, RendererBridge)
    bridge.check([role])
    before = list(texts.ids(texts.chat_text([Message("user", "go")])))
    for turn in ([*texts.ids("in the"), end_of(name)], list(texts.ids("in the"))):
        hears = [Message(role, "the 12")]
        assert bridge.ids(before, turn, hears) == TemplateBridge(texts).ids(before, turn, hears)


def test_a_renderer_is_used_under_the_lock_of_its_tokenizer() -> None:
    texts = TEXTS["smollm2"]
    is_locked: list[bool] = []

    class Renderer:
        def render_ids(self, *_: object, **__: object) -> list[int]:
            is_locked.append(texts.lock.locked())
            return [1]

        def bridge_to_next_turn(self, *_: object) -> None:
            is_locked.append(texts.lock.locked())

    renderer: Any = Renderer()
    bridge = RendererBridge(renderer, TemplateBridge(texts), texts.lock)
    bridge.check(["user"])
    assert bridge.ids([1], [2], [Message("user", "go")])
    assert is_locked == [True] * 3


@pytest.mark.parametrize("content", ["{}", "[]", '"text"'])
def test_a_tokenizer_file_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=r"^model.path = .*: its tokenizer cannot be loaded: [A-Z]\w+Error: "):
        load_chat_tokenizer(str(tmp_path))


def test_a_renderer_is_used_only_for_models_with_the_same_template(tmp_path: Path) -> None:
    pytest.importorskip("renderers")
    assert known_renderer(chat_tokenizer("qwen3"), str(tmp_path / "Qwen3-8B")) is not None
    assert known_renderer(chat_tokenizer("smollm2"), "Qwen/Qwen3-8B") is None
    assert known_renderer(chat_tokenizer("smollm2"), "HuggingFaceTB/SmolLM2-135M-Instruct") is None
    refusing = make_bridge(TEXTS["qwen3"], "Qwen/Qwen3-8B", chat=True, observation_template="")
    with pytest.raises(ConfigError, match="drops the <think> parts of earlier turns"):
        refusing.check(["environment"])
