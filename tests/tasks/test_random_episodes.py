"""Random episodes on each engine: tokens, masks, prefixes and versions are equal in engine and server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.tasks.engines.base import Engine
from staleflow.tasks.engines.emulated_engine import EmulatedEngine, emulated_logprobs, emulated_weights
from staleflow.tasks.engines.transformers import TransformersEngine, load_model
from tests.support.random_episodes import MAX_TOKENS, Plan, Subject, plans, play
from tests.tasks import test_engine_emulated, test_engine_transformers

MANY, FEW = 1000, 20
"""Minimum numbers of episodes of the slow test and of the default test of an engine."""


def random_episodes(subject: Subject, least: int) -> Counter[str]:
    """Run random plans until there were this many episodes. Returns counts of what happened."""
    counts: Counter[str] = Counter()

    @settings(max_examples=least // 2, database=None)
    @given(plans())
    def played(plan: Plan) -> None:
        counts.update(play(subject, plan))

    while counts["episodes"] < least:
        played()
    print(", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
    return counts


def check_variety(counts: Counter[str]) -> None:
    """Check that everything of interest happened often."""
    for what in (
        "interrupts", "migrations", "pulls within turns", "pulls between turns", "deliveries within turns", "restarts",
        "aborts", "answers of no tokens",
    ):  # fmt: skip
        assert counts[what] >= counts["episodes"] / 50, what
    assert counts["turns"] > counts["episodes"]
    assert counts["cached tokens"] > counts["turns"]


def wait_until(what: str, come: Callable[[], bool]) -> None:
    """Wait for a condition; aborted requests are freed at the next step."""
    deadline = time.monotonic() + 10
    while not come():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def check_idle(engine: Engine) -> None:
    wait_until("something is kept for turns to come", lambda: not engine.load_statistics().kept_tokens)


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[Subject]:
    folder = WeightFolder(tmp_path / "weights")
    values: dict[int, EmulatedEngine] = {}
    workload = test_engine_emulated.workload(
        kind="agentic", median=8.0, tool_tokens=4, long_share=0.05, max_tokens=MAX_TOKENS
    )

    def engine(number: int) -> Engine:
        close(number)
        more = {"workload": workload, "time_scale": 3.0, "kv_tokens": 256, "keep_cache": bool(number)}
        values[number] = EmulatedEngine(test_engine_emulated.settings(**more), InstanceId(f"i{number}"))
        return values[number]

    def close(number: int) -> None:
        if number in values:
            values.pop(number).close()

    def file(version: int) -> Path:
        if version not in folder.versions():
            folder.publish(PolicyVersion(version), emulated_weights(version))
        return folder.path(PolicyVersion(version))

    yield Subject(
        engine=engine,
        weights=file,
        logprobs=lambda tokens, first, versions: emulated_logprobs(np.asarray(tokens[first:], np.int32)).tolist(),
        check_idle=check_idle,
    )
    for number in list(values):
        close(number)


class TwoModels:
    """Two sets of weights of one model, for even and for odd versions."""

    def __init__(self, model: Path, folder: Path) -> None:
        odd, _ = test_engine_transformers.changed_weights(model, folder)
        plain = WeightFolder(folder / "plain")
        self._models = [load_model(str(model), "float32", "cpu", "eager") for _ in range(2)]
        plain.publish(PolicyVersion(0), dict(self._models[0].named_parameters()))
        self._files = [plain.path(PolicyVersion(0)), odd]
        named = dict(self._models[1].named_parameters())
        with torch.no_grad():
            for name, tensor in weight_folder.read(odd).items():
                named[name].copy_(tensor)

    def file(self, version: int) -> Path:
        return self._files[version % 2]

    def logprobs(self, tokens: list[int], first: int, versions: list[int]) -> list[float]:
        """Return the logprobs of tokens[first:], each under its version, by full forward passes."""
        tables = {}
        for odd in {version % 2 for version in versions}:
            with torch.no_grad():
                logits = self._models[odd](input_ids=torch.tensor([tokens])).logits[0].double()
            tables[odd] = logits.log_softmax(-1)
        return [float(tables[v % 2][first + i - 1, tokens[first + i]]) for i, v in enumerate(versions)]


def reused_engines(make: Callable[[int], Engine], models: TwoModels) -> Callable[[int], Engine]:
    """Return a factory that reuses slow-starting engines for successive plans; each plan starts at version 0 with an
    empty cache."""
    values: dict[int, Engine] = {}

    def engine(number: int) -> Engine:
        if number not in values:
            values[number] = make(number)
        one = values[number]
        one.abort([TrajectoryId(i) for i in range(10)])
        one.load(PolicyVersion(0), models.file(0))
        one.events(0.0)
        return one

    return engine


@pytest.fixture
def transformers(tiny_model: Path, tmp_path: Path) -> Iterator[Subject]:
    torch.set_num_threads(1)
    models = TwoModels(tiny_model, tmp_path)
    made: list[TransformersEngine] = []

    def make(number: int) -> Engine:
        more: dict[str, Any] = {"kv_tokens": 256, "page_tokens": 16, "max_batch_tokens": 64, "seed": number}
        made.append(TransformersEngine(test_engine_transformers.settings(tiny_model, **more), InstanceId(f"i{number}")))
        return made[-1]

    def idle(engine: Engine) -> None:
        check_idle(engine)
        assert isinstance(engine, TransformersEngine)
        wait_until("rows are lost", lambda: not any(engine._row_model.cache._buckets._rows.values()))

    yield Subject(engine=reused_engines(make, models), weights=models.file, logprobs=models.logprobs, check_idle=idle)
    for item in made:
        item.close()


@pytest.mark.parametrize("engine", ["emulated", "transformers"])
def test_random_episodes(engine: str, request: pytest.FixtureRequest) -> None:
    counts = random_episodes(request.getfixturevalue(engine), FEW)
    assert counts["turns"] > counts["episodes"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["emulated", "transformers"])
def test_a_thousand_random_episodes(engine: str, request: pytest.FixtureRequest) -> None:
    check_variety(random_episodes(request.getfixturevalue(engine), MANY))
