"""Splits rows without padding into micro-batches, and each of these among the ranks of a trainer. Rows of one prompt
stay together where that saves time, because their prompt is then computed once. Numpy, pure.

Invariants:
- Every row is in exactly one part of one micro-batch. A micro-batch has a part for each rank; it may be empty, but one
  of them is not.
- What counts of a part's tokens (shared_prompts.counted_tokens) is within the budget, unless it is a single row.
- Rows are cut prompt by prompt only if that leaves FEWER of the tokens that count to compute, and otherwise as padded
  ones are.
- The same rows are always divided the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from staleflow.tasks.training.microbatch_split import GATHER_TOKENS, PASS_TOKENS, Part, split_microbatches
from staleflow.tasks.training.shared_prompts import Ints, counted_tokens, equal_indices

FEWER = 1 / 16
"""Share of the tokens that have to be saved by rows of a prompt being together. They differ in length more than
neighbours in length do, and so do micro-batches: measured, a step without anything to share takes up to 6 % longer."""
PADDED = 2
"""Prompt by prompt, a part's rows times its longest row are within so many times the budget: their loss is computed
of padded rows."""
CLOSER = (1.0, 1.03, 1.06, 1.12, 1.25, 1.5)
"""Budgets of a part that are tried for several ranks, over what each would be if all were equal."""

Range = tuple[int, int]


def split_by_prompt(
    rows_by_prompt: Sequence[Sequence[int]], prompts: Sequence[int], rests: Sequence[int], ranks: int, token_budget: int
) -> list[tuple[Part, ...]]:
    """Split rows into micro-batches: for each, the row indices of each rank.

    Args:
        rows_by_prompt: The rows of each prompt.
        prompts, rests: Tokens of each row's prompt and of its response.
        token_budget: Maximum number of tokens per rank.

    >>> divided_by_prompt([[0, 2], [1]], [32, 8, 32], [9, 4, 7], ranks=1, token_budget=64)
    [((1, 2, 0),)]
    """
    by_length = split_microbatches([sum(both) for both in zip(prompts, rests, strict=True)], ranks, token_budget)
    if len(rows_by_prompt) == len(prompts):
        return by_length
    line = _Line.of(rows_by_prompt, prompts, rests)
    best = line.cut(token_budget)
    if ranks > 1:
        even = sum(line.count(part) for part in best) / (-(-len(best) // ranks) * ranks)
        budgets = [int(even * more) for more in CLOSER if 1 <= int(even * more) < token_budget]
        best = min([*(line.cut(budget) for budget in budgets), best], key=lambda parts: line.time(parts, ranks))
    batches = line.dealt(best, ranks)
    by_prompt = [tuple(line.order[start:end] for start, end in batch) for batch in batches]
    numbers = {i: number for number, run in enumerate(rows_by_prompt) for i in run}

    def tokens(cut: Sequence[tuple[Part, ...]]) -> int:
        return sum(max(_count(part, numbers, prompts, rests) for part in batch) for batch in cut)

    return by_prompt if tokens(by_prompt) <= (1 - FEWER) * tokens(by_length) else by_length


def _count(part: Part, numbers: Mapping[int, int], prompts: Sequence[int], rests: Sequence[int]) -> int:
    """What rows count for together. numbers: of each row's prompt."""
    runs = [[part[k] for k in run] for run in equal_indices(numbers[i] for i in part)]
    return sum(int(counted_tokens(len(run), prompts[run[0]], sum(rests[i] for i in run))) for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Rows in the order that they stand in, prompt by prompt, the longest last."""

    order: Part
    lengths: Ints  # [N]
    prompts: Ints  # [N]
    starts: Ints  # [N] the first row of each row's prompt
    ends: Ints  # [N] and the one after its last row
    rests: Ints  # [N + 1] tokens after prompts of all rows before
    remaining: Ints  # [N] what a row counts for, together with those of its prompt that come after it
    whole: Ints  # [N + 1] at the first row of a prompt, and at the end: what all rows before count for

    @classmethod
    def of(cls, rows_by_prompt: Sequence[Sequence[int]], prompts: Sequence[int], rests: Sequence[int]) -> _Line:
        runs = [sorted(run, key=lambda i: rests[i]) for run in rows_by_prompt]
        runs.sort(key=lambda run: prompts[run[-1]] + rests[run[-1]])
        order = tuple(i for run in runs for i in run)
        sizes = np.asarray([len(run) for run in runs])
        ends = np.repeat(sizes.cumsum(), sizes)
        of_prompt, of_rest = np.asarray(prompts, np.int64)[[*order]], np.asarray(rests, np.int64)[[*order]]
        rest = np.concatenate([[0], of_rest.cumsum()])
        rows = np.arange(len(order))
        starts = ends - np.repeat(sizes, sizes)
        remaining = counted_tokens(ends - rows, of_prompt, rest[ends] - rest[rows])
        complete = np.zeros(len(order) + 1, np.int64)
        complete[sizes.cumsum()] = remaining[starts[sizes.cumsum() - 1]].cumsum()
        return cls(
            order=order, lengths=of_prompt + of_rest, prompts=of_prompt, starts=starts, ends=ends, rests=rest,
            remaining=remaining, whole=complete,
        )  # fmt: skip

    def counts(self, firsts: Ints, end: int) -> Ints:
        """What rows from each of `firsts` up to the one before `end` count for."""
        start = int(self.starts[end - 1])
        within = np.maximum(firsts, start)
        last_prompt = counted_tokens(end - within, self.prompts[end - 1], self.rests[end] - self.rests[within])
        before = self.remaining[firsts] + self.whole[start] - self.whole[self.ends[firsts]]
        starts: Ints = last_prompt + np.where(firsts < start, before, 0)
        return starts

    def count(self, part: Range) -> int:
        start, end = part
        return int(self.counts(np.asarray([start]), end)[0])

    def cut(self, token_budget: int) -> list[Range]:
        """By dynamic programming: the best way of cutting the first rows is the best way of cutting fewer of them, and
        one part more."""
        num_rows = len(self.order)
        cost, starts = np.zeros(num_rows + 1, np.int64), np.zeros(num_rows + 1, np.int64)
        for end in range(1, num_rows + 1):
            max_rows = max(1, PADDED * token_budget // int(self.lengths[end - 1]))
            fitting = int(np.searchsorted(self.rests, self.rests[end] - token_budget))
            firsts = np.arange(min(end - 1, max(fitting, end - max_rows)), end)
            counts = self.counts(firsts, end)
            max_lengths = np.maximum.accumulate(self.lengths[firsts][::-1])[::-1]
            allowed = (counts <= token_budget) & ((end - firsts) * max_lengths <= PADDED * token_budget)
            allowed[-1] = True
            firsts = firsts[allowed]
            totals = cost[firsts] + counts[allowed] + PASS_TOKENS
            best = int(totals.argmin())
            cost[end], starts[end] = totals[best], firsts[best]
        parts, end = list[Range](), num_rows
        while end:
            parts.append((int(starts[end]), end))
            end = int(starts[end])
        return parts[::-1]

    def dealt(self, parts: Sequence[Range], ranks: int) -> list[tuple[Range, ...]]:
        """Parts that count for about as much together, dealt back and forth so that no rank has the larger one each
        time; where there are too few, empty ones with the smallest."""
        ordered = [*[(0, 0)] * (-len(parts) % ranks), *sorted(parts, key=self.count)]
        batches = [tuple(ordered[i : i + ranks]) for i in range(0, len(ordered), ranks)]
        return [batch if turn % 2 == 0 else batch[::-1] for turn, batch in enumerate(batches)]

    def time(self, parts: Sequence[Range], ranks: int) -> int:
        """Tokens in whose time ranks compute these parts, each micro-batch in that of its largest one."""
        largest = sorted(map(self.count, parts), reverse=True)[::ranks]
        return sum(largest) + GATHER_TOKENS * len(largest)
