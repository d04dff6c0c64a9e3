"""staleflow eval RUN_OR_MODEL --tasks NAME[,NAME]"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from staleflow.cli.stored import announce, quiet_libraries


@click.command("eval")
@click.argument("target", metavar="RUN_OR_MODEL", type=click.Path())
@click.option("--tasks", required=True, metavar="NAME[,NAME]", help="Tasks or groups of tasks of lm-eval.")
@click.option("--step", type=click.IntRange(1), help="Checkpoint of the run.  [default: the newest]")
@click.option("--include", default="", metavar="FOLDER", help="Folder of further tasks, as lm-eval's YAML files.")
@click.option("--shots", type=click.IntRange(0), help="Examples in each prompt.  [default: the task's own]")
@click.option("--limit", type=click.IntRange(1), help="Only the first documents of each task.")
@click.option("--chat", is_flag=True, help="Render prompts by the model's chat template.")
@click.option("--python", default=sys.executable, metavar="PATH", help="Python with lm-eval.  [default: this one]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    target: str,
    tasks: str,
    step: int | None,
    include: str,
    shots: int | None,
    limit: int | None,
    chat: bool,
    python: str,
    as_json: bool,
) -> None:
    """Run benchmark tasks of lm-eval on a checkpoint of a run, or on a model's folder. lm-eval loads the model by
    transformers."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.serving import make_serving_plan
    from staleflow.pipeline.stored_runs.suites import SuiteSettings, check_lm_eval, run_suite
    from staleflow.stores.errors import ConfigError

    names = tuple(filter(None, (name.strip() for name in tasks.split(","))))
    if not names:
        raise ConfigError(f"--tasks = {tasks!r}: name a task, such as gsm8k")
    check_lm_eval(python)
    plan = make_serving_plan(target, step=step)
    settings = SuiteSettings(
        model=plan.config.model.path, tasks=names, include=include, shots=shots, limit=limit, chat=chat
    )
    announce(f"{', '.join(names)} by lm-eval on {plan.label}")
    figures = run_suite(settings, python)
    if as_json:
        click.echo(json.dumps([asdict(figure) for figure in figures]))
        return
    for figure in figures:
        click.echo(figure.line)
