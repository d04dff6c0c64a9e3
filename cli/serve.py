"""staleflow serve | chat | eval | push: use a checkpoint of a run"""

from __future__ import annotations

import asyncio
import secrets
import select
import sys
from pathlib import Path

import click

from staleflow.cli.stored import announce, print_json, quiet_libraries

PORT = 8798
SIGNAL_POLL_S = 0.2
"""Seconds between two checks for signals while a line is awaited."""
override_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the run's job."
)


@click.command("serve")
@click.argument("target", metavar="RUN_OR_MODEL", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65_535), default=PORT, show_default=True, help="Port; 0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Name or address of this machine to listen on.")
@click.option("--key", default="", help="Key that requests must have.  [default: a random one, printed]")
@override_option
def serve(target: str, port: int, host: str, key: str, overrides: tuple[str, ...]) -> None:
    """Serve a run's newest checkpoint, or a model, as an OpenAI-compatible endpoint. Ctrl-C ends it."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.serving import make_serving_plan
    from staleflow.tasks.settings.endpoint_settings import EndpointConfig

    plan = make_serving_plan(target, overrides)
    api_key = key or secrets.token_urlsafe(24)

    async def work() -> None:
        announce(f"loading {plan.label}: the engine takes up to a minute to start")
        async with plan.serve(EndpointConfig(host=host, port=port), api_key) as server:
            shown_key = "" if key else f" OPENAI_API_KEY={api_key}"
            click.echo(f"{plan.label}: OPENAI_BASE_URL={server.base_url}{shown_key} (Ctrl-C ends it)")
            await asyncio.get_running_loop().create_future()

    asyncio.run(work())


@click.command("chat")
@click.argument("target", metavar="RUN_OR_MODEL", type=click.Path())
@override_option
def chat(target: str, overrides: tuple[str, ...]) -> None:
    """Chat with a run's newest checkpoint, or a model. An empty line starts a new conversation; Ctrl-D ends it."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.serving import make_serving_plan
    from staleflow.tasks.endpoint.requests import ChatMessage, ChatRequest, RequestError
    from staleflow.tasks.endpoint.served_policy import ServedPolicy

    plan = make_serving_plan(target, overrides)

    async def build() -> ServedPolicy:
        return plan.build("")

    announce(f"loading {plan.label}: the engine takes up to a minute to start")
    with asyncio.Runner() as runner:  # it waits here for input, where a signal ends it: a thread would go on waiting
        policy = runner.run(build())
        messages: list[ChatMessage] = []
        click.echo(f"{plan.label}; an empty line starts a new conversation, Ctrl-D ends it")
        try:
            while True:
                text = read_line()
                messages = [*messages, ChatMessage(role="user", content=text)] if text.strip() else []
                if not messages:
                    continue
                try:
                    reply = runner.run(policy.request_turn(ChatRequest(model="", messages=tuple(messages))))
                except RequestError as error:
                    remedy = "; an empty line starts a new conversation" if error.status < 500 else ""
                    click.echo(f"{error.message}{remedy}", err=True)
                    messages.pop()
                    continue
                messages.append(reply.message)
                click.echo(reply.message.content)
        except EOFError:
            pass
        finally:
            runner.close()  # first, because a request that it cancels is aborted in the engine
            policy.close()


def read_line() -> str:
    """Prompt for a line and read it. Raises EOFError at the end of the input."""
    click.echo("> ", nl=False)
    # Python handles a signal that arrives before it waits for a line only once the line is there.
    while sys.stdin.isatty() and not select.select([sys.stdin], [], [], SIGNAL_POLL_S)[0]:
        pass
    return input()


@click.command("push")
@click.argument("source", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--step", type=click.IntRange(1), help="Step of the checkpoint.  [default: the newest]")
@click.option("--private", is_flag=True, help="Create a private repository.")
@click.option("--card", "only_card", is_flag=True, help="Print the model card, and upload nothing.")
def push(source: Path, repo: str, step: int | None, private: bool, only_card: bool) -> None:
    """Upload a checkpoint of a run to the Hugging Face hub, with a model card: base model, data, settings, audit and
    evaluations. `hf auth login` or HF_TOKEN gives access; HF_ENDPOINT names another hub."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.hub import model_card, push_checkpoint

    if only_card:
        click.echo(model_card(source, step=step, title=repo.rpartition("/")[2]))
        return
    announce(f"auditing {source}, then uploading")
    click.echo(push_checkpoint(source, repo, step=step, private=private))


@click.command("eval")
@click.argument("target", metavar="RUN_OR_MODEL", type=click.Path())
@click.option("--tasks", required=True, metavar="NAME[,NAME]", help="Tasks or groups of tasks of lm-eval.")
@click.option("--step", type=click.IntRange(1), help="Checkpoint of the run.  [default: the newest]")
@click.option("--include", default="", metavar="FOLDER", help="Folder of further tasks, as lm-eval's YAML files.")
@click.option("--shots", type=click.IntRange(0), help="Examples in each prompt.  [default: the task's own]")
@click.option("--limit", type=click.IntRange(1), help="Only the first documents of each task.")
@click.option("--chat", is_flag=True, help="Render prompts by the model's chat template.")
@click.option(
    "--url", default="", help="Server of the model, such as http://localhost:8000/v1.  [default: started here]"
)
@click.option("--key", default="", envvar="OPENAI_API_KEY", help="API key of --url.  [default: OPENAI_API_KEY]")
@click.option("--python", default=sys.executable, metavar="PATH", help="Python with lm-eval.  [default: this one]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@override_option
def evaluate(
    target: str,
    tasks: str,
    step: int | None,
    include: str,
    shots: int | None,
    limit: int | None,
    chat: bool,
    url: str,
    key: str,
    python: str,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Run benchmark tasks of lm-eval on a checkpoint of a run, or on a model, as `serve` serves it. Before, a probe
    checks that the server obeys temperature 0 and that its logprobs are right. The figures of a run's checkpoint are
    kept in its folder, unless --url names another server or --set changes how it is served."""
    quiet_libraries()
    from staleflow.pipeline.runtime.evaluation_results import write_suite
    from staleflow.pipeline.stored_runs.serving import make_serving_plan
    from staleflow.pipeline.stored_runs.suites import (
        SuiteSettings,
        as_evaluations,
        check_lm_eval,
        evaluate_plan,
    )
    from staleflow.stores.errors import ConfigError

    task_names = tuple(filter(None, (name.strip() for name in tasks.split(","))))
    if not task_names:
        raise ConfigError(f"--tasks = {tasks!r}: name a task, such as gsm8k")
    check_lm_eval(python)
    plan = make_serving_plan(target, overrides, step=step)
    settings = SuiteSettings(tasks=task_names, include=include, shots=shots, limit=limit, chat=chat)
    announce(f"{', '.join(task_names)} by lm-eval on {url or plan.label}")
    figures = asyncio.run(evaluate_plan(plan, settings, python, url=url, key=key))
    if as_json:
        print_json(figures)
    else:
        for figure in figures:
            click.echo(figure.line)
    if plan.version is not None and not url and not overrides:
        folder = write_suite(Path(target), as_evaluations(figures, settings, plan.version))
        announce(f"stored in {folder}: `compare` and the run page show it")
