"""A stored run as one object: its data, proofs about it, and new results from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.pipeline.api import run_data
from staleflow.pipeline.api.run_data import MAIN_BRANCH, RunData
from staleflow.pipeline.config.knob_tree import Overrides, override_lines
from staleflow.pipeline.recovery import run_folder
from staleflow.stores.errors import ConfigError
from staleflow.stores.s3_url import is_url
from staleflow.stores.trajectory import TrajectoryId

if TYPE_CHECKING:
    from distributed import Client

    from staleflow.pipeline.jobs.replaying import ReplayResult
    from staleflow.pipeline.simulator.run_forecast import ForecastComparison
    from staleflow.pipeline.stored_runs.bisection import Bisection
    from staleflow.pipeline.stored_runs.branch_diff import BranchDifference
    from staleflow.pipeline.stored_runs.comparison import Comparison
    from staleflow.pipeline.stored_runs.exporting import ExportFormat, ExportResult
    from staleflow.pipeline.stored_runs.logprob_recompute import RecomputeResult
    from staleflow.pipeline.stored_runs.reward_rescoring import RescoreResult
    from staleflow.pipeline.stored_runs.training import OfflineTrainingResult
    from staleflow.pipeline.stored_runs.unlearning import UnlearningResult
    from staleflow.pipeline.stored_runs.verification import Verification
    from staleflow.stores.auditing.audit import AuditReport
    from staleflow.stores.auditing.drop_bias import DropBias

DEFAULT_RUNS_DIR = "runs"
"""The folder that runs are in by default."""
ProgressCallback = Callable[[int, int], None]
"""Called with (trajectories done, trajectories in all) as work goes on; first with (0, 0), when the input is checked
and workers start."""


class Run(RunData):
    """A stored run, live or finished. Created by `open_run`.

    Every call reads what is stored at that moment, so the object of a live run follows it; nothing needs refreshing.
    Reading never disturbs a run in progress. Methods that take `client` work on Dask workers: those of the cluster that
    a `distributed.Client` is connected to, or `workers` processes of this machine without one. (A script that is not a
    notebook guards its own code with `if __name__ == "__main__":` then, as Python demands of all programs that start
    processes.)

    Example:
        >>> run = staleflow.open_run("runs/demo")
        >>> run.metrics()[["reward", "staleness_mean"]].tail(3)
        >>> for t in run.trajectories(where="reward == 0 and step > 10"):
        ...     print(t.id, t.prompt, "->", t.response)
        >>> run.audit().is_clean
        True
    """

    # -- other views of it ---------------------------------------------------------------------------------------

    def branch(self, name: str) -> Run:
        """The run on another branch, with other rewards or logprobs. Raises ConfigError if there is none with this
        name."""
        return _require_branch_and_step(Run(self._path, self._source, branch=name))

    def at_step(self, step: int) -> Run:
        """The run at the commit of training step `step`; later commits are not seen. Raises ConfigError if that step is
        not stored."""
        return _require_branch_and_step(Run(self._path, self._source, at_step=step))

    # -- proofs --------------------------------------------------------------------------------------------------

    def audit(
        self, *, full: bool = False, memory_mib: int = 1024, workers: int = 2, client: Client | None = None
    ) -> AuditReport:
        """Verify the bound, single consumption and conservation from the stored data alone.

        What the run itself stored is audited, also if this object shows another branch.

        Args:
            full: Whether to verify what earlier steps and other branches read, too.
            memory_mib: Most resident memory of all local processes together, MiB.
            workers: Most local processes, if the store is large.
            client: Workers to read the tokens with instead.

        Raises:
            ConfigError: The limit of memory is too low.
        """
        from staleflow.pipeline.stored_runs.auditing import add_history_findings, audit_within_memory

        store = self._store(MAIN_BRANCH)
        report = audit_within_memory(store, memory_mib, workers, client)
        return add_history_findings(report, store.path) if full else report

    def compare_with_forecast(self) -> ForecastComparison | None:
        """Compare the run with the forecast that was made before its first step; None if there is none. See
        `staleflow.plan`. Raises StoreError if the forecast cannot be read."""
        from staleflow.pipeline.jobs.forecasting import FORECAST_FILE, compare_forecast

        if not (self._path / FORECAST_FILE).is_file():
            return None
        cause = run_folder.read_summary(self._path).get("diagnosis", {}).get("cause", "")
        return compare_forecast(self._path, [step.metrics for step in self.steps()], cause)

    def drop_bias(self) -> DropBias:
        """Compare dropped trajectories with trained ones, by reason: lengths, turns, rewards and prompts."""
        from staleflow.stores.auditing.drop_bias import drop_bias_of_store

        return drop_bias_of_store(self._store(MAIN_BRANCH))

    def verify(
        self,
        *,
        checkpoint: str | Path | None = None,
        steps: int = 3,
        seed: int | None = None,
        client: Client | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Verification:
        """Check the hash chain of the run's commits, and repeat random training steps, which must give the published
        weights bit for bit.

        Args:
            checkpoint: Folder of one of the run's checkpoints, to verify with it.
            steps: Number of steps to choose. All steps from the nearest resume point or the base model up to each of
                them are trained again.
            seed: Chooses them; by default others each time.
            client: Workers to train on: as many as `training.ranks`. Without, that many processes of this machine.
            report: Called with events as in `train_offline`.

        Returns:
            What was verified, what contradicts the run, and what was not verified and why.

        Raises:
            ConfigError: There is no store, the checkpoint has no certificate, or too few workers are free.
        """
        from staleflow.pipeline.stored_runs.verification import verify_run

        folder = None if checkpoint is None else Path(checkpoint)
        return verify_run(self._path, folder, steps=steps, seed=seed, client=client, report=report or _ignore)

    def replay(self, trajectory: int | None = None) -> ReplayResult:
        """Replay the run's recorded events in a new coordinator, whose commands must equal the recorded ones.

        Args:
            trajectory: Id of one whose events to list as the result's `story`.

        Raises:
            ConfigError: There are no recorded events, or the run never started that trajectory.
        """
        from staleflow.pipeline.jobs.replaying import replay_run

        if is_url(self._source):
            raise ConfigError(f"{self._source}: a bucket has only the store; name the run's folder")
        return replay_run(self._path, None if trajectory is None else TrajectoryId(trajectory))

    # -- new results ---------------------------------------------------------------------------------------------

    def rescore(
        self,
        *,
        branch: str,
        reward: str | Callable[..., Any] = "",
        changes: Overrides | None = None,
        workers: int = 2,
        client: Client | None = None,
        progress: ProgressCallback | None = None,
    ) -> RescoreResult:
        """Score the stored responses again, and store the rewards and the resulting advantages on a new branch.

        Args:
            branch: Name of the new branch; `Run.branch` opens it.
            reward: "task", "math_verify", "file.py:name", "module:name", or a function, which is pickled by value and
                saved in the run's code/. Empty for the job's own.
            changes: Changes to the settings of `[reward]` or to `task.answer_pattern`.
            workers: Local processes, unless there is a client.
            client: Workers to score with.
            progress: Called with (done, all) as responses are scored; first with (0, 0), when the input is checked.

        Returns:
            The mean rewards before and after, and the errors of responses that could not be scored.

        Raises:
            ConfigError: Something of it is wrong; nothing was computed.
        """
        from staleflow.pipeline.api.code_objects import reward_file
        from staleflow.pipeline.stored_runs.reward_rescoring import rescore

        self._require_newest("score the responses of")
        lines = override_lines(changes)
        if not reward and not lines:
            raise ConfigError("rescore: name the reward, or what changes of the job's own")
        with self._lock_run(), reward_file(self._path, branch, reward) as reward_name:
            return rescore(
                self._path, reward_name, branch, lines, client=client, workers=workers, progress=progress or _ignore
            )

    def recompute_logprobs(
        self,
        model: str | Path,
        *,
        where: str = "",
        branch: str = "",
        workers: int = 2,
        client: Client | None = None,
        progress: ProgressCallback | None = None,
    ) -> RecomputeResult:
        """Compute logprobs of the stored responses under other weights, and their distance from the sampling policies.

        Args:
            model: Folder of a checkpoint, or a hub name.
            where: Which trajectories, as in `trajectories`.
            branch: Name of a new branch to store the logprobs of all responses on; none by default.
            workers: Local processes, unless there is a client.
            client: Workers to compute with.
            progress: Called as in `rescore`.

        Returns:
            KL divergence, effective sample size and clipped share by staleness.

        Raises:
            ConfigError: Something of it is wrong; nothing was computed.
        """
        from staleflow.pipeline.stored_runs.logprob_recompute import recompute_logprobs

        self._require_newest("compute logprobs of")
        # Storing a branch commits to the store, as a run in progress does; reading disturbs nothing.
        with self._lock_run() if branch else contextlib.nullcontext():
            return recompute_logprobs(
                self._path, str(model), branch=branch, where=where, client=client, workers=workers,
                progress=progress or _ignore,
            )  # fmt: skip

    def diff(self, first: str, second: str) -> BranchDifference:
        """Compare the rewards of the same trajectories on two branches. Raises ConfigError."""
        from staleflow.pipeline.stored_runs.branch_diff import compare_branches

        return compare_branches(self._path, first, second)

    def push(self, repo: str, *, step: int | None = None, private: bool = False) -> str:
        """Upload a checkpoint to the Hugging Face hub, with a model card: base model, data, settings, audit and
        evaluations.

        Args:
            repo: Name of the model repository, as `OWNER/NAME`; it is created if there is none.
            step: Step of the checkpoint; the newest if None.
            private: Whether a new repository is private.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: There is no such checkpoint, the hub cannot be reached, or it refuses the upload.
        """
        from staleflow.pipeline.stored_runs.hub import push_checkpoint

        self._require_newest("push")
        return push_checkpoint(self._path, repo, step=step, private=private)

    def export(
        self,
        to: ExportFormat,
        out: str | Path | None = None,
        *,
        where: str = "",
        workers: int = 2,
        client: Client | None = None,
        progress: ProgressCallback | None = None,
    ) -> ExportResult:
        """Export trajectories of this branch, as texts and tokens, for other tools.

        Args:
            to: "parquet", "jsonl", or "hf", a folder for `datasets.load_dataset`.
            out: The folder, or the file of "jsonl", to create; it appears when it is complete. NAME.FORMAT in the
                current folder by default.
            where: Which trajectories, as in `trajectories`.
            workers: Local processes, unless there is a client.
            client: Workers to write with; they reach the same file system.
            progress: Called as in `rescore`.

        Raises:
            ConfigError: Something of it is wrong; nothing was written.
        """
        from staleflow.pipeline.stored_runs.exporting import export

        self._require_newest("export")
        path = Path(f"{self._path.resolve().name}.{to}" if out is None else out)
        return export(
            self._path, to, path, branch=self._branch, where=where, client=client, workers=workers,
            progress=progress or _ignore,
        )  # fmt: skip

    def train_offline(
        self,
        out: str | Path | None = None,
        *,
        where: str = "",
        overrides: Overrides | None = None,
        epochs: int = 1,
        client: Client | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> OfflineTrainingResult:
        """Train on the stored batches in their order, with the run's trainer and losses, without any rollout.

        On all of branch "main" with nothing changed this gives the run's own weights, bit for bit. Called again after
        it was killed, it goes on from its newest resume point.

        Args:
            out: Folder to create; it appears when the training is complete. By default the run's own name with
                `-offline` behind it, beside the run, or by URL in the current folder.
            where: Which trajectories, as in `trajectories`.
            overrides: Changes to `[training]`, `[model]`, `seed` or `task.eval_prompts`.
            epochs: Passes over the stored batches.
            client: Workers to train on: as many as `training.ranks`. Without, that many processes of this machine.
            report: Called with events: {"say": line}, {"total": steps}, and after each step {"done": steps, "total":
                steps, "metrics": of the step}.

        Returns:
            The folder of the checkpoint, and held-out rewards before and after.

        Raises:
            ConfigError: Something of it is wrong; nothing was trained.
        """
        from staleflow.pipeline.stored_runs.training import execute_plan, make_plan

        self._require_newest("train on")
        lines = override_lines(overrides)
        plan = make_plan(self._path, self._new_folder("offline", out), lines, self._branch, where, epochs)
        return execute_plan(plan, client, report or _ignore)

    def unlearn(
        self,
        where: str,
        *,
        branch: str = "unlearned",
        out: str | Path | None = None,
        client: Client | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> UnlearningResult:
        """Repeat the training without some trajectories, from the first step that used one of them.

        The weights equal, bit for bit, those of `train_offline` on the new branch without these trajectories. It begins
        at a resume point of the run if one is old enough, else at the base model. Called again after it was killed, it
        goes on from its newest resume point.

        Args:
            where: Which trajectories to leave out, as in `trajectories`.
            branch: Name of the new branch, with the advantages that groups have without them.
            out: Folder to create; it appears when the training is complete. By default the run's own name with the
                branch's behind it, beside the run, or by URL in the current folder.
            client: Workers to train on: as many as `training.ranks`. Without, that many processes of this machine.
            report: Called with events as in `train_offline`.

        Returns:
            What was left out and recomputed, and the training.

        Raises:
            ConfigError: Nothing that was trained on matches, or all of it; nothing was trained.
        """
        from staleflow.pipeline.stored_runs import unlearning

        self._require_newest("unlearn something of")
        if self._branch != MAIN_BRANCH:
            raise ConfigError(f"unlearn: {self._branch} is a branch; open the run without it, as it was trained")
        with self._lock_run():
            plan, facts = unlearning.make_plan(self._path, self._new_folder(branch, out), where, branch)
            return unlearning.unlearn(plan, facts, client, report or _ignore)

    def bisect(
        self,
        at: int,
        *,
        since: int | None = None,
        metric: str = "reward",
        client: Client | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Bisection:
        """Find the smallest change of the training without which the policy does not become worse.

        The steps between two versions are trained again without parts of their rows, without parts of the reward, or
        with settings as they were before a resume, and the held-out prompts are answered by each result. `unlearn` then
        makes a policy without the rows. A page in the run's folder shows the result.

        Args:
            at: Version with a lower reward.
            since: Version before it; by default the one with the highest evaluated reward, or ten steps before.
            metric: "reward", or the name of one of its parts.
            client: Workers to train on: as many as `training.ranks`. Without, that many processes of this machine.
            report: Called with {"say": text} for the plan and for each change.

        Returns:
            The changes that were tried with their rewards, and the smallest that prevents the drop if there is one.

        Raises:
            ConfigError: The versions are not those of the run, or there are no held-out prompts to measure on.
        """
        from staleflow.pipeline.stored_runs import bisection, bisection_page
        from staleflow.pipeline.stored_runs.pool import run_training

        self._require_newest("bisect")
        if self._branch != MAIN_BRANCH:
            raise ConfigError(f"bisect: {self._branch} is a branch; open the run without it, as it was trained")
        with self._lock_run():
            first = bisection.best_version_before(self._path, at) if since is None else since
            plan = bisection.make_plan(self._path, first, at, metric)
            ranks = max(part.config.training.ranks for part in plan.parts)
            result: Bisection = run_training(bisection.bisect, plan, ranks, client, report or _ignore)
            return bisection_page.write(self._path, result)

    def _new_folder(self, suffix: str, out: str | Path | None) -> Path:
        """The folder for a result: `out`, or by default one beside the run's."""
        beside = self._path.name if is_url(self._source) else self._path.resolve()
        return Path(f"{beside}-{suffix}" if out is None else out)

    def _lock_run(self) -> contextlib.AbstractContextManager[None]:
        """The lock of the run's folder. Raises FolderInUse if a process works on the run."""
        return run_folder.lock_folder(self._path)

    def _require_newest(self, operation: str) -> None:
        if self._at_step is not None:
            raise ConfigError(f"{self._source}: cannot {operation} the run as of a step; open it without at_step")


def open_run(source: str | Path, *, branch: str = MAIN_BRANCH, at_step: int | None = None) -> Run:
    """Open a stored run, live or finished.

    Args:
        source: The run's folder, or the URL of its store in a bucket: "s3://BUCKET/PREFIX/NAME", with endpoint and
            credentials of the environment.
        branch: Branch of the store whose rewards and logprobs to show.
        at_step: Show the run as it was when this training step was committed; by default as it is at each call.

    Returns:
        The run. Nothing of it is read before it is asked for.

    Raises:
        ConfigError: There is no such run, branch or step, or the bucket cannot be read.

    Example:
        >>> run = staleflow.open_run("runs/demo")
        >>> len(run.steps()), run.finished
        (60, True)
    """
    if at_step is not None and branch != MAIN_BRANCH:
        raise ConfigError(f"at_step = {at_step}: shows only what the run itself stored; leave out branch")
    run = Run(run_data.find_run_folder(source), str(source), branch=branch, at_step=at_step)
    return run if at_step is None and branch == MAIN_BRANCH else _require_branch_and_step(run)


def list_runs(folder: str | Path = DEFAULT_RUNS_DIR) -> list[Run]:
    """The runs in a folder, by name. Raises ConfigError if there is no such folder; the default one may be missing."""
    path = Path(folder)
    if not path.is_dir() and (path.exists() or path != Path(DEFAULT_RUNS_DIR)):
        why = "a file, not a folder" if path.exists() else "no such folder"
        raise ConfigError(f"{folder}: {why}; name the folder that holds runs, by default {DEFAULT_RUNS_DIR}")
    return [Run(folder, str(folder)) for folder in run_folder.list_runs(path)]


def compare(runs: Sequence[Run | str | Path]) -> Comparison:
    """Compare stored runs: settings that differ, curves, differences on the same prompts, and where time went.

    Runs whose settings differ only in name, seed and place are one job: its curves are means over its runs, with the
    standard error.

    Args:
        runs: Runs, or their folders or URLs; `RUN@BRANCH` is a branch with other rewards. The first one's job is the
            one that others are compared with on the same prompts.

    Returns:
        The comparison. Its tables are tuples of dataclasses: `pandas.DataFrame(comparison.rewards)` is the curves.

    Raises:
        ConfigError: A run cannot be read, or there are fewer than two different ones.

    Example:
        >>> comparison = staleflow.compare(["runs/demo", "runs/other"])
        >>> [(d.key, d.values) for d in comparison.settings]
        [('staleness.eta', {'demo': '1', 'other': '4'})]
    """
    from staleflow.pipeline.stored_runs import comparison
    from staleflow.pipeline.stored_runs.run_facts import read_run_facts

    open_runs = [run if isinstance(run, Run) else _open_branch(str(run)) for run in runs]
    views = [_view_options(run) for run in open_runs]
    name_suffixes = ["".join(f"@{value}" for value in view.values()) for view in views]
    names = [run.name + suffix for run, suffix in zip(open_runs, name_suffixes, strict=True)]
    if len({*names}) < len(names):
        names = [run.source + suffix for run, suffix in zip(open_runs, name_suffixes, strict=True)]
    return comparison.compare(
        [
            read_run_facts(run.path, run._store() if run._has_store() else None, name, view)
            for run, name, view in zip(open_runs, names, views, strict=True)
        ]
    )


def _open_branch(source: str) -> Run:
    """Open `RUN` or `RUN@BRANCH`. Raises ConfigError."""
    folder, slash, folder_name = source.rpartition("/")
    name, _, branch = folder_name.partition("@")
    if not branch or (not is_url(source) and Path(source).exists()):
        return open_run(source)
    return open_run(f"{folder}{slash}{name}", branch=branch)


def _view_options(run: Run) -> dict[str, str]:
    """The branch or the step that a Run shows, by option of `open_run`; empty if it shows the run's present state."""
    view = {"branch": run._branch} if run._branch != MAIN_BRANCH else {}
    return view if run._at_step is None else {**view, "at_step": str(run._at_step)}


def _require_branch_and_step(run: Run) -> Run:
    """Return the run. Raises ConfigError if it does not have the branch and step that it is to show."""
    assert run.snapshot
    return run


def _ignore(*_: Any) -> None:
    pass
