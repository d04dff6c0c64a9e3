"""How many tokens a verified step keeps, by what drafts come from: for the last response of each group of a stored run.

    python -m benchmarks.drafts runs/demo

No model is needed: what was sampled is known, and a drafted token would have been kept exactly where it is the sampled
one. The last response is the one that a step waits for; by then its siblings have finished, on its own instance and on
others. `history` has the responses of earlier groups with the same prompt. Speculation with drafts of --length tokens.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import InstanceId, TrajectoryId
from staleflow.tasks.engines.response_drafter import Drafter

SOURCES = ("itself", "siblings here", "all siblings", "history", "all siblings and history")


@dataclass(frozen=True, slots=True)
class Response:
    """A stored response. instance: that ended it."""

    id: TrajectoryId
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    instance: InstanceId
    ended_s: float


@dataclass(slots=True)
class Kept:
    """What became of drafts. steps: of the model; tokens: sampled in them."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of a stored run")
    parser.add_argument("--steps", type=int, nargs=2, default=(0, 10**9), metavar=("FIRST", "LAST"))
    parser.add_argument("--length", type=int, default=4, help="most tokens of a draft")
    parser.add_argument("--quick", action="store_true", help="of made-up responses: whether it works")
    args = parser.parse_args()
    if args.run is None and not args.quick:
        parser.error("name the folder of a stored run")
    groups = made_up() if args.run is None else stored(args.run, *args.steps)
    again = len(groups) - len({group[0].prompt for group in groups})
    print(f"{len(groups)} groups, {again} of prompts seen before", flush=True)
    print("| drafts from | tokens a step | drafted, per token | accepted |\n|---|---|---|---|", flush=True)
    for source in SOURCES:
        kept = drafted_from(groups, source, args.length)
        share = f"{kept.accepted / kept.drafted:.0%}" if kept.drafted else "-"
        per_token = kept.drafted / kept.tokens
        print(f"| {source} | {kept.tokens / kept.steps:.2f} | {per_token:.2f} | {share} |", flush=True)


def stored(run: Path, first: int, last: int) -> list[list[Response]]:
    """The groups that training steps from `first` to before `last` consumed, each in the order it ended in."""
    store = VersionedStore.open(run / "store")
    groups: dict[int, list[Response]] = defaultdict(list)
    for step in range(first, min(last, store.summary().num_steps)):
        for t in (row.trajectory for row in store.ended(step)):
            prompt, tokens = (tuple(part.tolist()) for part in (t.prompt_tokens, t.response_tokens))
            groups[t.group].append(Response(t.id, prompt, tokens, t.segments[-1].instance, t.timings.sampled_s))
    return [sorted(group, key=lambda item: (item.ended_s, item.id)) for group in groups.values() if len(group) > 1]


def made_up() -> list[list[Response]]:
    """Groups whose responses share most of their tokens."""
    rng = random.Random(0)

    def group(number: int) -> Iterator[Response]:
        common = [rng.randrange(500) for _ in range(40)]
        for member in range(4):
            tokens = tuple(rng.randrange(500) if rng.random() < 0.1 else token for token in common)
            yield Response(TrajectoryId(number * 4 + member), (number % 5,), tokens, InstanceId("ab"[member % 2]), 0.0)

    return [list(group(number)) for number in range(20)]


def drafted_from(groups: list[list[Response]], source: str, length: int) -> Kept:
    """Draft for the last response of each group in turn."""
    past: dict[tuple[int, ...], list[Response]] = defaultdict(list)
    kept = Kept()
    drafter = Drafter(length, 1)
    for group in groups:
        *siblings, last = group
        known = past[last.prompt][-16:] if "history" in source else []
        if "siblings" in source:
            known += [item for item in siblings if "all" in source or item.instance == last.instance]
        # Under a prompt of its own: what was known of an earlier group is history, unless it is told again.
        prompt = (*last.prompt, last.id)
        for item in known:
            drafter.add_response(prompt, item.id, item.tokens)
        _sample(drafter, prompt, last, kept)
        past[last.prompt] += group
    return kept


def _sample(drafter: Drafter, prompt: tuple[int, ...], one: Response, kept: Kept) -> None:
    """Sample a response again, with drafts after its first token."""
    drafter.begin("0", one.id, prompt, prompt)
    at = 0
    while at < len(one.tokens):
        draft = drafter.draft("0", len(one.tokens) - at - 1) if at else []
        accepted = 0
        while accepted < len(draft) and draft[accepted] == one.tokens[at + accepted]:
            accepted += 1
        drafter.extend("0", one.tokens[at : at + accepted + 1])
        at += accepted + 1
        kept.steps += 1
        kept.tokens += accepted + 1
        kept.drafted += len(draft)
        kept.accepted += accepted
    drafter.end("0")


if __name__ == "__main__":
    main()
