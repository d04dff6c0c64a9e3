"""Writing a trainer's state while it goes on training: a copy of it, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


def copied(state: Any) -> Any:
    """A copy of dicts and lists, and of the tensors in them, these in the processor's memory. Names of one tensor, as
    of tied weights, are names of one copy."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {key: copy(value) for key, value in thing.items()}
        if isinstance(thing, list):
            return [copy(value) for value in thing]
        if not isinstance(thing, torch.Tensor):
            return thing
        storage_key = (thing.data_ptr(), thing.dtype, thing.shape, thing.stride())
        if storage_key not in copies:
            copies[storage_key] = thing.detach().to("cpu", copy=True)
        return copies[storage_key]

    return copy(state)


def in_background(work: Callable[[], object]) -> Future[None]:
    """Do some work in a thread that does not keep the process from ending."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  whoever waits for it raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="resume-point", daemon=True).start()
    return done
