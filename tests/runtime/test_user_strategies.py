"""A run with a user's routing rule, loss and advantage stores their code and replays with it."""

from __future__ import annotations

import shutil
from pathlib import Path

from click.testing import CliRunner

from staleflow.cli.replay import command
from tests.config.test_extending import blocks
from tests.runtime.test_run import run


def test_a_run_uses_user_strategies_and_replays_with_its_copy(job: Path, tmp_path: Path) -> None:
    own = {name: blocks(heading, "python")[0] for name, heading in (
        ("rule", "A routing rule"), ("loss", "A loss with a knob"), ("estimate", "An advantage"),
    )}  # fmt: skip
    for name, text in own.items():
        (tmp_path / f"{name}.py").write_text(text)
    end = run(
        job, "steps=2", "task.eval_prompts=0", "rollout.instances=2",
        f"rollout.routing={tmp_path}/rule.py:LeastTokens", "rollout.routing.most=300",
        f"training.loss.name={tmp_path}/loss.py:Discard", f"training.advantage={tmp_path}/estimate.py:median",
    )  # fmt: skip
    assert end.summary["steps"] == 2
    code = {p.name: p.read_text() for p in (end.run_dir / "code").iterdir()}
    assert code == {
        "routing_rule.py": own["rule"],
        "loss_loss.py": own["loss"],
        "advantage_estimate.py": own["estimate"],
    }
    for name in own:
        (tmp_path / f"{name}.py").unlink()
    moved = shutil.move(end.run_dir, tmp_path / "moved")
    result = CliRunner().invoke(command, [str(moved)])
    assert (result.exit_code, result.output.rpartition(": ")[2]) == (0, "the same commands\n")
