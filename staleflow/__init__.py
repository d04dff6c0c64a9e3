"""Asynchronous RL post-training of language models on Dask, with a hard bound on policy staleness.

    import staleflow

    handle = staleflow.start("job.toml", reward=lambda response, row: float(response == row["answer"]))
    handle.status(), handle.stop(), handle.result()
    run = staleflow.open_run("runs/demo")
    print(run.metrics().reward.tail(), run.audit().is_clean)

What this package lists in `__all__` is its public API; modules below it are private and may move. Names are imported
when they are first used, so that `import staleflow` loads neither torch nor zarr nor dask.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staleflow.pipeline.api.dry_running import DryRunResult as DryRunResult
    from staleflow.pipeline.api.dry_running import dry_run as dry_run
    from staleflow.pipeline.api.initialization import init as init
    from staleflow.pipeline.api.job_loading import Job as Job
    from staleflow.pipeline.api.job_loading import load_job as load_job
    from staleflow.pipeline.api.planning import plan as plan
    from staleflow.pipeline.api.run_handle import RunHandle as RunHandle
    from staleflow.pipeline.api.run_status import RunResult as RunResult
    from staleflow.pipeline.api.run_status import RunStatus as RunStatus
    from staleflow.pipeline.api.running import resume as resume
    from staleflow.pipeline.api.running import run as run
    from staleflow.pipeline.api.running import run_async as run_async
    from staleflow.pipeline.api.running import start as start
    from staleflow.pipeline.api.running import start_resumed as start_resumed
    from staleflow.pipeline.api.simulating import SimulationResult as SimulationResult
    from staleflow.pipeline.api.simulating import simulate as simulate
    from staleflow.pipeline.api.stored_run import Run as Run
    from staleflow.pipeline.api.stored_run import compare as compare
    from staleflow.pipeline.api.stored_run import list_runs as list_runs
    from staleflow.pipeline.api.stored_run import open_run as open_run
    from staleflow.pipeline.api.submitting import SubmittedJob as SubmittedJob
    from staleflow.pipeline.api.submitting import submit as submit
    from staleflow.pipeline.api.submitting import submit_resumed as submit_resumed
    from staleflow.pipeline.api.submitting import submitted_jobs as submitted_jobs
    from staleflow.pipeline.config.first_job import FirstJob as FirstJob
    from staleflow.pipeline.jobs.replaying import ReplayResult as ReplayResult
    from staleflow.pipeline.jobs.tracking import Tracker as Tracker
    from staleflow.pipeline.runtime.evaluation_results import Evaluation as Evaluation
    from staleflow.pipeline.simulator.run_forecast import Forecast as Forecast
    from staleflow.pipeline.simulator.run_forecast import ForecastComparison as ForecastComparison
    from staleflow.pipeline.simulator.run_forecast import PredictedRange as PredictedRange
    from staleflow.pipeline.stored_runs.bisection import Bisection as Bisection
    from staleflow.pipeline.stored_runs.branch_diff import BranchDifference as BranchDifference
    from staleflow.pipeline.stored_runs.comparison import Comparison as Comparison
    from staleflow.pipeline.stored_runs.exporting import ExportResult as ExportResult
    from staleflow.pipeline.stored_runs.logprob_recompute import LogprobComparison as LogprobComparison
    from staleflow.pipeline.stored_runs.logprob_recompute import RecomputeResult as RecomputeResult
    from staleflow.pipeline.stored_runs.response_texts import MessageSpan as MessageSpan
    from staleflow.pipeline.stored_runs.reward_rescoring import RescoreResult as RescoreResult
    from staleflow.pipeline.stored_runs.stored_trajectories import ConsumedBatch as ConsumedBatch
    from staleflow.pipeline.stored_runs.stored_trajectories import StoredTrajectory as StoredTrajectory
    from staleflow.pipeline.stored_runs.training import OfflineTrainingResult as OfflineTrainingResult
    from staleflow.pipeline.stored_runs.unlearning import UnlearningResult as UnlearningResult
    from staleflow.pipeline.stored_runs.verification import Verification as Verification
    from staleflow.pipeline.stored_runs.views import TokenView as TokenView
    from staleflow.pipeline.stored_runs.views import TrajectoryView as TrajectoryView
    from staleflow.pipeline.strategies.routing import Candidate as Candidate
    from staleflow.pipeline.strategies.routing import Loads as Loads
    from staleflow.pipeline.strategies.routing import Routing as Routing
    from staleflow.stores.auditing.audit import AuditReport as AuditReport
    from staleflow.stores.auditing.drop_bias import DropBias as DropBias
    from staleflow.stores.auditing.findings import Finding as Finding
    from staleflow.stores.errors import ActorLost as ActorLost
    from staleflow.stores.errors import ConfigError as ConfigError
    from staleflow.stores.errors import JobFailed as JobFailed
    from staleflow.stores.errors import ProtocolViolation as ProtocolViolation
    from staleflow.stores.errors import StaleflowError as StaleflowError
    from staleflow.stores.errors import StoreError as StoreError
    from staleflow.stores.trajectories.reader import StoreSummary as StoreSummary
    from staleflow.stores.trajectories.records import CommitRecord as CommitRecord
    from staleflow.stores.trajectories.records import LedgerState as LedgerState
    from staleflow.tasks.engines.base import Engine as Engine
    from staleflow.tasks.engines.engine_settings import EngineSettings as EngineSettings
    from staleflow.tasks.environments.coroutine_environments import AgentTask as AgentTask
    from staleflow.tasks.environments.coroutine_environments import EpisodeTruncated as EpisodeTruncated
    from staleflow.tasks.environments.coroutine_environments import Session as Session
    from staleflow.tasks.settings.knobs import knob as knob
    from staleflow.tasks.settings.source_kinds import SourceKind as SourceKind
    from staleflow.tasks.settings.source_kinds import SourceType as SourceType
    from staleflow.tasks.sources.model_judge import Judge as Judge
    from staleflow.tasks.training import tiny_model as tiny_model
    from staleflow.tasks.training.advantage import Advantage as Advantage
    from staleflow.tasks.training.loss import Loss as Loss
    from staleflow.tasks.training.loss import TokenLoss as TokenLoss
    from staleflow.tasks.training.loss import Tokens as Tokens

    __version__: str

_NAMES_BY_MODULE = {
    "pipeline.api.dry_running": "DryRunResult dry_run",
    "pipeline.api.initialization": "init",
    "pipeline.api.job_loading": "Job load_job",
    "pipeline.api.planning": "plan",
    "pipeline.api.run_handle": "RunHandle",
    "pipeline.api.run_status": "RunResult RunStatus",
    "pipeline.api.running": "resume run run_async start start_resumed",
    "pipeline.api.simulating": "SimulationResult simulate",
    "pipeline.api.stored_run": "Run compare list_runs open_run",
    "pipeline.api.submitting": "SubmittedJob submit submit_resumed submitted_jobs",
    "pipeline.config.first_job": "FirstJob",
    "pipeline.jobs.replaying": "ReplayResult",
    "pipeline.jobs.tracking": "Tracker",
    "pipeline.runtime.evaluation_results": "Evaluation",
    "pipeline.simulator.run_forecast": "Forecast ForecastComparison PredictedRange",
    "pipeline.stored_runs.branch_diff": "BranchDifference",
    "pipeline.stored_runs.comparison": "Comparison",
    "pipeline.stored_runs.response_texts": "MessageSpan",
    "pipeline.stored_runs.exporting": "ExportResult",
    "pipeline.stored_runs.logprob_recompute": "LogprobComparison RecomputeResult",
    "pipeline.stored_runs.reward_rescoring": "RescoreResult",
    "pipeline.stored_runs.stored_trajectories": "ConsumedBatch StoredTrajectory",
    "pipeline.stored_runs.training": "OfflineTrainingResult",
    "pipeline.stored_runs.bisection": "Bisection",
    "pipeline.stored_runs.unlearning": "UnlearningResult",
    "pipeline.stored_runs.verification": "Verification",
    "pipeline.stored_runs.views": "TokenView TrajectoryView",
    "pipeline.strategies.routing": "Candidate Loads Routing",
    "stores.auditing.audit": "AuditReport",
    "stores.auditing.drop_bias": "DropBias",
    "stores.auditing.findings": "Finding",
    "stores.errors": "ActorLost ConfigError JobFailed ProtocolViolation StaleflowError StoreError",
    "stores.trajectories.reader": "StoreSummary",
    "stores.trajectories.records": "LedgerState CommitRecord",
    "tasks.engines.base": "Engine",
    "tasks.engines.engine_settings": "EngineSettings",
    "tasks.environments.coroutine_environments": "AgentTask EpisodeTruncated Session",
    "tasks.settings.knobs": "knob",
    "tasks.settings.source_kinds": "SourceKind SourceType",
    "tasks.sources.model_judge": "Judge",
    "tasks.training": "tiny_model",
    "tasks.training.advantage": "Advantage",
    "tasks.training.loss": "Loss TokenLoss Tokens",
}
"""Public names by module, below `staleflow`."""
_MODULE_BY_NAME = {name: f"staleflow.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
"""The module of each public name; a test compares it with the imports above, which type checkers read."""

__all__ = [*_MODULE_BY_NAME, "__version__"]  # noqa: PLE0604  names are strings

if not TYPE_CHECKING:  # type checkers would take every unknown name for one

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used. Raises AttributeError, with the nearest name, for others."""
        if name == "__version__":
            value: Any = importlib.import_module("importlib.metadata").version("staleflow")
        elif name in _MODULE_BY_NAME:
            module = importlib.import_module(_MODULE_BY_NAME[name])
            value = (
                getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{module.__name__}.{name}")
            )
        else:
            near = difflib.get_close_matches(name, _MODULE_BY_NAME, n=1)
            raise AttributeError(
                f"module 'staleflow' has no attribute {name!r}{f'; did you mean {near[0]}?' if near else ''}"
            )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
