"""A real environment host that is killed during steps."""

from __future__ import annotations

import re
import signal
from pathlib import Path

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

    repeatable = True

    def reset(self, seed):
        self.rng, self.turns = random.Random(seed), 0
        return self.digit(), {}

    def digit(self):
        self.shown = self.rng.randrange(10)
        return f"{self.shown}="

    def step(self, action):
        time.sleep(0.2)
        self.turns += 1
        right = float(action.startswith(str(self.shown)))
        return self.digit(), right / 3, self.turns == 3, False, {}
"""


def test_a_lost_environment_host_is_replaced_and_every_episode_is_whole(job: Path) -> None:
    (job.parent / "game.py").write_text(GAME)
    job.write_text(re.sub("options = .*", "", job.read_text()))
    overrides = (
        f"task.source={job.parent}/game.py:Echo", "task.multi_turn=yes", "task.eval_prompts=0", "steps=3",
        "rollout.turn_tokens=3", "deadlines.call_s=6",
    )  # fmt: skip
    driver = run_and_strike(job, overrides, "environment-0", signal.SIGKILL)
    assert "environment-0" in driver.report.lost_actors[0]
    store = VersionedStore.open(job.parent / "runs" / "job" / "store")
    assert audit(store).findings == ()
    consumed = [row.trajectory for row in store.trajectories() if row.fate is Fate.CONSUMED]
    assert len(consumed) == 3 * 16
    for t in consumed:
        assert len(t.turns) == 3 or (t.finish is FinishReason.LENGTH and t.num_tokens >= 24 - 3)
        assert all(1 <= len(turn) <= 3 for turn in t.turns)
        assert {span.role for span in t.spans if isinstance(span, EnvSpan)} <= {"environment"}
    entries = journal.JournalReader(job.parent / "runs" / "job" / "events.jsonl")
    assert not [e for e in entries if isinstance(e.event, EnvironmentFailed)], "it is repeatable"
