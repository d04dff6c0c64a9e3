"""staleflow serve RUN_OR_MODEL, staleflow chat RUN_OR_MODEL"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import click

from staleflow.cli.stored import announce, quiet_libraries

PORT = 8798
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the run's job."
)


@click.command("serve")
@click.argument("target", metavar="RUN_OR_MODEL", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65_535), default=PORT, show_default=True, help="Port; 0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Name or address of this machine to listen on.")
@click.option("--key", default="", help="Key that requests must have.  [default: a random one, printed]")
@set_option
def serve(target: str, port: int, host: str, key: str, overrides: tuple[str, ...]) -> None:
    """Serve a run's newest checkpoint, or a model, as an OpenAI-compatible endpoint. Ctrl-C ends it."""
    quiet_libraries()
    from staleflow.pipeline.config.model_files import vocabulary_of
    from staleflow.pipeline.stored_runs.serving import make_serving_plan
    from staleflow.tasks.endpoint.server import EndpointServer
    from staleflow.tasks.settings.endpoint_settings import EndpointConfig, EndpointSettings

    plan = make_serving_plan(target, overrides)
    api_key = key or secrets.token_urlsafe(24)

    async def work() -> None:
        announce(f"loading {plan.label}: the engine takes up to a minute to start")
        policy = plan.build(api_key)
        config = EndpointConfig(host=host, port=port)
        settings = EndpointSettings(
            config=config,
            model=plan.label,
            temperature=plan.config.rollout.temperature,
            vocabulary=vocabulary_of(plan.config.model.path),
        )
        server = EndpointServer(settings, policy)
        try:
            await server.start()
            click.echo(f"{plan.label}: OPENAI_BASE_URL={server.base_url} OPENAI_API_KEY={api_key} (Ctrl-C ends it)")
            await asyncio.get_running_loop().create_future()
        finally:
            await server.stop()
            policy.close()

    asyncio.run(work())


@click.command("chat")
@click.argument("target", metavar="RUN_OR_MODEL", type=click.Path())
@set_option
def chat(target: str, overrides: tuple[str, ...]) -> None:
    """Chat with a run's newest checkpoint, or a model. An empty line starts a new conversation; Ctrl-D ends it."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.serving import make_serving_plan
    from staleflow.tasks.endpoint.requests import ChatMessage, ChatRequest, RequestError

    plan = make_serving_plan(target, overrides)

    async def work() -> None:
        announce(f"loading {plan.label}: the engine takes up to a minute to start")
        policy = plan.build("")
        messages: list[ChatMessage] = []
        click.echo(f"{plan.label}; an empty line starts a new conversation, Ctrl-D ends it")
        try:
            with contextlib.suppress(EOFError):
                while True:
                    text = await asyncio.to_thread(input, "> ")
                    messages = [*messages, ChatMessage(role="user", content=text)] if text.strip() else []
                    if not messages:
                        continue
                    try:
                        reply = await policy.request_turn(ChatRequest(model="", messages=tuple(messages)))
                    except RequestError as refused:
                        click.echo(f"{refused.message}; an empty line starts a new conversation", err=True)
                        messages.pop()
                        continue
                    messages.append(reply.message)
                    click.echo(reply.message.content)
        finally:
            policy.close()

    asyncio.run(work())
