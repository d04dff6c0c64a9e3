"""Fits the cost model to measured decode steps: robust, non-negative, validated on held-out points. Pure.

step_seconds = k1 kv + max(A, B + k3 n), where A = k2 + k4 and B = b + k4. Measurements cannot separate k4 from the
common part of both branches, so k4 is by convention the smaller of A and B. For a given border between the branches the
model is linear in k1, k3, A and B; every border between measured n is tried. Residuals are relative, and Huber weights
limit the influence of steps that were disturbed by something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from staleflow.tasks.emulation.cost_model import CostModel

Array = npt.NDArray[np.float64]


HUBER_RESIDUAL = 0.05
"""Relative residual beyond which a point loses weight: decode steps repeat to within a few percent."""
MAX_REWEIGHTINGS = 8
"""Maximum number of reweightings; the weights converge earlier."""
HELD_OUT_PERIOD = 4
"""Every fourth point is held out of the fit to validate it."""
MIN_POINTS = 8
"""Minimum points of a fit: then about as many are held out as there are coefficients."""
SINGULAR_SHARE = 1e-12
"""Share of the largest singular value below which one counts as zero: the columns are then linearly dependent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """A measured decode step.

    Args:
        running: Number of running trajectories.
        kv_tokens: Their KV tokens.
        step_s: Seconds of the step, including prefills and the delay of messages.
        prefilled_tokens: Tokens prefilled per decode step.
        ended_responses: Responses that ended per decode step.
    """

    running: int
    kv_tokens: float
    step_s: float
    prefilled_tokens: float = 0.0
    ended_responses: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelFit:
    """A fitted cost model and its accuracy. error_*: |predicted - measured| / measured on held-out points."""

    model: CostModel
    num_points: int
    error_median: float
    error_p90: float
    running_range: tuple[int, int]
    """Smallest and largest measured number of running trajectories; beyond them the model extrapolates."""
    kv_tokens_range: tuple[float, float]
    delay_s: float = 0.0
    """Seconds that messages add to a response, on its way to the instance and back."""

    def ratio_to(self, model: CostModel) -> float:
        """Ratio of a decode step's time by this fit to that of `model`, in the middle of the measured range."""
        running, kv_tokens = sum(self.running_range) / 2, sum(self.kv_tokens_range) / 2
        return self.model.step_s(max(running, 1.0), kv_tokens) / model.step_s(max(running, 1.0), kv_tokens)


def fit_cost_model(points: Sequence[StepPoint]) -> CostModelFit:
    """Fit the cost model to measured decode steps.

    Args:
        points: Measured steps.

    Raises:
        ValueError: fewer than MIN_POINTS points.
    """
    if len(points) < MIN_POINTS:
        raise ValueError(f"{len(points)} measured steps; at least {MIN_POINTS} are needed")
    sorted_points = sorted(points, key=lambda p: (p.running, p.kv_tokens))
    held_out = sorted_points[HELD_OUT_PERIOD // 2 :: HELD_OUT_PERIOD]
    train_points = [p for i, p in enumerate(sorted_points) if i % HELD_OUT_PERIOD != HELD_OUT_PERIOD // 2]
    model, delay_s = _fit_best_border(train_points)
    errors = [abs(_predict_step_s(model, delay_s, p) - p.step_s) / p.step_s for p in held_out]
    return CostModelFit(
        model=model,
        num_points=len(points),
        error_median=float(np.median(errors)),
        error_p90=float(np.quantile(errors, 0.9)),
        running_range=(sorted_points[0].running, sorted_points[-1].running),
        kv_tokens_range=(min(p.kv_tokens for p in points), max(p.kv_tokens for p in points)),
        delay_s=delay_s,
    )


def _fit_best_border(points: Sequence[StepPoint]) -> tuple[CostModel, float]:
    """Fit the model for each border between the branches. Returns (model, delay_s) of the best fit."""
    running = np.array([p.running for p in points], float)
    kv = np.array([p.kv_tokens for p in points], float)
    seconds = np.array([p.step_s for p in points], float)
    # Only points from whole responses have prefilled tokens and ended responses.
    has_responses = any(p.prefilled_tokens for p in points)
    extra_columns = [[p.prefilled_tokens for p in points], [p.ended_responses for p in points]] if has_responses else []
    levels = np.unique(running)
    borders = [-np.inf, *((levels[1:] + levels[:-1]) / 2), np.inf]
    best: tuple[float, CostModel, float] | None = None
    for border in borders:
        is_flat = running <= border
        columns = [kv, np.where(is_flat, 0.0, running), is_flat.astype(float), (~is_flat).astype(float)]
        k1, k3, floor, offset, *extra_coefficients = _solve_robust(
            np.stack([*columns, *extra_columns], axis=1), seconds
        )
        if not is_flat.any():
            floor = 0.0
        if is_flat.all():
            offset = 0.0
        prefill_s, delay_s = extra_coefficients or (0.0, 0.0)
        k4 = min(floor, offset) if is_flat.any() and not is_flat.all() else 0.0
        model = CostModel(k1=k1, k2=floor - k4, k3=k3, k4=k4, b=offset - k4, prefill=prefill_s)
        predicted_s = np.array([_predict_step_s(model, delay_s, p) for p in points])
        loss = float(_huber_loss((predicted_s - seconds) / seconds).sum())
        if best is None or loss < best[0] * (1 - 1e-9):
            best = loss, model, delay_s
    assert best is not None
    return best[1:]


def _predict_step_s(model: CostModel, delay_s: float, point: StepPoint) -> float:
    other_s = model.prefill * point.prefilled_tokens + delay_s * point.ended_responses
    return model.step_s(point.running, point.kv_tokens) + other_s


def _solve_robust(design: Array, seconds: Array) -> list[float]:
    """Iteratively reweighted non-negative least squares on relative residuals."""
    weights = np.ones(len(seconds))
    solution = np.zeros(design.shape[1])
    for _ in range(MAX_REWEIGHTINGS):
        scale = np.sqrt(weights) / seconds
        solution = _solve_non_negative(design * scale[:, None], seconds * scale)
        residual = np.abs(design @ solution - seconds) / seconds
        previous_weights = weights
        weights = np.where(residual <= HUBER_RESIDUAL, 1.0, HUBER_RESIDUAL / np.maximum(residual, HUBER_RESIDUAL))
        if np.array_equal(weights, previous_weights):
            break
    return [float(x) for x in solution]


def _solve_non_negative(design: Array, target: Array) -> Array:
    """Least squares with coefficients >= 0: of all subsets of the columns, which are six at most, the best that has
    none below 0."""
    # Columns differ by orders of magnitude: KV tokens next to ones.
    norms = np.linalg.norm(design, axis=0)
    nonzero = np.flatnonzero(norms)
    q, r = np.linalg.qr(design[:, nonzero] / norms[nonzero])  # the same problem in as many rows as columns
    projection = q.T @ target
    best, best_loss = np.zeros(len(norms)), float(projection @ projection)
    for size in range(1, len(nonzero) + 1):
        subsets = np.array(list(itertools.combinations(range(len(nonzero)), size)))
        columns = np.moveaxis(r[:, subsets], 1, 0)  # [subsets, rows, size]
        solutions = np.linalg.pinv(columns, rcond=SINGULAR_SHARE) @ projection
        losses = np.square((columns @ solutions[..., None])[..., 0] - projection).sum(axis=-1)
        losses[(solutions < 0).any(axis=-1)] = np.inf
        if losses.min() < best_loss:
            lowest = int(losses.argmin())
            best, best_loss = np.zeros(len(norms)), float(losses[lowest])
            indices = nonzero[subsets[lowest]]
            best[indices] = solutions[lowest] / norms[indices]
    return best


def _huber_loss(residual: Array) -> Array:
    size = np.abs(residual)
    loss: Array = np.where(size <= HUBER_RESIDUAL, size * size / 2, HUBER_RESIDUAL * (size - HUBER_RESIDUAL / 2))
    return loss
