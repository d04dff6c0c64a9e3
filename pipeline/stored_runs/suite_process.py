"""The process that runs benchmark tasks with lm-eval. Imports no other module of staleflow, so any Python with lm-eval
can run this file.

It reads settings as JSON from its standard input (`suites.SuiteSettings`, and the file of the results) and writes JSON
to that file: a list of `suites.SuiteMetric`, or {"unknown_task": name}, or {"error": one line}.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the tasks."""
    settings = json.load(sys.stdin)
    try:
        result: Any = run_tasks(settings)
    except Exception as error:  # noqa: BLE001  lm-eval and its tasks may raise anything
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        result = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    Path(settings["results"]).write_text(json.dumps(result))


def run_tasks(settings: dict[str, Any]) -> Any:
    """Run the tasks on the model. Returns their metrics, or {"unknown_task": name}."""
    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=settings["include"] or None)
    for task in settings["tasks"]:
        if not manager.match_tasks([task]):
            return {"unknown_task": task}
    evaluation: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": settings["model"]},
        tasks=settings["tasks"],
        device="cuda" if torch.cuda.is_available() else "cpu",  # without one, it takes cuda on any machine
        num_fewshot=settings["shots"],
        limit=settings["limit"],
        batch_size=settings["batch_size"],
        apply_chat_template=settings["chat"],
        task_manager=manager,
    )
    return [
        metric
        for task, results in evaluation["results"].items()
        for metric in task_metrics(task, results, int(evaluation["n-shot"].get(task, 0)))
    ]


def task_metrics(task: str, results: dict[str, Any], num_shots: int) -> list[dict[str, Any]]:
    """The metrics of a task or group of tasks, from the result of simple_evaluate. Keys are METRIC,FILTER."""
    rows: list[dict[str, Any]] = []
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = results.get(f"{metric}_stderr,{filter_name}")
        rows.append(
            {
                "task": task,
                "metric": metric,
                "filter": filter_name,
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "num_documents": results.get("sample_len"),
                "num_shots": num_shots,
            }
        )
    return rows


if __name__ == "__main__":
    main()
