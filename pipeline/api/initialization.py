"""Writes a first job for a new user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.first_job import FirstJob, InitInputs, write_first_job
from staleflow.pipeline.processes import local_cluster


def init(
    folder: str | Path,
    *,
    data: str = "",
    model: str = "",
    reward: str = "",
    options: Mapping[str, Any] | None = None,
    prompt_column: str = "",
    answer_column: str = "",
    progress: Callable[[str], None] = print,
) -> FirstJob:
    """Write a commented job file into a folder, and a default data set, reward or model for each that is not given.

    Without any: made-up sums, a reward to edit, and a tiny Llama that is pretrained in half a minute. `load_job`, `run`
    and `start` take the job file. Nothing that exists is overwritten.

    Args:
        folder: Where to write; created if it does not exist.
        data: A .jsonl or .parquet file, a folder or hub name of `datasets`, or a task source such as `textarena:GAME`.
        model: Folder or hub name of a causal LM with its tokenizer.
        reward: `exact`, `math_verify`, or `path/to/file.py:NAME`.
        options: Arguments of the data set, such as `{"split": "train"}`.
        prompt_column: Where rows have their prompt, if it cannot be found.
        answer_column: Where rows have their answer, if it cannot be found.
        progress: Receives a line for each stage that takes long.

    Returns:
        The files that were written, and the first prompt as the model receives it.

    Raises:
        ConfigError: Something named cannot be used, or a file exists already.
    """
    local_cluster.set_process_environment(1)
    inputs = InitInputs(
        data=data,
        model=model,
        reward=reward,
        options=dict(options or {}),
        prompt_column=prompt_column,
        answer_column=answer_column,
    )
    return write_first_job(Path(folder), inputs, progress)
