"""Random streams are distinct and reproducible."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staleflow.tasks.settings.seeds import ENGINE_SEED_BITS, Stream, engine_seed, generator


def test_engine_seeds_are_unique() -> None:
    """4096 instances with all their replacements, before and after a resume, and in a job with the next seed."""
    seeds = [engine_seed(0, i, a, starts) for starts in range(2) for a in range(4) for i in range(4096)]
    seeds += [engine_seed(1, i, 0, 0) for i in range(4096)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**ENGINE_SEED_BITS


parts = st.tuples(st.integers(0, 2**31), st.integers(0, 4095), st.integers(0, 3), st.integers(0, 1000))


@given(parts, parts)
def test_an_engine_seed_depends_on_each_argument(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert (engine_seed(*first) == engine_seed(*second)) == (first == second)


def test_random_streams_differ_and_are_stable_across_releases() -> None:
    first = [generator(7, stream).integers(0, 2**62) for stream in Stream]
    assert len(set(first)) == len(Stream)
    assert generator(7, Stream.MINIBATCHES).integers(0, 2**62) == np.random.default_rng(7).integers(0, 2**62)
    assert generator(7, Stream.WORKLOAD, 5).integers(0, 2**62) == np.random.default_rng([7, 2, 5]).integers(0, 2**62)
