"""Benchmark tasks of lm-eval: errors of the command, and results where lm-eval is installed."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from staleflow.pipeline.runtime.evaluation_results import read_suites, remove_evaluations_after, write_suite
from staleflow.pipeline.stored_runs import suite_process, suites
from staleflow.pipeline.stored_runs.completions_probe import CompletionsServer
from staleflow.pipeline.stored_runs.hub import model_card
from staleflow.pipeline.stored_runs.run_facts import read_run_facts
from staleflow.pipeline.stored_runs.serving import make_serving_plan
from staleflow.pipeline.stored_runs.suite_process import (
    RefusalHandler,
    TaskRefused,
    check_room,
    count_shots,
    is_status_error,
    needs_bos_token,
    task_metrics,
)
from staleflow.pipeline.stored_runs.suites import (
    CODEC,
    SuiteMetric,
    SuiteSettings,
    as_evaluations,
    evaluate_plan,
    run_suite,
)
from staleflow.stores.errors import ConfigError, StoreError, SuiteFailed
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command
from tests.tasks.chat_models import chat_tokenizer

ROWS = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "choices": ROWS
    + """
output_type: multiple_choice
doc_to_choice: ["3", "7"]
doc_to_target: label
metric_list: [{{metric: acc}}]
""",
    "texts": ROWS
    + """
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["+", ";"], max_gen_toks: 12}}
filter_list:
  - name: digit
    filter: [{{function: regex, regex_pattern: "([0-9])"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
""",
    "documents": ROWS.replace('doc_to_text: "{{{{question}}}}"', "")
    + """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}{{{{answer}}}}"
metric_list: [{{metric: byte_perplexity}}]
""",
}
"""Tasks of lm-eval that send each kind of request."""
SAMPLING = {
    "sampled": "until: ['+'], max_gen_toks: 12, temperature: 0.5",
    "top_p": "until: ['+'], max_gen_toks: 12, temperature: 0.5, top_p: 0.9",
    "long": "until: ['+'], max_gen_toks: 100000",
}
"""Sampling parameters of tasks, by task."""


def test_a_missing_lm_eval_gives_a_one_line_error_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "CHECK_LM_EVAL_CODE", "raise SystemExit(1)")
    with pytest.raises(ConfigError, match=r"has no lm-eval: pip install 'staleflow\[eval\]'"):
        suites.check_lm_eval(sys.executable)
    with pytest.raises(ConfigError, match="cannot be run: No such file"):
        suites.check_lm_eval(str(tmp_path / "python"))


def test_suite_figures_have_each_metric_with_the_standard_error_of_its_filter() -> None:
    results = {
        "alias": "sums", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.25, "exact_match,last": 1,
        "exact_match_stderr,last": "N/A", "f1,none": np.float32(0.25),
    }  # fmt: skip
    lines = [figure.line for figure in CODEC.decode(task_metrics("sums", results, 3), list[SuiteMetric])]
    assert lines == [
        "sums: acc 0.5000 ± 0.2500, 3-shot, 4 documents",
        "sums: exact_match (last) 1.0000, 3-shot, 4 documents",
        "sums: f1 0.2500, 3-shot, 4 documents",
    ]


def test_a_group_has_the_shots_of_its_tasks_if_they_are_equal() -> None:
    groups = {"all": ["stem", "other"], "stem": ["physics", "logic"], "other": ["law"], "mixed": ["law", "essays"]}
    evaluation = {"group_subtasks": groups, "n-shot": {"physics": 5, "logic": 5, "law": 5, "stem": 5, "essays": 0}}
    assert [count_shots(task, evaluation) for task in ("all", "stem", "mixed", "essays")] == [5, 5, None, 0]
    (row,) = task_metrics("mixed", {"acc,none": 0.5}, None)
    assert CODEC.decode(row, SuiteMetric).line == "mixed: acc 0.5000, several shots"


def test_only_an_http_error_is_explained_by_the_last_refusal() -> None:
    class StatusError(Exception):
        status = 503

    assert is_status_error(StatusError())
    assert not is_status_error(KeyError("doc_to_text"))


def test_figures_of_a_checkpoint_are_kept_until_its_run_resumes_before_it(tmp_path: Path) -> None:
    metric = SuiteMetric(
        task="gsm8k", metric="exact_match", filter="strict", value=0.25, stderr=0.03, num_documents=200, num_shots=5
    )
    settings = SuiteSettings(tasks=("gsm8k",), limit=200, chat=True)
    assert read_suites(tmp_path) == []
    for version, value in ((10, 0.1), (20, 0.2), (20, 0.3)):  # the last one is run again
        figures = [replace(metric, value=value), replace(metric, metric="acc", value=math.nan)]
        write_suite(tmp_path, as_evaluations(figures, settings, version))
    other = as_evaluations([replace(metric, task="piqa", filter="none")], replace(settings, chat=False, limit=None), 20)
    again = as_evaluations([replace(metric, value=0.3)], settings, 20)
    write_suite(tmp_path, [*other, *again])
    (tmp_path / "evaluations" / "suite-copy-of.json").touch()
    name = "gsm8k exact_match (strict), 5-shot, chat, first 200"
    expected = [(10, name, 0.1), (20, name, 0.3), (20, "piqa exact_match, 5-shot", 0.25)]
    mixed = [as_evaluations([replace(metric, num_shots=None)], replace(settings, shots=n), 20)[0].name for n in (2, 5)]
    assert len(set(mixed)) == 2
    (included,) = as_evaluations([metric], replace(settings, include="my/tasks"), 20)  # of the same name
    assert included.name == f"{name}, with tasks"
    assert sorted((e.version, e.name, e.greedy) for e in read_suites(tmp_path)) == expected
    assert {(e.sampled_text, e.greedy_text) for e in read_suites(tmp_path)} >= {("-", "0.100 ± 0.030")}
    remove_evaluations_after(tmp_path, 10)
    assert [e.version for e in read_suites(tmp_path)] == [10]
    next((tmp_path / "evaluations").glob("suite-000010-*")).write_text("{")
    with pytest.raises(StoreError, match=r"suite-000010-\w+\.json: cannot be read: .*; remove it"):
        read_suites(tmp_path)


def test_the_command_keeps_the_figures_of_a_run(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the comparison with another run, and in the model card."""
    metric = SuiteMetric(task="piqa", metric="acc", filter="none", value=0.5, stderr=0.1, num_documents=20, num_shots=0)
    monkeypatch.setattr(suites, "check_lm_eval", lambda python: None)

    async def evaluate_plan(
        plan: Any, settings: SuiteSettings, python: str, *, url: str, key: str
    ) -> list[SuiteMetric]:
        return [metric]

    monkeypatch.setattr(suites, "evaluate_plan", evaluate_plan)
    elsewhere = command("eval", stored, "--tasks", "piqa", "--url", "http://localhost:1/v1")
    assert elsewhere.stdout.startswith("piqa: acc 0.5000")
    assert read_suites(stored) == []  # of a server that may have another policy
    end = command("eval", stored, "--tasks", "piqa")
    assert (end.returncode, end.stdout) == (0, "piqa: acc 0.5000 ± 0.1000, 0-shot, 20 documents\n")
    assert "compare` and the run page show it" in end.stderr
    (suite,) = read_suites(stored)
    facts = read_run_facts(stored, VersionedStore.open(stored / "store"), "one", {})
    (shown,) = (e for e in facts.evaluations if e.set == "piqa acc, 0-shot")
    assert (shown.version, shown.reward, shown.stderr) == (suite.version, 0.5, 0.1)
    assert f"| {suite.version} | piqa acc, 0-shot | 0.500 ± 0.100 |" in model_card(stored, title="a model")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks. Skips the test where lm-eval is not installed."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows = [{"question": f"{i}+{j}=", "label": (i + j) % 2, "answer": str(i % 10)} for i in range(3) for j in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for task, text in TASKS.items():
        (tmp_path / f"{task}.yaml").write_text(text.format(task=task, folder=tmp_path))
    for task, parameters in SAMPLING.items():
        text = TASKS["texts"].format(task=task, folder=tmp_path)
        (tmp_path / f"{task}.yaml").write_text(f"{text}generation_kwargs: {{{parameters}, do_sample: true}}")
    return tmp_path


@pytest.mark.timeout(1200)
async def test_figures_are_those_of_lm_eval_with_the_model_loaded_by_transformers(
    tasks: Path, tiny_model: Path
) -> None:
    """For choices, texts, and logprobs of whole documents."""
    settings = SuiteSettings(tasks=tuple(TASKS), include=str(tasks), limit=25)
    figures = await evaluate_plan(make_serving_plan(str(tiny_model)), settings, sys.executable)
    import lm_eval

    own: Any = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(tiny_model), "dtype": "float32"}, tasks=list(TASKS), device="cpu",
        limit=25, task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
    )  # fmt: skip
    assert {figure.task for figure in figures} == set(TASKS)
    for figure in figures:
        expected = own["results"][figure.task][f"{figure.metric},{figure.filter}"]
        assert figure.value == pytest.approx(expected, rel=1e-4), figure
        assert figure.num_documents == 25
    (chosen,) = (figure.value for figure in figures if figure.task == "choices")
    assert 0 < chosen < 1


@pytest.mark.timeout(1200)
async def test_a_task_that_cannot_run_gives_a_one_line_error(tasks: Path, tiny_model: Path) -> None:
    plan, settings = make_serving_plan(str(tiny_model)), SuiteSettings(tasks=("shapes",), include=str(tasks))
    with pytest.raises(ConfigError, match="lm-eval has no task 'shapes'"):
        await evaluate_plan(plan, settings, sys.executable)
    with pytest.raises(SuiteFailed, match="lm-eval failed: the server refused a request: top_p: a served policy"):
        await evaluate_plan(plan, replace(settings, tasks=("top_p",)), sys.executable)
    with pytest.raises(ConfigError, match="--tasks: long: its responses may have max_gen_toks = 100000 tokens"):
        await evaluate_plan(plan, replace(settings, tasks=("long",)), sys.executable)
    (sampled,) = await evaluate_plan(plan, replace(settings, tasks=("sampled",), limit=4), sys.executable)
    assert (sampled.task, sampled.num_documents) == ("sampled", 4)


@pytest.mark.parametrize(("parameters", "tokens"), [({"max_gen_toks": 511}, 511), ({"max_gen_toks": 600}, 600)])
def test_a_task_whose_responses_leave_no_room_for_prompts_is_refused(parameters: dict[str, int], tokens: int) -> None:
    """lm-eval cut the starts of prompts, or nothing, without a word."""
    short, long = (SimpleNamespace(task_name=name, args=("a", {"max_gen_toks": 510} | more))
                   for name, more in (("short", {}), ("long", parameters)))  # fmt: skip
    check_room([short, SimpleNamespace(task_name="default", args=("a", {}))], 256, 512)
    with pytest.raises(
        TaskRefused, match=rf"long: .* max_gen_toks = {tokens} .* 512 .*; lower it in a copy of the task"
    ):
        check_room([short, long], 256, 512)
    with pytest.raises(TaskRefused, match=r"default: .* max_gen_toks = 256 "):
        check_room([SimpleNamespace(task_name="default", args=("a", {}))], 256, 257)


def test_the_reason_of_a_refused_request_is_kept_from_lm_evals_log() -> None:
    handler = RefusalHandler()
    body = json.dumps({"error": {"message": 'stop: "a" is\ntoo long', "code": "invalid"}})
    for text in ("it starts", f"API request failed! Status code: 400, Response text: {body}. Retrying...", "it ends"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    assert handler.reason == 'the server refused a request: stop: "a" is\ntoo long'
    handler.handle(logging.makeLogRecord({"msg": 'API request failed! "message": "two\nlines"'}))
    handler.handle(logging.makeLogRecord({"msg": r'API request failed! "message": "no \JSON"'}))
    assert handler.reason == "the server refused a request: two\nlines"


def test_prompts_get_a_first_token_if_the_tokenizer_adds_one_and_the_template_does_not(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("llama3")  # its template begins with the first token
    tokenizer.save_pretrained(tmp_path)
    assert not needs_bos_token(str(tmp_path), chat=False)
    first = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer.save_pretrained(tmp_path)
    assert needs_bos_token(str(tmp_path), chat=False)
    assert not needs_bos_token(str(tmp_path), chat=True)


async def test_a_cancelled_suite_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, started = tmp_path / "program.py", tmp_path / "started"
    program.write_text(f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
                       "time.sleep(600)\n")  # fmt: skip
    monkeypatch.setattr(suite_process, "__file__", str(program))
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    server = CompletionsServer(url="", key="", model="", tokenizer="", context=8, concurrency=1)
    task = asyncio.ensure_future(run_suite(SuiteSettings(tasks=("a",)), server, sys.executable))
    async with asyncio.timeout(120):
        while not started.exists() or not started.read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait({task})
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
