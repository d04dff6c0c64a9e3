"""The examples of docs/extending.md, and the engine of CONTRIBUTING.md, run as printed and have the stated lengths."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.pipeline.config import actor_settings, loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.jobs.tracking import track
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.simulator.analysis import Trace
from staleflow.pipeline.simulator.simulated_run import SimulatedRun
from staleflow.tasks.engines import engine_settings as engines
from staleflow.tasks.engines.engine_builder import MODULES
from staleflow.tasks.engines.engine_settings import ENGINES
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import Registry
from staleflow.tasks.sources.task_sources import make_reward, make_source
from staleflow.tasks.training.loss import LOSSES, Tokens

PAGE = Path("docs/extending.md").read_text()
JOB = {
    "steps": 6, "rollout": {"instances": 3, "max_new_tokens": 400, "engine": {"name": "emulated", "max_running": 16}},
    "batch": {"groups_per_step": 6, "group_size": 3}, "workload": {"median": 60.0, "prompt_tokens": 20},
    "simulation": {"train_s": 0.5, "pull_s": 0.05},
}  # fmt: skip


def blocks(heading: str, language: str) -> list[str]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def merge(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(tree)
    for key, value in over.items():
        result[key] = merge(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the file of a section of the page into a temporary folder and load its job."""

    def made(heading: str, **changes: Any) -> RunConfig:
        (tmp_path / "mine.py").write_text(blocks(heading, "python")[0])
        monkeypatch.chdir(tmp_path)
        (toml,) = blocks(heading, "toml")
        config = loading.from_tree(merge(merge(JOB, tomllib.loads(toml)), changes), heading)
        user_files.check_user_code(config)
        return user_files.with_absolute_paths(config)

    return made


def simulate(config: RunConfig) -> Trace:
    return SimulatedRun(config, actor_settings.make_workload(config)).run()


def test_a_rule_from_a_file_routes_and_declines(example: Any) -> None:
    often, seldom = (simulate(example("A routing rule", rollout={"routing": {"most": most}})) for most in (10**6, 100))
    assert simulate(example("A routing rule")).steps[-1].step == 5
    assert len(often.steps) == len(seldom.steps) == 6
    assert often.refusals.get("declined by the routing rule", 0) == 0 < seldom.refusals["declined by the routing rule"]
    assert often.finished_s < seldom.finished_s


def test_a_loss_from_a_file_equals_its_formula(example: Any) -> None:
    config = example("A loss with a knob")
    rng = np.random.default_rng(0)
    new, sampled = rng.normal(-1.0, 0.5, (2, 3, 7))
    advantage = rng.normal(size=(3, 1))
    logprobs = torch.tensor(new, requires_grad=True)
    whole = torch.ones((3, 7), dtype=torch.bool)
    result = LOSSES.make(config.training.loss).token_loss(
        Tokens(
            logprobs=logprobs, proximal=logprobs.detach(), behaviour=torch.tensor(sampled),
            advantage=torch.tensor(advantage), sampled=whole, lags=whole.long(),
        )
    )  # fmt: skip
    ratio = np.exp(new - sampled)
    kept = (ratio <= 1.5) & (ratio >= 1 / 1.5)
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(result.loss.detach().numpy(), -ratio * kept * advantage * new)
    assert (result.clipped.numpy() == ~kept).all()
    result.loss.sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), -ratio * kept * advantage)


def test_an_advantage_from_a_file_is_used(example: Any) -> None:
    rewards, valid = np.array([[1.0, 0.0, 5.0], [3.0, 1.0, 9.0]]), np.array([[True] * 3, [True, True, False]])
    given = example("An advantage").training.advantage.advantages(rewards, valid)
    assert given.tolist() == [[0.0, -1.0, 4.0], [1.0, -1.0, 0.0]]


async def test_a_source_a_reward_and_a_tracker_from_a_file_are_used(example: Any, tmp_path: Path) -> None:
    config = example("A source of prompts, and a reward")
    source = make_source(config.task.source, config.task.options, 2)
    assert source.task(4).prompt == "9 + 9 = "
    assert source.score("18", source.task(4).record) == 1.0
    assert make_reward(config.reward.function, source)("abc", {}) == 0.25
    config = example("A tracker", tracking={"tensorboard": False})
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        async with track(config, tmp_path) as tracking:
            tracking.on_evaluation(Evaluation(version=0, num_prompts=4, sampled=0.25, greedy=None))
            tracking.on_step_stored({"step": 0.0, "reward": 0.5}, "")
    evaluated, trained = printed.getvalue().splitlines()
    assert evaluated.startswith("run 0 {'evaluation/held-out/sampled': 0.25")
    assert trained == "run 0 {'reward': 0.5}"


def test_an_engine_is_registered_by_its_settings() -> None:
    registry: Registry[Any] = Registry("engine", "rollout.engine", engines.EngineSettings)
    known = {"ENGINES": registry, "ModelSettings": engines.ModelSettings, "knob": knob, "dataclass": dataclass}
    known |= {"__name__": __name__}
    example = Path("CONTRIBUTING.md").read_text().split("\n### An engine\n")[1]
    (settings, _) = re.findall(r"```python\n(.*?)```", example, re.DOTALL)
    exec(compile(settings, "settings.py", "exec", dont_inherit=True), known)
    assert {ENGINES.find(name) for name in ENGINES.names} == set(MODULES)
    assert registry.names_with_knob("echoes") == ["parrot"]
    with pytest.raises(TypeError, match="engine 'mute' must be a dataclass derived from EngineSettings"):
        registry.register("mute")(type("MuteSettings", (), {}))


def test_each_example_has_the_length_stated_on_the_page() -> None:
    def lines(text: str) -> int:
        return sum(bool(line.strip()) and not line.startswith("# mine.py") for line in text.splitlines())

    messages = {n: int(count) for n, count in re.findall(r'"mine\.py:(\w+)"` \| (\d+) \|', PAGE)}
    first = {
        name: blocks(heading, "python")[0]
        for name, heading in (
            ("LeastTokens", "A routing rule"), ("Discard", "A loss with a knob"), ("median", "An advantage"),
            ("helpful", "A judge model as a reward"), ("Printed", "A tracker"),
        )
    }  # fmt: skip
    first["Doubles"], short = blocks("A source of prompts, and a reward", "python")[0].split("def short")
    first["short"] = f"def short{short}"
    assert messages == {name: lines(text) for name, text in first.items()}
