"""staleflow run CONFIG"""

from __future__ import annotations

import click

from staleflow.cli.dry_run import try_job
from staleflow.cli.job import check, execute_job, store_option, warm_up


@click.command("run")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@store_option
@click.option("--dry-run", is_flag=True, help="Try the job: three small steps on random responses; nothing is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and no progress.")
@click.option("-v", "--verbose", count=True, help="Log each step and event; -vv each placement and pull.")
def command(
    config_path: str, overrides: tuple[str, ...], store: str, dry_run: bool, as_json: bool, verbose: int
) -> None:
    """Run a job from start to end. Ctrl-C stops it cleanly and keeps what is stored.

    With --dry-run, prompts, reward, coordination and store are the job's, and no model samples or is trained.
    """
    overrides = (*overrides, f"store={store}") if store else overrides
    if dry_run:
        try_job(config_path, overrides, as_json=as_json, verbose=verbose)
        return
    from staleflow.pipeline.api.job_loading import load_job, new_job

    config = new_job(load_job(config_path, overrides))
    warm_up(config, verbose)
    check(config)
    execute_job(config, as_json=as_json, verbose=verbose, resume=False)
