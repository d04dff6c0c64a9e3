"""The data of a stored run: its steps, trajectories, tables and branches, live or finished. A run is a folder, or the
URL of its store in a bucket.

An object keeps no data: every call reads what is stored at that moment, from one snapshot of the store.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import run_folder
from staleflow.pipeline.recovery.run_folder import require_run
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.s3_url import is_url
from staleflow.stores.trajectory import TrajectoryId

if TYPE_CHECKING:
    import datasets
    import pandas
    import xarray

    from staleflow.pipeline.runtime.evaluation_results import Evaluation
    from staleflow.pipeline.stored_runs.stored_trajectories import ConsumedBatch, StoredTrajectory
    from staleflow.pipeline.stored_runs.views import Order, TrajectoryView
    from staleflow.stores.trajectories.reader import StoreSummary
    from staleflow.stores.trajectories.records import CommitRecord
    from staleflow.stores.trajectories.versioned import VersionedStore

MAIN_BRANCH = "main"
"""The branch that a run itself writes."""


class RunData:
    """The data of a stored run. Each call reads the current state of its folder, or of its store in a bucket."""

    def __init__(self, path: Path, source: str, *, branch: str = MAIN_BRANCH, at_step: int | None = None) -> None:
        self._path = path
        self._source = source
        self._branch = branch
        self._at_step = at_step

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The run's folder. For a run opened by URL: a temporary folder with the job, without checkpoints."""
        return self._path

    @property
    def source(self) -> str:
        """The folder or store URL with which the run was opened."""
        return self._source

    @property
    def name(self) -> str:
        """The run's name."""
        return self.job.name

    @property
    def url(self) -> str:
        """URL of the store's data in a bucket; empty if they are in the run's folder."""
        from staleflow.stores.trajectories.repository import url_of

        return url_of(self._path / "store")

    @property
    def job(self) -> RunConfig:
        """The run's job as its latest start resolved it. Raises ConfigError."""
        return run_folder.load_job(self._path)

    @property
    def eta(self) -> int:
        """The staleness bound, in policy versions."""
        return self._store().header.eta

    @property
    def bound(self) -> str:
        """The staleness bound in words."""
        return self._store().header.bound_text

    @property
    def live(self) -> bool:
        """Whether a process is working on the run, which has the lock of the run's folder. Always False by URL."""
        return run_folder.is_in_use(self._path)

    @property
    def finished(self) -> bool:
        """Whether the run's end is stored: it has done all steps, or was stopped regularly."""
        summary = self.summary()
        return summary is not None and summary.has_ended

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of all branches of the store: "main", those with other rewards or logprobs, and those with steps that a
        resume has undone."""
        return tuple(sorted({MAIN_BRANCH, *self._store().branches()}, key=lambda name: (name != MAIN_BRANCH, name)))

    @property
    def lineage(self) -> Mapping[str, Any]:
        """How the current branch was derived; empty for "main"."""
        return self._store().lineage

    @property
    def snapshot(self) -> str:
        """Id of the store's current snapshot."""
        return self._store().snapshot

    def summary(self) -> StoreSummary | None:
        """Progress of the run: number of steps, trajectories and tokens, and its latest commit. None before the run has
        a store."""
        return self._store().summary() if self._has_store() else None

    # -- steps ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[CommitRecord]:
        """The training steps, oldest first: metrics and fingerprints of each. Reads no trajectory."""
        return [record for record in self.commits() if record.kind == "step"]

    def commits(self) -> list[CommitRecord]:
        """All commits, oldest first: training steps, resumes, and ends of the run. Empty if nothing is stored yet."""
        return self._store().commits() if self._has_store() else []

    def metrics(self) -> pandas.DataFrame:
        """The metrics of the training steps.

        Returns:
            A `pandas.DataFrame` with a row for each step and a column for each metric; docs/metrics.md has their units.

        Raises:
            ConfigError: pandas is not installed.
        """
        from staleflow.pipeline.stored_runs.stored_trajectories import metrics_table

        return metrics_table(self.steps())

    def batch(self, step: int) -> ConsumedBatch:
        """The batch that a training step consumed, compared with what the trainer received. Raises ConfigError if the
        step is not stored."""
        from staleflow.pipeline.stored_runs.stored_trajectories import read_batch

        return read_batch(self._store(), step)

    def evaluations(self) -> list[Evaluation]:
        """Mean rewards on held-out prompts, in order of evaluation. None by URL, because they are in the run's folder.
        Raises StoreError."""
        from staleflow.pipeline.runtime.evaluation_results import read_evaluations

        return read_evaluations(self._path)

    # -- trajectories --------------------------------------------------------------------------------------------

    def trajectories(
        self, where: str = "", *, step: int | None = None, texts: bool = True
    ) -> Iterator[StoredTrajectory]:
        """Iterate over stored trajectories in stored order. Memory does not grow with their number.

        Args:
            where: Which ones: comparisons, `and`, `or`, `not`, `in` and arithmetic over the columns that docs/store.md
                lists, such as "staleness <= 1 and reward > 0".
            step: Only those that this training step consumed.
            texts: Whether to decode prompts and responses, which needs the model's tokenizer.

        Raises:
            ConfigError: The condition is wrong, or there is no tokenizer.
            StoreError: A trajectory cannot be read.
        """
        from staleflow.pipeline.stored_runs.stored_trajectories import StoredTrajectory, read_rows

        decoder = self._detokenizer() if texts else None
        rows = read_rows(self._store(), _step_condition(where, step))
        return (StoredTrajectory.of(row, decoder) for row in rows)

    def trajectory(self, id: int) -> StoredTrajectory:
        """One trajectory, with texts. Raises ConfigError for an unknown id, StoreError for a damaged one."""
        from staleflow.pipeline.stored_runs.stored_trajectories import StoredTrajectory

        row = self._store().get(TrajectoryId(id))
        if row is None:
            raise ConfigError(f"{self._path}: no stored trajectory {id}; it was never started or is still in flight")
        return StoredTrajectory.of(row, self._detokenizer())

    def sorted_ids(self, order: Order, count: int, where: str = "", *, step: int | None = None) -> list[int]:
        """Ids of the trajectories with the lowest or highest reward, or the most response tokens.

        Args:
            order: "worst", "best" or "longest". The first two leave out what was never scored; among equals each group
                comes once before any comes twice.
            count: Most ids to return.
            where: Which trajectories to rank, as in `trajectories`.
            step: Only those that this training step consumed.
        """
        from staleflow.pipeline.stored_runs.views import sorted_ids

        return [int(id) for id in sorted_ids(self._store(), order, count, _step_condition(where, step))]

    def view(self, trajectories: int | Iterable[int], *, model: str = "") -> list[TrajectoryView]:
        """Trajectories for display, token by token: text, policy version, instance, probability and importance ratio.

        Args:
            trajectories: Their ids, or one id.
            model: Folder of a checkpoint, or a hub name, to compute importance ratios under. Without, the ratios are
                those of logprobs stored on this branch, if there are any.
        """
        from staleflow.pipeline.stored_runs.views import make_views

        ids = [trajectories] if isinstance(trajectories, int) else trajectories
        return make_views(self._path, self._store(), [TrajectoryId(id) for id in ids], model)

    def to_pandas(self, where: str = "", *, texts: bool = True) -> pandas.DataFrame:
        """Trajectories as a `pandas.DataFrame`, one row each; token columns hold numpy arrays.

        Args:
            where: Which ones, as in `trajectories`.
            texts: Whether to add the columns `prompt` and `response`.

        Raises:
            ConfigError: The condition is wrong, there is no tokenizer, or pandas is not installed.
        """
        from staleflow.pipeline.stored_runs.tables import pandas_table

        return pandas_table(self._store(), where, self._detokenizer() if texts else None)

    def to_dask(self, where: str = "", *, texts: bool = True) -> Any:
        """Trajectories as a `dask.dataframe`, one row each, which may be larger than memory. Workers read the run's
        folder block by block.

        Args:
            where: Which ones, as in `trajectories`.
            texts: Whether to add the columns `prompt`, `response` and `messages`; token ids, if the tokenizer is gone.

        Raises:
            ConfigError: The condition is wrong, or dask.dataframe is not installed.
        """
        from staleflow.pipeline.stored_runs.tables import dask_table

        return dask_table(self._path, self._store(), where, texts=texts)

    def to_xarray(self) -> xarray.Dataset:
        """All trajectories as an `xarray.Dataset` over `trajectory` and `token`; tokens stay on disk until computed."""
        return self._store().to_xarray()

    def to_dataset(self, where: str = "") -> datasets.Dataset:
        """Trajectories as a `datasets.Dataset` in memory, with the columns of an export, such as `prompt` and
        `completion`. Use `export` if they do not fit into memory. Raises ConfigError."""
        from staleflow.pipeline.stored_runs.tables import hugging_face_dataset

        return hugging_face_dataset(self._store(), where, self._detokenizer())

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"<Run {self.url or self._path}: {facts}>"

    def _facts(self) -> dict[str, str]:
        summary = self._store().summary() if self._has_store() else None
        return make_display_facts(self._branch, self._at_step, summary, is_live=self.live)

    # -- reading -------------------------------------------------------------------------------------------------

    def _has_store(self) -> bool:
        return (self._path / "store").exists()

    def _store(self, branch: str = "") -> VersionedStore:
        """The store at one snapshot: what a call reads belongs together. Raises ConfigError, StoreError."""
        from staleflow.stores.trajectories.versioned import VersionedStore

        if self._at_step is not None:
            return VersionedStore.open(self._path / "store", self._at_step)
        return VersionedStore.open_pinned(self._path / "store", branch or self._branch)

    def _detokenizer(self) -> Any:
        from staleflow.pipeline.stored_runs.response_texts import make_detokenizer

        return make_detokenizer(self.job)


def _step_condition(where: str, step: int | None) -> str:
    """A condition on trajectories that also demands that a training step consumed them."""
    if step is None:
        return where
    condition = f"fate == 'consumed' and step == {step}"
    return f"({where}) and {condition}" if where else condition


def make_display_facts(
    branch: str, at_step: int | None, summary: StoreSummary | None, *, is_live: bool
) -> dict[str, str]:
    """The displayed facts of a run, by name, in display order. summary: None before the run has a store."""
    has_ended = summary is not None and summary.has_ended
    last_record = None if summary is None else summary.last_step
    reward = None if last_record is None else last_record.metrics.get("reward")
    return {
        "branch": branch,
        **({} if at_step is None else {"as of step": str(at_step)}),
        "state": "finished" if has_ended else "live" if is_live else "unfinished",
        "steps": f"{0 if summary is None else summary.num_steps:,}",
        "trajectories": f"{0 if summary is None else summary.num_rows:,}",
        "tokens": f"{0 if summary is None else summary.num_tokens:,}",
        **({} if reward is None else {"reward": f"{reward:.3f}"}),
    }


def find_run_folder(source: str | Path) -> Path:
    """Find the folder of a run.

    Args:
        source: The run's folder, or the URL of its store.

    Returns:
        The run's folder. For a URL, a temporary folder that lasts as long as this process, with the job file that the
        store holds and a `store` file that names the URL.

    Raises:
        ConfigError: There is no run, or nothing can be read at the URL.
    """
    text = str(source)
    if not is_url(text):
        require_run(Path(source))
        return Path(source)
    from staleflow.stores.trajectories.repository import check_endpoint, write_url_file
    from staleflow.stores.trajectories.versioned import VersionedStore

    parent = tempfile.TemporaryDirectory(prefix="staleflow-", ignore_cleanup_errors=True)
    atexit.register(parent.cleanup)
    folder = Path(parent.name) / text.rstrip("/").rpartition("/")[2]
    folder.mkdir()
    write_url_file(folder / "store", text)
    try:
        check_endpoint()
        store = VersionedStore.open_pinned(folder / "store")
    except (StoreError, OSError) as error:
        why = str(error).rpartition(": ")[2]
        raise ConfigError(
            f"{text}: no store can be read there: {why}; check the URL, AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID"
        ) from error
    (folder / "config.toml").write_text(store.header.job, "utf-8")
    return folder
