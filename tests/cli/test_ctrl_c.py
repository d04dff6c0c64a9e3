"""Ctrl-C in a real terminal, which sends it to the workers too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.repository import repository_at
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.support.terminal import Terminal, terminal

EMULATED = """
name = "job"
runs_dir = "runs"
steps = 4000

[batch]
groups_per_step = 2
group_size = 2

[rollout]
instances = 1
max_new_tokens = 64

[rollout.engine]
name = "emulated"

[simulation]
train_s = {train_s}
pull_s = 0.02

[cluster]
dashboard = false
"""
WRONG = ("Traceback", "Error", "CancelledError", "is gone")


def assert_orderly_end(shown: Terminal) -> None:
    assert shown.end() == 130, shown.text
    assert not [word for word in WRONG if word in shown.text], shown.text


def emulated(folder: Path, train_s: float) -> Path:
    path = folder / "job.toml"
    path.write_text(EMULATED.format(train_s=train_s))
    return path


def test_the_first_interrupt_ends_a_run_in_order_and_it_can_be_resumed(tmp_path: Path) -> None:
    folder = emulated(tmp_path, 0.3).parent
    for args in (("run", "job.toml"), ("resume", "runs/job")):
        with terminal(*args, cwd=folder) as shown:
            shown.until(r"step\s+([2-9]|[1-9]\d+)/4000")
            shown.ctrl_c()
            assert_orderly_end(shown)
            assert "interrupted: stopping; Ctrl-C again ends at once" in shown.text
            assert "staleflow resume runs/job" in shown.text
            assert "staleflow store show" in shown.text
        store = VersionedStore.open(folder / "runs" / "job" / "store")
        assert store.commits()[-1].kind == "end"
        assert audit(store).findings == ()


@pytest.mark.parametrize("cpu_s", [0.3, 1.0])
def test_an_interrupt_before_the_first_step_ends_a_run(tmp_path: Path, cpu_s: float) -> None:
    with terminal("run", emulated(tmp_path, 1.0), cwd=tmp_path, forked=False) as shown:
        shown.until_computed(cpu_s)
        shown.ctrl_c()
        assert_orderly_end(shown)
        assert "interrupted" in shown.text
    if "before the first step" in shown.text:  # else before the run, or in it
        begun = (tmp_path / "runs" / "job" / "store").is_dir()
        assert ("`staleflow resume " if begun else "the same command begins it again") in shown.text


def test_the_second_interrupt_ends_a_run_at_once(tmp_path: Path) -> None:
    with terminal("run", emulated(tmp_path, 100_000.0), cwd=tmp_path) as shown:
        shown.until("4 consumed")  # the first batch is being trained on
        shown.ctrl_c()
        shown.until("stopping")
        shown.ctrl_c()
        assert_orderly_end(shown)
        assert "ended at once" in shown.text


def test_an_interrupt_ends_a_simulation(tmp_path: Path) -> None:
    with terminal("simulate", emulated(tmp_path, 1.0), "--set", "steps=10000000", cwd=tmp_path) as shown:
        shown.until_computed(2.0)
        shown.ctrl_c()
        assert_orderly_end(shown)
        assert "interrupted" in shown.text


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_chat_that_waits_for_input(
    tiny_model: Path, tmp_path: Path, signal_number: int, code: int
) -> None:
    with terminal("chat", tiny_model, cwd=tmp_path) as shown:
        shown.until("> $")
        if signal_number == signal.SIGINT:
            shown.ctrl_c()
        else:
            shown.process.send_signal(signal_number)
        assert shown.end() == code, shown.text
        assert not [word for word in WRONG if word in shown.text], shown.text


def test_a_key_of_the_user_is_not_printed(tiny_model: Path, tmp_path: Path) -> None:
    with terminal("serve", tiny_model, "--port", "0", "--key", "sesame", cwd=tmp_path) as shown:
        shown.until("OPENAI_BASE_URL=http.*Ctrl-C ends it")
        shown.ctrl_c()
        assert_orderly_end(shown)
    assert "sesame" not in shown.text


SLOW = """
import pathlib, time

def slow(answer, record):
    pathlib.Path("{begun}").touch()
    time.sleep(2)
    return 1.0
"""


def test_an_interrupt_ends_rescoring_and_leaves_no_branch(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    (tmp_path / "slow.py").write_text(SLOW.format(begun=tmp_path / "begun"))
    words = ("store", "rescore", run, "--reward", f"{tmp_path}/slow.py:slow", "--branch", "slow")
    with terminal(*words, cwd=tmp_path) as shown:
        shown.until_there(tmp_path / "begun")
        shown.ctrl_c()
        assert_orderly_end(shown)
        assert "interrupted" in shown.text
    assert "slow" not in repository_at(run / "store").list_branches()


COMMAND = """
import click, sys
from staleflow.cli import main
if __name__ == "__main__":
    main.cli = click.Command("staleflow", callback=callback)
    sys.argv = ["staleflow"]
    main.entry()
"""


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script whose function `callback` is the command."""
    (folder / "signalled.py").write_text(f"{script}\n{COMMAND}")
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{folder}"}
    command = [sys.executable, "-m", "signalled"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_exit_code_is_130_wherever_the_interrupt_occurs(tmp_path: Path) -> None:
    """Also in code created at run time, where the interrupt is remembered until exit."""
    script = """
CODE = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(30)"
def callback():
    exec(CODE)
"""
    result = run_script(script, tmp_path)
    assert (result.returncode, result.stderr.strip()) == (130, "staleflow: interrupted")


WITHIN_AN_IMPORT = "import swallowing"
WITHIN_A_FINALIZER = """
class Freed:
    def __del__(self):
        kill()
Freed()
"""


WHILE_IT_IS_HELD_BACK = """
import swallowing
from staleflow.pipeline.processes.local_cluster import _sigint_deferred
with _sigint_deferred():
    import time; time.sleep(1)
"""


@pytest.mark.parametrize(
    ("where", "name", "code"),
    [
        (WITHIN_AN_IMPORT, "SIGINT", 130),
        (WITHIN_AN_IMPORT, "SIGTERM", 143),
        (WITHIN_A_FINALIZER, "SIGTERM", 143),
        (WHILE_IT_IS_HELD_BACK, "SIGINT", 130),
    ],
)
def test_a_signal_is_not_lost_in_code_that_ignores_all_errors(name: str, code: int, where: str, tmp_path: Path) -> None:
    """Occasionally the signal was lost and the run continued."""
    (tmp_path / "swallowing.py").write_text(
        "from signalled import kill\ntry:\n    kill()\nexcept BaseException:\n    pass"
    )
    script = f"""
import os, signal

def kill():
    os.kill(os.getpid(), signal.{name})
    for _ in range(1000):
        pass

CODE = {where!r} + "\\nimport time; time.sleep(60)"
def callback():
    exec(CODE)
"""
    result = run_script(script, tmp_path)
    shown = "staleflow: interrupted" if name == "SIGINT" else ""
    assert (result.returncode, result.stderr.strip()) == (code, shown)


def test_a_signal_during_imports_reaches_the_run(tmp_path: Path) -> None:
    """The wakeup pipe of the event loop received an alarm every 20 ms during the import and lost the signal when it was
    full."""
    (tmp_path / "importing.py").write_text(
        "import time\nuntil = time.monotonic() + 1\nwhile time.monotonic() < until:\n    pass\n"
    )
    (tmp_path / "early.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    script = """
import asyncio, socket
from staleflow.pipeline.jobs.execution import StoppedBeforeStart, StopRequest, stopped_by_signals

make_pair = socket.socketpair

def make_small_pair():  # full after a few alarms
    pair = make_pair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return pair

socket.socketpair = make_small_pair

async def run():
    with StopRequest() as stop, stopped_by_signals(stop, print, lambda: print("at once")):
        import importing
        await asyncio.sleep(60)

def callback():
    import early  # the signal comes during an import, before anything else listens
    try:
        asyncio.run(run())
    except StoppedBeforeStart as stopped:
        print(stopped)
"""
    result = run_script(script, tmp_path)
    text = "interrupted: stopping; Ctrl-C again ends at once\ninterrupted\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, text, "")


def test_the_exit_code_is_kept_if_a_thread_aborts_at_exit(tmp_path: Path) -> None:
    """Library threads may abort the process at exit; atexit functions still run."""
    script = """
import atexit, os
class Aborts:
    def __del__(self, abort=os.abort):
        abort()
keep = Aborts()
def callback():
    atexit.register(print, "cleaned up")
    print("done")
    sys.exit(3)
"""
    result = run_script(script, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (3, "done\ncleaned up\n", "")
