"""Benchmark tasks of lm-eval: errors of the command, and results where lm-eval is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from staleflow.pipeline.stored_runs import suites
from staleflow.pipeline.stored_runs.suite_process import task_metrics
from staleflow.pipeline.stored_runs.suites import CODEC, SuiteMetric, SuiteSettings, run_suite
from staleflow.stores.errors import ConfigError

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
