"""The random streams of a job: all come from its one seed, and no two of them are the same.

Each use has a number of its own, and each part of it (an instance, a block of responses) numbers after that. numpy's
SeedSequence mixes them, so that neighbouring seeds, instances or attempts have nothing in common; sums such as
`seed * 1000 + instance` meet again as soon as one of their parts outgrows its share.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

ENGINE_SEED_BITS = 63
"""What torch takes as a seed, as a signed number."""


class Stream(IntEnum):
    """What is drawn. 0 is the order of minibatches: numpy has a plain seed stand for itself and zeros."""

    MINIBATCHES = 0
    ROUTING = 1
    WORKLOAD = 2
    FAULTS = 3
    SAMPLING = 4


def generator(seed: int, stream: Stream, *part: int) -> np.random.Generator:
    """A generator of one stream of the job with this seed. part: numbers that tell its parts apart."""
    return np.random.default_rng([seed, stream, *part])


def engine_seed(seed: int, instance: int, attempt: int, life: int) -> int:
    """The seed that an engine samples with. attempt: how often its instance has been replaced. life: how often the run
    was started before; going on with a run must not sample the same again."""
    sequence = np.random.SeedSequence([seed, Stream.SAMPLING, instance, attempt, life])
    return int(sequence.generate_state(1, np.uint64)[0]) >> (64 - ENGINE_SEED_BITS)
