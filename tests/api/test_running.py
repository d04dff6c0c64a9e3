"""Jobs run from Python: in the background, until their end, in a coroutine, on a given cluster."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

import staleflow
from staleflow.pipeline.api.run_handle import RunHandle, RunProgress
from staleflow.pipeline.config import preflight
from staleflow.pipeline.jobs.execution import StoppedBeforeStart
from staleflow.stores.errors import ConfigError, RunStuck
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from staleflow.tasks.sources import reward_process
from tests.support import forking

ROWS = [{"prompt": f"{i}+{k}=", "answer": str(i + k)} for i in range(10) for k in range(4)]
LENGTH = 3
SUMMARY = {
    "steps": 2, "reward_first": 0.25, "reward_last": 0.5, "evaluations": [], "staleness_histogram": {"0": 4},
    "eta": 1, "tokens_per_s": 10.0, "seconds": {},
}  # fmt: skip


def answer_distance(text: str) -> float:
    return float(len(text) % LENGTH)


def reward(text: str, row: Mapping[str, Any]) -> float:
    return answer_distance(text) + 0.5 * ("answer" in row)


def emulated(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job without a model, defined as in a notebook."""
    return {
        "name": "emulated",
        "runs_dir": folder / "runs",
        "steps": 4,
        "batch": {"groups_per_step": 4, "group_size": 2},
        "rollout": {"engine": {"name": "emulated", "time_scale": 100.0}},
        "cluster": {"dashboard": False},
    } | changes


@pytest.fixture(autouse=True)
def forked_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork reward processes from one that has imported their modules."""
    monkeypatch.setenv(forking.ADDRESS, forking.served())
    monkeypatch.setattr(reward_process, "subprocess", forking.SUBPROCESS)


def test_rows_and_a_local_reward_function_train_a_model(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = staleflow.run(job, overrides={"steps": 3, "task.eval_prompts": 4}, rows=ROWS, reward=reward)
    assert result.stop_reason == ""
    assert result.summary["steps"] == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["0/3", "1/3", "2/3"]
    stored = VersionedStore.open(result.run_dir / "store")
    rows = [row.trajectory for row in stored.trajectories() if row.fate is Fate.CONSUMED]
    assert len(rows) == 3 * 16
    assert {row.reward % 1 for row in rows} == {0.5}
    assert [json.loads(line) for line in (result.run_dir / "rows.jsonl").read_text().splitlines()] == ROWS
    code = result.run_dir / "code" / "reward_reward.py"
    assert "return answer_distance(text)" in code.read_text()
    kept = result.run.job
    assert kept.reward.function == f"{code}:reward"
    assert kept.task.source == f"jsonl:{result.run_dir}/rows.jsonl"
    assert result.run.audit().is_clean
    assert "steps 3" in str(result)


def test_a_started_run_can_be_watched_stopped_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    third = threading.Event()

    def watch(status: staleflow.RunStatus) -> None:
        if status.step >= 3:
            third.set()

    handle = staleflow.start(emulated(tmp_path, steps=200), progress=watch)
    assert third.wait(120)
    status = handle.status()
    assert status.state == "running"
    assert status.step >= 3
    assert status.steps == 200
    assert status.remaining_s is not None and status.remaining_s > 0
    assert f"step {status.step}/200" in str(status)
    with pytest.raises(TimeoutError, match="it goes on: running"):
        handle.result(timeout_s=0)
    handle.stop("seen enough")
    result = handle.result()
    assert result.stop_reason == "seen enough"
    assert handle.done
    done = handle.status()
    assert (done.state, done.message, done.remaining_s) == ("stopped", "seen enough", None)
    steps = len(handle.run.steps())
    assert 3 <= steps < 200
    with pytest.raises(ConfigError, match="eta=3: cannot be changed when resuming"):
        staleflow.resume(handle.run_dir, ["staleness.eta=3"])
    capsys.readouterr()
    resumed = staleflow.resume(handle.run_dir, {"steps": steps + 2})
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert printed == [f"{step}/{steps + 2}" for step in (steps, steps + 1)]
    assert resumed.stop_reason == ""
    assert len(resumed.run.steps()) == steps + 2


def test_an_interrupt_stops_the_run_in_order(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    interrupted: list[staleflow.RunStatus] = []

    def interrupt(status: staleflow.RunStatus) -> None:
        if status.step >= 2 and not interrupted:
            interrupted.append(status)
            signal.pthread_kill(main, signal.SIGINT)

    result = staleflow.run(emulated(tmp_path, steps=500), progress=interrupt)
    assert result.stop_reason == "interrupted"
    assert 2 <= result.summary["steps"] < 500


class LastInstance:
    """A routing rule defined in a notebook."""

    def choose(self, work: Any, loads: Any, fitting: Any) -> int | None:
        rows = fitting.nonzero()[0]
        return int(rows[-1]) if len(rows) else None

    def takes(self, work: Any, running: Any, kv_tokens: Any) -> bool:
        return True


def test_run_async_returns_the_result_and_dask_computes_afterwards(tmp_path: Path) -> None:
    """Placing several actors at once left Dask's global scheduler set without a client."""
    result = asyncio.run(staleflow.run_async(emulated(tmp_path), progress=False))
    assert result.summary["steps"] == 4
    assert dask.config.get("scheduler", None) is None
    assert result.run.to_dask(texts=False).reward.count().compute() > 0


class NoNetwork:
    """A tracker that fails at the first step."""

    def __init__(self, run_dir: str, job: dict[str, Any]) -> None:
        pass

    def step(self, step: int, metrics: dict[str, float]) -> None:
        raise OSError("no network")

    def close(self) -> None:
        pass


def test_of_two_parallel_runs_one_has_a_local_routing_rule_and_a_failing_tracker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule is replayed, and the tracker stops neither run."""
    local = staleflow.start(
        emulated(tmp_path), overrides=["name=one"], progress=True, routing=LastInstance, tracker=NoNetwork
    )
    results = [handle.result() for handle in (local, staleflow.start(emulated(tmp_path), overrides=["name=two"]))]
    assert [result.summary["steps"] for result in results] == [4, 4]
    assert all(result.run.audit().is_clean for result in results)
    rule = results[0].run.job.rollout.routing
    assert rule.name == f"{results[0].run_dir}/code/routing_LastInstance.py:LastInstance"
    assert results[0].run.replay().difference == ""
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: tracker")]
    assert warnings == ["warning: tracker NoNetwork failed and is not called again: OSError('no network')"]


def test_an_existing_run_name_is_rejected_at_once(tmp_path: Path) -> None:
    (tmp_path / "runs" / "emulated").mkdir(parents=True)
    (tmp_path / "runs" / "emulated" / "events.jsonl").write_text("something\n")
    with pytest.raises(ConfigError, match="already has a run"):
        staleflow.start(emulated(tmp_path))


def test_a_run_stopped_before_its_start_has_no_result(tmp_path: Path) -> None:
    handle = staleflow.start(emulated(tmp_path, steps=100))
    handle.stop("never mind")
    with pytest.raises(StoppedBeforeStart, match="never mind"):
        handle.result()
    assert handle.status().state == "stopped"


def test_an_interrupt_during_the_check_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[RunHandle] = []

    def interrupt(handle: RunHandle) -> None:
        handles.append(handle)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunHandle, "wait_until_checked", interrupt)
    with pytest.raises(KeyboardInterrupt):
        staleflow.start(emulated(tmp_path))
    with pytest.raises(StoppedBeforeStart, match="interrupted"):
        handles[0].result()


def test_any_error_of_the_check_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: staleflow.Job) -> list[str]:
        raise ValueError("a fault of the check")

    monkeypatch.setattr(preflight, "check_job", fail)
    with pytest.raises(ValueError, match="a fault of the check"):
        staleflow.start(emulated(tmp_path))


def test_the_last_line_is_printed_before_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a script that ends then would not print it."""
    handles, ended_at_print = [], []

    async def execute(handle: RunHandle) -> staleflow.RunResult:
        handles.append(handle)
        return staleflow.RunResult(run_dir=tmp_path, stop_reason="", summary=SUMMARY)

    monkeypatch.setattr(RunHandle, "_execute", execute)
    monkeypatch.setattr(RunProgress, "print", lambda progress, line: ended_at_print.append(handles[0].done))
    assert staleflow.start(emulated(tmp_path), progress=True).wait(120)
    assert ended_at_print == [False]


def test_a_stop_before_the_start_is_an_interrupt_only_for_the_call_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(handle: RunHandle) -> staleflow.RunResult:
        raise StoppedBeforeStart("by another thread")

    monkeypatch.setattr(RunHandle, "_execute", stop)
    with pytest.raises(StoppedBeforeStart, match="by another thread"):
        staleflow.run(emulated(tmp_path), progress=False)


async def test_a_coroutine_cancelled_twice_waits_for_the_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def execute(handle: RunHandle) -> staleflow.RunResult:
        loop.call_soon_threadsafe(begun.set)
        while not released.is_set():
            await asyncio.sleep(0.01)
        return staleflow.RunResult(run_dir=tmp_path, stop_reason="cancelled", summary=SUMMARY)

    monkeypatch.setattr(RunHandle, "_execute", execute)
    running = asyncio.ensure_future(staleflow.run_async(emulated(tmp_path), progress=False))
    await begun.wait()
    try:
        for _ in range(2):
            running.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not running.done()
    finally:
        released.set()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_cancelled_coroutine_stops_its_run_in_order(tmp_path: Path) -> None:
    first = asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(
        staleflow.run_async(emulated(tmp_path, steps=200), progress=lambda _: loop.call_soon_threadsafe(first.set))
    )
    await first.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    run = staleflow.open_run(tmp_path / "runs" / "emulated")
    assert 1 <= len(run.steps()) < 200
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["stopped"] == "cancelled"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a local cluster as started in a notebook."""
    with LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


def test_a_run_uses_the_cluster_of_a_client(tmp_path: Path, client: Client) -> None:
    before = client.submit(lambda: 1).result()
    result = staleflow.run(emulated(tmp_path), client=client, progress=False)
    assert result.summary["steps"] == 4
    assert result.run.job.cluster.address == client.scheduler.address
    assert client.submit(lambda: 2).result() == before + 1
    assert len(client.sync(client.scheduler.identity, n_workers=-1)["workers"]) == 4


def test_a_run_waiting_for_workers_reports_it_and_can_be_stopped(tmp_path: Path, client: Client) -> None:
    job = emulated(tmp_path, steps=500)
    handle = staleflow.start(job, overrides={"rollout.instances": 8}, client=client)
    while handle.status().state == "starting":
        handle.wait(0.1)
    status = handle.status()
    assert status.state == "waiting"
    assert status.message.startswith("needs 10 worker processes")
    handle.stop("no patience")
    with pytest.raises(staleflow.StaleflowError, match="no patience"):
        handle.result()


def test_a_cluster_of_threads_is_rejected(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises(ConfigError, match=r"threads of this process.*processes=True"),
    ):
        staleflow.start(emulated(tmp_path), client=client)


def test_a_reward_that_fails_on_the_first_prompt_is_rejected_before_the_start(job: Path) -> None:
    def fails(text: str, row: Mapping[str, Any]) -> float:
        return float(row["no such column"])

    with pytest.raises(ConfigError, match=r"fails on the first prompt: KeyError: 'no such column' \(fails, line \d+\)"):
        staleflow.start(job, rows=ROWS, reward=fails)


def test_the_result_of_a_failed_run_raises_its_error(tmp_path: Path) -> None:
    handle = staleflow.start(
        emulated(tmp_path, deadlines={"stuck_s": 1.0}, steps=3)
        | {"rollout": {"engine": {"name": "emulated", "time_scale": 0.001}}, "simulation": {"pull_s": 0.0}}
    )
    with pytest.raises(RunStuck):
        handle.result()
    assert handle.status().state == "failed"
    assert "no progress" in handle.status().message


@functools.cache
def cached(text: str, row: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": cached}, "functools.cache"),
        ({"rewards": answer_distance}, "rewards: no such argument; there are reward, loss"),
        ({"rows": []}, "rows: there are none"),
        ({"rows": ["1+1="]}, "row 0 is a str; each must be a mapping"),
        ({"rows": {"prompt": "1+1="}}, "rows: a dict; expected a list of mappings"),
        ({"rows": [{"prompt": object()}]}, "row 0 cannot be written as JSON"),
        ({"rows": ROWS, "source": answer_distance}, "source and another argument both set task.source"),
        ({"overrides": "steps=3"}, "pass a mapping or a list"),
        ({"overrides": [("steps", 3)]}, r"^overrides = \[\('steps', 3\)\]: pass a mapping or a list"),
        ({"eval_rows": [{"prompt": "1"}, 2]}, "^eval_rows: row 1 is a int; each must be a mapping"),
        ({"overrides": {"runs_dir": "~/runs"}}, "^runs_dir = '~/runs': ~ is not replaced here, write the whole path$"),
        ({"overrides": {"step": 3}}, "did you mean steps"),
        ({"overrides": {"steps": None}}, "leave it out"),
        (
            {"routing": LastInstance()},
            "routing: a LastInstance; .* set its knobs by overrides, as rollout.routing.KNOB",
        ),
        ({"reward": 3}, "reward: a int; expected a function, a class, or a name as in a job file$"),
        ({"client": "tcp://head:8786"}, "client: a str; expected a distributed.Client"),
    ],
)
def test_invalid_arguments_give_a_one_line_error(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        staleflow.start(emulated(tmp_path), **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"rows": [{"question": "1+1=", "solution": "2"}]}, r"^rows\[0\]: no 'prompt'; .* question, solution$"),
        ({"rows": [ROWS[0], {"prompt": "2+2="}]}, r"^rows\[1\]: no 'answer', which other rows have; add "),
        ({"rows": ROWS, "eval_rows": [{"prompt": ""}]}, r"^eval_rows\[0\]: prompt is empty"),
        ({"rows": ROWS[:1] * 2}, r"^rows: each training row has the prompt of a held-out row"),
        ({"rows": [{"prompt": "1+" * 500, "answer": "2"}, *ROWS]}, r"^rows\[0\]: a prompt has \d+ tokens"),
    ],
)  # fmt: skip
def test_an_invalid_row_is_named_by_its_index_and_printed_nowhere(
    job: Path, capfd: pytest.CaptureFixture[str], objects: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        staleflow.run(job, **objects)
    assert capfd.readouterr() == ("", "")


def test_an_agent_with_a_wrong_signature_is_rejected_once(job: Path) -> None:
    def agent() -> float:
        return 0.0

    with pytest.raises(
        ConfigError, match=r"^task\.source = '[^']*agent:[^']*': an agent takes \(base_url, key, task\)"
    ):
        staleflow.start(job, agent=agent)


def test_a_job_of_a_wrong_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match="job: a int; expected the path of a job file, a mapping or a Job"):
        staleflow.load_job(3)  # type: ignore[arg-type]


def test_repr_of_a_result_is_one_line() -> None:
    result = staleflow.RunResult(run_dir=Path("runs/a"), stop_reason="", summary=SUMMARY)
    assert repr(result) == (
        "<RunResult runs/a: steps 2, reward 0.250 at first, 0.500 at last, staleness 0: 4 (eta 1), tokens/s 10>"
    )
    scored = staleflow.RescoreResult(
        branch="b", snapshot="", rows=3, scored=2, errors={1: "KeyError: 'x' (f, line 3)", 2: "another"},
        mean_before=0.0, mean_after=0.5,
    )  # fmt: skip
    assert repr(scored) == (
        "<RescoreResult branch b: mean reward 0.000 -> 0.500, 2 of 3 scored, "
        "2 failed, first: KeyError: 'x' (f, line 3)>"
    )


def test_a_pandas_table_is_written_as_rows(job: Path, client: Client) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "hint": [1.5, float("nan")]})
    job_of_table = staleflow.load_job(job, {"task.eval_prompts": 0})
    handle = staleflow.start(job_of_table, rows=table, reward=reward, client=client)
    handle.stop()
    handle.wait()
    written = handle.job.task.source.removeprefix("jsonl:")
    assert [json.loads(line) for line in Path(written).read_text().splitlines()] == [
        {"prompt": "1+1=", "answer": "2", "hint": 1.5},
        {"prompt": "2+2=", "answer": "4"},
    ]


SCRIPT = """
import staleflow
print("executed")
def longest(text, row):
    return float(len(text))
handle = staleflow.start({job}, overrides=dict(name="left", steps=1000), reward=longest, progress=lambda _: None)
while not handle.status().step:
    handle.wait(0.1)
"""


def test_a_script_without_a_main_guard_stops_its_runs_at_exit(tmp_path: Path) -> None:
    job = emulated(tmp_path) | {"runs_dir": str(tmp_path / "runs")}
    (tmp_path / "script.py").write_text(SCRIPT.format(job=job))
    run = forking.run([sys.executable, "-m", "script"], cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout.splitlines(), run.stderr) == (["executed"], "")
    starts = json.loads((tmp_path / "runs" / "left" / "starts.json").read_text())
    assert [start["end"] for start in starts] == ["stopped: Python exits"]


def test_load_job_accepts_a_file_a_mapping_and_a_job(job: Path, tmp_path: Path) -> None:
    from_file = staleflow.load_job(job, {"training.learning_rate": 1e-4, "rollout.engine.max_running": 8})
    assert (from_file.training.learning_rate, from_file.rollout.engine.max_running) == (1e-4, 8)
    assert staleflow.load_job(from_file) == from_file
    assert staleflow.load_job(from_file, ["steps=7"]).steps == 7
    assert staleflow.load_job(emulated(tmp_path)).run_dir == tmp_path / "runs" / "emulated"
    with pytest.raises(ConfigError, match="no such job file"):
        staleflow.load_job(tmp_path / "other.toml")


def test_functions_are_accepted_wherever_a_mapping_names_code() -> None:
    parts = {"near": {"function": reward, "weight": 0.5}}
    job = staleflow.load_job(
        {"model": {"path": "tiny"}, "reward": {"parts": parts}, "training": {"advantage": answer_distance}}
    )
    assert job.reward.parts["near"].function.endswith("reward.py:reward")
    assert job.reward.parts["near"].weight == 0.5
    assert job.training.advantage.name.endswith("answer_distance.py:answer_distance")
