"""A stored run as one object: live or finished, in a folder or in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import run_folder
from staleflow.pipeline.stored_runs.run_location import run_folder as located
from staleflow.pipeline.stored_runs.steps import Step, metrics_table


class Run:
    """A stored run, live or finished."""

    def __init__(self, path: Path, branch: str, at_step: int | None) -> None:
        self._path, self._branch, self._at_step = path, branch, at_step

    @property
    def path(self) -> Path:
        """The run's folder; of a run that was opened by URL, a temporary one."""
        return self._path

    @property
    def job(self) -> RunConfig:
        """The run's job, as its latest start resolved it."""
        return run_folder.load_job(self._path)

    def steps(self) -> list[Step]:
        """The training steps, oldest first."""
        return [Step.of(record) for record in self._store().steps() if record.kind == "step"]

    def metrics(self) -> Any:
        """A pandas.DataFrame of the metrics: a row for each training step, a column for each metric."""
        return metrics_table(self.steps())

    def to_pandas(self) -> Any:
        from staleflow.stores.trajectories import dataframes

        return dataframes.to_pandas(self._store().ended())

    def audit(self) -> Any:
        from staleflow.stores.auditing.audit import audit

        return audit(self._store())

    def _store(self) -> Any:
        from staleflow.stores.trajectories.versioned import VersionedStore

        return VersionedStore.open(self._path / "store", self._at_step, self._branch)


def open_run(source: str | Path, *, branch: str = "main", at_step: int | None = None) -> Run:
    """Open a stored run."""
    return Run(located(source), branch, at_step)


def list_runs(folder: str | Path = "runs") -> list[Run]:
    """The runs in a folder, by name."""
    return [Run(path, "main", None) for path in run_folder.list_runs(Path(folder))]
