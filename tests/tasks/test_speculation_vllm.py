"""Speculation in vLLM changes no token distribution, no logprob and no greedy response. Runs where vllm is installed
(`make test-vllm`)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId
from staleflow.tasks.engines import response_drafter
from staleflow.tasks.engines.engine_settings import Speculation, VllmSettings
from tests.tasks import test_engine_vllm
from tests.tasks.engine_conformance import check_drafts, model_settings
from tests.tasks.speculation_checks import (
    ExactDistribution,
    check_distribution,
    drafter_of,
    greedy_responses,
    sharpen_model,
)

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from staleflow.tasks.engines import vllm_drafting
from staleflow.tasks.engines.vllm import VllmEngine

SOURCES = ("likely", "absurd", "random", "responses")


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen_model(tiny_model, tmp_path_factory.mktemp("sharp"))


@contextmanager
def speculating(
    model: Path, length: int = 3, source: str = "responses", max_running: int = 1000, **changes: Any
) -> Iterator[VllmEngine]:
    speculation = Speculation(num_speculative_tokens=length, source=source, disable_above=max_running)
    given = model_settings(model) | {"eos": (), "max_running": 128, "kv_tokens": 16384, "speculation": speculation}
    engine = VllmEngine(VllmSettings(**(given | changes)), InstanceId("rollout-0"))
    yield engine
    engine.close()


def check_source(model: Path, source: str, monkeypatch: pytest.MonkeyPatch, responses: int) -> None:
    exact = ExactDistribution(model, 0.8)
    monkeypatch.setattr(response_drafter, "MIN_LIKELIHOOD", response_drafter.MIN_LIKELIHOOD)
    monkeypatch.setattr(vllm_drafting, "Drafter", drafter_of(source, exact))
    with speculating(model, temperature=0.8) as engine:
        load = check_distribution(engine, exact, responses)
    assert load.drafted_tokens >= responses / 4
    share = load.accepted_tokens / load.drafted_tokens
    assert share > 0.1 if source == "likely" else share < 0.05 if source == "absurd" else 0 < share < 1


@pytest.mark.parametrize("source", SOURCES)
def test_speculation_does_not_change_the_token_distribution(
    model: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_source(model, source, monkeypatch, 500)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_speculation_does_not_change_the_distribution_of_100000_tokens(
    model: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_source(model, source, monkeypatch, 25_000)


def test_a_missing_package_is_named(model: Path) -> None:
    if importlib.util.find_spec("arctic_inference"):
        pytest.skip("arctic-inference is installed")
    with pytest.raises(ConfigError, match="needs arctic-inference"), speculating(model, source="suffix"):
        pass


def test_speculation_does_not_change_greedy_responses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with speculating(model, length=0) as engine:
        expected = greedy_responses(engine)
    assert len({tuple(tokens) for tokens in expected}) > 1
    monkeypatch.setattr(response_drafter, "MIN_LIKELIHOOD", 0.0)
    with speculating(model) as engine:
        assert greedy_responses(engine) == expected
        load = engine.load_statistics()
    assert load.drafted_tokens > load.accepted_tokens > 0


def test_drafts_have_at_most_the_tokens_of_the_settings(model: Path) -> None:
    """At a low temperature a response repeats itself, so there is something to draft."""
    with speculating(model, temperature=0.001) as engine:
        check_drafts(engine)


class TestSpeculatingVllmEngine(test_engine_vllm.TestVllmEngine):
    """The conformance suite with drafts for every request at every step."""

    @pytest.fixture
    def engine(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
        monkeypatch.setattr(response_drafter, "MIN_LIKELIHOOD", 0.0)
        with speculating(tiny_model, eos=(1,), max_running=32, kv_tokens=4096) as engine:
            yield engine


def test_suffix_drafts_of_vllm_do_not_change_greedy_responses(model: Path) -> None:
    """Must be the last test: it may import numba, after which vLLM 0.32 cannot create another engine in the process."""
    if importlib.util.find_spec("arctic_inference") is None:
        pytest.skip(f"{vllm_drafting.SUFFIX_PACKAGE} is not installed")
    if "numba" in sys.modules:
        pytest.skip("numba is loaded in this process; run this test alone")
    with speculating(model, length=0) as engine:
        expected = greedy_responses(engine)
    with speculating(model, source="suffix", temperature=0.8) as engine:
        check_distribution(engine, ExactDistribution(model, 0.8), 2000)
        assert greedy_responses(engine) == expected
        load = engine.load_statistics()
    assert load.drafted_tokens > load.accepted_tokens > 0
