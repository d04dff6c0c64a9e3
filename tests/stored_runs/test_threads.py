"""Objects shared by threads of one process: each result reaches its caller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from distributed import Client

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.stored_runs import exporting, logprob_recompute, reward_rescoring
from staleflow.pipeline.stored_runs import pool as pools
from staleflow.stores.trajectories.records import CommitRecord, LedgerState
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    Fate,
    GroupId,
    PolicyVersion,
    Trajectory,
    TrajectoryId,
)
from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.task_config import RewardConfig, TaskConfig
from staleflow.tasks.sources import reward_process
from staleflow.tasks.sources.reward_process import Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import SourceSettings, make_source
from tests.support.segments import sampled_segment

THREADS = 8
Result = TypeVar("Result")

REWARDS = """
import fcntl, os, pickle, struct, subprocess, sys, time, zlib

def number(answer, record):
    n = int(answer)
    assert record["n"] == n
    if n % 10 == 3:
        raise ValueError(f"not {n}")
    if n % 150 == 77:
        time.sleep(1000)
    if n % 150 == 140:
        os._exit(1)
    return float(n), {"n": n}

def checksum(answer, record):
    n = zlib.crc32(f"{answer}|{record['question']}".encode())
    if n % 16 == 0:
        raise ValueError(f"not {n}")
    return float(n % 100_000)

class Mine:
    pass

def parts(answer, record):
    return float(answer), ({"mine": Mine()} if answer == "1" else {"n": 1})

def noisy(answer, record):
    subprocess.run([sys.executable, "-c", "import sys; sys.stdin.read(); print('x' * 1000)"], check=True)
    os.write(1, b"y" * 1000)
    return float(answer)

def doubled(answer, record):
    if answer == "1":
        message = pickle.dumps((0, 99.0, {}, ""))
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                os.write(fd, struct.pack("<I", len(message)) + message)
    return float(answer)

def one(answer, record):
    return 1.0

def slow(answer, record):
    time.sleep(0.2)
    return 1.0
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def scorers(rewards: Path) -> Iterator[Callable[[str], Scorer]]:
    """Create scorers by function name, closed at the end."""
    made: list[Scorer] = []

    def make(name: str, timeout_s: float = 1.0) -> Scorer:
        source = SourceSettings(task=TaskConfig(source="emulated"), seed=0)
        settings = ScoringSettings(
            source=source, reward=RewardConfig(function=f"{rewards}:{name}", timeout_s=timeout_s)
        )
        made.append(Scorer(settings))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def run_in_threads(function: Callable[[int], Result], calls: int = THREADS) -> list[Result]:
    """Call function(i) for each i in THREADS threads that start together."""
    begin = threading.Barrier(min(THREADS, calls))

    def called(i: int) -> Result:
        if i < begin.parties:
            begin.wait()
        return function(i)

    with ThreadPoolExecutor(THREADS) as executor:
        return list(executor.map(called, range(calls)))


# -- scoring -----------------------------------------------------------------------------------------------------------


def test_threads_that_share_a_scorer_get_their_rewards(scorers: Any) -> None:
    scorer = scorers("number")
    size = 25

    def score(block: int) -> list[Any]:
        scores: list[Any] = scorer.score([(str(n), {"n": n}) for n in range(block * size, (block + 1) * size)])
        return scores

    scores = [score for block in run_in_threads(score, 3 * THREADS // 2) for score in block]
    for n, score_ in enumerate(scores):
        if n % 10 == 3:
            assert score_.error == f"ValueError: not {n} (rewards.py, line 8)"
        elif n % 150 == 77:
            assert score_.error == "the reward took longer than 1 s"
        elif n % 150 == 140:
            assert score_.error.startswith("the reward process died")
        else:
            assert (score_.reward, score_.parts, score_.error) == (float(n), {"n": n}, "")


def test_replies_after_an_unreadable_one_are_correct(scorers: Any) -> None:
    scorer = scorers("parts")
    first = scorer.score([(str(n), {}) for n in range(4)])
    assert [s.reward for s in first] == [0.0, 0.0, 2.0, 3.0]
    assert "it must be a number" in first[1].error
    assert [s.reward for s in scorer.score([(str(n), {}) for n in range(4, 8)])] == [4.0, 5.0, 6.0, 7.0]


def test_an_interrupted_call_leaves_no_reply_for_the_next(scorers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = scorers("number")
    scorer.check()
    read = reward_process._read
    reads = iter(range(100))

    def interrupted(*args: Any) -> Any:
        if next(reads) == 2:
            raise KeyboardInterrupt
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(reward_process, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scorer.score([(str(n), {"n": n}) for n in range(10, 20)])
    assert [s.reward for s in scorer.score([(str(n), {"n": n}) for n in (20, 21, 22)])] == [20.0, 21.0, 22.0]


def test_a_repeated_reply_is_not_used_for_the_next_request(scorers: Any) -> None:
    scores = scorers("doubled").score([(str(n), {}) for n in range(5)])
    assert [s.reward for s in scores] == [0.0, 0.0, 2.0, 3.0, 4.0]
    assert ["another request" in s.error for s in scores] == [False, True, False, False, False]


def test_input_and_output_of_reward_subprocesses_is_not_part_of_the_protocol(scorers: Any) -> None:
    scores = scorers("noisy", 20.0).score([(str(n), {}) for n in range(4)])
    assert [(s.reward, s.error) for s in scores] == [(float(n), "") for n in range(4)]


def test_a_scoring_process_that_died_while_idle_costs_no_row(scorers: Any) -> None:
    scorer = scorers("number")
    assert scorer.score([("1", {"n": 1})])[0].reward == 1.0
    os.kill(scorer._process.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert [(s.reward, s.error) for s in scorer.score([("2", {"n": 2}), ("4", {"n": 4})])] == [(2.0, ""), (4.0, "")]


def test_a_scorer_closed_by_another_thread_stops_and_starts_no_process(scorers: Any) -> None:
    scorer = scorers("slow")
    scorer.check()
    with ThreadPoolExecutor(1) as executor:
        work = executor.submit(scorer.score, [("", {})] * 1000)
        time.sleep(0.3)
        begin = time.monotonic()
        scorer.close()
        assert time.monotonic() - begin < 60.0  # the work itself takes 200 s
        with pytest.raises(RuntimeError, match="closed"):
            work.result(timeout=60)
    assert scorer._process is None
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score([("", {})])


# -- prompts, texts, models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["pool_matrix", "knights_knaves", "chain_sum"])
def test_prompts_drawn_by_several_threads_equal_those_of_one(dataset: str) -> None:
    """One of these datasets draws from numpy's global generator, and one stores a generator."""
    count = 40
    source = make_source(f"reasoning_gym:{dataset}", {}, 3)
    expected = [json.dumps(source.task(i).record, default=str) for i in range(count)]
    for drawn in run_in_threads(lambda _: [json.dumps(source.task(i).record, default=str) for i in range(count)]):
        assert drawn == expected


class Slow:
    """A Python tokenizer that stores its position while it decodes."""

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        self._pieces: list[str] = []
        for token in tokens:
            time.sleep(1e-4)
            self._pieces.append(str(token))
        return " ".join(self._pieces)


def test_a_tokenizer_decodes_for_one_thread_at_a_time() -> None:
    texts = ChatTokenizer(Slow())
    for i, text in enumerate(run_in_threads(lambda i: texts.text([i] * 20))):
        assert text.split() == [str(i)] * 20


def test_models_loaded_concurrently_are_complete_and_global_settings_are_restored(tiny_model: Path) -> None:
    """from_pretrained changes global settings of torch and transformers while it runs."""
    import torch
    from transformers import PreTrainedModel

    from staleflow.tasks.engines.transformers import forward_logprobs, load_model

    before = (PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.linspace, torch.get_default_dtype())
    one = load_model(str(tiny_model), "float32", "cpu", attention="sdpa")
    expected = forward_logprobs(one, range(2, 12))
    models = run_in_threads(
        lambda i: load_model(str(tiny_model), "float32" if i % 2 else "bfloat16", "cpu", attention="sdpa"), 4 * THREADS
    )
    after = (PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.linspace, torch.get_default_dtype())
    assert before == after
    for i, model in enumerate(models):
        assert {p.dtype for p in model.parameters()} == {torch.float32 if i % 2 else torch.bfloat16}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        if i % 2:
            assert forward_logprobs(model, range(2, 12)) == expected


def test_files_of_one_name_are_separate_modules(tmp_path: Path) -> None:
    import typing

    made = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            f"from __future__ import annotations\nclass Kind:\n    of = {folder!r}\nclass Given:\n    kind: Kind\n"
        )
        made.append(user_code.load(f"{tmp_path}/{folder}/mine.py:Given", "task.source"))
    assert [typing.get_type_hints(given)["kind"].of for given in made] == ["a", "b"]


# -- work on a stored run ----------------------------------------------------------------------------------------------

ROWS = 192


@pytest.fixture(scope="module")
def large_run(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with ROWS trajectories with different responses."""
    folder = tmp_path_factory.mktemp("many") / "run"
    folder.mkdir()
    shutil.copy(stored / "config.toml", folder)
    rng = np.random.default_rng(0)
    header = VersionedStore.open(stored / "store").header
    prompts = actor_settings.prompt_settings(
        loading.load(folder / "config.toml"),
        num_held_out=header.num_held_out,
        max_prompt_tokens=header.max_prompt_tokens,
    ).build()
    rows = []
    for i in range(ROWS):
        tokens = rng.integers(2, 14, int(rng.integers(4, 20))).astype(np.int32)
        segment = sampled_segment(tokens, -rng.random(len(tokens), np.float32), instance="rollout-0")
        trajectory = Trajectory(
            id=TrajectoryId(i),
            group=GroupId(i // 4),
            prompt_tokens=np.asarray(prompts.encode(prompts.task(i // 4)), np.int32),
            spans=(segment,),
        )
        rows.append(
            EndedTrajectory(
                trajectory=trajectory, fate=Fate.ABORTED, reason=AbortReason.RUN_ENDED, step=0, loss_mask=False
            )
        )
    ledger = LedgerState(
        num_started=ROWS, num_ended={"aborted:run_ended": ROWS}, live=(), next_step=0, version=PolicyVersion(0)
    )
    VersionedStore.create(folder / "store", header).commit(CommitRecord(kind="end", step=0, ledger=ledger), rows)
    return folder


@pytest.fixture(scope="module")
def threaded_client() -> Iterator[Client]:
    """One worker process with four threads, as `dask worker --nthreads 4` starts it."""
    from distributed import LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=4, memory_limit=0, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_rewards_of_a_multithreaded_worker_equal_those_of_a_loop(
    large_run: Path, rewards: Path, threaded_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    config = loading.load(large_run / "config.toml")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    source = make_source(config.task.source, config.task.options, config.seed)
    expected: dict[int, tuple[float, str]] = {}
    for row in VersionedStore.open(large_run / "store").trajectories():
        answer = tokenizer.decode(row.trajectory.response_tokens.tolist(), skip_special_tokens=True).strip()
        prompt = source.task(int(row.trajectory.group)).prompt
        number = zlib.crc32(f"{answer}|{prompt}".encode())
        bad = number % 16 == 0
        error = f"ValueError: not {number} (reward_rewards.py, line 18)"
        expected[row.trajectory.id] = (0.0, error) if bad else (float(number % 100_000), "")
    assert len(set(expected.values())) > ROWS * 0.9

    monkeypatch.setattr(pools, "MIN_BLOCK_ROWS", 8)
    for branch in ("once", "twice"):
        reward_rescoring.rescore(large_run, f"{rewards}:checksum", branch, client=threaded_client)
        rows = VersionedStore.open(large_run / "store", branch=branch).trajectories()
        assert {r.trajectory.id: (r.trajectory.reward, r.trajectory.error) for r in rows} == expected
    # Another reward, while the threads hold the scorers of the first.
    reward_rescoring.rescore(large_run, f"{rewards}:one", "one", client=threaded_client)
    rows = VersionedStore.open(large_run / "store", branch="one").trajectories()
    assert {(r.trajectory.reward, r.trajectory.error) for r in rows} == {(1.0, "")}


def test_logprobs_of_several_threads_equal_those_of_one(
    large_run: Path, tiny_model: Path, threaded_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_recompute, "MAX_CALL_ROWS", 8)
    monkeypatch.setattr(pools, "MIN_BLOCK_ROWS", 8)
    logprob_recompute.recompute_logprobs(large_run, str(tiny_model), client=threaded_client, branch="read")
    config = loading.load(large_run / "config.toml")
    store = VersionedStore.open(large_run / "store", branch="read")
    rows = list(store.trajectories())
    expected = logprob_recompute.response_logprobs(logprob_recompute.logprob_settings(config, str(tiny_model)), rows)
    for row, logprobs in zip(rows, expected, strict=True):
        result = store.recomputed_logprobs(row.trajectory.id)
        assert result is not None
        np.testing.assert_allclose(result, logprobs, atol=1e-5)
    assert list(threaded_client.run(_num_logprob_models).values()) == [1]


def _num_logprob_models() -> int:
    """Return the number of models loaded in this process for logprobs."""
    import gc

    from staleflow.tasks.training.logprobs import LogprobModel

    return sum(isinstance(held, LogprobModel) for held in gc.get_objects())


def test_an_export_by_several_threads_equals_that_of_one(
    large_run: Path, tmp_path: Path, threaded_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "PART_ROWS", 16)
    exporting.export(large_run, "jsonl", tmp_path / "threads.jsonl", client=threaded_client)
    store = VersionedStore.open(large_run / "store")
    part = tmp_path / "one.jsonl"
    exporting.write_part("jsonl", str(large_run), str(store.path), store.snapshot, np.arange(ROWS), str(part))
    assert (tmp_path / "threads.jsonl").read_text() == part.read_text()
