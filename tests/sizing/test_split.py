"""The proposed split of GPUs between sampling and training."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.config import size_plan
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.sizing.plan import propose_gpu_split


@given(
    sample_s=st.floats(0.1, 1000), train_s=st.floats(0.1, 1000), num_gpus=st.integers(1, 64),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]), min_ranks=st.integers(1, 8),
)  # fmt: skip
def test_no_other_split_is_faster(
    sample_s: float, train_s: float, num_gpus: int, tensor_parallel: int, min_ranks: int
) -> None:
    split = propose_gpu_split(sample_s, train_s, num_gpus, tensor_parallel, min_ranks)
    others = [
        (max(sample_s / instances, train_s / ranks), ranks)
        for ranks in range(min_ranks, num_gpus + 1)
        for instances in range(1, num_gpus + 1)
        if ranks + instances * tensor_parallel <= num_gpus
    ]
    assert (split is None) == (not others)
    if split is not None:
        instances, ranks, _ = split
        assert (max(sample_s / instances, train_s / ranks), ranks) == min(others)
        assert ranks + instances * tensor_parallel <= num_gpus


def test_slower_sampling_gets_more_gpus() -> None:
    split = propose_gpu_split(60.0, 20.0, 8)
    assert split is not None and split[:2] == (6, 2)
    assert "samples a step's batch in 60 s (rollout.cost), a rank trains it in 20 s" in split[2]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_jobs_split_counts_mean_responses_and_the_work_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """simulation.train_s is that of all ranks; responses are longer on average than in the median."""
    job = RunConfig()
    job = dataclasses.replace(
        job,
        training=dataclasses.replace(job.training, ranks=ranks),
        simulation=dataclasses.replace(job.simulation, train_s=3.0, train_s_per_token=1e-5),
        rollout=dataclasses.replace(job.rollout, max_new_tokens=100_000),
    )
    works: list[tuple[float, float]] = []

    def record_work(sample_s: float, train_s: float, *settings: int) -> None:
        works.append((sample_s, train_s))

    monkeypatch.setattr(size_plan, "propose_gpu_split", record_work)
    assert size_plan.gpu_split_line(job, 8, 0) == ""
    mean = size_plan.mean_response_tokens(job)
    assert mean == pytest.approx(1.65 * job.workload.median, rel=0.05)  # lognormal, sigma 1: exp(1 / 2)
    batch_tokens = job.trajectories_per_step * (job.workload.prompt_tokens + mean)
    assert works[0][1] == pytest.approx(ranks * (3.0 + 1e-5 * batch_tokens))
    with_double = dataclasses.replace(job, workload=dataclasses.replace(job.workload, median=2 * job.workload.median))
    size_plan.gpu_split_line(with_double, 8, 0)
    assert works[1][0] > 1.8 * works[0][0]


def test_a_row_longer_than_a_micro_batch_is_planned_as_a_pass_of_its_own() -> None:
    job = RunConfig()
    job = dataclasses.replace(job, rollout=dataclasses.replace(job.rollout, max_new_tokens=40_000))
    settings = size_plan.memory_settings(job, 1)
    assert settings.training.microbatch_tokens == settings.max_length > 40_000
