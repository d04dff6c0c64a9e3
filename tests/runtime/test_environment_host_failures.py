"""Real environment hosts that are killed or stopped during steps."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.events import EnvironmentFailed
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import EnvSpan, Fate, FinishReason
from tests.runtime.test_run import run_and_strike

GAME = """
import random, time

class Echo:
    '''Three digits to repeat, one a turn, each shown after a while.'''

    repeatable = {repeatable}

    def reset(self, seed):
        self.rng, self.turns = random.Random(seed), 0
        return self.digit(), {{}}

    def digit(self):
        self.shown = self.rng.randrange(10)
        return f"{{self.shown}}="

    def step(self, action):
        time.sleep(0.2)
        self.turns += 1
        right = float(action.startswith(str(self.shown)))
        return self.digit(), right / 3, self.turns == 3, False, {{}}
"""


@pytest.mark.parametrize(
    ("blow", "repeatable"),
    [
        (signal.SIGKILL, True),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.slow),
    ],
    ids=["killed", "killed, not repeatable", "hung"],
)
def test_a_lost_environment_host_is_replaced_and_every_episode_is_whole(
    job: Path, blow: signal.Signals, repeatable: bool
) -> None:
    (job.parent / "game.py").write_text(GAME.format(repeatable=repeatable))
    job.write_text(re.sub("options = .*", "", job.read_text()))
    overrides = (
        f"task.source={job.parent}/game.py:Echo", "task.multi_turn=yes", "task.eval_prompts=0", "steps=6",
        "rollout.turn_tokens=3", "deadlines.call_s=6",
    )  # fmt: skip
    driver = run_and_strike(job, overrides, "environment-0", blow)
    assert "environment-0" in driver.report.actor_losses[0]
    store = VersionedStore.open(job.parent / "runs" / "job" / "store")
    assert audit(store).findings == ()
    consumed = [row.trajectory for row in store.trajectories() if row.fate is Fate.CONSUMED]
    assert len(consumed) == 6 * 16
    for t in consumed:
        assert len(t.turns) == 3 or (t.finish is FinishReason.LENGTH and t.num_tokens >= 24 - 3)
        assert all(1 <= len(turn) <= 3 for turn in t.turns)
        assert {span.role for span in t.spans if isinstance(span, EnvSpan)} <= {"environment"}
    entries = journal.JournalReader(job.parent / "runs" / "job" / "events.jsonl")
    failed = [e.event.error for e in entries if isinstance(e.event, EnvironmentFailed)]
    assert all("is not repeatable; start it again" in error for error in failed)
    assert not (failed and repeatable)
