"""Comparison of an engine's weights with the published ones: verified, contradicted or not verified."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from staleflow.stores.weights.weight_comparison import WeightPart, compare_by_name, compare_parts
from staleflow.stores.weights.weight_report import NO_PARTS, WeightReport, sum_reports


def test_one_flipped_bit_of_one_tensor_contradicts() -> None:
    published = {"a": torch.randn(3, 4), "b": torch.randn(2, dtype=torch.bfloat16)}
    values = {name: tensor.clone() for name, tensor in published.items()}
    assert compare_by_name(values, published) == WeightReport(verified=2)
    values["b"].view(torch.int16)[1] ^= 1
    report = compare_by_name(values, published)
    assert (report.verified, report.contradicted, report.names) == (1, 1, ("b",))
    assert report.outcome == "contradicted"


def test_bits_are_compared_and_not_values() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert compare_parts([WeightPart(name="nan", loaded=nan, published=nan.clone())]).outcome == "verified"
    assert compare_parts([WeightPart(name="zero", loaded=zero, published=-zero)]).outcome == "contradicted"
    assert compare_parts([WeightPart(name="type", loaded=zero, published=zero.double())]).outcome == "contradicted"
    assert compare_parts([WeightPart(name="array", loaded=np.zeros(2), published=np.zeros(2))]).outcome == "verified"


@pytest.mark.parametrize("report", [WeightReport(), WeightReport(verified=9, not_verified={"packed": 1})])
def test_no_parts_or_a_part_not_compared_is_not_verified(report: WeightReport) -> None:
    assert report.outcome == "not verified"
    assert (NO_PARTS in report.line) == (not report.verified)


def test_a_tensor_missing_on_either_side_is_not_verified() -> None:
    report = compare_by_name({"a": np.zeros(1), "b": np.zeros(1)}, {"a": np.zeros(1), "c": np.zeros(1)})
    assert (report.verified, sum(report.not_verified.values())) == (1, 2)


def test_a_contradiction_of_one_worker_contradicts_the_engine() -> None:
    first, second = (
        WeightReport(verified=3),
        WeightReport(verified=2, not_verified={"packed": 2}, contradicted=1, names=("q",)),
    )
    assert sum_reports([first, second]) == WeightReport(
        verified=5, not_verified={"packed": 2}, contradicted=1, names=("q",)
    )
    assert sum_reports([first, second]).outcome == "contradicted"
    assert sum_reports([]).outcome == "not verified"
