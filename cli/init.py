"""staleflow init [FOLDER]"""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("init")
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@click.option(
    "--data", default="", help="A .jsonl or .parquet file, a folder or hub name of `datasets`, or a task.source."
)
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="Of the data set, such as split=train.")
@click.option("--prompt-column", default="", help="Where rows have their prompt, if it is not found.")
@click.option("--answer-column", default="", help="Where rows have their answer, if it is not found.")
@click.option("--model", default="", help="Folder or hub name of a causal LM with its tokenizer.")
@click.option("--reward", default="", help="exact, math_verify, or your function, FILE.py:NAME.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing; use the defaults for what is not set.")
def command(
    folder: Path,
    data: str,
    options: tuple[str, ...],
    prompt_column: str,
    answer_column: str,
    model: str,
    reward: str,
    yes: bool,
) -> None:
    """Write a first job into FOLDER: a commented job file, with data, reward and model if you bring none.

    Without anything: made-up sums, a reward to edit, and a tiny model that learns them in minutes on two cores.
    """
    from staleflow.pipeline.api.initialization import init
    from staleflow.pipeline.config.knob_tree import apply_override

    if sys.stdin.isatty() and sys.stdout.isatty() and not (yes or data or model or reward):
        click.echo("Enter takes what is in brackets.")
        data = _prompt_user("Data set: a .jsonl or .parquet file, a folder, a hub name", "made-up sums")
        model = _prompt_user("Model: a folder or a hub name", "" if data else "a tiny one, made here in a minute")
        reward = _prompt_user("Reward: exact, math_verify, FILE.py:NAME", "a file of your own, to edit")
    data_options: dict[str, object] = {}
    for option in options:
        if "=" not in option:
            raise click.UsageError(f"--option {option}: expected KEY=VALUE, such as split=train")
        apply_override(data_options, option)
    first_job = init(
        folder,
        data=data,
        model=model,
        reward=reward,
        options=data_options,
        prompt_column=prompt_column,
        answer_column=answer_column,
        progress=click.echo,
    )
    width = max(map(len, first_job.files))
    for name, about in first_job.files.items():
        click.echo(f"{name:<{width}}  {about}")
    click.echo(f"\nfirst prompt, {first_job.num_tokens} tokens: {first_job.first_prompt[:200]!r}")
    if first_job.num_unknown:
        click.echo(
            f"{first_job.num_unknown} of them stand for what the model's tokenizer does not know: it cannot read these "
            "prompts as you wrote them"
        )
    click.echo("\nnext:")
    for line in () if folder.resolve() == Path.cwd() else (f"cd {folder}",):
        click.echo(f"  {line}")
    click.echo("  staleflow run job.toml")
    click.echo("  staleflow store show runs/first --worst 3")


def _prompt_user(question: str, default: str) -> str:
    """An answer from the terminal; empty for the default."""
    answer: str = click.prompt(
        f"{question} [{default}]" if default else question, default="" if default else None, show_default=False
    )
    return answer.strip()
