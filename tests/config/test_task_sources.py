"""Several [[task]] tables of a job file: how they are read, and their errors."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from staleflow.pipeline.api.job_loading import load_job
from staleflow.pipeline.config import actor_settings, user_files
from staleflow.pipeline.config.factories import make_strategies
from staleflow.pipeline.config.loading import load
from staleflow.pipeline.config.preflight import check_job
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery.source_fingerprints import compute, describe_changes
from staleflow.stores.errors import ConfigError

TWO = """
[model]
path = "x"
[rollout]
max_new_tokens = 32
[[task]]
name = "a"
ratio = 3
[[task]]
name = "b"
source = "mine.py:Numbers"
reward = "mine.py:score"
max_new_tokens = 8
"""


def read(folder: Path, text: str, *overrides: str) -> RunConfig:
    (folder / "job.toml").write_text(text)
    return load(folder / "job.toml", overrides)


def test_each_table_is_a_source_by_its_name(tmp_path: Path) -> None:
    config = read(tmp_path, TWO, "task.sources.b.ratio=0.5", "task.sources.b.sampler.name=uniform")
    assert {name: task.ratio for name, task in config.task.sources.items()} == {"a": 3, "b": 0.5}
    jobs = config.jobs_by_source
    assert [job.rollout.max_new_tokens for job in jobs.values()] == [32, 8]
    assert [job.reward.function for job in jobs.values()] == ["task", "mine.py:score"]
    assert list(config.evaluation_sets) == ["a", "b"]
    assert "mine.py" in user_files.with_absolute_paths(config).task.sources["b"].reward
    assert make_strategies(config).mixture is not None
    assert make_strategies(RunConfig()).mixture is None


def test_a_single_source_may_have_a_sampler(tmp_path: Path) -> None:
    config = read(tmp_path, '[model]\npath = "x"\n[task]\nsampler = "uniform"\n')
    mixture = make_strategies(config).mixture
    assert mixture is not None
    assert len({task for _, task in mixture.draw(100)}) == 100


def test_an_environment_among_several_sources_keeps_its_reward_and_tools(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        TWO.replace('"mine.py:Numbers"', '"gymnasium:CartPole-v1"').replace('reward = "mine.py:score"', ""),
        "environment.tools=['calculator']",
        "reward.function=math_verify",
    )
    assert config.has_environment
    a, b = config.jobs_by_source.values()
    assert (a.reward.function, b.reward.function) == ("math_verify", "task")
    assert (len(a.environment.tools), len(b.environment.tools)) == (1, 0)
    scoring = actor_settings.scoring_settings(config)
    assert [source.name for source in scoring.sources] == ["a"]


def test_unrepeatable_sources_are_environments_that_cannot_be_set_back(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(
        "class Game:\n    def reset(self, seed): ...\n    def step(self, action): ...\n"
        "class Replayed(Game):\n    repeatable = True\n"
    )
    text = TWO.replace('reward = "mine.py:score"', "")
    file = tmp_path / "games.py"
    for source, expected in ((f"{file}:Game", {1}), (f"{file}:Replayed", set())):
        assert actor_settings.unrepeatable_sources(read(tmp_path, text.replace("mine.py:Numbers", source))) == expected
    assert not actor_settings.unrepeatable_sources(read(tmp_path, text)), "it has no environment, and is not loaded"


def test_an_error_of_a_table_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text("raise ValueError('broken')\n")
    text = TWO.replace('reward = "mine.py:score"', "").replace("mine.py:Numbers", f"{tmp_path / 'games.py'}:Game")
    config = read(tmp_path, text, "environment.tools=['calculator']")
    with pytest.raises(ConfigError, match=r"task\.sources\.b\.source"):
        actor_settings.unrepeatable_sources(config)


def test_a_source_that_cannot_be_imported_here_is_not_checked(tmp_path: Path, tiny_model: Path) -> None:
    text = TWO.replace('"x"', f'"{tiny_model}"').replace("mine.py:Numbers", "nowhere_installed:Numbers")
    (line,) = check_job(read(tmp_path, text.replace('reward = "mine.py:score"', "")), runs_here=False)
    assert line.startswith("not checked here: task.sources.b.source = 'nowhere_installed:Numbers' cannot be imported")


def test_an_evaluation_set_that_cannot_be_imported_here_is_not_checked(tmp_path: Path, tiny_model: Path) -> None:
    text = TWO.replace('"x"', f'"{tiny_model}"') + '[evaluation.sets.far]\nsource = "nowhere_installed:Numbers"\n'
    (line,) = check_job(read(tmp_path, text), runs_here=False)
    assert line.startswith("not checked here: evaluation.sets.far.source = 'nowhere_installed:Numbers' cannot be")


def test_keys_of_listed_sources_may_be_overridden(tmp_path: Path) -> None:
    tree = tomllib.loads(TWO)
    assert load_job(tree, {"task.sources.a.ratio": 2}).task.sources["a"].ratio == 2


def test_fingerprints_are_per_source(tmp_path: Path) -> None:
    config = read(tmp_path, TWO)
    changed = read(tmp_path, TWO, 'task.sources.b.template="{prompt}!"')
    (line,) = describe_changes(compute(config), compute(changed))
    assert line == "template changed since the run began: b: task.template was '{prompt}', is '{prompt}!'"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("[[task]]\nname = \"a\"", "[[task]]"), '[[task]] number 1 needs a name, such as name = "sums"'),
        (('"b"', '"a"'), "two [[task]] tables have name = 'a'; rename one"),
        (("ratio = 3", "ratio = 0"), "task.sources.a.ratio = 0.0 is out of range; it must be > 0, <= 1000000"),
        (("= 8", "= 80"), "task.sources.b.max_new_tokens = 80 is more than rollout.max_new_tokens = 32"),
        (('"a"', '"held-out"'), "task.sources.held-out: an evaluation set has this name; rename one"),
        (("[rollout]", "[training.sft]\nweight = 0.1\n[rollout]"), "training.sft is not supported with several"),
        (("[rollout]", "[evaluation.sets.c]\n[rollout]"), "evaluation.sets.c needs a source"),
        (("ratio = 3", 'template = "x"'), "task.sources.a.template must contain {prompt}"),
    ],
)  # fmt: skip
def test_a_mistake_gives_a_one_line_error(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, TWO.replace(*change))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_of_a_single_source_beside_several_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.chat is set beside several sources; set task\.sources\.NAME\.chat"):
        read(tmp_path, TWO, "task.chat=true")
