"""The process that runs benchmark tasks with lm-eval, on a server. Imports no other module of staleflow, so any Python
with lm-eval can run this file.

It reads settings as JSON from its standard input (`suites.SuiteSettings`, `completions_probe.CompletionsServer`, and
the file of the results) and writes JSON to that file: a list of `suites.SuiteMetric`, or {"refusal": one line} for
the user to correct, or {"error": one line}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import numbers
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPLY_TIMEOUT_S = 86_400
"""Seconds that lm-eval waits for a reply. A slow machine is no error."""


def main() -> None:
    """Run the tasks."""
    settings = json.load(sys.stdin)
    refusals = RefusalHandler()
    logging.getLogger("lm_eval").addHandler(refusals)
    try:
        result: Any = run_tasks(settings)
    except TaskRefused as refusal:
        result = {"refusal": str(refusal)}
    except Exception as error:  # noqa: BLE001  lm-eval and its tasks may raise anything
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = refusals.reason if is_status_error(error) else ""
        result = {"error": reason or f"{type(error).__name__}: {lines[0] if lines else ''}"}
    Path(settings["results"]).write_text(json.dumps(result), "utf-8")


def is_status_error(error: Exception) -> bool:
    """Whether an error of requests or aiohttp has the HTTP status of a reply."""
    return hasattr(error, "status") or getattr(error, "response", None) is not None


class TaskRefused(Exception):
    """A task cannot be run as it was asked for."""


class RefusalHandler(logging.Handler):
    """Keeps the server's last reason for refusing a request. lm-eval logs it; its error has the status alone."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.search(r'API request failed.*"message": ?("(?:[^"\\]|\\.)*")', record.getMessage(), re.DOTALL):
            with contextlib.suppress(ValueError):  # a foreign server's reply may be no JSON
                self.reason = f"the server refused a request: {json.loads(match[1], strict=False)}"


def run_tasks(settings: dict[str, Any]) -> Any:
    """Run the tasks on the model. Returns their metrics. Raises TaskRefused."""
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    class ServedModel(LocalCompletionsAPI):  # type: ignore[misc]  # lm-eval has no types
        """Is greedy unless a task sets do_sample = true, as lm-eval's own models are."""

        def _create_payload(
            self, messages: Any, generate: bool = False, gen_kwargs: Any = None, **fields: Any
        ) -> dict[str, Any]:
            if generate and not gen_kwargs.get("do_sample"):
                gen_kwargs = {**gen_kwargs, "temperature": 0}
            payload: dict[str, Any] = super()._create_payload(messages, generate, gen_kwargs, **fields)
            return payload

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            check_room(requests, self._max_gen_toks, server["context"])
            return super().generate_until(requests, disable_tqdm)

    server = settings["server"]
    manager = TaskManager(include_path=settings["include"] or None)
    tasks = {pattern: manager.match_tasks([pattern]) for pattern in settings["tasks"]}
    for pattern, names in tasks.items():
        if not names:
            raise TaskRefused(
                f"--tasks: lm-eval has no task {pattern!r}; `lm-eval ls tasks` lists them, --include adds a folder"
            )
    evaluation: Any = lm_eval.simple_evaluate(
        model=ServedModel(
            base_url=f"{server['url']}/completions",
            model=server["model"],
            tokenizer=server["tokenizer"],
            tokenizer_backend="huggingface",
            add_bos_token=needs_bos_token(server["tokenizer"], chat=settings["chat"]),
            max_length=server["context"],
            num_concurrent=server["concurrency"],
            timeout=REPLY_TIMEOUT_S,
            batch_size=1,  # the server itself batches what it is sent
        ),
        tasks=list(dict.fromkeys(name for names in tasks.values() for name in names)),
        num_fewshot=settings["shots"],
        limit=settings["limit"],
        gen_kwargs={"seed": None},  # lm-eval sends one with each request; a served policy that samples refuses it
        apply_chat_template=settings["chat"],
        task_manager=manager,
    )
    return [
        metric
        for task, results in evaluation["results"].items()
        for metric in task_metrics(task, results, count_shots(task, evaluation))
    ]


def count_shots(task: str, evaluation: Mapping[str, Any]) -> int | None:
    """Examples in each prompt of a task or group of tasks; None if they differ between the tasks of a group."""
    members = evaluation["group_subtasks"].get(task)
    if not members:
        return int(evaluation["n-shot"].get(task, 0))
    first, *others = {count_shots(member, evaluation) for member in members}
    return None if others else first


def check_room(requests: Any, default_tokens: int, context: int) -> None:
    """Raise TaskRefused if lm-eval would leave no token of a prompt, or cut it at a wrong place without a word, because
    responses may be as long as the context. default_tokens: maximum length where a task has none."""
    for request in requests:
        tokens = request.args[1].get("max_gen_toks", default_tokens)
        if tokens >= context - 1:
            raise TaskRefused(
                f"--tasks: {request.task_name}: its responses may have max_gen_toks = {tokens} tokens, which leaves "
                f"prompts none of the {context} of both (rollout.engine.kv_tokens, or the model's context); lower it "
                "in a copy of the task in a folder for --include"
            )


def needs_bos_token(tokenizer_path: str, *, chat: bool) -> bool:
    """Whether prompts get a first token before their text, as with lm-eval's own models: where the tokenizer adds one
    and the chat template does not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    text = "a"
    if chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    first_token = tokenizer.bos_token
    return bool(
        first_token and tokenizer(text).input_ids[0] == tokenizer.bos_token_id and not text.startswith(first_token)
    )


def task_metrics(task: str, results: dict[str, Any], num_shots: int | None) -> list[dict[str, Any]]:
    """The metrics of a task or group of tasks, from its part of the results of simple_evaluate, by METRIC,FILTER."""
    rows: list[dict[str, Any]] = []
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, numbers.Real):
            continue
        stderr = results.get(f"{metric}_stderr,{filter_name}")
        rows.append(
            {
                "task": task,
                "metric": metric,
                "filter": filter_name,
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, numbers.Real) else None,
                "num_documents": results.get("sample_len"),
                "num_shots": num_shots,
            }
        )
    return rows


if __name__ == "__main__":
    main()
