"""Job files: values round-trip, and every mistake gives a helpful one-line error."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from staleflow.cli.config import command as config_command
from staleflow.pipeline.config import actor_settings, knob_tree, loading, model_files, schema
from staleflow.pipeline.config.model_facts import check_teacher_fits, check_teacher_models
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.strategies.migration import LargestGain, NoMigration
from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.engine_settings import ENGINES
from tests.commands import command

GOOD = '[model]\npath = "somewhere"\n'


def load(tmp_path: Path, text: str = GOOD, *overrides: str) -> RunConfig:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return loading.load(path, overrides)


def test_defaults_are_valid_and_round_trip(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, 'task.options={a = 1, b = "x\\"y", c = [1, 2]}', "task.answer_pattern=so(\\d+)\\.")
    assert load(tmp_path, knob_tree.to_toml(config)) == config


TEXTS = st.text() | st.text('\r\n\t\0\x01\x7f\\"\x27 .=[]{}#a\u2028')
VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.datetimes() | st.dates(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=6,
)


@given(options=st.dictionaries(TEXTS, VALUES, max_size=4), pattern=TEXTS)
def test_arbitrary_keys_and_texts_round_trip(options: dict[str, Any], pattern: str) -> None:
    config = RunConfig(task=replace(RunConfig().task, options=options, answer_pattern=pattern))
    read = tomllib.loads(knob_tree.to_toml(config))["task"]
    assert (read["options"], read["answer_pattern"]) == (options, pattern)


def test_a_rule_is_chosen_and_configured_by_overrides_in_any_order(tmp_path: Path) -> None:
    chosen, knob = "rollout.migration=largest_gain", "rollout.migration.gain=0.25"
    for overrides in ((chosen, knob), (knob, chosen), ("rollout.migration.name=largest_gain", knob)):
        migration = load(tmp_path, GOOD, *overrides).rollout.migration
        assert isinstance(migration, LargestGain) and migration.gain == 0.25
    text = f'{GOOD}[rollout.migration]\nname = "largest_gain"\ngain = 0.25\n'
    assert load(tmp_path, text).rollout.migration == migration
    assert load(tmp_path, text, "rollout.migration=none").rollout.migration == NoMigration()
    with pytest.raises(ConfigError, match=r"gain: a knob of largest_gain; rollout\.migration\.name is none"):
        load(tmp_path, text, "rollout.migration.name=none")


def test_overrides_are_toml_or_bare_words(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "steps=3", "rollout.engine.max_running=7", "name=my-run", "task.chat=true")
    assert (config.steps, config.rollout.engine.max_running, config.name, config.task.chat) == (3, 7, "my-run", True)


def test_derived_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "batch.groups_per_step=4", "batch.group_size=3", "batch.extra_members=1")
    assert config.trajectories_per_step == 12
    assert config.max_trajectories_in_flight == 2 * 4 * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("staleness.etta=2", r"unknown key staleness.etta; did you mean staleness.eta\?"),
        ("nonsense=2", "unknown key nonsense; known here: name"),
        ("eta=2", r"unknown key eta; did you mean staleness.eta\?"),
        ("rollout.learning_rate=1", "did you mean training.learning_rate or training.sft.learning_rate"),
        ("steps=" + "9" * 40, "steps = 9+ is out of range; it must be at most 9223372036854775807, in 64 bits"),
        ("training.learning_rate=" + "9" * 400, "learning_rate = 9+... .400 characters. is out of range"),
        ("training.learning_rate=" + "9" * 5000, "learning_rate must be a number, not '9+... .5002 characters."),
        ("task.options={a = [1, {b = 99999999999999999999}]}", "task.options.a.b = 9+ is out of range"),
        ("task..chat=true", "override task..chat=true: the key has an empty part"),
        ("task.answer_pattern='so(-?'", r"answer_pattern = 'so\(-\?' does not compile: missing \)"),
        ("task.answer_pattern='so.*'", r"answer_pattern = 'so.\*' has no group; put the answer's part in \( \)"),
        ('task.template={"q": "{prompt}"}', r'any other brace twice: \{\{"q": "\{prompt\}"\}\}$'),
        ("task.template={prompt} {answer}", r"any other brace twice: \{prompt\} \{\{answer\}\}$"),
        ("task.template={prompt} {", r"any other brace twice: \{prompt\} \{\{$"),
        ("task.template={prompt.x}{prompt}", r"only \{prompt\} is replaced"),
        ("staleness.eta=-1", "staleness.eta = -1 is out of range; it must be >= 0, <= 1000"),
        ("staleness.eta=1.5", "staleness.eta must be a whole number, not 1.5"),
        ("staleness.eta=true", "staleness.eta must be a whole number, not True"),
        ("training.learning_rate=0", "learning_rate = 0.0 is out of range; it must be > 0"),
        ("training.beta1=1", "training.beta1 = 1.0 is out of range; it must be >= 0, < 1"),
        ("training.beta2=1", "training.beta2 = 1.0 is out of range; it must be >= 0, < 1"),
        ("training.learning_rate=nan", "learning_rate = nan must be finite"),
        ("staleness=3", "staleness must be a table, not 3"),
        ("rollout.routing=best", "must be one of deadline, or your own, file.py:NAME, not 'best'"),
        ("training.loss.name=ppo_clap", r"did you mean 'ppo_clip'\?"),
        ("training.loss.name=grpo", r"not 'grpo'; did you mean training\.advantage = 'grpo'\?$"),
        ("training.advantage=gspo", r"not 'gspo'; did you mean training\.loss = 'gspo'\?$"),
        ("training.loss.name=none", "not 'none'$"),
        ("steps", "expected key=value"),
        ("model.path=", "model.path is missing"),
        ("task.template=hello", r"must contain \{prompt\}"),
        ("name=a/b", "must be a plain folder name"),
        ("batch.group_size=1", "leaves grpo nothing to compare; it must be >= 2"),
        ("training={resume_every=5, keep_every=7}", "keep_every = 7 is no multiple of training.resume_every = 5"),
        ("training={resume_every=0, keep_every=5}", "keep_every = 5 is no multiple of training.resume_every = 0"),
        (
            "training.kl.reference=runs/old",
            r"reference = 'runs/old' is not used while training.kl.coefficient = 0; set",
        ),
        ("training.sft.source=jsonl:mine.jsonl", "is not used while training.sft.steps and .*weight are 0; set one"),
        ("training.sft.weight=-0.1", "training.sft.weight = -0.1 is out of range; it must be >= 0"),
        (
            "training={minibatches=4, sft={weight=0.1, examples_per_step=3}}",
            r"examples_per_step = 3 is less than training\.minibatches = 4, over which .* are divided; raise it",
        ),
        ("training={sft={steps=3}, kl={coefficient=0.1}}", "training.kl.reference is missing: .* another model"),
        ("training={loss='dpo', kl={coefficient=0.1}}", "has its own beta; set training.kl.coefficient"),
        ("training.kl={coefficient=1, place='advantage'}", '"k3" would only push .* down; set estimator = "k1"'),
        ("training.advantage=none", "leaves nothing to train on; set training.kl.coefficient above 0"),
        ("teacher.instances=1", "nothing is compared with a reference model; set training.kl.coefficient above 0, or"),
        ('teacher.engine={name="vllm",options={seed=1}}', "teacher.engine.options.seed: has its own key; remove it"),
        ("training.kl.estimator=k4", "must be one of k1, k2, k3, not 'k4'"),
        ("rollout.min_instances=4000", "min_instances = 4000 is more than rollout.instances = "),
        (
            "rollout={instances=2, max_instances=1}",
            "max_instances = 1 is less than rollout.instances = 2, with which the run begins",
        ),
        ("training.ranks=99999", "training.ranks = 99999 is out of range; it must be >= 1, <= 1024"),
        ("training.minibatches=1000", "is more than the 128 trajectories of a step"),
        ("training.overlong_tokens=100000", "= 100000 is more than rollout.max_new_tokens = "),
        ("rollout.max_new_tokens=100000", "cannot hold one response .*; set it to at least 200000"),
        ("cluster.kind=address", "needs cluster.address"),
        ("endpoint.tls_key=key.pem", "tls_cert and endpoint.tls_key belong together; set both, or neither"),
        ("endpoint.tls_cert=cert.pem", "tls_cert and endpoint.tls_key belong together; set both, or neither"),
        ("workload.kind=recorded", "needs workload.run"),
        ("rollout.cost={k2=0, k3=0, k4=0, b=0}", "a decode step of one trajectory takes no time"),
        ("simulation.report_s=0", "out of range; it must be >= 0.01"),
        ("batch.stragglers=retri", "must be one of wait, truncate, not 'retri'"),
        ("staleness.admission={name='credits', alpha=2}", "name = 'credits' imitates another system, .* use staleflow"),
        (
            "rollout.engine.options={a=1}",
            "options: a knob of vllm; rollout.engine.name is transformers, which has max_ru",
        ),
        ("rollout.engine=vllm", "rollout.engine must be a table, not 'vllm'; set rollout.engine.name"),
        ("rollout.engine.time_scale=2", "time_scale: a knob of emulated; rollout.engine.name is transformers"),
        ("rollout.migration.gain=0.2", "gain: a knob of largest_gain; rollout.migration.name is none, which has none"),
        ("rollout.migration={name='largest_gain', gain=2}", "gain = 2.0 is out of range; it must be >= 0, <= 1"),
        ("rollout.routing=3", "rollout.routing must be a name, or a table with name, not 3"),
        ("training.clip_low=0.1", r"unknown key training.clip_low; did you mean training.loss.clip_low\?"),
        ("name.x=3", "name must be a string, not"),
        ("steps.x=3", "steps must be a whole number, not {'x': 3}"),
        (
            'rollout.engine.speculation={num_speculative_tokens=4,source="suffix"}',
            "not supported by the transformers engine",
        ),
        (
            'rollout.engine={name="vllm",tensor_parallel=2,speculation={num_speculative_tokens=4}}',
            "source = 'responses' needs tensor_parallel = 1",
        ),
        ('rollout.engine={name="vllm",options={speculative_config=1}}', "set rollout.engine.speculation instead"),
        (
            "rollout.engine={name='vllm', options={logprobs_mode='raw_logprobs'}}",
            "options.logprobs_mode: tokens could no",
        ),
        ("rollout.engine={name='vllm', options={max_model_len=9}}", "follows from the model and rollout.engine.kv_tok"),
        ("rollout.engine={name='vllm', options={logits_processors=[]}}", "of the policy that sampled; remove it"),
        ("rollout.engine={name='vllm', options={pipeline_parallel_size=2}}", "divided by tensor_parallel only; remove"),
        ("rollout.engine={name='vllm', options={data_parallel_size=2}}", "divided by tensor_parallel only; remove"),
        (
            "rollout.engine={name='vllm', options={top_p=0.9}}",
            "options.top_p: it would sample from another distribution",
        ),
        ("rollout.top_p=0.9", "rollout.top_p is not supported: it would sample from another distribution"),
        ("rollout.repetition_penalty=1.1", "rollout.repetition_penalty is not supported"),
    ],
)
def test_each_mistake_gives_a_one_line_error(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, GOOD, override)
    assert "\n" not in str(caught.value)


TEACHER = ("teacher.instances=1", "training.kl.coefficient=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("teacher.engine.name=vllm", "rollout.temperature=0.7"),
            "the vllm engine computes a teacher's logprobs at temperature 1 only; set it to 1, or teacher.engine.name",
        ),
        (("teacher.engine.name=emulated",), '"emulated" has no model; use "transformers" or "vllm"'),
        (
            ("teacher.engine.speculation.num_speculative_tokens=4",),
            "teacher.engine.speculation: a teacher samples nothing; leave num_speculative_tokens at 0",
        ),
    ],
)
def test_a_teacher_whose_engine_cannot_compute_logprobs_is_rejected(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    assert load(tmp_path, GOOD, *TEACHER, "rollout.temperature=0.7").teachers == ("teacher-0",)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, GOOD, *TEACHER, *overrides)


def test_a_teacher_has_to_fit_the_longest_trajectory(tmp_path: Path) -> None:
    """vLLM's request for the logprobs of a sequence needs room for one more token."""
    context = {"max_position_embeddings": 512, "vocab_size": 32}
    for engine, most in (("transformers", 512), ("vllm", 511)):
        name = f"teacher.engine.name={engine}"
        check_teacher_fits(load(tmp_path, GOOD, *TEACHER, name, f"rollout.engine.kv_tokens={most}"), context, context)
        with pytest.raises(ConfigError, match=f"model.path: its .* set rollout.engine.kv_tokens to at most {most}"):
            check_teacher_fits(
                load(tmp_path, GOOD, *TEACHER, name, f"rollout.engine.kv_tokens={most + 1}"),
                context | {"max_position_embeddings": 1024},
                context,
            )


def test_the_configuration_of_a_reference_is_read_where_the_run_is(tmp_path: Path, tiny_model: Path) -> None:
    """Its context is shorter than the policy's."""
    reference = shutil.copytree(tiny_model, tmp_path / "reference")
    settings = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 16}))
    policy = f"model.path={tiny_model}"
    check_teacher_models(load(tmp_path, GOOD, *TEACHER, policy))
    with pytest.raises(ConfigError, match=r"training\.kl\.reference: its context is 16 tokens"):
        check_teacher_models(load(tmp_path, GOOD, *TEACHER, policy, f"training.kl.reference={reference}"))


ADAPTER = "rollout.on_pull=adapter"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("training.lora.rank=8",), 'rank = 8 makes versions adapters, .* set rollout.on_pull = "adapter" in place of'),
        ((ADAPTER,), 'rollout.on_pull = "adapter" needs versions that are adapters; set training.lora.rank'),
        (("training.lora.alpha=8",), "training.lora.rank = 0 trains no adapter"),
        (
            (ADAPTER, "training.lora.rank=8", "rollout.engine.speculation.num_speculative_tokens=4"),
            "drafts are not verified under adapters",
        ),
        (
            (ADAPTER, "training.lora.rank=8", "rollout.engine={name='vllm', options={max_loras=1}}"),
            "options.max_loras: it follows from training.lora and staleness.eta; remove it",
        ),
    ],
)
def test_engine_settings_that_cannot_serve_adapters_are_rejected(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, GOOD, *overrides)
    assert "\n" not in str(caught.value)


def test_eta_plus_one_adapters_are_served(tmp_path: Path) -> None:
    adapters = (ADAPTER, "training.lora.rank=8", "staleness.eta=3")
    assert load(tmp_path).num_served_versions == 0
    assert load(tmp_path, GOOD, *adapters).num_served_versions == 4
    for engine in ENGINES.names:
        config = load(tmp_path, GOOD, *adapters, f"rollout.engine.name={engine}")
        settings = actor_settings.engine_settings(config, 0, (1,))
        assert getattr(settings, "num_served_versions", None) == 4


def test_groups_of_one_need_an_estimator_and_a_filter_without_comparison(tmp_path: Path) -> None:
    alone, whitened = "batch.group_size=1", "training.advantage=reinforce_plus_plus"
    assert load(tmp_path, GOOD, alone, whitened).batch.group_size == 1
    with pytest.raises(ConfigError, match=r"dpo.* compares responses to one prompt; batch.group_size must be >= 2"):
        load(tmp_path, GOOD, alone, whitened, "training.loss=dpo")
    with pytest.raises(ConfigError, match="leaves reinforce_plus_plus_baseline nothing to compare"):
        load(tmp_path, GOOD, alone, f"{whitened}_baseline")
    with pytest.raises(ConfigError, match=r"would drop every group of batch\.group_size = 1"):
        load(tmp_path, GOOD, alone, whitened, "batch.filtering=no_signal")


def test_a_missing_or_invalid_file_gives_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such job file"):
        loading.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path, "a = = 1")
    with pytest.raises(ConfigError, match="nested too deep"):
        load(tmp_path, "a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="not valid TOML: Exceeds the limit"):
        load(tmp_path, "steps = " + "9" * 5000)
    with pytest.raises(ConfigError, match="a folder, not a job file"):
        loading.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "gr\xf6\xdfe"')
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 10\); save it as UTF-8"):
        loading.load(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert loading.load(tmp_path / "job.toml") == load(tmp_path)


def test_doubled_braces_in_a_template_are_literal(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, 'task.template={{"q": "{prompt}"}}')
    assert config.task.template.format(prompt="1 + 1") == '{"q": "1 + 1"}'


def test_every_knob_has_a_description(tmp_path: Path) -> None:
    rows = schema.explain_config(load(tmp_path))
    assert all(r.doc for r in rows)
    assert {r.key for r in rows} >= {"staleness.eta", "rollout.engine.kv_tokens", "trajectories_per_step"}


def test_explain_prints_json_and_marks_the_keys_that_a_job_sets() -> None:
    rows = json.loads(command("config", "explain", "examples/demo.toml", "--json").stdout)
    values = {row["key"]: (row["value"], row["default"]) for row in rows}
    assert values["task.eval_options"] == ({}, {})
    assert values["rollout.routing.name"] == ("deadline", "deadline")
    assert values["task.options"] == ({"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 1}, {})
    lines = command("config", "explain", "examples/demo.toml").stdout.splitlines()
    marked = {line[2:].split()[0] for line in lines if line.startswith("* ")}
    assert "task.options" in marked
    assert not marked & {"task.eval_options", "rollout.routing.name"}


def test_an_example_without_its_model_names_the_make_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makefile = Path("Makefile").read_text()
    paths = {loading.load(path).model.path for path in EXAMPLES} - {""}
    monkeypatch.chdir(tmp_path)
    for path in paths:
        with pytest.raises(ConfigError, match=r"no such folder; `make ([a-z0-9-]+)` creates it") as refused:
            model_files.find_model_folder(path)
        target = str(refused.value).split("`")[1].removeprefix("make ")
        recipe = makefile.split(f"\n{target}: ")[1].split("\n\n")[0]
        assert f"--out {path}" in recipe


EXAMPLES = sorted(Path("examples").glob("*.toml"))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key; free-form tables are values."""
    results: dict[str, Any] = {}
    for name, value in tree.items():
        # Each of several task sources has the keys of [task].
        key = re.sub(r"^task\.sources\.[^.]+\.", "task.", f"{prefix}{name}")
        table = isinstance(value, Mapping) and (key not in FREE or (key == "task.sources" and value))
        results |= flat(value, f"{prefix}{name}.") if table else {f"{prefix}{name}": value}
    return results


FREE = (
    "task.options", "task.eval_options", "task.sources", "training.sft.options", "reward.parts", "evaluation.sets",
)  # fmt: skip


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_explain_lists_every_key_and_marks_those_that_differ_from_the_default(path: Path) -> None:
    written = flat(tomllib.loads(knob_tree.to_toml(loading.load(path))))
    rows = json.loads(command("config", "explain", str(path), "--no-check", "--json").stdout)
    rows = [row for row in rows if row["limits"] != "derived"]
    assert {row["key"]: row["value"] for row in rows} == written
    *lines, _ = command("config", "explain", str(path), "--no-check").stdout.splitlines()
    printed = [(line[0], line[2:].split()[0]) for line in lines if line.startswith(("  ", "* "))]
    assert printed == [(" " if row["value"] == row["default"] else "*", row["key"]) for row in rows]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_round_trip(path: Path, tmp_path: Path) -> None:
    config = loading.load(path)
    assert load(tmp_path, knob_tree.to_toml(config)) == config


def test_explain_prints_dates_as_json() -> None:
    job = ["examples/dryrun.toml", "--json", "--no-check", "--set", "task.options.day=2026-01-02"]
    rows = json.loads(CliRunner().invoke(config_command, ["explain", *job]).stdout)
    assert {row["key"]: row["value"] for row in rows}["task.options"] == {"day": "2026-01-02"}


def test_explain_prints_no_warning_for_an_emulated_job() -> None:
    """An emulated job names no model and uses no data or reward."""
    result = CliRunner().invoke(config_command, ["explain", "examples/dryrun.toml"])
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_vocabulary_size_of_a_fetched_model_is_known_by_its_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    monkeypatch.setattr(model_files, "find_local_model", lambda name: tmp_path if name == "owner/name" else None)
    assert model_files.read_vocabulary_size("owner/name") == 77
    assert model_files.read_vocabulary_size("owner/other") == 0
