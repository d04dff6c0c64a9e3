"""The proposed split of GPUs between sampling and training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.sizing.plan import StepWork, propose_split


@given(
    sample_s=st.floats(0.1, 1000), train_s=st.floats(0.1, 1000), num_gpus=st.integers(1, 64),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]), min_ranks=st.integers(1, 8),
)  # fmt: skip
def test_no_other_split_is_faster(
    sample_s: float, train_s: float, num_gpus: int, tensor_parallel: int, min_ranks: int
) -> None:
    split = propose_split(StepWork(sample_s=sample_s, train_s=train_s), num_gpus, tensor_parallel, min_ranks)
    others = [
        (max(sample_s / instances, train_s / ranks), ranks)
        for ranks in range(min_ranks, num_gpus + 1)
        for instances in range(1, num_gpus + 1)
        if ranks + instances * tensor_parallel <= num_gpus
    ]
    assert (split is None) == (not others)
    if split is not None:
        step_s = max(sample_s / split.instances, train_s / split.ranks)
        assert (step_s, split.ranks) == min(others)
        assert split.ranks + split.instances * tensor_parallel <= num_gpus


def test_slower_sampling_gets_more_gpus() -> None:
    split = propose_split(StepWork(sample_s=60.0, train_s=20.0), 8)
    assert split is not None and (split.instances, split.ranks) == (6, 2)
    assert "samples a step's batch in 60 s (rollout.cost), a rank trains it in 20 s" in split.reason
