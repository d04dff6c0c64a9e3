"""Imported by the fork server, to import the modules of workers once. pipeline/processes/local_cluster.py names these
modules in an environment variable."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

if "STALEFLOW_PRELOAD" in os.environ:  # this process is the fork server, and was started with SIGINT blocked
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C; workers inherit this
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
gc.disable()  # collections would take a quarter of the time of the imports
os.environ.pop("PYTHONSAFEPATH", None)  # only for this process; child processes of workers get the caller's setting
for module in filter(None, os.environ.pop("STALEFLOW_PRELOAD", "").split(",")):
    with contextlib.suppress(Exception):  # a worker that needs the module imports it again and reports the error
        importlib.import_module(module)
with contextlib.suppress(ImportError):
    import numpy as np

    os.register_at_fork(after_in_child=np.random.seed)  # `random` reseeds itself; torch's default seed is fixed
gc.collect()
gc.freeze()  # a collection in a worker would copy all of these pages
gc.enable()
