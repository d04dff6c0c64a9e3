"""Settings and fixtures shared by many tests: a tiny model on disk and a job that uses it."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from staleflow.pipeline.cluster import connection
from staleflow.pipeline.processes import local_cluster
from tests.support import browser, fork_server, forking
from tests.support.tiny_models import make_tiny_model

gc.disable()  # until all modules are imported: garbage collections take a quarter of that time
os.environ["OMP_NUM_THREADS"] = "1"  # processes that fork may have no other thread, and numpy starts some
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")

UNFREEZE = gc.unfreeze
objects_unfrozen = threading.Event()
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 6 * 2**30
"""Free memory in bytes above which test folders are kept in memory. Stores have hundreds of small files and every
commit waits for the disk: on ext4 copying a store costs four times the CPU time."""
if (
    "TMPDIR" not in os.environ
    and MEMORY.is_dir()
    and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) >= MEMORY_BYTES
):
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None  # imported by pytest already

slow_ok = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", max_examples=50, deadline=None, suppress_health_check=slow_ok)
settings.register_profile("quick", max_examples=10, deadline=None, suppress_health_check=slow_ok)
settings.register_profile("mutants", max_examples=30, deadline=None, suppress_health_check=slow_ok, derandomize=True)
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=slow_ok)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


HEAVIEST = (
    "jobs/test_jobs.py",
    "jobs/test_resume.py",
    "run_page/test_browser.py",
    "api/test_running.py",
    "stored_runs/test_bisection.py",
    "api/test_notebook.py",
    "cli/test_ctrl_c.py",
    "runtime/test_actor_failures.py",
    "stores/test_audit_findings.py",
    "stored_runs/test_offline.py",
    "stored_runs/test_verification.py",
    "tasks/test_ranks.py",
    "runtime/test_run.py",
    "cluster/test_tls_cluster.py",
    "jobs/test_bucket.py",
    "stores/test_bucket.py",
    "tasks/test_agents.py",
    "stored_runs/test_unlearning.py",
    "packaging/test_installed.py",
    "stores/test_spans.py",
    "stores/test_stores.py",
    "runtime/test_evaluation_runs.py",
)
"""The slowest files. Processes that divide the tests by file start with them, so that no process works alone for long
at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = config.rootpath / "tests"
    ranks = {folder / name: rank for rank, name in enumerate(HEAVIEST)}
    assert all(path.is_file() for path in ranks), "HEAVIEST lists missing files"
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test by the RUN function of its module, or by asyncio if it has none or runs in real time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    real_time = pyfuncitem.get_closest_marker("real_time") is not None
    run = asyncio.run if real_time else getattr(pyfuncitem.module, "RUN", asyncio.run)
    run(pyfuncitem.obj(**arguments))
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the objects of imported modules: with torch a full collection takes a second, and closing a transformers
    engine needs two. If a test samples from a model, local workers of all tests are forked from one process that has
    imported torch, so that results do not depend on the order of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.unfreeze = _unfreeze_until_teardown
    if any("tiny_model" in getattr(item, "fixturenames", ()) for item in session.items):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(session.config.rootpath), prepend=os.pathsep)
            modules = local_cluster.modules_to_preload(emulated=False)
            if any("job" in getattr(item, "fixturenames", ()) for item in session.items):  # there will be runs
                patch.setenv(forking.ADDRESS, forking.served())
                modules += fork_server.RUN_MODULES
                importlib.import_module("tests.support.blank_picture")
            local_cluster.start_fork_server(1, modules)


def _unfreeze_until_teardown() -> None:
    """Unfreeze all objects as gc.unfreeze does; they are frozen again after the test."""
    UNFREEZE()
    objects_unfrozen.set()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze the objects again that a driver has unfrozen, for the next full collection, and at the end of a module
    those that its tests have left."""
    if objects_unfrozen.is_set():  # gc.get_freeze_count() takes a tenth of a second: it counts all objects
        gc.collect(1)
    elif nextitem is not None and nextitem.path != item.path:
        gc.collect()
    else:
        return
    gc.freeze()
    objects_unfrozen.clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Name the tests that were skipped without a browser in the very last line."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    count = sum(browser.REASON in str(report.longrepr) for report in reporter.stats.get("skipped", []))
    if count:
        reporter.write_line(f"{count} tests of pages were left out: {browser.MISSING} not found on this machine")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with the demo's tokenizer, as `from_pretrained` reads it."""
    folder = tmp_path_factory.mktemp("tiny-model")
    make_tiny_model(folder)
    return folder


JOB = """
name = "job"
runs_dir = "{runs}"
steps = {steps}
seed = 3

[model]
path = "{model}"

[task]
source = "reasoning_gym:chain_sum"
options = {{ min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1 }}
eval_prompts = 8

[batch]
groups_per_step = 4
group_size = 4

[rollout]
max_new_tokens = 24

[rollout.engine]
max_running = 16
kv_tokens = 2048

[training]
learning_rate = 1e-3
minibatches = 2

[cluster]
dashboard = false

[deadlines]
call_s = 30
stuck_s = 60
"""


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> Path:
    """A job file of five small steps on the tiny model; its runs are in the folder of the test."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(runs=tmp_path / "runs", steps=5, model=tiny_model))
    return path


@pytest.fixture
def drawn_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw summary.png, which tests otherwise leave out."""
    from staleflow.pipeline.jobs import summary
    from tests.support import blank_picture

    monkeypatch.setattr(summary, "draw_summary", blank_picture.draw_summary)


@pytest.fixture
def short_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command gives up a scheduler that does not answer after a second."""
    monkeypatch.setattr(connection, "CONNECT_S", 1.0)
    monkeypatch.setattr(connection, "PROBE_AFTER_S", 0.2)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """An in-memory folder used by this test only."""
    with tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm") as folder:
        yield Path(folder)


REWARDS = """
def length(answer, record):
    return float(len(answer) % 3), {"letters": float(len(answer))}

def picky(answer, record):
    if len(answer) % 3 == 1:
        raise ValueError("not this one")
    return 1.0
"""


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a small finished run, which tests must not change; two folders above it is a file of rewards."""
    from tests.runtime.test_run import run

    folder = tmp_path_factory.mktemp("stored")
    (folder / "job.toml").write_text(JOB.format(runs=folder / "runs", steps=3, model=tiny_model))
    (folder / "mine.py").write_text(REWARDS)
    return run(folder / "job.toml", "task.eval_prompts=0", "batch.extra_members=1").run_dir


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, finished_run: Path) -> Path:
    """A copy of the finished run and of the files beside it for this module. Its tests may add branches."""
    folder = tmp_path_factory.mktemp("stored")
    shutil.copytree(finished_run.parents[1], folder, dirs_exist_ok=True)
    return folder / finished_run.relative_to(finished_run.parents[1])
