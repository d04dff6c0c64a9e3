"""The recorded workload of a stored run is simulated again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.simulator.analysis import compute_stats
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from tests.support.simulated_store import JOB, stored_simulation


@pytest.mark.parametrize("extra", [pytest.param((), marks=pytest.mark.slow), ("batch.extra_members=1",)])
def test_groups_that_a_run_filtered_are_sampled_and_filtered_again(tmp_path: Path, extra: tuple[str, ...]) -> None:
    changes = ("steps=12", "batch.group_size=4", "batch.filtering=no_signal", "workload.signal_share=0.4", *extra)
    own = loading.load(JOB, (f"runs_dir={tmp_path}", *changes))
    run = stored_simulation(tmp_path, *changes)
    recorded = ("workload.kind=recorded", f"workload.run={json.dumps(str(run))}")
    again = loading.load(JOB, (f"runs_dir={tmp_path}", *changes, *recorded))
    first, second = (
        compute_stats(config, SimulatedRun(config, actor_settings.make_workload(config)).run())
        for config in (own, again)
    )
    filtered = [item.ending_counts["filtered:no_signal"] for item in (first, second)]
    assert filtered[1] == pytest.approx(filtered[0], rel=0.15)
    assert second.tokens_per_s == pytest.approx(first.tokens_per_s, rel=0.15)
    every = compute_stats(keep := loading.load(JOB, (*changes, *recorded, "batch.filtering=keep_all")),
                    SimulatedRun(keep, actor_settings.make_workload(keep)).run())  # fmt: skip
    assert every.tokens_per_s > 1.3 * second.tokens_per_s
