"""staleflow run --dry: the job on responses drawn at random, in seconds."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from staleflow.cli.job import check, warm_up, watch


def try_job(config_path: str, overrides: tuple[str, ...], *, as_json: bool, verbose: int) -> None:
    """Run a job dry in a temporary folder, audit what it stored, and print what was tried. Exit code 1 if the audit
    finds a fault, 130 if the run was stopped. Raises ConfigError."""
    from staleflow.pipeline.config import loading, preflight, user_files
    from staleflow.pipeline.config.dry_run_settings import dry_run

    config = loading.load(config_path, overrides)
    preflight.check_names(config)
    config = user_files.located(config)
    with tempfile.TemporaryDirectory(prefix="staleflow-dry-") as folder:
        tried = dry_run(config, Path(folder))
        warm_up(tried, verbose)
        check(dataclasses.replace(tried, reward=config.reward))
        _, end = watch(tried, quiet=as_json, verbose=verbose, resume=False)
        if end.stopped:
            sys.exit(130)
        found = outcome(end.run_dir)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        size = f"{tried.batch.groups_per_step} groups of {tried.batch.group_size}"
        click.echo(f"dry run of {config.name}: {found['steps']} of its {config.steps} steps, each of {size} responses")
        print_outcome(found)
    if found["findings"]:
        sys.exit(1)


def outcome(run_dir: Path) -> dict[str, Any]:
    """What a dry run stored, and what an audit says of it. Raises StoreError."""
    from staleflow.stores.auditing.audit import audit
    from staleflow.stores.trajectories.versioned import VersionedStore

    store = VersionedStore.open(run_dir / "store")
    result = audit(store)
    scored = [row.trajectory for row in store.ended() if row.trajectory.timings.rewarded_s]
    errors = Counter(t.error for t in scored if t.error)
    rewards = [t.reward for t in scored if not t.error]
    prompts = [len(t.prompt_tokens) for t in scored]
    return {
        "steps": result.num_steps,
        "prompt_tokens": [min(prompts, default=0), max(prompts, default=0)],
        "rewards": len(rewards),
        "reward": [min(rewards, default=0.0), max(rewards, default=0.0)],
        "reward_errors": dict(errors.most_common()),
        "findings": [finding.what for finding in result.findings],
    }


def print_outcome(found: dict[str, Any]) -> None:
    """Print a dry run's outcome, a line for each part of the job."""
    failed = sum(found["reward_errors"].values())
    first = next(iter(found["reward_errors"]), "")
    click.echo("  prompts  drawn and encoded, {} to {} tokens".format(*found["prompt_tokens"]))
    click.echo("  reward   computed for {} random responses, {:g} to {:g}".format(found["rewards"], *found["reward"]))
    if failed:
        click.echo(f"           failed for {failed} more; most often: {first}")
    audited = (
        f"{len(found['findings'])} FINDINGS: {found['findings'][0]}" if found["findings"] else "audited, all holds"
    )
    click.echo(f"  store    {audited}")
    click.echo("no model sampled or was trained, and nothing is kept; `staleflow run` does both")
