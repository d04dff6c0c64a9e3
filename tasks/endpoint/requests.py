"""Parse agents' requests from JSON. A request that is not understood is refused with a one-line reason. Pure.

The content of a request is read, compared and rendered, never executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from staleflow.stores.in_flight.stop_criteria import NO_STOP, StopCriteria
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.rendering.turn_params import TurnParams

MAX_SHOWN_CHARS = 60
"""Maximum characters of a request's value that an error message shows."""
MAX_MESSAGES = 10_000
MAX_PROMPTS = 128
"""Prompts of a request to /v1/completions."""
MAX_STOPS = 16
"""Stop strings of a request. OpenAI's own limit is 4; each is searched for after each token."""
MAX_STOP_CHARS = 200
"""Characters of a stop string."""
MAX_STOP_IDS = 128
"""Token ids that end a turn, in addition to the job's."""
ROLES = ("system", "developer", "user", "assistant", "tool")
IGNORED_FIELDS = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "cache_salt", "priority", "return_tokens_as_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
"""Fields that are accepted and ignored, since they do not affect what is sampled here."""
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,), "logit_bias": ({},), "bad_words": ([],),
    "seed": (), "ignore_eos": (False,), "use_beam_search": (False,), "best_of": (1,),
}  # fmt: skip
"""Sampling parameters, and the values at which they do not change the model's distribution. No seed is accepted: a
response may come from several engines and weight versions."""
NEUTRAL_IF_GREEDY = ("top_p", "top_k", "min_p", "seed")
"""Parameters without effect at temperature 0: the most likely token always remains, and no random number is drawn."""
MAX_TEMPERATURE = 100
"""Above it all tokens of any model are about equally likely."""


class SamplingRule(Enum):
    """How to handle a request whose sampling parameters differ from the engine's.

    A session's turns are trained on with the job's sampling parameters, so other sampling parameters are overridden or
    refused. A served policy is not trained, so it obeys.
    """

    OVERRIDE = "override"
    REFUSE = "refuse"
    OBEY = "obey"


AUXILIARY = "auxiliary"
"""Field of a request's body. If it is true, the turn is not trained on."""
AUXILIARY_HEADER = "x-auxiliary"
"""Header with the same meaning as AUXILIARY; its value is 1 or true."""


class RequestError(Exception):
    """A request is refused: HTTP status, message and code of the error. retry_s: seconds after which the client may
    retry; None: never."""

    def __init__(self, status: int, message: str, code: str = "invalid_request", retry_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_s = status, message, code, retry_s

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestError, (self.status, self.message, self.code, self.retry_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A tool call in a message of a request or reply. arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str

    @property
    def canonical(self) -> tuple[str, str]:
        """The call in canonical form: equal for JSON texts with the same arguments."""
        try:
            return self.name, json.dumps(json.loads(self.arguments), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a request. calls: tool calls; only assistant messages have any."""

    role: str
    content: str
    calls: tuple[FunctionCall, ...] = ()

    @property
    def canonical(self) -> tuple[Any, ...]:
        """The message in canonical form, for comparison with an earlier one: clients strip white space around the
        model's text and reformat the arguments of calls."""
        content = self.content.strip() if self.role == "assistant" else self.content
        return self.role, content, tuple(call.canonical for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for a turn, with messages, with token ids, or with a text that the turn continues as it is.

    Args:
        echo: Whether the reply scores the prompt, instead of a turn. If max_tokens is 1, the most likely token follows.
        tools: Definitions of tools as JSON; empty if there are none.
        stop: Stop criteria in addition to the model's end tokens.
        include_stop: Whether the reply includes the stop string that ended the turn.
        with_tool_calls: Whether the reply returns the tool calls in the sampled text as such.
        auxiliary: The turn is not trained on.
        overridden: Sampling parameters that are overridden: by name, the value that applies.
        temperature: Temperature of this turn, 0 for greedy; None: the engine's.
        num_bytes: Size of the body.
    """

    model: str
    messages: tuple[ChatMessage, ...] = ()
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    echo: bool = False
    tools: str = ""
    max_tokens: int = 0
    stop: StopCriteria = NO_STOP
    include_stop: bool = False
    with_tool_calls: bool = True
    stream: bool = False
    with_usage: bool = False
    with_logprobs: bool = False
    with_token_ids: bool = False
    auxiliary: bool = False
    num_bytes: int = 0
    overridden: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None

    def turn_params(
        self, *, first: bool, ids: tuple[int, ...] | None = None, after_turn: int | None = None
    ) -> TurnParams:
        """Build the parameters of the requested turn.

        Args:
            first: Whether this is the session's first turn, which includes the definitions of tools.
            ids: Token ids in place of messages.
            after_turn: See TurnParams.
        """
        return TurnParams(
            tools=self.tools if first else "",
            token_ids=ids,
            max_tokens=self.max_tokens,
            stop=self.stop,
            after_turn=after_turn,
            auxiliary=self.auxiliary,
        )


def to_model_message(message: ChatMessage) -> Message:
    """Convert a request's message to the message that is rendered for the model."""
    return Message("system" if message.role == "developer" else message.role, message.content)


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Parse the body of a request as a JSON object. Raises RequestError."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {_shorten(str(error))}") from error
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, not {_shorten(value)}")
    return value


def parse_chat(body: Mapping[str, Any], *, temperature: float, sampling: SamplingRule) -> list[ChatRequest]:
    """Parse the body of a request to /v1/chat/completions, which is for one turn. Raises RequestError. temperature: the
    engine's. sampling: how to handle other sampling parameters."""
    unread_fields = dict(body)
    model = _require_text(unread_fields.pop("model", None), "model")
    messages = _parse_messages(unread_fields.pop("messages", None))
    tools = _parse_tools(unread_fields.pop("tools", None))
    tool_choice = unread_fields.pop("tool_choice", None)
    if tool_choice not in (None, "auto", "none"):
        raise RequestError(400, f"tool_choice = {_shorten(tool_choice)}: the policy itself decides; use auto or none")
    stream_options = unread_fields.pop("stream_options", None) or {}
    if not isinstance(stream_options, dict):
        raise RequestError(400, f"stream_options must be an object, not {_shorten(stream_options)}")
    response_format = unread_fields.pop("response_format", None)
    if response_format not in (None, {"type": "text"}):
        raise RequestError(400, "response_format: the policy samples only text; leave it out")
    if unread_fields.pop("top_logprobs", None) not in (None, 0):
        raise RequestError(400, "top_logprobs: logprobs of other tokens are not kept; use 0")
    stream = _pop_bool(unread_fields, "stream")
    with_logprobs, with_token_ids = _pop_bool(unread_fields, "logprobs"), _pop_bool(unread_fields, "return_token_ids")
    auxiliary = _pop_bool(unread_fields, AUXILIARY)
    max_tokens = _pop_max_tokens(unread_fields, ("max_completion_tokens", "max_tokens"))
    stop, include_stop = _pop_stop(unread_fields), _pop_bool(unread_fields, "include_stop_str_in_output")
    number, overridden = _pop_sampling(unread_fields, temperature, sampling)
    _refuse_unknown(unread_fields)
    request = ChatRequest(
        model=model, messages=messages, tools=tools, max_tokens=max_tokens, stop=stop, include_stop=include_stop,
        with_tool_calls=tool_choice != "none" and bool(tools), stream=stream,
        with_usage=bool(stream_options.get("include_usage")), with_logprobs=with_logprobs,
        with_token_ids=with_token_ids, auxiliary=auxiliary, overridden=overridden, temperature=number,
    )  # fmt: skip
    return [request]


def parse_completions(body: Mapping[str, Any], *, temperature: float, sampling: SamplingRule) -> list[ChatRequest]:
    """Parse the body of a request to /v1/completions: a turn for each of its prompts, which are texts or lists of token
    ids. Raises RequestError."""
    unread_fields = dict(body)
    model = _require_text(unread_fields.pop("model", None), "model")
    prompts = _parse_prompts(unread_fields.pop("prompt", None))
    echo, with_token_ids = _pop_bool(unread_fields, "echo"), _pop_bool(unread_fields, "return_token_ids")
    if _pop_bool(unread_fields, "stream"):
        raise RequestError(400, "stream: completions are sent in one reply; use /v1/chat/completions to stream texts")
    num_logprobs = unread_fields.pop("logprobs", None)
    if num_logprobs is not None and (not _is_int(num_logprobs) or not 0 <= num_logprobs <= echo):
        raise RequestError(400, f"logprobs must be 0, or 1 with echo, not {_shorten(num_logprobs)}")
    no_tokens = echo and unread_fields.get("max_tokens") == 0
    if no_tokens:
        del unread_fields["max_tokens"]
    max_tokens, stop = _pop_max_tokens(unread_fields, ("max_tokens",)), _pop_stop(unread_fields)
    number, overridden = _pop_sampling(unread_fields, temperature, sampling)
    _refuse_unknown(unread_fields)
    if echo and (num_logprobs is None or not (no_tokens or (max_tokens == 1 and number == 0))):
        raise RequestError(
            400, "echo: a prompt is only scored; use logprobs = 1, and max_tokens = 0, or 1 at temperature = 0"
        )
    return [
        ChatRequest(
            model=model, token_ids=None if isinstance(prompt, str) else prompt,
            text=prompt if isinstance(prompt, str) else None, echo=echo, max_tokens=max_tokens, stop=stop,
            with_tool_calls=False, with_logprobs=num_logprobs is not None, with_token_ids=with_token_ids,
            overridden=overridden, temperature=number,
        )
        for prompt in prompts
    ]  # fmt: skip


def _parse_prompts(value: Any) -> list[str | tuple[int, ...]]:
    """Parse a text, token ids, or a list of texts or of lists of token ids. Raises RequestError."""
    prompts = value if isinstance(value, list) and not (value and _is_int(value[0])) else [value]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise RequestError(400, f"prompt has {len(prompts)} texts; a request may have 1 to {MAX_PROMPTS}")
    return [
        _require_text(prompt, "prompt") if isinstance(prompt, str) else _require_ids(prompt, "prompt")
        for prompt in prompts
    ]


def parse_generate(body: Mapping[str, Any], *, temperature: float, sampling: SamplingRule) -> list[ChatRequest]:
    """Parse the body of a request to /inference/v1/generate, which has token ids instead of messages. Raises
    RequestError."""
    unread_fields = dict(body)
    model = _require_text(unread_fields.pop("model", None), "model")
    ids = _require_ids(unread_fields.pop("token_ids", None), "token_ids")
    params = unread_fields.pop("sampling_params", None)
    if not isinstance(params, dict):
        raise RequestError(400, f"sampling_params must be an object, not {_shorten(params)}")
    if _pop_bool(unread_fields, "stream"):
        raise RequestError(400, "stream: token ids are sent in one reply; use /v1/chat/completions to stream texts")
    auxiliary = _pop_bool(unread_fields, AUXILIARY)
    _refuse_unknown(unread_fields)
    unread_params = dict(params)
    if unread_params.pop("logprobs", None) != 1:
        raise RequestError(400, "sampling_params.logprobs must be 1: a response without logprobs cannot be trained on")
    # Dropped without a message, except allowed_token_ids: they change the form of a reply, which is fixed here.
    for name in ("prompt_logprobs", "detokenize", "output_kind", "include_stop_str_in_output", "allowed_token_ids"):
        if unread_params.pop(name, None) is not None and name == "allowed_token_ids":
            raise RequestError(400, "sampling_params.allowed_token_ids: the policy may sample every token")
    max_tokens, stop = _pop_max_tokens(unread_params, ("max_tokens",)), _pop_stop(unread_params, "sampling_params.")
    number, overridden = _pop_sampling(unread_params, temperature, sampling)
    _refuse_unknown(unread_params, "sampling_params.")
    request = ChatRequest(
        model=model, token_ids=ids, max_tokens=max_tokens, stop=stop, with_logprobs=True, with_token_ids=True,
        overridden=overridden, with_tool_calls=False, auxiliary=auxiliary, temperature=number,
    )  # fmt: skip
    return [request]


def _refuse_unknown(unread_fields: dict[str, Any], prefix: str = "") -> None:
    """Raise RequestError if a field is unknown. IGNORED_FIELDS are dropped without a message."""
    for name in IGNORED_FIELDS:
        unread_fields.pop(name, None)
    if unread_fields:
        raise RequestError(400, f"{prefix}{_shorten(next(iter(unread_fields)))}: unknown field; remove it")


def _parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise RequestError(400, f"messages must be a list of at least one message, not {_shorten(value)}")
    if len(value) > MAX_MESSAGES:
        raise RequestError(400, f"messages has {len(value)}; a request may have at most {MAX_MESSAGES}")
    messages = tuple(_parse_message(message, f"messages[{index}]") for index, message in enumerate(value))
    if messages[-1].role == "assistant":
        raise RequestError(400, "messages: the last message must not be the assistant's")
    return messages


def _parse_message(value: Any, path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise RequestError(400, f"{path} must be an object, not {_shorten(value)}")
    role = value.get("role")
    if role not in ROLES:
        raise RequestError(400, f"{path}.role must be one of {', '.join(ROLES)}, not {_shorten(role)}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise RequestError(400, f"{path}.tool_calls must be a list, of an assistant's message")
    content = _parse_content(value.get("content"), path, may_be_empty=role == "assistant")
    return ChatMessage(role=role, content=content, calls=tuple(_parse_call(c, f"{path}.tool_calls") for c in calls))


def _parse_content(value: Any, path: str, *, may_be_empty: bool) -> str:
    if value is None and may_be_empty:
        return ""
    if isinstance(value, list):
        parts = []
        for part in value:
            part_type = part.get("type") if isinstance(part, dict) else None
            if part_type != "text" or not isinstance(part.get("text"), str):
                raise RequestError(400, f"{path}.content: only parts of type text are read, not {_shorten(part_type)}")
            parts.append(part["text"])
        value = "".join(parts)
    return _require_text(value, f"{path}.content")


def _parse_call(value: Any, path: str) -> FunctionCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise RequestError(400, f"{path}: a call is {{id, type, function: {{name, arguments}}}}, not {_shorten(value)}")
    return FunctionCall(
        name=_require_text(function.get("name"), f"{path}.function.name"),
        arguments=_require_text(function.get("arguments"), f"{path}.function.arguments"),
    )


def _parse_tools(value: Any) -> str:
    """Check the definitions of tools, and return them as JSON; empty if there are none. Raises RequestError."""
    if not value:
        return ""
    if not isinstance(value, list):
        raise RequestError(400, f"tools must be a list, not {_shorten(value)}")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, f"tools[{index}] must be {{type: function, function: {{name, ...}}}}")
    _require_text(json.dumps(value, ensure_ascii=False), "tools")  # a chat template may render any part of them
    return json.dumps(value, sort_keys=True)


def _pop_max_tokens(unread_fields: dict[str, Any], names: tuple[str, ...]) -> int:
    """Read the token limit of the turn; 0 without one."""
    limit = 0
    for name in names:
        value = unread_fields.pop(name, None)
        if value is not None:
            if not _is_int(value) or value < 1:
                raise RequestError(400, f"{name} must be a whole number of at least 1, not {_shorten(value)}")
            limit = min(limit or value, value)
    return limit


def _pop_stop(unread_fields: dict[str, Any], prefix: str = "") -> StopCriteria:
    """Parse the stop criteria of a request, and remove them from its fields. Raises RequestError. prefix: of the names
    of fields in error messages."""
    strings, ids = unread_fields.pop("stop", None), unread_fields.pop("stop_token_ids", None)
    strings = [] if strings is None else [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, list) or len(strings) > MAX_STOPS:
        raise RequestError(400, f"{prefix}stop must be a text, or a list of up to {MAX_STOPS}, not {_shorten(strings)}")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_CHARS or not _can_be_sampled(string):
            raise RequestError(
                400, f"{prefix}stop: each must be a text of 1 to {MAX_STOP_CHARS} characters, not {_shorten(string)}"
            )
    ids = [] if ids is None else ids
    if not isinstance(ids, list) or len(ids) > MAX_STOP_IDS or not all(_is_int(i) and 0 <= i < 2**31 for i in ids):
        raise RequestError(
            400, f"{prefix}stop_token_ids must be a list of at most {MAX_STOP_IDS} token ids, not {_shorten(ids)}"
        )
    return StopCriteria(tuple(strings), tuple(ids))


def _pop_sampling(
    unread_fields: dict[str, Any], temperature: float, rule: SamplingRule
) -> tuple[float | None, dict[str, Any]]:
    """Parse the sampling parameters of a request, and remove them from its fields.

    Args:
        unread_fields: The fields not parsed yet.
        temperature: The engine's.
        rule: What to do with parameters that differ from the engine's.

    Returns:
        The temperature of this request (None: the engine's), and the overridden parameters: by name, the value that
        applies instead.

    Raises:
        RequestError: A parameter is malformed, or the rule refuses it.
    """
    n = unread_fields.pop("n", None)
    if n is not None and (not _is_int(n) or n != 1):
        raise RequestError(400, f"n = {_shorten(n)}: a turn is sampled once; use n = 1")
    number = unread_fields.pop("temperature", None)
    if number is not None and (not _is_number(number) or not 0 <= number <= MAX_TEMPERATURE):
        raise RequestError(400, f"temperature must be a number from 0 to {MAX_TEMPERATURE}, not {_shorten(number)}")
    overridden: dict[str, Any] = {}
    if number is not None and float(number) != temperature and rule is not SamplingRule.OBEY:
        overridden["temperature"] = temperature
    greedy = rule is SamplingRule.OBEY and number == 0
    for name, neutral in NEUTRAL_VALUES.items():
        value = unread_fields.pop(name, None)
        if value is None or any(
            value == neutral_value and isinstance(value, bool) == isinstance(neutral_value, bool)
            for neutral_value in neutral
        ):
            continue
        if not (_is_number(value) or isinstance(value, (dict, list, bool))):
            raise RequestError(400, f"{name} must be a number, not {_shorten(value)}")
        if not (greedy and name in NEUTRAL_IF_GREEDY):
            overridden[name] = neutral[0] if neutral else None
    if overridden and rule is SamplingRule.OBEY:
        raise RequestError(
            400,
            f"{', '.join(overridden)}: a served policy samples by temperature alone; leave "
            f"{'it' if len(overridden) == 1 else 'them'} out, or use temperature = 0, which needs none of top_p, "
            "top_k, min_p and seed",
            "sampling_refused",
        )
    if overridden and rule is SamplingRule.REFUSE:
        values = ", ".join(f"{name} {'unset' if value is None else value}" for name, value in overridden.items())
        raise RequestError(
            400,
            f"{', '.join(overridden)}: the job samples with {values}; logprobs under others would "
            'not be the policy\'s; leave them out, or set endpoint.sampling = "override"',
            "sampling_refused",
        )
    is_obeyed = rule is SamplingRule.OBEY and number is not None
    return (float(number) if is_obeyed else None), overridden


def _pop_bool(unread_fields: dict[str, Any], name: str) -> bool:
    value = unread_fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false, not {_shorten(value)}")
    return bool(value)


def _require_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RequestError(400, f"{name} must be a text, not {_shorten(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(400, f"{name} is not valid Unicode: {error.reason} at character {error.start}") from error
    return value


def _require_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(_is_int(id) and 0 <= id < 2**31 for id in value):
        raise RequestError(400, f"{name} must be a list of token ids, not {_shorten(value)}")
    return tuple(value)


def _can_be_sampled(text: str) -> bool:
    """Whether a model could sample the text: it has no surrogates and no replacement character."""
    return "\ufffd" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shorten(value: object) -> str:
    """Format a value of a request for an error message: one line of at most MAX_SHOWN_CHARS characters and `...`."""
    text = repr(value) if not isinstance(value, str) else ascii(value)[1:-1]
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
