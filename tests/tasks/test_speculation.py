"""Speculation in the transformers engine changes no token distribution, no logprob and no greedy response."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.model_families import make_family_model
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.engines import response_drafter, transformers
from staleflow.tasks.engines.base import PromptResponses, SampledTokens
from staleflow.tasks.engines.engine_settings import Speculation, TransformersSettings
from staleflow.tasks.engines.transformers import TransformersEngine, num_accepted
from tests.tasks import test_engine_transformers
from tests.tasks.brake import brake, brake_of_transformers  # noqa: F401  used by name
from tests.tasks.engine_conformance import (
    check_drafts,
    collect,
    model_settings,
    request,
    sample_until,
    tokens_of,
)
from tests.tasks.speculation_checks import (
    ExactDistribution,
    check_distribution,
    check_wrong_acceptance_is_detected,
    drafter_of,
    greedy_responses,
    sharpen_model,
)

SOURCES = ("likely", "absurd", "random", "responses")


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen_model(tiny_model, tmp_path_factory.mktemp("sharp"))


@contextmanager
def speculating(model: Path, length: int = 3, max_running: int = 1000, **changes: Any) -> Iterator[TransformersEngine]:
    torch.set_num_threads(1)
    speculation = Speculation(num_speculative_tokens=length, disable_above=max_running)
    given = model_settings(model) | {"eos": (), "max_running": 256, "kv_tokens": 16384, "speculation": speculation}
    engine = TransformersEngine(TransformersSettings(**(given | changes)), InstanceId("rollout-0"))
    yield engine
    engine.close()


@pytest.fixture
def forced_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, ExactDistribution], None]:
    """Make engines draft always, from this source."""

    def force(source: str, exact: ExactDistribution) -> None:
        monkeypatch.setattr(response_drafter, "MIN_LIKELIHOOD", response_drafter.MIN_LIKELIHOOD)
        monkeypatch.setattr(transformers, "Drafter", drafter_of(source, exact))

    return force


def check_source(model: Path, source: str, forced: Callable[[str, ExactDistribution], None], responses: int) -> None:
    exact = ExactDistribution(model, 0.8)
    forced(source, exact)
    with speculating(model, temperature=0.8) as engine:
        load = check_distribution(engine, exact, responses)
    assert load.drafted_tokens >= responses / 4
    share = load.accepted_tokens / load.drafted_tokens
    assert share > 0.1 if source == "likely" else share < 0.05 if source == "absurd" else 0 < share < 1


@pytest.mark.parametrize("source", SOURCES)
def test_speculation_does_not_change_the_token_distribution(
    model: Path, source: str, forced_source: Callable[[str, ExactDistribution], None]
) -> None:
    check_source(model, source, forced_source, 500)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_speculation_does_not_change_the_distribution_of_100000_tokens(
    model: Path, source: str, forced_source: Callable[[str, ExactDistribution], None]
) -> None:
    check_source(model, source, forced_source, 25_000)


@pytest.mark.slow
def test_tokens_without_speculation_have_the_model_distribution(model: Path) -> None:
    with speculating(model, length=0) as engine:
        assert check_distribution(engine, ExactDistribution(model, 1.0), 25_000).drafted_tokens == 0


def test_the_distribution_test_detects_a_wrong_acceptance_rule(model: Path) -> None:
    check_wrong_acceptance_is_detected(ExactDistribution(model, 1.0))


def test_speculation_does_not_change_greedy_responses(
    model: Path, forced_source: Callable[[str, ExactDistribution], None]
) -> None:
    with speculating(model, length=0) as engine:
        expected = greedy_responses(engine)
    assert len({tuple(tokens) for tokens in expected}) > 1
    for source in ("responses", "random"):
        forced_source(source, ExactDistribution(model, 1.0))
        with speculating(model) as engine:
            assert greedy_responses(engine) == expected
            load = engine.load_statistics()
            assert load.drafted_tokens > load.accepted_tokens > 0


def test_responses_sampled_elsewhere_are_used_as_drafts(model: Path) -> None:
    """At a low temperature the same response is sampled again; it does not repeat itself early on."""
    prompt = (3, 10, 14, 7)

    def sampled(engine: TransformersEngine, trajectory: int) -> SampledTokens:
        engine.submit([request(trajectory, prompt=prompt, max_new_tokens=12)])
        return collect(engine, 1)[trajectory]

    with speculating(model, temperature=0.001) as engine:
        alone = sampled(engine, 0)
        engine.reset(InstanceId("rollout-1"))
        assert engine.drafting_trajectories() == ()
        known = PromptResponses(prompt=prompt, responses=((TrajectoryId(7), tuple(tokens_of(alone))),))
        engine.add_draft_responses([known])
        after = sampled(engine, 1)
        load = engine.load_statistics()
    assert tokens_of(after) == tokens_of(alone)
    assert after.accepted_tokens > alone.accepted_tokens
    assert after.drafted_tokens >= after.accepted_tokens
    assert (load.drafted_tokens, load.accepted_tokens) == (after.drafted_tokens, after.accepted_tokens)


def test_an_interrupted_request_reports_its_drafted_tokens(model: Path) -> None:
    with speculating(model, temperature=0.001) as engine:
        sample_until(engine, 60, [request(0, max_new_tokens=4000)])
        (stopped,) = engine.interrupt([TrajectoryId(0)])
        load = engine.load_statistics()
    assert stopped.drafted_tokens == load.drafted_tokens > 0
    assert stopped.accepted_tokens == load.accepted_tokens


def test_drafts_have_at_most_the_tokens_of_the_settings(model: Path) -> None:
    """At a low temperature a response repeats itself, so there is something to draft."""
    with speculating(model, temperature=0.001) as engine:
        check_drafts(engine)


def test_accepted_drafts_stop_at_the_end_token_and_the_limit() -> None:
    assert num_accepted([5, 6, 7], [5, 6, 7, 8], set(), 10) == 3
    assert num_accepted([5, 6, 7], [5, 9, 7, 8], set(), 10) == 1
    assert num_accepted([5, 6, 7], [5, 6, 7, 8], {6}, 10) == 1
    assert num_accepted([5, 6, 7], [5, 6, 7, 8], set(), 2) == 1
    assert num_accepted([], [8], set(), 1) == 0


def test_a_model_with_irreversible_states_is_rejected(tmp_path: Path) -> None:
    make_family_model("qwen3_5_text", tmp_path)
    refused = r"speculation.num_speculative_tokens = 3: the model has layers whose states cannot .* use 0"
    with pytest.raises(ConfigError, match=refused), speculating(tmp_path):
        pass


@pytest.mark.slow
class TestSpeculatingTransformersEngine(test_engine_transformers.TestTransformersEngine):
    """The conformance suite with drafts for every request at every step."""

    @pytest.fixture
    def engine(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransformersEngine]:
        monkeypatch.setattr(response_drafter, "MIN_LIKELIHOOD", 0.0)
        with speculating(tiny_model, eos=(1,), max_running=32, kv_tokens=4096) as engine:
            yield engine
