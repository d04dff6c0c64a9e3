"""Conformance suite of engines that serve adapters of several policy versions at the same time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from staleflow.stores.errors import StoreError
from staleflow.stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.engines.adapters import AdapterLayer, LoraConfig
from staleflow.tasks.engines.base import Engine, Request, SampledTokens
from staleflow.tasks.engines.transformers import forward_logprobs, load_model
from tests.tasks.engine_conformance import PROMPT, collect, logprobs_of, request, sample_until, tokens_of

LORA = LoraConfig(rank=3, alpha=6)
SERVED = 3
TOLERANCE = 2e-4
"""Maximum difference of a logprob from that of a plain forward pass, nats."""


def linear_layers(model: torch.nn.Module) -> list[AdapterLayer]:
    """Names of all linear layers except the output layer."""
    return [
        AdapterLayer(name, rank=LORA.rank, inputs=module.in_features, outputs=module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]


class AdapterVersions:
    """Versions of a model that differ in randomly drawn adapters; version 0 is the base model."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = load_model(str(model), "float32", "cpu", attention="sdpa")
        self._begin = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._folder = WeightFolder(folder)
        self._layers = linear_layers(self._model)

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(version)
        results = {}
        for layer in self._layers:
            # Larger adapters make attention so steep that rounding in float32 alone moves a logprob by 6e-5 and more.
            results[layer.down_name] = torch.randn(layer.rank, layer.inputs, generator=made) / layer.inputs**0.5
            results[layer.up_name] = torch.randn(layer.outputs, layer.rank, generator=made) / 3
        return results

    def file(self, version: int) -> Path:
        self._folder.publish(PolicyVersion(version), self.tensors(version))
        return self._folder.path(PolicyVersion(version))

    def load(self, engine: Engine, version: int) -> None:
        loaded = engine.load(PolicyVersion(version), self.file(version))
        assert engine.version == version
        assert loaded.fingerprint == fingerprint(self.tensors(version))
        assert loaded.weights.outcome == "verified", loaded.weights.line

    def logprobs(self, version: int, tokens: list[int]) -> tuple[float, ...]:
        """Return the logprobs of tokens[1:] by a plain forward pass of the model with the adapter of the version
        merged."""
        weights = dict(self._begin)
        if version:
            adapter = self.tensors(version)
            for item in self._layers:
                added = LORA.scaling * adapter[item.up_name] @ adapter[item.down_name]
                weights[f"{item.module}.weight"] = weights[f"{item.module}.weight"] + added
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
        return forward_logprobs(self._model, tokens)

    def check(self, asked: Request, sampled: SampledTokens, version: int) -> None:
        """Check that all tokens were sampled under one version."""
        assert {segment.version for segment in sampled.segments} == {version}
        tokens = [*asked.tokens, *tokens_of(sampled)]
        expected = self.logprobs(version, tokens)[len(asked.tokens) - 1 :]
        np.testing.assert_allclose(logprobs_of(sampled), expected, atol=TOLERANCE)


class AdapterEngineTests:
    """Suite for engines that serve SERVED versions of the adapters described by LORA. Token 1 ends a response."""

    @pytest.fixture
    def versions(self, tiny_model: Path, tmp_path: Path) -> AdapterVersions:
        return AdapterVersions(tiny_model, tmp_path / "published")

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError

    def test_versions_differ_by_more_than_the_tolerance(self, versions: AdapterVersions) -> None:
        """Otherwise the other tests would not notice tokens of another version."""
        tokens = [*PROMPT, 5, 6, 7, 8]
        logprobs = [np.asarray(versions.logprobs(version, tokens)) for version in range(21)]
        for first, second in itertools.combinations(logprobs, 2):
            assert np.abs(first - second).max() > 10 * TOLERANCE

    def test_requests_finish_under_the_version_they_started_with(
        self, engine: Engine, versions: AdapterVersions
    ) -> None:
        """Load 20 new versions while requests of all served versions run; no context is prefilled again."""
        done: dict[int, SampledTokens] = {}
        requests: dict[int, tuple[Request, int]] = {}
        for version in range(21):
            if version:
                versions.load(engine, version)
            for i in range(4):
                number = 10 * version + i
                one = request(number, prompt=(3, 10, 14, 4 + i), max_new_tokens=40)
                requests[number] = one, version
                engine.submit([one])
            while not any(10 * version <= t and n >= 2 for t, n in engine.load_statistics().progress):
                done |= {e.trajectory: e for e in engine.events(0.01) if isinstance(e, SampledTokens)}
                if len(done) == len(requests):
                    break
            # As in training: requests of old versions have finished before the next version.
            while any(requests[t][1] <= version - SERVED + 1 for t, _ in engine.load_statistics().progress):
                done |= {e.trajectory: e for e in engine.events(0.01) if isinstance(e, SampledTokens)}
        collect(engine, len(requests), done)
        for number, (one, version) in requests.items():
            versions.check(one, done[number], version)
        load = engine.load_statistics()
        assert load.prefilled_tokens + load.cached_tokens == sum(len(one.tokens) for one, _ in requests.values())

    def test_versions_are_sampled_side_by_side(self, engine: Engine, versions: AdapterVersions) -> None:
        """Requests of several versions share forward passes; the probe uses the newest version."""
        kinds = {}
        for version in range(SERVED):
            if version:
                versions.load(engine, version)
            for greedy in (False, True):
                first_request = request(2 * version + greedy, prompt=PROMPT, max_new_tokens=80, greedy=greedy)
                kinds[int(first_request.trajectory)] = first_request, version
        # All at once, by the versions that they ask for.
        requests = {i: replace(one, version=PolicyVersion(v)) for i, (one, v) in kinds.items()}
        engine.submit(list(requests.values()))
        tokens = [3, 4, 5, 6, 7]
        np.testing.assert_allclose(
            engine.score([tokens])[0].logprobs, versions.logprobs(SERVED - 1, tokens), atol=TOLERANCE
        )
        finished = collect(engine, len(requests))
        for number, (_, version) in kinds.items():
            versions.check(requests[number], finished[number], version)

    def test_a_later_turn_uses_the_version_of_the_first_turn(self, engine: Engine, versions: AdapterVersions) -> None:
        """A version is loaded between the two turns; the second turn still uses the cached context."""
        versions.load(engine, 1)
        first = request(0, prompt=PROMPT, max_new_tokens=20, keep_kv=True)
        engine.submit([first])
        turn = collect(engine, 1)[0]
        before = engine.load_statistics()
        versions.load(engine, 2)
        context = (*PROMPT, *tokens_of(turn), 5, 6, 7)
        sampled_before = len(context) - len(PROMPT)
        second = request(
            0,
            prompt=context,
            route_number=2,
            max_new_tokens=10,
            num_response_tokens=sampled_before,
            version=PolicyVersion(1),
        )
        fresh = request(1, prompt=context, max_new_tokens=10)
        engine.submit([second, fresh])
        finished = collect(engine, 2)
        versions.check(second, finished[0], 1)
        versions.check(fresh, finished[1], 2)
        assert engine.load_statistics().cached_tokens - before.cached_tokens >= self.kept(len(PROMPT), turn)

    def kept(self, prompt: int, turn: SampledTokens) -> int:
        """Return a lower bound of the tokens cached from a turn."""
        return prompt + len(tokens_of(turn)) - 1

    def test_an_unused_version_is_evicted(self, engine: Engine, versions: AdapterVersions) -> None:
        """A version in use stays loaded. A request for an evicted version uses the oldest loaded one."""
        versions.load(engine, 1)
        long = request(0, prompt=PROMPT, max_new_tokens=90, greedy=True)
        sample_until(engine, 2, [long])
        for version in (2, 3, 4):
            versions.load(engine, version)
        first = request(1, prompt=PROMPT, version=PolicyVersion(2))
        engine.submit([first])
        finished = collect(engine, 2)
        versions.check(long, finished[0], 1)
        versions.check(first, finished[1], 2)
        versions.load(engine, 5)
        late = request(2, prompt=PROMPT, version=PolicyVersion(1))
        engine.submit([late])
        versions.check(late, collect(engine, 1)[2], 3)

    def test_reloading_a_served_version_changes_nothing(self, engine: Engine, versions: AdapterVersions) -> None:
        """Also while a request runs under the version."""
        for version in range(1, SERVED + 1):
            versions.load(engine, version)
        first_request = request(0, prompt=PROMPT, max_new_tokens=80, greedy=True)
        sample_until(engine, 2, [first_request])
        versions.load(engine, SERVED)
        versions.check(first_request, collect(engine, 1)[0], SERVED)

    def test_an_interrupted_request_continues_under_its_version(
        self, engine: Engine, versions: AdapterVersions
    ) -> None:
        versions.load(engine, 1)
        sample_until(engine, 3, [request(0, prompt=PROMPT, max_new_tokens=80, greedy=True)])
        versions.load(engine, 2)
        (part,) = engine.interrupt([TrajectoryId(0)])
        first = tokens_of(part)
        again = request(
            0,
            prompt=(*PROMPT, *first),
            route_number=2,
            max_new_tokens=8,
            num_response_tokens=len(first),
            version=PolicyVersion(1),
        )
        engine.submit([again])
        versions.check(again, collect(engine, 1)[0], 1)

    def test_invalid_adapter_weights_are_rejected(
        self, engine: Engine, versions: AdapterVersions, tmp_path: Path
    ) -> None:
        versions.load(engine, 1)
        folder = WeightFolder(tmp_path / "others")
        right = versions.tensors(2)
        name, tensor = next(iter(right.items()))
        for wrong in (
            {"model.norm.weight": torch.zeros(64)},
            {key: value for key, value in right.items() if key != name},
            {**right, name: tensor[:, 1:].clone()},
            {key.replace("layers.0", "layers.7"): value for key, value in right.items()},
        ):
            folder.publish(PolicyVersion(2), wrong)
            with pytest.raises(StoreError, match=r"v00000002\.safetensors: "):
                engine.load(PolicyVersion(2), folder.path(PolicyVersion(2)))
        assert engine.version == 1
        first_request = request(0, prompt=PROMPT)
        engine.submit([first_request])
        versions.check(first_request, collect(engine, 1)[0], 1)

    def test_a_reset_engine_serves_the_base_model(self, engine: Engine, versions: AdapterVersions) -> None:
        """Versions of another run may have the same numbers."""
        versions.load(engine, 1)
        engine.submit([request(0, prompt=PROMPT, keep_kv=True)])
        collect(engine, 1)
        engine.reset(InstanceId("rollout-1"))
        assert engine.version == 0
        base = request(0, prompt=PROMPT)
        engine.submit([base])
        versions.check(base, collect(engine, 1)[0], 0)
        versions.load(engine, 1)
        first_request = request(1, prompt=PROMPT)
        engine.submit([first_request])
        versions.check(first_request, collect(engine, 1)[1], 1)
