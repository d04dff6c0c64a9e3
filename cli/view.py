"""staleflow view RUN"""

from __future__ import annotations

import os
import signal
import sys
import threading
import webbrowser

import click

from staleflow.cli.stored import quiet_libraries

PORT = 8799
LOCAL_HOST = "127.0.0.1"


@click.command("view")
@click.argument("run", type=click.Path())
@click.argument("other", type=click.Path(), default="")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=None,
    help=f"Port to listen on; 0 for any free one.  [default: {PORT}, or a free one if that is taken]",
)
@click.option("--host", default=LOCAL_HOST, show_default=True, help="Name or address of this machine to listen on.")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@click.option("--until-eof", is_flag=True, hidden=True)
def command(run: str, other: str, port: int | None, host: str, no_browser: bool, until_eof: bool) -> None:
    """Show a run, live or finished, on a page in the browser: steps, groups, trajectories, instances over time,
    branches, job and audit. With OTHER, a second run's steps and settings are beside those of the first. Ends with
    Ctrl-C."""
    quiet_libraries()
    from staleflow.pipeline.api.stored_run import open_run
    from staleflow.pipeline.run_page.api import RunApi
    from staleflow.pipeline.run_page.page_server import listen, make_server
    from staleflow.pipeline.run_page.run_reader import RunReader

    reader, *others = (RunReader(open_run(name).path) for name in (run, other) if name)
    for page_reader in (reader, *others):
        page_reader.read_snapshot()  # reports a store that cannot be read before anything is served
    sock = listen(host, PORT if port is None else port, exactly=port is not None)
    url_host = f"[{host}]" if ":" in host else host
    address = f"http://{url_host}:{sock.getsockname()[1]}/"

    if until_eof:  # for a program that starts it, and with which it is to end
        threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        click.echo(f"{run}: {address} (Ctrl-C ends it)")
        if host != LOCAL_HOST:
            click.echo("everyone who reaches this address can read the run: it asks for no password", err=True)
        if not no_browser and _has_display():
            webbrowser.open(address)  # the socket listens already
        make_server(RunApi(reader, *others), host).run(sockets=[sock])
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _has_display() -> bool:
    """Whether a browser would open in a window; else a text browser might take the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
