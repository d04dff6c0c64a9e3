"""A record of what engines sample and load, made where they do it and by nothing that reports it: the soak compares the
run's store and journals with it.

`dask worker --preload benchmarks.soaking.recording` keeps it, one file of JSON lines per process below FOLDER. A line
is written at once, so that it outlives a process that is killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.stores.weights import weight_folder
from staleflow.tasks.engines.emulated_engine import TENSOR_NAME, EmulatedEngine
from staleflow.tasks.engines.running_requests import RunningRequest

FOLDER = "STALEFLOW_SOAK_RECORDS"
"""Environment variable: the folder of the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Tokens that an engine sampled in one go: positions start <= position < stop of a trajectory's response."""

    instance: str
    trajectory: int
    route_number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Weights that an engine loaded. loaded_version: the version that the weights themselves are of."""

    instance: str
    version: int
    loaded_version: int


def dask_setup(worker: Any) -> None:
    """Record what this process's emulated engines do. Called by Dask as a worker starts."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(**line: str | int) -> None:
        os.write(file, json.dumps(line).encode() + b"\n")

    sampled, load = RunningRequest.sampled_tokens, EmulatedEngine.load

    def recorded_sampled(self: Any, *args: Any) -> Any:
        result = sampled(self, *args)
        stop = result.start + sum(len(segment.tokens) for segment in result.segments)
        write(
            instance=result.segments[-1].instance if result.segments else "",
            trajectory=result.trajectory,
            route_number=result.route_number,
            start=result.start,
            stop=stop,
        )
        return result

    def recorded_load(self: Any, version: Any, weights: Path) -> Any:
        loaded_version = int(weight_folder.read_arrays(weights)[TENSOR_NAME][0])
        result = load(self, version, weights)
        write(instance=self._instance, version=version, loaded_version=loaded_version)
        return result

    setattr(RunningRequest, "sampled_tokens", recorded_sampled)  # noqa: B010  a method, which mypy lets nobody assign
    setattr(EmulatedEngine, "load", recorded_load)  # noqa: B010


def read(folder: Path) -> Iterator[Sampling | Loading]:
    """The record of all processes. What one request has sampled so far is there several times, ever longer."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            yield Loading(**fields) if "version" in fields else Sampling(**fields)
