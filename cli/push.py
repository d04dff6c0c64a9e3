"""staleflow push RUN OWNER/NAME"""

from __future__ import annotations

from pathlib import Path

import click

from staleflow.cli.stored import announce, quiet_libraries


@click.command("push")
@click.argument("source", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--step", type=click.IntRange(1), help="Step of the checkpoint.  [default: the newest]")
@click.option("--private", is_flag=True, help="Create a private repository.")
@click.option("--card", "only_card", is_flag=True, help="Print the model card, and upload nothing.")
def command(source: Path, repo: str, step: int | None, private: bool, only_card: bool) -> None:
    """Upload a checkpoint of a run to the Hugging Face hub, with a model card: base model, data, settings, audit and
    evaluations. `hf auth login` or HF_TOKEN gives access; HF_ENDPOINT names another hub."""
    quiet_libraries()
    from staleflow.pipeline.stored_runs.hub import model_card, push_checkpoint

    if only_card:
        click.echo(model_card(source, step=step, title=repo.rpartition("/")[2]))
        return
    announce(f"auditing {source}, then uploading")
    click.echo(push_checkpoint(source, repo, step=step, private=private))
