"""Environments of the package `openenv` (0.10) as agents: the agent calls the environment's server over its own
protocol, and the model over the endpoint.

`openenv:http://HOST:PORT` is a running server; `openenv:PACKAGE` is an installed package, whose `server.app:app` each
episode serves on loopback. The model sees observations as JSON. Its turn is an action as JSON or, if an action has one
required field, the text of this field.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.endpoint.server import ServerWithoutSignalHandlers
from staleflow.tasks.environments.episode import EpisodeFailed, error_line
from staleflow.tasks.episodes.loaded_agent import AgentArgs, LoadedAgent, check_options

OPTION_TYPES = {"reset": (dict,), "system": (str,), "field": (str,)}
HIDDEN_FIELDS = ("done", "reward", "metadata")
"""Fields of an observation that the model does not see."""
START_S = 10.0
"""Seconds in which a package's server must listen."""


class BadAction(ValueError):
    """The model's text is not a valid action."""


def load_environment(name: str, options: Mapping[str, Any], label: str) -> LoadedAgent:
    """Load the environment at a URL or of a package. Raises ConfigError. options: see docs/agents.md."""
    check_options(options, OPTION_TYPES, label)
    environment = OpenEnvironment(name, options, label)
    return LoadedAgent(run=environment.run, blocking=True, options={}, prepare=environment.prepare)


class OpenEnvironment:
    """An environment and its server, loaded once per process."""

    def __init__(self, name: str, options: Mapping[str, Any], label: str) -> None:
        self._url = name if name.startswith(("http://", "https://")) else ""
        self._name, self._options, self._label = name, options, label
        self._app: Any = None

    def prepare(self) -> None:
        """Load the environment's package, if it has one and it is not loaded. Raises ConfigError."""
        if self._url or self._app is not None:
            return
        module = f"{self._name}.server.app"
        with raised_as(ConfigError, f"{self._label}: no app in {module}", Exception, describe=error_line):
            self._app = importlib.import_module(module).app

    async def run(self, args: AgentArgs) -> float:
        """Run one episode. Returns the sum of its steps' rewards. Raises EpisodeFailed, ConfigError."""
        from openai import AsyncOpenAI, BadRequestError
        from openenv import GenericEnvClient

        base_url, key, task = args
        self.prepare()
        reward = 0.0
        async with (
            self._server_url() as url,
            AsyncOpenAI(base_url=base_url, api_key=key) as client,
            GenericEnvClient(base_url=url) as environment,
        ):
            schema = await _action_schema(url)
            result = await environment.reset(**{"seed": task.seed, **self._options.get("reset", {})})
            system = self._options.get("system")
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            while not result.done:
                messages.append({"role": "user", "content": self._format_observation(result.observation)})
                try:
                    response = await client.chat.completions.create(model="policy", messages=messages)
                except BadRequestError as error:
                    if error.code != "context_length_exceeded":
                        raise
                    break
                text = response.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                try:
                    result = await environment.step(parse_action(text, schema))
                except BadAction:
                    break
                except RuntimeError as error:
                    if "VALIDATION_ERROR" not in str(error):
                        raise
                    break  # the server has rejected the action
                reward += float(result.reward or 0.0)
        return reward

    def _format_observation(self, observation: Mapping[str, Any]) -> str:
        """Format an observation as text for the model."""
        field = self._options.get("field")
        if field:
            return str(observation.get(field, ""))
        visible = {k: v for k, v in observation.items() if k not in HIDDEN_FIELDS and v is not None}
        return json.dumps(visible, sort_keys=True)

    @contextlib.asynccontextmanager
    async def _server_url(self) -> AsyncIterator[str]:
        """Context manager: yield the URL of the environment's server. A package's server runs until the exit."""
        if self._url:
            yield self._url
            return
        import uvicorn

        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            config = uvicorn.Config(self._app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
            server = ServerWithoutSignalHandlers(config)
            serve_task = asyncio.ensure_future(server.serve(sockets=[sock]))
            try:
                async with asyncio.timeout(START_S):
                    while not server.started:
                        if serve_task.done():
                            raise EpisodeFailed(f"the server of {self._name} ended before it listened")
                        await asyncio.sleep(0.005)
                yield f"http://127.0.0.1:{sock.getsockname()[1]}"
            finally:
                server.should_exit = True
                await asyncio.wait({serve_task}, timeout=2.0)
                serve_task.cancel()


def parse_action(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the model's text as an action. Raises BadAction.

    >>> parse_action("go", {"required": ["message"]})
    {'message': 'go'}
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text.strip()
    if isinstance(value, dict):
        return value
    required_names = schema.get("required", ())
    if len(required_names) != 1:
        raise BadAction(f"an action has the fields {', '.join(required_names)}; write a JSON object with them")
    (name,) = required_names
    is_text = schema.get("properties", {}).get(name, {}).get("type", "string") == "string"
    return {name: text.strip() if is_text else value}


async def _action_schema(url: str) -> Mapping[str, Any]:
    """Return the JSON schema of a server's actions."""
    import httpx

    async with httpx.AsyncClient(timeout=START_S) as http:
        response = await http.get(f"{url}/schema")
        response.raise_for_status()
        schema: Mapping[str, Any] = response.json()["action"]
        return schema
