"""Evaluation sets of a job: rejected settings and allowed sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError

PLAYED = ("task.multi_turn=yes", "task.source=mine.py:Game")


def job(*overrides: str) -> RunConfig:
    return loading.load("examples/demo.toml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("evaluation.sets.a.samples=0", "evaluation.sets.a.greedy=false"), "sets.a: samples = 0 and greedy = false"),
        (("evaluation.sets.a.max_new_tokens=65",), r"max_new_tokens = 65 is more than rollout.max_new_tokens = 64"),
        (
            (*PLAYED, "evaluation.sets.a.source=jsonl:rows.jsonl"),
            r"sets.a.source = 'jsonl:rows.jsonl': environments of",
        ),
        (
            (*PLAYED, "evaluation.sets.a.reward=math_verify"),
            r"sets.a.reward = 'math_verify': environments reward their",
        ),
        (
            ("evaluation.best_checkpoint_set=a",),
            "evaluation.best_checkpoint_set = 'a' is no set that is evaluated; known: held-out",
        ),
        (
            ("evaluation.sets.held-out.prompts=1",),
            "evaluation.sets.held-out is the name of the set of task.eval_prompts",
        ),
    ],
)
def test_invalid_evaluation_sets_give_a_one_line_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        job(*overrides)
    assert "\n" not in str(refused.value)


def test_an_evaluation_set_may_have_a_smaller_token_limit() -> None:
    config = job(*PLAYED, "evaluation.sets.a.max_new_tokens=9")
    sets = actor_settings.evaluation_sets(config)
    assert [evaluation_set.config.max_new_tokens for evaluation_set in sets] == [64, 9]


def test_a_task_source_is_evaluated_with_its_own_token_limit() -> None:
    """As in training, so that a prompt that fits in training fits in its evaluations."""
    config = loading.load("examples/mixture.toml", ["task.sources.running-sums.max_new_tokens=24"])
    limits = {s.name: s.config.max_new_tokens for s in actor_settings.evaluation_sets(config)}
    assert limits["running-sums"] == 24 < config.rollout.max_new_tokens
    assert {limit for name, limit in limits.items() if name != "running-sums"} == {config.rollout.max_new_tokens}


@pytest.mark.parametrize("source", ["agent:{here}/mine.py:play", "gymnasium:Taxi-v3", "{here}/mine.py:Game"])
def test_an_environment_in_a_set_of_a_job_without_environment_is_rejected(tmp_path: Path, source: str) -> None:
    """Its episodes would count as single turns, and all their rewards would fail."""
    (tmp_path / "mine.py").write_text(
        "def play(task, client):\n    return 1.0\n\n\n"
        "class Game:\n    def reset(self, seed):\n        return 'hi', {}\n\n"
        "    def step(self, action):\n        return '', 1.0, True, False, {}\n"
    )
    config = job(f"evaluation.sets.a.source={source.format(here=tmp_path)}")
    (_, own) = actor_settings.evaluation_sets(config)
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.a\.source = .* is an environment of many turns, which"):
        own.build()
