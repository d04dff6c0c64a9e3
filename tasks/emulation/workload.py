"""Emulated responses: their lengths, rewards and tool calls. Pure.

A workload is a function of ids: the same seed, group and member give the same response under every strategy and in any
order, so runs differ in their decisions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from staleflow.tasks.settings.choice_names import LATENCY_NAMES, WORKLOAD_NAMES
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.seeds import Stream, generator

BLOCK_GROUPS = 1024
"""Number of groups whose random numbers are drawn together, for speed. They depend only on the seed and the group."""
RESAMPLED_GROUPS = 4096
"""Groups of a resampled workload: more than most forecasts need before they repeat."""
MAX_TURNS_FACTOR = 10
"""Maximum turns of a trajectory, as a multiple of the mean."""
MAX_EMULATED_S = 100_000.0
"""Maximum of an emulated duration, such as a tool call, in seconds: about a day. Virtual time advances in short
reporting intervals."""


class Turn(NamedTuple):
    """One turn: the number of sampled tokens and, except in the last turn, a tool call with its duration and number of
    tokens."""

    tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


class Workload(Protocol):
    """Lengths, turns and rewards of emulated responses."""

    def prompt_tokens(self, group: int) -> int: ...

    def turns(self, group: int, member: int) -> tuple[Turn, ...]:
        """The turns of a response. member: index of the response in its group, from 0."""
        ...

    def reward(self, group: int, member: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The [workload] table of a job file: the responses in `staleflow simulate` and of the emulated engine."""

    kind: str = knob("lognormal", "distribution of response lengths", choices=WORKLOAD_NAMES)
    prompt_tokens: int = knob(512, "tokens per prompt", low=1)
    median: float = knob(2000.0, "median response length, tokens (power_law: shortest length)", low=1)
    sigma: float = knob(1.0, "lognormal, agentic: standard deviation of the log length", low=0, high=10)
    long_share: float = knob(0.15, "bimodal: share of long responses", low=0, high=1)
    long_ratio: float = knob(15.0, "bimodal: factor by which long responses are longer", low=1)
    exponent: float = knob(1.5, "power_law: P(length > x) is proportional to x**-exponent", above=0)
    turns: float = knob(5.0, "agentic: mean number of turns, the last one without a tool call", low=1)
    fixed_turns: bool = knob(False, "agentic: every response has that many turns; else 1 + a Poisson number")
    tool_s: float = knob(
        5.0, "agentic: seconds of a tool call; the median if lognormal, else the mean", low=0, high=MAX_EMULATED_S
    )
    tool_latency: str = knob("lognormal", "agentic: distribution of a tool call's seconds", choices=LATENCY_NAMES)
    tool_spread: float = knob(
        1.0,
        "agentic: standard deviation of a tool call's seconds if normal (none is negative), of their log if lognormal",
        low=0,
    )
    reset_s: float = knob(
        0.0, "agentic: seconds to reset an environment, added to its first step", low=0, high=MAX_EMULATED_S
    )
    tool_tokens: int = knob(200, "agentic: tokens per tool result", low=0)
    group_correlation: float = knob(
        0.0, "correlation of log lengths within a group; 1: the prompt alone determines them", low=0, high=1
    )
    acceptance_rate: float = knob(
        0.7,
        "probability that a draft token is accepted if those before it were (rollout.engine.speculation)",
        low=0,
        high=1,
    )
    signal_share: float = knob(1.0, "share of groups whose rewards are not all equal", low=0, high=1)
    run: str = knob("", "recorded: folder of a stored run whose lengths, prompts and rewards are used")
    prompts: str = knob(
        "drawn",
        "prompts and rewards of the emulated engine: drawn like the responses, or those of [task] and [reward]",
        choices=("drawn", "task"),
    )


class RandomWorkload:
    """A workload with lengths drawn from a distribution."""

    def __init__(self, config: WorkloadConfig, members_per_group: int, max_tokens: int, seed: int) -> None:
        """max_tokens: length at which responses are truncated."""
        self._config, self._max_tokens, self._seed = config, max_tokens, seed
        self._members_per_group = members_per_group
        self._block = lru_cache(maxsize=64)(self._draw_block)
        self._turns = lru_cache(maxsize=8192)(self._draw_turns)

    def __reduce__(self) -> tuple[type[RandomWorkload], tuple[WorkloadConfig, int, int, int]]:
        """Pickle only the settings; the receiver draws the same numbers."""
        return RandomWorkload, (self._config, self._members_per_group, self._max_tokens, self._seed)

    @property
    def mean_tokens(self) -> float:
        """Mean number of sampled tokens of a response, over BLOCK_GROUPS groups."""
        return float(self._block(0)["lengths"].mean())

    def prompt_tokens(self, group: int) -> int:
        return self._config.prompt_tokens

    def turns(self, group: int, member: int) -> tuple[Turn, ...]:
        return self._turns(group, member)

    def _draw_turns(self, group: int, member: int) -> tuple[Turn, ...]:
        block = self._block(group // BLOCK_GROUPS)
        row = group % BLOCK_GROUPS
        total = int(block["lengths"][row, member])
        if self._config.kind != "agentic":
            return (Turn(total),)
        return self._split_into_turns(total, block["seeds"][row, member])

    def reward(self, group: int, member: int) -> float:
        return float(self._block(group // BLOCK_GROUPS)["rewards"][group % BLOCK_GROUPS, member])

    def _draw_block(self, block_index: int) -> dict[str, npt.NDArray[Any]]:
        config = self._config
        rng = generator(self._seed, Stream.WORKLOAD, block_index)
        shape = (BLOCK_GROUPS, self._members_per_group)
        group_noise, member_noise = rng.standard_normal((BLOCK_GROUPS, 1)), rng.standard_normal(shape)
        z = np.sqrt(config.group_correlation) * group_noise + np.sqrt(1 - config.group_correlation) * member_noise
        match config.kind:
            case "lognormal" | "agentic":
                lengths = config.median * np.exp(config.sigma * z)
            case "bimodal":
                # The same normal decides between long and short, so that group_correlation keeps its meaning.
                is_long = _normal_cdf(z) < config.long_share
                medians = config.median * np.where(is_long, config.long_ratio, 1.0)
                lengths = medians * np.exp(0.2 * rng.standard_normal(shape))
            case "power_law":
                lengths = config.median * np.maximum(1e-12, 1 - _normal_cdf(z)) ** (-1 / config.exponent)
            case _:
                raise ValueError(f"unknown workload {config.kind!r}")
        with_signal = rng.random((BLOCK_GROUPS, 1)) < config.signal_share
        # Half of a group has reward 1, in random order, so that rewards do not depend on which responses end first.
        halves = rng.permuted(np.broadcast_to(np.arange(self._members_per_group) % 2, shape), axis=1)
        rewards = np.where(with_signal, halves, 0)
        return {
            "lengths": np.clip(np.rint(lengths), 1, self._max_tokens).astype(np.int64),
            "rewards": rewards,
            "seeds": rng.integers(0, 2**31, shape),
        }

    def _split_into_turns(self, total: int, seed: int) -> tuple[Turn, ...]:
        """Split `total` sampled tokens into turns, with a tool call after each but the last."""
        s = self._config
        rng = np.random.default_rng(int(seed))
        num_turns = round(s.turns) if s.fixed_turns else 1 + int(rng.poisson(s.turns - 1))
        count = min(num_turns, int(MAX_TURNS_FACTOR * s.turns), total)
        ends = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1 if count > 1 else np.zeros(0, np.int64)
        turn_tokens = np.diff(np.concatenate([[0], ends, [total]]))
        tool_s = self._tool_seconds(rng.standard_normal(count))
        tool_s[0] += s.reset_s
        last_index = count - 1
        return tuple(
            Turn(int(n), 0.0 if i == last_index else float(t), 0 if i == last_index else s.tool_tokens)
            for i, (n, t) in enumerate(zip(turn_tokens, tool_s, strict=True))
        )

    def _tool_seconds(self, z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds of tool calls, from standard normal numbers."""
        s = self._config
        match s.tool_latency:
            case "lognormal":
                return s.tool_s * np.exp(s.tool_spread * z)
            case "normal":
                return np.maximum(0.0, s.tool_s + s.tool_spread * z)
            case "constant":
                return np.full(len(z), s.tool_s)
            case _:
                raise ValueError(f"unknown latency {s.tool_latency!r}")


class RecordedWorkload:
    """Workload with the prompt lengths, response lengths, turns and rewards of a stored run. After its last group, the
    groups repeat."""

    def __init__(
        self,
        prompts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        rewards: npt.NDArray[np.float64],
        turns: Mapping[tuple[int, int], tuple[Turn, ...]] | None = None,
    ) -> None:
        """prompts: [G] tokens. lengths: [G, M] tokens. rewards: [G, M]. turns: by (g, m), for responses of several
        turns."""
        if not len(prompts) or lengths.shape != rewards.shape or len(lengths) != len(prompts):
            raise ValueError("a recorded workload needs prompts [G], lengths and rewards [G, M], G > 0")
        self._prompts, self._lengths, self._rewards, self._turns = prompts, lengths, rewards, turns or {}

    def resample(self, seed: int, max_tokens: int) -> RecordedWorkload:
        """Another sample of what the run's groups were drawn from: RESAMPLED_GROUPS drawn from a bootstrap sample of
        the recorded ones, so that its mean is as uncertain as theirs. max_tokens: length at which responses are
        truncated."""
        rng = generator(seed, Stream.WORKLOAD)
        rows = rng.choice(rng.integers(len(self._prompts), size=len(self._prompts)), RESAMPLED_GROUPS)
        members = range(self._lengths.shape[1])
        recorded = {(g, m): self._turns.get((int(row), m)) for g, row in enumerate(rows) for m in members}
        return RecordedWorkload(
            self._prompts[rows],
            np.minimum(self._lengths[rows], max_tokens),
            self._rewards[rows],
            {key: turns for key, turns in recorded.items() if turns},
        )

    def prompt_tokens(self, group: int) -> int:
        return int(self._prompts[group % len(self._prompts)])

    def turns(self, group: int, member: int) -> tuple[Turn, ...]:
        index = (group % len(self._lengths), member % self._lengths.shape[1])
        return self._turns.get(index) or (Turn(int(self._lengths[index])),)

    def reward(self, group: int, member: int) -> float:
        row = self._rewards[group % len(self._rewards)]
        return float(row[member % len(row)])


def _normal_cdf(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """P(Z <= z), to 1e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper_tail = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * poly
    result: npt.NDArray[np.float64] = np.where(z >= 0, 1 - upper_tail, upper_tail)
    return result
