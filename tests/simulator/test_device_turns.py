"""Trainer and instances in turns on the same GPUs, in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulator.test_simulator import job, run


@pytest.mark.parametrize("eta", [0, 1])
def test_all_instances_sleep_at_each_step(eta: int) -> None:
    changes: dict[str, Any] = {"staleness__eta": eta, "simulation__switch_s": 0.2}
    separate, turns = (run(job(cluster__layout=layout, **changes)) for layout in ("separate", "turns"))
    assert "Sleep" not in separate.command_counts
    assert turns.command_counts["Sleep"] == 8 * 3
    assert turns.finished_s > separate.finished_s
