"""Has the scoring processes of the process that imports this be forked: each would import reasoning_gym otherwise, and
a run has two. The tests of scoring itself start new interpreters."""

from __future__ import annotations

from staleflow.tasks.sources import reward_process
from tests.support import forking

vars(reward_process)["subprocess"] = forking.SUBPROCESS
