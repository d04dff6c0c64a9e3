"""staleflow cluster | submit | jobs | status | logs | retire | cancel"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from staleflow.cli.job import check_and_print, store_option
from staleflow.stores.printable import printable

if TYPE_CHECKING:
    from staleflow.pipeline.cluster.connection import ClusterAddress

Command = TypeVar("Command", bound=Callable[..., Any])


def cluster_options(function: Command) -> Command:
    """Decorator: options that name a cluster and its TLS files; the command receives them as `cluster`."""

    def with_options(
        *args: Any, scheduler: str, scheduler_file: str, tls_ca_file: str, tls_cert: str, tls_key: str, **kwargs: Any
    ) -> Any:
        from staleflow.pipeline.cluster.connection import ClusterAddress, make_security

        security = make_security(tls_ca_file, tls_cert, tls_key)
        cluster = ClusterAddress(address=scheduler, scheduler_file=scheduler_file, security=security)
        return function(*args, cluster=cluster, **kwargs)

    with_options.__doc__, with_options.__name__ = function.__doc__, function.__name__
    with_options.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    for option, doc in reversed(
        (
            ("--scheduler", "Scheduler address, such as tcp://host:8786; Dask's configuration by default."),
            ("--scheduler-file", "File written by `dask scheduler --scheduler-file`."),
            ("--tls-ca-file", "CA certificate of a cluster with TLS, a PEM file."),
            ("--tls-cert", "Client certificate, a PEM file."),
            ("--tls-key", "Private key of the client certificate, a PEM file."),
        )
    ):
        with_options = click.option(option, default="", help=doc)(with_options)
    return with_options  # type: ignore[return-value]


@click.command("submit")
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a value of the job file.")
@click.option("--name", default="", help="Name of the run; the same as --set name=NAME.")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON.")
@cluster_options
def submit(
    config_path: str, overrides: tuple[str, ...], name: str, store: str, as_json: bool, cluster: ClusterAddress
) -> None:
    """Submit a job to a Dask cluster and print its id. It keeps running after you disconnect."""
    from staleflow.pipeline.api.job_loading import load_job, prepare_job
    from staleflow.pipeline.config.knob_tree import override_lines
    from staleflow.pipeline.jobs import job_driver

    overrides += override_lines({key: value for key, value in (("name", name), ("store", store)) if value})

    config = prepare_job(load_job(config_path, overrides))
    check_and_print(config, runs_here=False)
    print_submitted(asyncio.run(job_driver.submit(config, cluster)), as_json=as_json)


def print_submitted(job: dict[str, Any], *, as_json: bool) -> None:
    """Print a submitted job's id to stdout, and the next commands to stderr."""
    if as_json:
        click.echo(json.dumps(job, indent=2))
        return
    id = job["id"]
    click.echo(id)
    click.echo(f"folder: {job['run_dir']}; staleflow status {id}, staleflow logs {id} -f", err=True)
    if job["state"] == "waiting" and job["why"]:
        click.echo(f"waiting: {job['why']}", err=True)


@click.command("jobs")
@click.option("--all", "show_all", is_flag=True, help="Also list jobs that ended more than a day ago.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@cluster_options
def list_jobs(show_all: bool, as_json: bool, cluster: ClusterAddress) -> None:
    """List the jobs of a cluster: those that wait or run, and those that ended within the last day."""
    from staleflow.pipeline.cluster import job_lookup

    all_jobs = asyncio.run(job_lookup.all_jobs(cluster))
    jobs = all_jobs if show_all else job_lookup.recent_jobs(all_jobs, time.time())
    if as_json:
        click.echo(json.dumps(jobs, indent=2))
        return
    if not all_jobs:
        click.echo("no jobs; `staleflow submit CONFIG` submits one")
    for job in jobs:
        click.echo(_job_line(job))
    if len(jobs) < len(all_jobs):
        click.echo(f"{len(all_jobs) - len(jobs)} ended more than a day ago; --all lists them too", err=True)


@click.command("status")
@click.argument("id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@cluster_options
def status(id: str, as_json: bool, cluster: ClusterAddress) -> None:
    """Show a job's progress: step, reward, staleness, throughput, instances, and what it waits for. ID may also be a
    run's folder, which needs no cluster."""
    from staleflow.pipeline.cluster import job_lookup
    from staleflow.pipeline.recovery import job_record

    if job_record.has_record(Path(id)):
        match = job_lookup.Match(job_record.read(Path(id)))
    else:
        match = job_lookup.find_matching(asyncio.run(job_lookup.all_jobs(cluster)), id)
    job = match.job
    if match.note:
        click.echo(match.note, err=True)
    if as_json:
        click.echo(json.dumps(job, indent=2))
        return
    click.echo(_job_line(job))
    for line in _detail_lines(job):
        click.echo(f"  {line}")


@click.command("logs")
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as a JSON object with time and text.")
@cluster_options
def logs(id: str, follow: bool, as_json: bool, cluster: ClusterAddress) -> None:
    """Print a job's log. If several jobs have the name, the log of the one that has not ended is printed, or else that
    of the newest. Exit code 1 if a followed job fails. ID may also be a run's folder, which needs no cluster."""
    from staleflow.pipeline.cluster import job_lookup
    from staleflow.pipeline.recovery import job_record

    def print_line(job: str, line: str) -> None:
        time_text, _, text = line.partition("  ")
        click.echo(json.dumps({"id": job, "time": time_text, "text": text}) if as_json else printable(line))

    async def show() -> str:
        if job_record.has_record(Path(id)):
            job = job_record.read(Path(id))["id"]
            async for line in job_record.read_log(Path(id), follow=follow):
                print_line(job, line)
            return str(job_record.read(Path(id))["state"])
        match = job_lookup.find_matching(await job_lookup.all_jobs(cluster), id)
        if match.note:
            click.echo(match.note, err=True)
        job = match.job["id"]
        async for line in job_lookup.log_lines(cluster, job, follow=follow):
            print_line(job, line)
        return str(job_lookup.find_matching(await job_lookup.all_jobs(cluster), job).job["state"])

    if asyncio.run(show()) == "failed" and follow:
        sys.exit(1)


@click.command("cancel")
@click.argument("id")
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON, with its state before the command.")
@cluster_options
def cancel(id: str, as_json: bool, cluster: ClusterAddress) -> None:
    """Stop a running job at its next step, a waiting one at once. Its results so far are stored; `staleflow resume`
    continues from them."""
    from staleflow.pipeline.cluster import job_lookup, submitted_job

    job, state = asyncio.run(job_lookup.cancel_job(cluster, id))
    if as_json:
        click.echo(json.dumps(job | {"state_before": state}, indent=2))
    elif state in submitted_job.ENDED:
        click.echo(f"{job['id']} has ended already: {state}")
    elif job["state"] in submitted_job.ENDED:
        click.echo(f"{job['id']} waited and is cancelled; it held no workers")
    else:
        click.echo(f"{job['id']} stops at its next step; `staleflow resume {job['run_dir']}` continues it")


@click.command("retire")
@click.argument("id")
@click.argument("worker")
@cluster_options
def retire(id: str, worker: str, cluster: ClusterAddress) -> None:
    """Take a rollout instance out of a job and its worker out of the cluster. WORKER is the name of the instance, or
    the name or address of its worker. Its trajectories continue on other instances, from the tokens they have."""
    from staleflow.pipeline.cluster import job_lookup

    job = asyncio.run(job_lookup.retire_worker(cluster, id, worker))
    click.echo(f"{job} gives up {worker}; `staleflow logs {job} -f` says when it has left")


def _job_line(job: dict[str, Any]) -> str:
    last_step, status = job["last"], job["status"]
    num_steps = int(last_step["step"]) + 1 if last_step else 0
    parts = [f"{job['id']:<24}", f"{job['state']:<8}", f"step {num_steps}/{job['steps']}"]
    if last_step:
        parts.append(f"reward {last_step['reward']:.3f}")
    if job["state"] == "running":
        parts.append(f"{status.get('doing', '')}")
        if status.get("evaluating"):
            parts.append(status["evaluating"])
    elif job["why"]:
        parts.append(printable(job["why"]))
    if job["state"] in ("running", "waiting") and job["reported_at"]:
        since_report_s = time.time() - job["reported_at"]
        if since_report_s > 10:
            parts.append(f"(no report for {since_report_s:.0f} s)")
    return "  ".join(parts)


def _detail_lines(job: dict[str, Any]) -> list[str]:
    last_step, status = job["last"], job["status"]
    lines = [f"folder {Path(job['run_dir'])}"]
    if last_step:
        lines.append(
            f"staleness {last_step['staleness_mean']:.2f} (max {last_step['staleness_max']:.0f}), "
            f"{last_step['tokens_per_s']:.0f} tokens/s, length {last_step['response_mean']:.0f}, "
            f"loss {last_step['loss']:+.4f}, "
            f"train {last_step['train_s']:.1f} s, wait {last_step['wait_s']:.1f} s per step"
        )
    if status:
        environment_text = (
            f"{status['num_in_environment']} in environment, " if status.get("num_in_environment") else ""
        )
        lines.append(
            f"{status['num_queued']} queued, {status['num_running']} sampling, {environment_text}"
            f"{status['num_scoring']} scoring; "
            f"staleness in flight {status['staleness_in_flight']:.2f}, in queue {status['staleness_in_queue']:.2f}"
        )
        lines += status.get("evaluated", ())
        if status.get("fleet"):
            lines.append(status["fleet"])
        lines += [
            f"{instance['instance']:<14} v{instance['version']}{' pulling' if instance['pulling'] else ''}  "
            f"{instance['num_running']}/{instance['max_running']} running, "
            f"{instance['kv_tokens']}/{instance['kv_capacity']} KV tokens"
            for instance in status["instances"]
        ]
        lines += [
            f"{host['host']:<14} {host['num_in_environment']} in environment, {host['slots']} slots"
            for host in status.get("environments", ())
        ]
        lines += status.get("sources", ())
        lines += [f"lost: {loss}" for loss in status["losses"]]
    if job["stop"] and job["state"] in ("running", "waiting"):
        lines.append(f"stop requested: {job['stop']}")
    return lines


@click.command("cluster")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--workers", type=click.IntRange(0, 1024), default=4, show_default=True, help="Workers on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="This machine's name or address, for other hosts.")
@click.option("--port", type=click.IntRange(1, 65_535), default=8786, show_default=True, help="The scheduler's port.")
def cluster(folder: Path, workers: int, host: str, port: int) -> None:
    """Start a Dask cluster that only holders of FOLDER can reach: scheduler and workers on this machine, over TLS.

    FOLDER receives certificates and a Dask configuration, and is used again if it has them. Ends with Ctrl-C.
    """
    from staleflow.pipeline.cluster.tls_cluster import WORKER_OPTIONS, tls_cluster

    with tls_cluster(folder, host=host, port=port, num_workers=workers, announce=click.echo) as cluster:
        dask_config = f"DASK_CONFIG={folder.resolve()}"
        click.echo(f"{cluster.address}: {workers} workers. In another terminal:")
        click.echo(f"  {dask_config} staleflow submit job.toml")
        if host not in ("127.0.0.1", "localhost", "::1"):
            click.echo("More workers, on a host with a copy of the folder at the same path:")
            click.echo(f"  {dask_config} dask worker {cluster.address} {' '.join(WORKER_OPTIONS)}")
        click.echo("Ctrl-C ends it.")
        cluster.wait()
