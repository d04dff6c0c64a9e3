"""Random streams of a job, all derived from its one seed and all different.

Each use has its own number, followed by indices within it (of an instance, a block of responses). numpy's SeedSequence
mixes them, so that neighboring seeds, instances or attempts give independent streams. Sums such as
`seed * 1000 + instance` would collide as soon as one term exceeds its range.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

ENGINE_SEED_BITS = 63
"""Bits of an engine's seed: torch takes a signed 64-bit number."""


class Stream(IntEnum):
    """The uses of random numbers. MINIBATCHES is 0 because numpy treats a plain seed as itself followed by zeros."""

    MINIBATCHES = 0
    ROUTING = 1
    WORKLOAD = 2
    FAULTS = 3
    SAMPLING = 4
    ENVIRONMENTS = 5
    MEASURED_ROWS = 6
    TASKS = 7


def generator(seed: int, stream: Stream, *indices: int) -> np.random.Generator:
    """Create the random generator of a stream. indices: select an independent part of the stream."""
    return np.random.default_rng([seed, stream, *indices])


def engine_seed(seed: int, instance: int, attempt: int, num_earlier_starts: int) -> int:
    """Derive the seed of an engine's sampling.

    Args:
        seed: The job's seed.
        instance: Index of the instance.
        attempt: How often the instance has been replaced.
        num_earlier_starts: Number of earlier starts of the run; a resumed run must not sample the same tokens again.
    """
    sequence = np.random.SeedSequence([seed, Stream.SAMPLING, instance, attempt, num_earlier_starts])
    return int(sequence.generate_state(1, np.uint64)[0]) >> (64 - ENGINE_SEED_BITS)


def task_seed(seed: int, index: int, *, held_out: bool) -> int:
    """Derive the seed with which an environment is reset for task `index`.

    Seeds are odd for held-out tasks and even for others, so that no task of training is also held out. They have 31
    bits, which all packages accept.
    """
    sequence = np.random.SeedSequence([seed, Stream.ENVIRONMENTS, held_out, index])
    return int(sequence.generate_state(1, np.uint32)[0]) >> 2 << 1 | held_out
