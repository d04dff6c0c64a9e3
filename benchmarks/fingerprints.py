"""What a proof that weights are equal costs on a processor, in one thread: SHA-256 of their bytes, the order-free sum
of their elements (stores/weights/part_sums.py), and a comparison bit by bit. Rounds alternate; ratios are of medians of
process seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from staleflow.stores.weights.part_sums import part_sum
from staleflow.stores.weights.weight_comparison import equal_bits
from staleflow.stores.weights.weight_hash import fingerprint


def seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Process seconds of each call."""
    used = [time.process_time()]
    for call in calls:
        call()
        used.append(time.process_time())
    return [end - begin for begin, end in pairwise(used)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a million elements, two rounds")
    args = parser.parse_args()
    elements, rounds = (2**20, 2) if args.quick else (args.elements, args.rounds)
    torch.set_num_threads(1)
    print("| type | SHA-256, ns an element | sum | comparison | sum / SHA-256 | sum / comparison |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype).reshape(-1, 1024)
        calls = (
            partial(fingerprint, {"t": tensor}, threads=1),
            partial(part_sum, tensor),
            partial(equal_bits, tensor, tensor.clone()),
        )
        seconds(calls)
        measured = [seconds(calls) for _ in range(rounds)]
        sha, order_free, compared = (median(column) for column in zip(*measured, strict=True))
        costs = " | ".join(f"{s / elements * 1e9:.2f}" for s in (sha, order_free, compared))
        print(f"| {dtype} | {costs} | {order_free / sha:.1f} | {order_free / compared:.1f} |", flush=True)


if __name__ == "__main__":
    main()
