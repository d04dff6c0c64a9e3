"""Stored trajectories for display: text, and for each token the version that sampled it and its probability.

Values only; the terminal and the run page render them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.recovery.run_folder import load_job
from staleflow.pipeline.stored_runs.response_texts import MessageSpan, make_display_detokenizer, message_spans
from staleflow.pipeline.stored_runs.stored_trajectories import plain_cells
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.columns import has_reward
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EndedTrajectory, EnvSpan, TrajectoryId
from staleflow.tasks.rendering.chat_tokenizer import Detokenizer, split_by_token

Order = Literal["worst", "best", "longest"]
ORDERS: dict[Order, tuple[str, int]] = {
    "worst": ("reward", 1),
    "best": ("reward", -1),
    "longest": ("response_tokens", -1),
}
"""The column and sort direction of each order."""
FACTS = (
    "trajectory", "group", "fate", "reason", "step", "v_traj", "staleness", "finish", "reward", "advantage",
)  # fmt: skip
TURN_FACTS = ("turns", "given_tokens", "tool_s")
"""Columns that are displayed as facts of a trajectory, and those of one with steps of an environment besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """A token after the prompt, for display."""

    id: int
    text: str
    version: int
    """Policy version that sampled it; NO_VERSION for env tokens."""
    instance: str
    """Rollout instance that sampled it; the role for env tokens."""
    logprob: float
    ratio: float | None
    """pi_model / pi_rollout; None without a model's logprobs, and for env tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    """A trajectory for display. facts: by name, in display order. message_spans: the conversation, by speaker."""

    id: int
    facts: dict[str, object]
    prompt: str
    response: str
    tokens: tuple[TokenView, ...]
    message_spans: tuple[MessageSpan, ...] = ()
    error: str = ""
    reward_parts: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


def sorted_ids(store: VersionedStore, order: Order, count: int, where: str) -> list[TrajectoryId]:
    """The first `count` trajectories that `where` selects, in an order of ORDERS. Among equal ones, one of each
    group comes first. Orders by reward leave out trajectories without one. Raises ConfigError."""
    if order not in ORDERS:
        raise ConfigError(f"order = {order!r}: choose one of {', '.join(ORDERS)}")
    columns = store.displayed_columns()
    mask = Selection(where).mask(columns)
    name, sign = ORDERS[order]
    if name == "reward":
        mask &= has_reward(columns)
    (positions,) = np.nonzero(mask)
    positions = positions[np.argsort(columns["trajectory"][positions])]
    # Ties list one of each group first: siblings are too similar to read in a row.
    num_in_group: Counter[int] = Counter()
    ranks_in_group = np.zeros(len(positions), np.int64)
    for i, group in enumerate(columns["group"][positions].tolist()):
        ranks_in_group[i] = num_in_group[group]
        num_in_group[group] += 1
    positions = positions[
        np.lexsort((columns["trajectory"][positions], ranks_in_group, sign * columns[name][positions]))
    ]
    return [TrajectoryId(int(i)) for i in columns["trajectory"][positions[:count]]]


def make_views(
    run_dir: Path, store: VersionedStore, trajectories: Sequence[TrajectoryId], model: str = ""
) -> list[TrajectoryView]:
    """Build the views of the trajectories with these ids.

    Args:
        run_dir: The run's folder.
        store: Its store.
        trajectories: Ids.
        model: A folder or hub name to compute importance ratios under; without one, the logprobs stored on the branch
            are used, if any.

    Raises:
        ConfigError: An id is unknown.
        StoreError: A row is damaged.
    """
    config = load_job(run_dir)
    rows = []
    for id in trajectories:
        row = store.get(id)
        if row is None:
            raise ConfigError(f"{run_dir}: no stored trajectory {id}; it was never started or is still in flight")
        rows.append(row)
    model_logprobs: list[npt.NDArray[np.float32] | None]
    if model:
        from staleflow.pipeline.stored_runs.logprob_recompute import logprob_settings, response_logprobs

        model_logprobs = [*response_logprobs(logprob_settings(config, model), rows)]
    else:
        model_logprobs = [store.recomputed_logprobs(row.trajectory.id) for row in rows]
    detokenizer = make_display_detokenizer(config)
    return [
        make_trajectory_view(row, detokenizer, logprobs) for row, logprobs in zip(rows, model_logprobs, strict=True)
    ]


def make_trajectory_view(
    row: EndedTrajectory, detokenizer: Detokenizer, model_logprobs: npt.NDArray[np.float32] | None = None
) -> TrajectoryView:
    """Build the view of a stored row. model_logprobs: [T] logprobs of its response under another model, nats, for the
    ratios."""
    t = row.trajectory
    ids, logprobs = t.response_tokens.tolist(), t.logprobs
    ratios: list[float | None] = [None] * len(ids)
    if model_logprobs is not None:
        ratio_values = np.exp(np.asarray(model_logprobs, np.float64) - logprobs).tolist()
        ratios = [ratio if sampled else None for ratio, sampled in zip(ratio_values, t.sampled, strict=True)]
    origins = [s.role if isinstance(s, EnvSpan) else str(s.instance) for s in t.spans for _ in s.tokens]
    tokens = tuple(
        TokenView(id=i, text=text, version=int(v), instance=origin, logprob=float(p), ratio=r)
        for i, text, v, origin, p, r in zip(
            ids, split_by_token(detokenizer, ids), t.versions, origins, logprobs, ratios, strict=True
        )
    )
    return TrajectoryView(
        id=int(t.id),
        facts=make_facts(row),
        prompt=detokenizer.text(t.prompt_tokens.tolist(), keep_special=True),
        response=detokenizer.text(ids, keep_special=True),
        tokens=tokens,
        message_spans=message_spans(t),
        error=t.error,
        reward_parts=t.reward_parts,
        timings={name: getattr(t.timings, name) for name in ("arrived_s", "routed_s", "sampled_s", "rewarded_s")},
    )


def make_facts(row: EndedTrajectory) -> dict[str, object]:
    """The displayed facts of a stored row besides its tokens, by name, in display order."""
    cells = plain_cells(row)
    return {name: cells[name] for name in (*FACTS, *(TURN_FACTS if row.trajectory.has_env_steps else ()))}
