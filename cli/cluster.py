"""staleflow cluster FOLDER"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("cluster")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--workers", type=click.IntRange(0, 1024), default=4, show_default=True, help="Workers on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="This machine's name or address, for other hosts.")
@click.option("--port", type=click.IntRange(1, 65_535), default=8786, show_default=True, help="The scheduler's port.")
def command(folder: Path, workers: int, host: str, port: int) -> None:
    """Start a Dask cluster that only holders of FOLDER can reach: scheduler and workers on this machine, over TLS.

    FOLDER receives certificates and a Dask configuration, and is used again if it has them. Ends with Ctrl-C.
    """
    from staleflow.pipeline.cluster.tls_cluster import WORKER_OPTIONS, tls_cluster

    with tls_cluster(folder, host=host, port=port, num_workers=workers, announce=click.echo) as cluster:
        configured = f"DASK_CONFIG={folder.resolve()}"
        click.echo(f"{cluster.address}: {workers} workers. In another terminal:")
        click.echo(f"  {configured} staleflow submit job.toml")
        if host not in ("127.0.0.1", "localhost", "::1"):
            click.echo("More workers, on a host with a copy of the folder at the same path:")
            click.echo(f"  {configured} dask worker {cluster.address} {' '.join(WORKER_OPTIONS)}")
        click.echo("Ctrl-C ends it.")
        cluster.wait()
