"""Copies a trainer's state to host memory, and runs the function that saves the copy in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


def copy_to_cpu(state: Any) -> Any:
    """Copy nested dicts and lists, and the tensors in them, to CPU memory. A tensor that occurs several times, such as
    tied weights, is copied once."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        storage_key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if storage_key not in copies:
            copies[storage_key] = value.detach().to("cpu", copy=True)
        return copies[storage_key]

    return copy(state)


def run_in_background(work: Callable[[], object]) -> Future[None]:
    """Call a function in a daemon thread. Returns a future that raises the function's error."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  whoever waits for it raises it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="resume-point", daemon=True).start()
    return future
