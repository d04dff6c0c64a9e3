"""The multi-turn example on a real cluster: stored spans equal the played games."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.agent_game import HigherOrLower
from staleflow.pipeline.runtime import instance_link
from staleflow.pipeline.stored_runs.verification import verify_run
from staleflow.stores.trajectory import NO_VERSION, EnvSpan, Fate, Segment, Trajectory
from staleflow.tasks.settings.seeds import task_seed
from tests.runtime.test_run import check, run
from tests.stored_runs.in_process import repeat_in_this_process  # noqa: F401  used by name

JOB = Path("examples/agent.toml")
STEPS = 2


def assert_played(t: Trajectory, seed: int, tokenizer: AutoTokenizer) -> None:
    """Check token by token that the spans of a trajectory are its turns and the observations of the game."""
    game = HigherOrLower()
    observation, _ = game.reset(seed)
    assert t.prompt_tokens.tolist() == tokenizer(observation)["input_ids"]
    values = [span for span in t.spans if isinstance(span, EnvSpan)]
    assert isinstance(t.spans[-1], Segment)  # nothing is given after the last turn
    for number, turn in enumerate(t.turns):
        text = tokenizer.decode(turn.tolist(), skip_special_tokens=True)
        observation, reward, terminated, truncated, info = game.step(text)
        ended = terminated or truncated
        assert ended == (number == len(t.turns) - 1)
        if ended:
            assert (t.reward, t.reward_parts) == (reward, info["parts"])
        else:
            assert values[number].role == "environment"
            assert values[number].tokens.tolist() == tokenizer(observation)["input_ids"]
    assert len(values) == len(t.turns) - 1


def check_example(player: Path, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run the example with a small batch and check that its store has the played games. Returns metrics by step."""
    small = (
        f"model.path={player}",
        f"runs_dir={folder}",
        f"steps={STEPS}",
        "task.eval_prompts=6",
        "batch.groups_per_step=4",
        "batch.group_size=4",
        "rollout.instances=1",
        "training.minibatches=1",
        "cluster.dashboard=false",
    )
    end = run(JOB, *small, *overrides)
    store = check(end.run_dir, STEPS)
    assert verify_run(end.run_dir, steps=STEPS).is_verified
    tokenizer, model = AutoTokenizer.from_pretrained(player), AutoModelForCausalLM.from_pretrained(player)
    rows = list(store.trajectories())
    consumed = [row for row in rows if row.fate is Fate.CONSUMED]
    assert len(consumed) == STEPS * 16
    assert max(len(row.trajectory.turns) for row in consumed) == 4
    for row in consumed:
        t = row.trajectory
        assert t.error == ""
        assert_played(t, task_seed(1, t.group, held_out=False), tokenizer)
        sampled = np.concatenate([np.full(len(s.tokens), isinstance(s, Segment)) for s in t.spans])
        np.testing.assert_array_equal(t.sampled, sampled)
        assert not t.logprobs[~sampled].any()
        assert (t.versions[~sampled] == NO_VERSION).all()
        assert t.v_traj <= t.versions[sampled].min()
        assert row.step - 1 <= t.v_traj <= row.step
        if t.versions[sampled].max() == 0:
            # The engine sampled each turn after exactly the tokens that are stored before it.
            whole = [*t.prompt_tokens.tolist(), *t.response_tokens.tolist()]
            with torch.no_grad():
                table = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
            first = len(t.prompt_tokens)
            expected = np.asarray([float(table[i - 1, whole[i]]) for i in range(first, len(whole))])
            np.testing.assert_allclose(t.logprobs[sampled], expected[sampled], atol=2e-4)
    assert any(len(r.trajectory.turns) > 1 for r in consumed if r.trajectory.versions.max() == 0)
    trained_on = sum(row.trajectory.num_sampled for row in rows if row.loss_mask)
    assert int(store.to_xarray().mask.sum()) == trained_on
    return [record.metrics for record in store.commits() if record.kind == "step"]


def test_a_run_of_the_example_stores_the_played_games(
    player: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_link, "REPORT_S", 0.02)  # its steps are shorter than the usual half a second
    steps = check_example(player, tmp_path)
    for name in ("prefilled_tokens", "cached_tokens"):
        assert sum(step[name] for step in steps) > 0, name
