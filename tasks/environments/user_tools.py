"""Users' own tools: a function in a file becomes a tool that a model may call.

    def lookup(word: str, limit: int = 3) -> list[str]:
        "Meanings of a word."

The model sees its name, its docstring and the JSON schema of its arguments, which comes from their type hints. It may
be `async def`. Each call runs in a process of its own, forked from one that has loaded the file
(tasks/episodes/tools.py).
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.environments.episode import CallEnvironment, EnvStepResult, EpisodeFailed, EpisodeStart, error_line
from staleflow.tasks.environments.gym_environments import outside_event_loop
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.settings import user_code

TOOLS_KEY = "environment.tools"
"""The key of a job file that names tools."""
TOOL_ROLE = "tool"
"""Message role of a tool's result."""
MAX_RESULT_CHARS = 20_000
"""Maximum characters of a tool's result; the rest is dropped."""
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
"""JSON schema's name of each type that an argument may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTool:
    """A user's function as a tool. parameters: the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]


def load_tool(reference: str) -> UserTool:
    """Load a tool named file.py:NAME or module:NAME. Raises ConfigError."""
    label = f"{TOOLS_KEY}: {reference!r}"
    function = user_code.load(reference, TOOLS_KEY)
    if not inspect.isfunction(function):
        raise ConfigError(f"{label}: a tool is a function, def or async def, not {type(function).__name__}")
    description = inspect.getdoc(function) or ""
    if not description.strip():
        raise ConfigError(f"{label}: needs a docstring, which describes the tool to the model")
    return UserTool(
        name=function.__name__, description=description, parameters=_parameters(function, label), function=function
    )


def _parameters(function: Callable[..., Any], label: str) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments. Raises ConfigError."""
    with raised_as(ConfigError, f"{label}: its type hints cannot be read", Exception, describe=error_line):
        hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{label}: argument {parameter} cannot be passed by name; declare each argument by name")
        if name not in hints:
            raise ConfigError(f"{label}: argument {name} needs a type hint, such as {name}: str")
        schema = _schema(hints[name])
        if schema is None:
            raise ConfigError(
                f"{label}: argument {name} has type {hints[name]}; use str, int, float, bool, list, dict, Literal, "
                "Any, or one of them | None"
            )
        properties[name] = schema
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(hint: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a type; None if the type is not supported."""
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if hint is type(None):
        return {"type": "null"}
    origin, type_arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in JSON_TYPES and not type_arguments:  # typing.List and typing.Dict without element types
        return {"type": JSON_TYPES[origin]}
    if origin is typing.Literal:
        is_json = all(type(value) in (str, int, bool, type(None)) for value in type_arguments)
        return {"enum": list(type_arguments)} if is_json else None
    schemas = [_schema(argument) for argument in type_arguments]
    json_schemas = [schema for schema in schemas if schema is not None]
    if len(json_schemas) < len(schemas):
        return None
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": json_schemas}
    if origin is list:
        return {"type": "array", "items": json_schemas[0]}
    if origin is dict and type_arguments[0] is str:
        return {"type": "object", "additionalProperties": json_schemas[1]}
    return None


def argument_error(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return an error text for the arguments of a call; empty if they match the schema."""
    properties: Mapping[str, Any] = parameters["properties"]
    names = ", ".join(properties) or "none"
    if unknown_names := [name for name in arguments if name not in properties]:
        return f"there is no argument {unknown_names[0]}; there are {names}"
    if missing_names := [name for name in parameters["required"] if name not in arguments]:
        return f"argument {missing_names[0]} is missing"
    invalid = next((name for name, value in arguments.items() if not _matches_schema(value, properties[name])), None)
    return "" if invalid is None else f"argument {invalid} must be {_describe_schema(properties[invalid])}"


def _matches_schema(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_matches_schema(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    match schema.get("type"):
        case None:
            return True
        case "array":
            return isinstance(value, list) and all(_matches_schema(item, schema.get("items", {})) for item in value)
        case "object":
            value_schema = schema.get("additionalProperties", {})
            return isinstance(value, dict) and all(_matches_schema(item, value_schema) for item in value.values())
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case json_type:
            return isinstance(value, {"string": str, "boolean": bool, "null": type(None)}[json_type])


def _describe_schema(schema: Mapping[str, Any]) -> str:
    """Describe a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_describe_schema, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(json.dumps(value) for value in schema['enum'])}"
    words = {"string": "a text", "integer": "a whole number", "number": "a number", "boolean": "true or false",
             "array": "a list", "object": "an object", "null": "null"}  # fmt: skip
    return words.get(schema.get("type", ""), "anything") + (
        f" of {_describe_schema(i)}" if (i := schema.get("items")) else ""
    )


def unnamed_argument_of(parameters: Mapping[str, Any]) -> str:
    """Return the name of the argument that a call may give without a name: the only one, or the only one without a
    default; empty if there is none."""
    for names in (list(parameters["properties"]), parameters["required"]):
        if len(names) == 1:
            return str(names[0])
    return ""


def read_argument(text: str, schema: Mapping[str, Any]) -> Any:
    """Parse the value of an argument from the text in a tag, where texts have no quotation marks."""
    if _matches_schema(text, schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tool_environment(tool: UserTool) -> CallEnvironment:
    """Build the environment of a user's tool: an episode is one call, and its only turn is the arguments as JSON."""

    async def call(start: EpisodeStart, text: str) -> EnvStepResult:
        arguments: dict[str, Any] = json.loads(text)
        try:
            if inspect.iscoroutinefunction(tool.function):
                result = await tool.function(**arguments)
            else:
                result = outside_event_loop(lambda: tool.function(**arguments))
                result = await result if inspect.isawaitable(result) else result
        except (Exception, SystemExit) as error:
            raise EpisodeFailed(error_line(error)) from error
        return EnvStepResult(messages=(Message(TOOL_ROLE, _text(result)),))

    return CallEnvironment(call)


def _text(result: Any) -> str:
    """Return a tool's result as text for the model. Raises EpisodeFailed."""
    problem, errors = "its result cannot be written as JSON", (TypeError, ValueError, RecursionError)
    with raised_as(EpisodeFailed, problem, *errors, describe=error_line):
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False)
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # surrogates, which no tokenizer accepts
    return text if len(text) <= MAX_RESULT_CHARS else f"{text[:MAX_RESULT_CHARS]}... ({len(text)} characters)"
