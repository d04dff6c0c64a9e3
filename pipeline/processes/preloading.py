"""Imported by the fork server, to import the modules of workers once. pipeline/processes/local_cluster.py names these
modules in an environment variable."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

if "STALEFLOW_PRELOAD" in os.environ:  # this is the server; it was started with SIGINT held back
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C means its caller, which ends it; its workers inherit that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
gc.disable()  # collections while modules are made take a quarter of the time that importing takes
os.environ.pop("PYTHONSAFEPATH", None)  # set for this process only; what workers start is as the caller has it
for module in filter(None, os.environ.pop("STALEFLOW_PRELOAD", "").split(",")):
    with contextlib.suppress(Exception):  # a worker that needs it imports it again, and tells what is wrong
        importlib.import_module(module)
with contextlib.suppress(ImportError):
    import numpy as np

    os.register_at_fork(after_in_child=np.random.seed)  # `random` does so by itself; torch's default seed is fixed
gc.collect()
gc.freeze()  # a collection in a worker would copy all of these pages
gc.enable()
