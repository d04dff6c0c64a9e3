"""The status and the result of a run, with their display in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from staleflow.pipeline.api.stored_run import Run, open_run
from staleflow.pipeline.cluster.submitted_job import ENDED

RunState = Literal["starting", "waiting", "running", "stopping", "done", "stopped", "failed"]
"""waiting: for workers of a cluster. done: all steps are finished. stopped: ended earlier by request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run at one moment."""

    state: RunState
    step: int
    """Training steps that are finished."""
    steps: int
    """Training steps of the job."""
    reward: float | None = None
    """Mean reward of the newest step; None before the first one."""
    staleness: float | None = None
    """Mean staleness of the newest step, versions; None before the first one."""
    tokens_per_s: float = 0.0
    """Trained response tokens per second since the run began."""
    elapsed_s: float = 0.0
    """Seconds since the run began, as of the newest step."""
    remaining_s: float | None = None
    """Estimated seconds until the last step; None before the first step and after the last."""
    message: str = ""
    """What the run is doing, what it waits for, or why it ended."""

    @classmethod
    def of(
        cls, state: RunState, step: int, steps: int, last_step: Mapping[str, float], tokens_per_s: float, message: str
    ) -> RunStatus:
        """Build a status from the metrics of the newest step, which are empty before the first one."""
        elapsed_s, num_left = last_step.get("elapsed_s", 0.0), steps - step
        has_remaining_steps = last_step and num_left > 0 and state not in ENDED
        return cls(
            state=state,
            step=step,
            steps=steps,
            reward=last_step.get("reward"),
            staleness=last_step.get("staleness_mean"),
            tokens_per_s=tokens_per_s,
            elapsed_s=elapsed_s,
            remaining_s=num_left * elapsed_s / (last_step["step"] + 1) if has_remaining_steps else None,
            message=message,
        )

    def __str__(self) -> str:
        parts = [f"step {self.step}/{self.steps}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.staleness is not None:
            parts.append(f"staleness {self.staleness:.2f}")
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.remaining_s is not None:
            parts.append(f"{self.remaining_s:,.0f} s left")
        why = f": {self.message}" if self.message and self.message != self.state else ""
        return f"{self.state}: {', '.join(parts)}{why}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult:
    """A finished or stopped run."""

    run_dir: Path
    """Folder of the run."""
    stop_reason: str
    """Why the run ended before its last step; empty if it did all of them."""
    summary: Mapping[str, Any]
    """What summary.json in the run's folder holds: steps, evaluations, rewards, seconds, staleness."""

    @property
    def run(self) -> Run:
        """The stored run."""
        return open_run(self.run_dir)

    def __repr__(self) -> str:
        return f"<RunResult {self}>"

    def __str__(self) -> str:
        return f"{self.run_dir}: {', '.join(f'{name} {value}' for name, value in self._summary_rows())}"

    def _summary_rows(self) -> list[tuple[str, str]]:
        """The most important numbers, by name."""
        summary = self.summary
        rows = [("steps", str(summary["steps"]))]
        if summary["reward_first"] is not None:
            rows.append(("reward", f"{summary['reward_first']:.3f} at first, {summary['reward_last']:.3f} at last"))
        for evaluation in summary["evaluations"]:
            mean = evaluation["greedy"] if evaluation["sampled"] is None else evaluation["sampled"]
            if mean is not None:
                rows.append((f"{evaluation['name']}, version {evaluation['version']}", f"{mean:.3f}"))
        if summary["staleness_histogram"]:
            counts = ", ".join(f"{lag}: {count}" for lag, count in summary["staleness_histogram"].items())
            bound = f"eta {summary['eta']}"
            rows.append(("staleness", f"{counts} ({bound})"))
        rows.append(("tokens/s", f"{summary['tokens_per_s']:,.0f}"))
        if self.stop_reason:
            rows.append(("stopped", self.stop_reason))
        return rows
