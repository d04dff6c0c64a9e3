"""Checks that speculation changes neither the distribution of tokens, nor their logprobs, nor greedy responses, for
drafts of several sources and qualities."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from staleflow.tasks.engines import response_drafter
from staleflow.tasks.engines.base import Engine, EngineLoad, SampledTokens
from staleflow.tasks.engines.response_drafter import Drafter
from tests.tasks.engine_conformance import collect, logprobs_of, request, tokens_of

PROMPT = (3, 10, 14, 7)
LENGTH = 4
"""Tokens of a response: the first one is never drafted; of the others up to two are drafted before one that is not."""
ALPHA = 1e-6
"""Probability with which a correct engine fails the test of a distribution."""
FEW = 5.0
"""Expected count below which tokens are pooled."""


def sharpen_model(model: Path, to: Path, factor: float = 5.0) -> Path:
    """Return a copy of a model whose distributions differ between contexts, so that some drafts are accepted and some
    are not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    result.config.max_position_embeddings = 4096
    result.save_pretrained(to)
    AutoTokenizer.from_pretrained(model).save_pretrained(to)
    return to


class ExactDistribution:
    """The exact distribution of the model after PROMPT and up to LENGTH - 1 tokens, by plain forward passes."""

    def __init__(self, model: Path, temperature: float) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._temperature = temperature
        self._found: dict[tuple[int, ...], np.ndarray] = {}
        vocabulary = range(self._model.config.vocab_size)
        for length in range(LENGTH - 1):  # all that drafters ask for one by one, in few passes
            self.after(list(itertools.product(vocabulary, repeat=length)))

    def after(self, responses: list[tuple[int, ...]]) -> list[np.ndarray]:
        """Return the probabilities of the next token after responses of equal length."""
        new = sorted(set(responses) - set(self._found))
        for start in range(0, len(new), 512):
            part = new[start : start + 512]
            with torch.no_grad():
                logits = self._model(torch.tensor([[*PROMPT, *response] for response in part])).logits[:, -1]
            result = (logits.double() / self._temperature).softmax(-1).numpy()
            self._found |= dict(zip(part, result, strict=True))
        return [self._found[response] for response in responses]


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float | None:
    """Return the p-value of Pearson's chi-squared test for one context, or None if it has too few tokens."""
    expected = probabilities * counts.sum()
    many = expected >= FEW
    cells, wanted = counts[many], expected[many]
    if expected[~many].sum() >= FEW:
        cells, wanted = np.append(cells, counts[~many].sum()), np.append(wanted, expected[~many].sum())
    elif counts[~many].sum() and len(cells):
        cells[-1] += counts[~many].sum()
        wanted[-1] += expected[~many].sum()
    if len(cells) < 2:
        return None
    statistic = float(((cells - wanted) ** 2 / wanted).sum())
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def least_p_value(exact: ExactDistribution, responses: list[tuple[int, ...]]) -> float:
    """Return the smallest p-value of all contexts times their number (Bonferroni)."""
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for response in responses:
        for at, token in enumerate(response):
            following[response[:at]][token] += 1
    results = []
    for length in range(LENGTH):
        contexts = [context for context in following if len(context) == length]
        for context, probabilities in zip(contexts, exact.after(contexts), strict=True):
            counts = np.array([following[context][token] for token in range(len(probabilities))], np.float64)
            if (value := p_value(counts, probabilities)) is not None:
                results.append(value)
    return min(results) * len(results)


def drafter_of(source: str, exact: ExactDistribution) -> type[Drafter]:
    """Return a drafter that always drafts. source: likely, absurd or random tokens, or tokens of other responses."""

    class Forced(Drafter):
        def draft(self, key: str, limit: int) -> list[int]:
            if source == "responses":
                return super().draft(key, limit)
            running = self._requests[key]
            response = tuple(running.text.tokens) if running.index else running.response
            drafted: list[int] = []
            if source == "random":
                return random.choices(range(len(exact.after([()])[0])), k=max(0, min(limit, self._max_length)))
            for _ in range(min(limit, self._max_length, LENGTH - 1 - len(response))):
                probabilities = exact.after([(*response, *drafted)])[0]
                drafted.append(int(probabilities.argmax() if source == "likely" else probabilities.argmin()))
            return drafted

    if source == "responses":
        response_drafter.MIN_LIKELIHOOD = 0.0  # undone by the calling test
    return Forced


def check_distribution(engine: Engine, exact: ExactDistribution, responses: int, at_once: int = 256) -> EngineLoad:
    """Sample responses and check that the tokens have the distribution and the logprobs of the model."""
    done: dict[int, SampledTokens] = {}
    for start in range(0, responses, at_once):
        count = min(at_once, responses - start)
        engine.submit([request(start + i, prompt=PROMPT, max_new_tokens=LENGTH) for i in range(count)])
        done = collect(engine, start + count, done)
    sampled = [tuple(tokens_of(item)) for item in done.values()]
    for at in range(LENGTH):
        exactly = exact.after([response[:at] for response in sampled])
        wanted = [float(np.log(p[response[at]])) for p, response in zip(exactly, sampled, strict=True)]
        np.testing.assert_allclose([logprobs_of(item)[at] for item in done.values()], wanted, atol=2e-4)
    assert least_p_value(exact, sampled) > ALPHA
    return engine.load_statistics()


def check_wrong_acceptance_is_detected(exact: ExactDistribution, responses: int = 1000) -> None:
    """Check that these tests fail for a wrong acceptance rule: one that accepts every draft."""
    rng = np.random.default_rng(0)

    def drawn(accepts: Callable[[float], bool]) -> list[tuple[int, ...]]:
        results = []
        for _ in range(responses):
            response: tuple[int, ...] = ()
            while len(response) < LENGTH:
                probabilities = exact.after([response])[0]
                likely = int(probabilities.argmax())
                token = int(rng.choice(len(probabilities), p=probabilities))
                response += (likely if response and accepts(probabilities[likely]) else token,)
            results.append(response)
        return results

    assert least_p_value(exact, drawn(lambda p: False)) > ALPHA
    assert least_p_value(exact, drawn(lambda p: rng.random() < 0.2)) < ALPHA


def greedy_responses(engine: Engine) -> list[list[int]]:
    prompts = [(3, 10, 14, 7), (4, 9, 8, 15, 6), (3, 3, 11), (5, 16, 10, 12)]
    engine.submit([request(10**6 + i, prompt=prompts[i % 4], max_new_tokens=60, greedy=True) for i in range(8)])
    finished = collect(engine, 8)
    return [tokens_of(finished[10**6 + i]) for i in range(8)]
