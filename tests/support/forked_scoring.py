"""Forks the scoring processes of the importing process; otherwise each would import reasoning_gym, and a run has two.
Tests of scoring itself start new interpreters."""

from __future__ import annotations

from staleflow.tasks.sources import reward_process
from tests.support import forking

vars(reward_process)["subprocess"] = forking.SUBPROCESS
