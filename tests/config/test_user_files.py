"""Data and code that a job names by file: resolved from any folder, and files of one name kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import actor_settings, knob_tree, loading, preflight, schema, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import run_folder
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import repository


def job(*overrides: str) -> RunConfig:
    return loading.load("examples/demo.toml", overrides)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("rows.jsonl", "a/mine.py", "b/mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    examples = Path("examples").resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(examples)
    return tmp_path


def test_a_bucket_is_checked_for_the_job_that_its_run_stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are copied into the run's folder; a second attempt to start was refused as another job."""
    (folder / "a" / "rule.py").write_text("class Mine:\n    pass\n")
    config = job("store=s3://bucket/runs", "training.loss.name=a/rule.py:Mine")
    checked: list[str | None] = []
    monkeypatch.setattr(repository, "check_bucket", lambda url, new_job: checked.append(new_job))
    with pytest.raises(ConfigError, match="model"):
        preflight.check_job(config)
    stored, _ = user_files.with_copied_code(user_files.with_absolute_paths(config))
    assert checked == [actor_settings.run_header(stored).job]
    assert "code/loss_rule.py:Mine" in (checked[0] or "")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("jsonl:rows.jsonl", "jsonl:{here}/rows.jsonl"),
        ("jsonl:~nobody-here/rows.jsonl", "jsonl:{here}/~nobody-here/rows.jsonl"),
        ("parquet:none.parquet", "parquet:{here}/none.parquet"),
        ("datasets:a", "datasets:{here}/a"),
        ("datasets:openai/gsm8k", "datasets:openai/gsm8k"),
        ("a/mine.py:Sums", "{here}/a/mine.py:Sums"),
        ("reasoning_gym:chain_sum", "reasoning_gym:chain_sum"),
    ],
)
@pytest.mark.parametrize("key", ["task.source", "task.eval_source", "evaluation.sets.a.source"])
def test_a_dataset_is_found_from_any_folder(folder: Path, key: str, source: str, found: str) -> None:
    located = user_files.with_absolute_paths(job(f"{key}={source}"))
    values = {"task.source": located.task.source, "task.eval_source": located.task.eval_source}
    values |= {f"evaluation.sets.{name}.source": one.source for name, one in located.evaluation.sets.items()}
    assert values[key] == found.format(here=folder)


def test_the_rows_of_an_environment_are_found_from_any_folder(folder: Path) -> None:
    own = ("task.source=skyrl_gym:gsm8k", "task.options={rows='jsonl:rows.jsonl', env_config={}}")
    located = user_files.with_absolute_paths(job(*own, "task.eval_source=skyrl_gym:gsm8k"))
    assert located.task.options == {"rows": f"jsonl:{folder}/rows.jsonl", "env_config": {}}
    assert located.task.eval_options == {}
    table = {"source": "skyrl_gym:gsm8k", "options": {"rows": "jsonl:rows.jsonl"}}
    mixed = loading.from_tree({"model": {"path": "m"}, "task": {"sources": {"one": table}}}, "job")
    sources = user_files.with_absolute_paths(mixed).task.sources
    assert sources["one"].options["rows"] == f"jsonl:{folder}/rows.jsonl"


def test_code_that_is_not_utf_8_gives_a_one_line_error(folder: Path) -> None:
    (folder / "a" / "mine.py").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match=r"^reward\.function = 'a/mine\.py:f': cannot be read: 'utf-8' codec"):
        user_files.collect_code(job("reward.function=a/mine.py:f"))


def test_further_paths_are_found_from_any_folder(folder: Path) -> None:
    own = ("workload.run=runs/a", "cluster.scheduler_file=s.json", "endpoint.tls_cert=c.pem", "endpoint.tls_key=k.pem")
    located = user_files.with_absolute_paths(job(*own))
    assert (located.workload.run, located.cluster.scheduler_file) == (f"{folder}/runs/a", f"{folder}/s.json")
    assert (located.endpoint.tls_cert, located.endpoint.tls_key) == (f"{folder}/c.pem", f"{folder}/k.pem")


def test_files_of_one_name_are_packed_separately(folder: Path) -> None:
    config, code = user_files.collect_code(job("task.source=a/mine.py:One", "task.eval_source=b/mine.py:Two"))
    assert sorted(code.values()) == ["# a/mine.py\n", "# b/mine.py\n"]
    assert code[config.task.source.partition(":")[0]] == "# a/mine.py\n"
    assert code[config.task.eval_source.partition(":")[0]] == "# b/mine.py\n"
    again, same = user_files.collect_code(job("task.source=a/mine.py:One", "task.eval_source=a/mine.py:Two"))
    assert (list(same), again.task.eval_source) == (["task_mine.py"], "task_mine.py:Two")


def test_the_code_of_each_reward_part_is_packed_and_restored(folder: Path) -> None:
    names = ('reward.parts.one.function="a/mine.py:f"', "reward.parts.two.function=b/mine.py:g", "reward.parts.sum={}")
    config = user_files.with_absolute_paths(job(*names))
    assert config.reward.parts["one"].function == f"{folder}/a/mine.py:f"
    assert config.reward.parts["sum"].function == "task"
    sent, code = user_files.collect_code(config)
    files = {name: part.function.partition(":")[0] for name, part in sent.reward.parts.items()}
    assert (code[files["one"]], code[files["two"]]) == ("# a/mine.py\n", "# b/mine.py\n")
    assert all(file.startswith("reward_") for file in code)
    back = user_files.with_code_in(sent, folder / "code", code).reward.parts
    assert back["two"].function == f"{folder}/code/{files['two']}:g"


def test_the_code_of_a_reward_part_moves_with_its_run(folder: Path) -> None:
    config = job(f"runs_dir={folder}/runs", "name=one", f"reward.parts.a.function={folder}/runs/one/code/mine.py:f")
    (folder / "runs" / "two").mkdir(parents=True)
    (folder / "runs" / "two" / "config.toml").write_text(knob_tree.to_toml(config))
    moved = run_folder.load_job(folder / "runs" / "two")
    assert moved.reward.parts["a"].function == f"{folder}/runs/two/code/mine.py:f"


def test_reward_parts_are_written_explained_and_checked_by_name(folder: Path) -> None:
    config = job("reward.parts.a.weight=0.5", "reward.parts.b-2={}")
    (folder / "again.toml").write_text(knob_tree.to_toml(config))
    assert loading.load(folder / "again.toml") == config
    rows = {row.key: row.value for row in schema.explain_config(config)}
    assert (rows["reward.parts.a.weight"], rows["reward.parts.b-2.function"]) == (0.5, "task")
    for override, message in (
        ("reward.parts.a.wieght=1", r"unknown key reward\.parts\.a\.wieght; did you mean reward\.parts\.a\.weight\?"),
        ("reward.parts.a.weight=much", r"reward\.parts\.a\.weight must be a number"),
        ("reward.parts.a=1", r"reward\.parts\.a must be a table"),
        ("reward.parts=1", r"reward\.parts must be a table of named tables"),
        ('reward.parts={"a b"={}}', r"reward\.parts: 'a b' is not a valid name; use letters, digits, - and _"),
    ):
        with pytest.raises(ConfigError, match=message):
            job(override)


def test_code_of_tools_belongs_to_scoring_since_prompts_describe_tools(folder: Path) -> None:
    config = job('environment.tools=["a/mine.py:add"]')
    assert "environment.tools.0" in user_files.scoring_code_keys(config)


def test_the_code_of_an_evaluation_set_is_packed_and_restored(folder: Path) -> None:
    own = ("evaluation.sets.one.source=a/mine.py:Sums", "evaluation.sets.two.reward=b/mine.py:f")
    config = user_files.with_absolute_paths(job(*own))
    sets = config.evaluation.sets
    assert (sets["one"].source, sets["two"].reward) == (f"{folder}/a/mine.py:Sums", f"{folder}/b/mine.py:f")
    assert (sets["one"].reward, sets["two"].source) == ("task", "")
    sent, code = user_files.collect_code(config)
    assert sorted(code.values()) == ["# a/mine.py\n", "# b/mine.py\n"]
    assert {key for key in user_files.scoring_code_keys(config) if "sets" in key} == {
        f"evaluation.sets.{name}.{key}" for name in ("one", "two") for key in ("source", "reward")
    }
    back = user_files.with_code_in(sent, folder / "code", code).evaluation.sets
    for named, text in ((back["one"].source, "# a/mine.py\n"), (back["two"].reward, "# b/mine.py\n")):
        assert code[Path(named.rpartition(":")[0]).name] == text


def test_numbers_of_prompts_that_exceed_the_data_set_are_noted(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(20)))
    task = {"source": f"jsonl:{tmp_path}/rows.jsonl", "eval_prompts": 2}
    tree: dict[str, Any] = {"model": {"path": str(tiny_model)}, "task": task, "rollout": {"max_new_tokens": 8}}
    assert preflight.check_job(loading.from_tree(tree, "job")) == []
    large = tree | {"batch": {"groups_per_step": 27}, "task": task | {"eval_prompts": 5}}
    evaluated, drawn = preflight.check_job(loading.from_tree(large, "job"))
    assert evaluated == "task.eval_prompts = 5: only 2 rows are held out; each is evaluated once"
    assert drawn.startswith("batch.groups_per_step = 27: jsonl:")
    assert drawn.endswith("has only 18 distinct training prompts; a step draws each about 1.5 times")
    repeated = "".join(f'{{"prompt": "{i % 6}+1=", "answer": "{i % 6 + 1}"}}\n' for i in range(20))
    (tmp_path / "rows.jsonl").write_text(repeated)
    (drawn,) = preflight.check_job(loading.from_tree(tree | {"batch": {"groups_per_step": 8}}, "job"))
    assert drawn.endswith("has only 4 distinct training prompts; a step draws each about 2.0 times")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.max_new_tokens=60", "rollout.engine.kv_tokens=100"), r"kv_tokens = 100 is too small .* least 120$"),
        (("rollout.max_new_tokens=128",), r"max_new_tokens = 128 leaves no room for a prompt"),
        (("endpoint={tls_cert='c.pem', tls_key='k.pem'}",), r"^endpoint\.tls_cert = 'c\.pem': no such file$"),
        (("endpoint={tls_cert='~/c.pem', tls_key='k'}",), r"tls_cert = '~/c\.pem': ~ is not replaced here, write the"),
        (("reward.parts.a.function=~/r.py:f",), r"^reward\.parts\.a\.function = '~/r\.py:f': ~ is not replaced here"),
        (
            ("rollout.engine.name=emulated", "workload.kind=agentic"),
            r'workload\.kind = "agentic": without environments',
        ),
        (("rollout.engine.name=emulated", "workload={kind='recorded', run='none'}"), r"'none': no stored run there"),
    ],
)
def test_what_no_run_could_use_is_found_before_it_starts(
    tiny_model: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tree = {"model": {"path": str(tiny_model)}, "task": {"source": f"jsonl:{tmp_path}/rows.jsonl"}}
    with pytest.raises(ConfigError, match=message):
        preflight.check_job(loading.from_tree_with_overrides(tree, overrides, "job"))
