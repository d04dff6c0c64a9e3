"""Run folders, and running a job from start to end in one.

runs/NAME/ holds config.toml (resolved), store/, events.jsonl, evaluations.json, checkpoints/, resume/ (the latest
resume points), summary.json and summary.png.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import config as configuration
from pipeline import knobs
from pipeline.config import RunConfig
from pipeline.crew import Crew
from pipeline.driver import Driver, Outcomes
from pipeline.model_files import ModelFacts
from pipeline.resumption import Resumption
from pipeline.snapshot import Snapshot
from stores.errors import ConfigError, StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """A finished or stopped run."""

    run_dir: Path
    summary: dict[str, object]
    stopped: str


def prepare_run_dir(config: RunConfig) -> Path:
    """Make the run's folder. ConfigError if it holds a run already: nothing stored is ever overwritten."""
    run_dir = config.run_dir
    if (run_dir / "store").exists():
        raise ConfigError(f"{run_dir} already holds a run; choose another with --set name=..., or remove it")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.toml").write_text(knobs.to_toml(config))
    except OSError as error:
        raise StoreError(f"{run_dir}: cannot be written: {error}; set runs_dir to another folder") from error
    return run_dir


@contextlib.contextmanager
def only_here(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder. ConfigError, naming the holder, if another process runs there. The lock ends with this
    process, however that ends."""
    with (run_dir / ".running").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(f"{run_dir}: is running now, in {file.read().strip()}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def list_runs(runs_dir: Path) -> list[Path]:
    """Folders below `runs_dir` that hold a run, by name."""
    return sorted(p.parent for p in runs_dir.glob("*/config.toml"))


async def execute(
    config: RunConfig,
    progress: Callable[[Snapshot, Outcomes, str], None],
    announce: Callable[[str], None],
    *,
    resume: bool = False,
) -> RunEnd:
    """Run a job on the cluster it names, or go on with it where its folder left off. `announce` gets lines for people,
    such as the dashboard's address."""
    from pipeline import resumption as resumptions
    from pipeline.model_files import inspect_model

    if config.simulation.colocated:
        raise ConfigError("simulation.colocated = true: in a run all roles have workers of their own; use simulate")
    facts = inspect_model(config)
    config = configuration.located(config)
    with contextlib.ExitStack() as held:
        if resume:
            held.enter_context(only_here(config.run_dir))
            resumption = resumptions.prepare(config)
            announce(f"going on from version {resumption.version}")
        else:
            prepare_run_dir(config)
            held.enter_context(only_here(config.run_dir))
            resumption = None
        return await _run(config, facts, resumption, progress, announce)


async def _run(
    config: RunConfig,
    facts: ModelFacts,
    resumption: Resumption | None,
    progress: Callable[[Snapshot, Outcomes, str], None],
    announce: Callable[[str], None],
) -> RunEnd:
    from pipeline.cluster import connect
    from pipeline.report import write_report

    run_dir = config.run_dir
    cluster = await connect(config)
    if cluster.dashboard:
        announce(f"Dask dashboard: {cluster.dashboard}")
    driver = Driver(config, Crew(config, cluster, run_dir, facts), run_dir, progress, resumption)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: driver.stop("interrupted"))
    loop.add_signal_handler(signal.SIGTERM, lambda: driver.stop("terminated"))
    try:
        outcomes = await driver.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not driver.outcomes.stopped or task is None:
            raise
        task.uncancel()
        outcomes = driver.outcomes  # stopped at once: what is committed is all there is
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
        await driver.close()
        await cluster.close()
    summary = write_report(config, outcomes, run_dir)
    return RunEnd(run_dir=run_dir, summary=summary, stopped=outcomes.stopped)
