"""Samples of decode steps and of drafts, and the fit of a cost model to them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.profiling.fit import MIN_POINTS, CostModelFit, StepPoint, fit_cost_model
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.emulation.cost_model import CostModel, probability_at, tokens_per_step

MAX_SAMPLES = 4096
"""Maximum sampled responses kept for the fit. Beyond it, only every second, fourth, ... response is kept."""
RUNNING_BINS, KV_BINS, LENGTH_BINS = 32, 2, 4
"""Bins in which samples are averaged: by running requests, each of these by KV tokens, each of these by response
length. Different lengths separate the time of decoding from a fixed delay per response."""
MAX_DELAY_SHARE = 0.3
"""Maximum share of message delays in a response's time; a fit with more is rejected."""
MIN_FIXED_SHARE = 0.01
"""Minimum share of a decode step that does not depend on the KV cache."""
MIN_WARM_SAMPLES = 64
"""Number of samples after the first training step at which earlier ones, from the warm-up, are left out."""


class StepSample(NamedTuple):
    """Mean decode step of an instance during one response, or between two of its reports.

    computed_tokens: tokens per step, including draft tokens. seconds: duration of all steps. num_steps: decode steps;
    each samples one token and the accepted draft tokens. prefilled_tokens: tokens that the instance prefilled in the
    same time, including those of this response.
    """

    computed_tokens: float
    kv_tokens: float
    seconds: float
    num_steps: float
    prefilled_tokens: float
    instance: InstanceId


class StepSamples:
    """Samples of one run: one per response, and one per report of an instance."""

    def __init__(self) -> None:
        self._responses: list[StepSample] = []
        self._reports: deque[StepSample] = deque(maxlen=MAX_SAMPLES)
        self._warmup_responses: list[StepSample] = []
        self._until_next = self._period = 1

    def add_response(self, sample: StepSample) -> None:
        """Add the sample of a response. Beyond MAX_SAMPLES, only every second, fourth, ... one is kept."""
        self._until_next -= 1
        if not self._until_next:
            self._until_next = self._period
            self._responses.append(sample)
            if len(self._responses) > MAX_SAMPLES:
                self._responses = self._responses[::2]
                self._period *= 2

    def add_report(self, sample: StepSample) -> None:
        """Add the sample of the steps between two reports of an instance."""
        self._reports.append(sample)

    def end_warmup(self) -> None:
        """Mark all responses until now as part of the warm-up."""
        self._warmup_responses, self._responses = self._responses, []
        self._until_next = self._period = 1

    def fit(self, verify_share: float, slow_instances: Collection[InstanceId]) -> CostModelFit | None:
        """Fit the cost model and the delay of messages; None if there are too few samples.

        The result is scaled so that it predicts the total time of all samples.

        Args:
            verify_share: CostModel.verify_share, which the samples do not determine.
            slow_instances: Instances whose samples are left out.
        """
        samples = self._responses
        if len(samples) < MIN_WARM_SAMPLES:
            samples = [*self._warmup_responses, *samples]
        rows = np.asarray([sample[:-1] for sample in samples if sample.instance not in slow_instances], np.float64)
        if len(rows) < MIN_POINTS:
            return None
        report_rows = np.asarray(
            [sample[:-1] for sample in self._reports if sample.instance not in slow_instances], np.float64
        )
        if len(report_rows) >= MIN_WARM_SAMPLES:
            return _fit_reports(report_rows, rows, verify_share)
        fit = _fit_responses(rows)
        if fit.model.compute_s(1) <= 0:  # all samples had one load, which KV tokens alone explain
            fit = replace(
                fit, model=replace(fit.model, k4=MIN_FIXED_SHARE * float(rows[:, 2].sum() / rows[:, 3].sum()))
            )
        computed_tokens, kv_tokens, seconds, steps, prefilled_tokens = rows.T
        predicted_s = (
            fit.model.step_s_by_instance(computed_tokens, kv_tokens) * steps
            + fit.model.prefill * prefilled_tokens
            + fit.delay_s
        )
        factor = float(seconds.sum() / predicted_s.sum())
        model = replace(fit.model.scaled(factor), verify_share=verify_share)
        return replace(fit, model=model, delay_s=fit.delay_s * factor)


def _fit_reports(
    report_rows: npt.NDArray[np.float64], response_rows: npt.NDArray[np.float64], verify_share: float
) -> CostModelFit:
    """Fit to the steps that instances reported, as they do in a job with speculative decoding.

    There, requests draft while few run and not while many run, so the steps of all responses compute similar numbers of
    tokens and do not determine the model. The time by which responses take longer is counted as
    delay.
    """
    fit = fit_cost_model([replace(point, ended_responses=0.0) for point in _average(report_rows)])
    computed_tokens, kv_tokens, seconds, steps, prefilled_tokens = response_rows.T
    predicted_s = (
        fit.model.step_s_by_instance(computed_tokens, kv_tokens) * steps + fit.model.prefill * prefilled_tokens
    )
    delay_s = max(0.0, float((seconds - predicted_s).mean()))
    model = replace(fit.model, verify_share=verify_share)
    return replace(fit, model=model, delay_s=delay_s if delay_s <= MAX_DELAY_SHARE * seconds.mean() else 0.0)


def _fit_responses(rows: npt.NDArray[np.float64]) -> CostModelFit:
    points = _average(rows)
    delay_share = fit_cost_model(points).delay_s * len(rows) / float(rows[:, 2].sum())
    if delay_share > MAX_DELAY_SHARE:  # with responses of one length, delays cannot be separated from decoding
        points = [replace(point, ended_responses=0.0) for point in points]
    else:  # during message delays an instance runs fewer trajectories than the coordinator counts
        rows[:, :2] *= 1 - delay_share
        points = _average(rows)
    return fit_cost_model(points)


def _average(rows: npt.NDArray[np.float64]) -> list[StepPoint]:
    """Average samples in bins (see RUNNING_BINS); too few bins: one point per sample. rows: [N, 5] samples."""
    running = np.maximum(1, np.rint(rows[:, 0])).astype(int)
    masks = [running == n for n in np.unique(running)]
    if len(masks) > RUNNING_BINS:
        masks = [np.isin(np.arange(len(rows)), part) for part in np.array_split(np.argsort(running), RUNNING_BINS)]
    points = []
    for mask in masks:
        load_rows = rows[mask]
        for part in np.array_split(load_rows[np.argsort(load_rows[:, 1], kind="stable")], KV_BINS):
            by_length = part[np.argsort(part[:, 3], kind="stable")]
            points += [_mean_point(bin_rows) for bin_rows in np.array_split(by_length, LENGTH_BINS) if len(bin_rows)]
    return points if len(points) >= MIN_POINTS else [_mean_point(row[None]) for row in rows]


def _mean_point(rows: npt.NDArray[np.float64]) -> StepPoint:
    computed_tokens, kv_tokens, seconds, steps, prefilled_tokens = rows.T
    return StepPoint(
        running=max(1, round(float(np.average(computed_tokens, weights=seconds)))),
        kv_tokens=float(np.average(kv_tokens, weights=seconds)),
        step_s=float(seconds.sum() / steps.sum()),
        prefilled_tokens=float(prefilled_tokens.sum() / steps.sum()),
        ended_responses=len(rows) / float(steps.sum()),
    )


@dataclass(slots=True)
class DraftStats:
    """Draft statistics of steps that may have drafts. max_length: maximum draft length of the job. num_steps: number of
    steps, summed over requests. drafted_tokens, accepted_tokens: numbers of tokens."""

    max_length: int = 0
    num_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add_steps(self, num_steps: int, drafted_tokens: int, accepted_tokens: int) -> None:
        """Add `num_steps` steps with `drafted_tokens` draft tokens in total."""
        if self.max_length and num_steps > 0:
            self.num_steps += num_steps
            self.drafted_tokens += drafted_tokens
            self.accepted_tokens += accepted_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Acceptance rate that explains the tokens per step if every request drafted its maximum; None without drafts.

        Lower than accepted_tokens / drafted_tokens if requests often had no draft.
        """
        if not self.num_steps:
            return None
        return probability_at(lambda a: tokens_per_step(self.max_length, a), 1 + self.accepted_tokens / self.num_steps)

    def scale_cost_model(self, model: CostModel) -> CostModel:
        """Cost model for use with `acceptance_rate`: verify_share is scaled by the ratio of draft tokens to their
        maximum."""
        if not self.num_steps:
            return model
        share = self.drafted_tokens / (self.max_length * self.num_steps)
        return replace(model, verify_share=model.verify_share * share)
