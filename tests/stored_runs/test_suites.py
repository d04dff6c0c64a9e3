"""Benchmark tasks of lm-eval: errors of the command, and results where lm-eval is installed."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.runtime.evaluation_results import read_suites, remove_evaluations_after, write_suite
from staleflow.pipeline.stored_runs import suites
from staleflow.pipeline.stored_runs.hub import model_card
from staleflow.pipeline.stored_runs.run_facts import read_facts
from staleflow.pipeline.stored_runs.suite_process import task_metrics
from staleflow.pipeline.stored_runs.suites import CODEC, SuiteMetric, SuiteSettings, as_evaluations, run_suite
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command

TASK = """
task: colors
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" red", " blue"]
doc_to_target: label
metric_list:
  - metric: acc
"""


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
        "exact_match_stderr,last": "N/A",
    }  # fmt: skip
    lines = [figure.line for figure in CODEC.decode(task_metrics("sums", results, 3), list[SuiteMetric])]
    assert lines == [
        "sums: acc 0.5000 ± 0.2500, 3-shot, 4 documents",
        "sums: exact_match (last) 1.0000, 3-shot, 4 documents",
    ]


def test_figures_of_a_checkpoint_are_kept_until_its_run_resumes_before_it(tmp_path: Path) -> None:
    metric = SuiteMetric(
        task="gsm8k", metric="exact_match", filter="strict", value=0.25, stderr=0.03, num_documents=200, num_shots=5
    )
    settings = SuiteSettings(model="m", tasks=("gsm8k",), limit=200, chat=True)
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
    monkeypatch.setattr(suites, "run_suite", lambda settings, python: [metric])
    end = command("eval", stored, "--tasks", "piqa")
    assert (end.returncode, end.stdout) == (0, "piqa: acc 0.5000 ± 0.1000, 0-shot, 20 documents\n")
    assert "compare` and the run page show it" in end.stderr
    (suite,) = read_suites(stored)
    facts = read_facts(stored, VersionedStore.open(stored / "store"), "one", {})
    (shown,) = (e for e in facts.evaluations if e.set == "piqa acc, 0-shot")
    assert (shown.version, shown.reward, shown.stderr) == (suite.version, 0.5, 0.1)
    assert f"| {suite.version} | piqa acc, 0-shot | 0.500 ± 0.100 |" in model_card(stored, title="a model")


def test_a_task_folder_runs_and_an_unknown_task_gives_a_one_line_error(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows = [{"question": f"{i} is", "label": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "colors.yaml").write_text(TASK.format(folder=tmp_path))
    settings = SuiteSettings(model=str(tiny_model), tasks=("colors",), include=str(tmp_path), limit=3)
    (figure,) = run_suite(settings, sys.executable)
    assert (figure.task, figure.metric, figure.num_documents) == ("colors", "acc", 3)
    with pytest.raises(ConfigError, match="lm-eval has no task 'shapes'"):
        run_suite(SuiteSettings(model=str(tiny_model), tasks=("shapes",)), sys.executable)
