"""Splits rows into micro-batches, and each micro-batch among the ranks of a trainer. Pure.

The ranks compute in lockstep, because each layer's parameters are gathered from all of them. So it is not enough that
ranks have equal numbers of tokens in total; they must be equal in each micro-batch.

Invariants:
- Every row is in exactly one part of one micro-batch. A micro-batch has a part for each rank; it may be empty, but one
  of them is not.
- Equal rows are always split equally.

Rows are split by length, or by prompt where that saves time: the rows of a prompt stay together, and it is computed
once. Invariants of a split by length:
- A part's rows times its longest row are within the budget, unless it is a single row.
- The parts of a micro-batch differ by one row at most, and hold rows that are neighbours in length.
- No other split of the sorted rows takes less time, if the time of a micro-batch is that of a rank's padded tokens plus
  a constant overhead.

Invariants of a split by prompt:
- A part's cost in tokens (shared_prompts.cost_tokens) is within the budget, and its rows times its longest row are
  within MAX_PADDING_FACTOR times the budget, unless it is a single row.
- It saves at least MIN_SAVED_SHARE of the tokens of a split by length, the overhead of micro-batches included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from staleflow.tasks.training.shared_prompts import Ints, cost_tokens, indices_of_equal_keys

RowIndices = tuple[int, ...]
PASS_OVERHEAD_TOKENS, GATHER_OVERHEAD_TOKENS = 256, 2048
"""Overhead of a micro-batch, as a number of tokens that take the same time: in one process, and with ranks, where each
layer's parameters are gathered for it (8 bytes per parameter at 400 GB/s, against arithmetic at 400 TFLOP/s)."""


def split_by_length(lengths: Sequence[int], num_ranks: int, token_budget: int) -> list[tuple[RowIndices, ...]]:
    """Split rows into micro-batches: for each, the row indices of each rank. lengths: tokens of each row. token_budget:
    maximum number of padded tokens per rank.

    Rows are split from the shortest to the longest, and dealt to the ranks back and forth, so that no rank always gets
    the longer ones.

    >>> split_by_length([5, 1, 4, 2, 3], num_ranks=2, token_budget=8)
    [((1,), (3, 4)), ((2,), (0,))]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    ends = _microbatch_ends([lengths[i] for i in order], num_ranks, token_budget)
    return [_deal_to_ranks(order[start:end], num_ranks) for start, end in zip([0, *ends], ends, strict=False)]


def _microbatch_ends(lengths: Sequence[int], num_ranks: int, token_budget: int) -> list[int]:
    """Ends of the micro-batches of rows with ascending lengths. By dynamic programming: the best split of the first
    rows is the best split of fewer rows plus one micro-batch."""
    cost = np.zeros(len(lengths) + 1, np.int64)
    starts = np.zeros(len(lengths) + 1, np.int64)
    for end, max_length in enumerate(lengths, start=1):
        first = max(0, end - num_ranks * max(1, token_budget // max_length))
        rows_per_rank = -(-(end - np.arange(first, end)) // num_ranks)
        costs = cost[first:end] + rows_per_rank * max_length + _overhead(num_ranks)
        best = int(costs.argmin())
        cost[end], starts[end] = costs[best], first + best
    return [end for _, end in _row_ranges(starts)]


def _row_ranges(starts: Ints) -> list[RowRange]:
    """The parts of a split, in order. starts: [N + 1] the first row of the part that ends before each row."""
    parts, end = list[RowRange](), len(starts) - 1
    while end:
        parts.append((int(starts[end]), end))
        end = int(starts[end])
    return parts[::-1]


def _deal_to_ranks(rows: Sequence[int], num_ranks: int) -> tuple[RowIndices, ...]:
    """Deal rows to ranks back and forth: 0, 1, 2, 2, 1, 0, 0, ..."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, row in enumerate(rows):
        round_index, position = divmod(index, num_ranks)
        parts[position if round_index % 2 == 0 else num_ranks - 1 - position].append(row)
    return tuple(tuple(part) for part in parts)


MIN_SAVED_SHARE = 1 / 16
"""Minimum share of the tokens of a split by length that a split by prompt must save. Rows of a prompt differ more in
length than rows sorted by length, so micro-batches are less equal: a step without shared prompts was measured to take
up to 6 % longer."""
MAX_PADDING_FACTOR = 2
"""In a split by prompt, the padded tokens of a part are at most this multiple of the budget, because the loss is
computed from padded rows."""
BUDGET_FACTORS = (1.0, 1.03, 1.06, 1.12, 1.25, 1.5)
"""Token budgets that are tried for several ranks, as multiples of the mean number of tokens per part."""

RowRange = tuple[int, int]


def split_by_prompt(
    rows_by_prompt: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    num_ranks: int,
    token_budget: int,
) -> list[tuple[RowIndices, ...]]:
    """Split rows into micro-batches: for each, the row indices of each rank.

    Args:
        rows_by_prompt: The rows of each prompt.
        prompt_lengths, response_lengths: Numbers of tokens of each row's prompt and response.
        token_budget: Maximum number of tokens per rank.

    >>> split_by_prompt([[0, 2], [1]], [32, 8, 32], [9, 4, 7], num_ranks=1, token_budget=64)
    [((1, 2, 0),)]
    """
    by_length = split_by_length(
        [sum(lengths) for lengths in zip(prompt_lengths, response_lengths, strict=True)], num_ranks, token_budget
    )
    if len(rows_by_prompt) == len(prompt_lengths):
        return by_length
    sorted_rows = _OrderedRows.of(rows_by_prompt, prompt_lengths, response_lengths)
    best_parts = sorted_rows.split(token_budget)
    if num_ranks > 1:
        mean_tokens = sum(sorted_rows.cost_of(part) for part in best_parts) / (
            -(-len(best_parts) // num_ranks) * num_ranks
        )
        budgets = [
            int(mean_tokens * factor) for factor in BUDGET_FACTORS if 1 <= int(mean_tokens * factor) < token_budget
        ]
        best_parts = min(
            [*(sorted_rows.split(budget) for budget in budgets), best_parts],
            key=lambda parts: sorted_rows.estimated_time(parts, num_ranks),
        )
    batches = sorted_rows.deal(best_parts, num_ranks)
    by_prompt = [tuple(sorted_rows.order[start:end] for start, end in batch) for batch in batches]
    prompt_of_row = {i: number for number, prompt_rows in enumerate(rows_by_prompt) for i in prompt_rows}

    def tokens(batches: Sequence[tuple[RowIndices, ...]]) -> int:
        return sum(
            max(_cost_tokens(part, prompt_of_row, prompt_lengths, response_lengths) for part in batch)
            for batch in batches
        )

    tokens_by_length = tokens(by_length)
    saved_tokens = tokens_by_length - tokens(by_prompt) + _overhead(num_ranks) * (len(by_length) - len(by_prompt))
    return by_prompt if saved_tokens >= MIN_SAVED_SHARE * tokens_by_length else by_length


def _overhead(num_ranks: int) -> int:
    """Overhead of a micro-batch, in tokens."""
    return PASS_OVERHEAD_TOKENS if num_ranks == 1 else GATHER_OVERHEAD_TOKENS


def _cost_tokens(
    part: RowIndices, prompt_of_row: Mapping[int, int], prompt_lengths: Sequence[int], response_lengths: Sequence[int]
) -> int:
    """Cost of a part. prompt_of_row: index of each row's prompt."""
    rows_of_prompts = [
        [part[k] for k in prompt_rows] for prompt_rows in indices_of_equal_keys(prompt_of_row[i] for i in part)
    ]
    return sum(
        int(
            cost_tokens(len(prompt_rows), prompt_lengths[prompt_rows[0]], sum(response_lengths[i] for i in prompt_rows))
        )
        for prompt_rows in rows_of_prompts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OrderedRows:
    """Rows ordered by prompt; prompts by their longest row, the longest last."""

    order: RowIndices
    lengths: Ints  # [N]
    prompt_lengths: Ints  # [N]
    starts: Ints  # [N] the first row of each row's prompt
    ends: Ints  # [N] and the one after its last row
    response_offsets: Ints  # [N + 1] tokens after prompts of all rows before
    cost_to_prompt_end: Ints  # [N] cost of a row, together with those of its prompt that come after it
    cost_before_prompt: Ints  # [N + 1] at the first row of a prompt, and at the end: cost of all rows before

    @classmethod
    def of(
        cls, rows_by_prompt: Sequence[Sequence[int]], prompt_lengths: Sequence[int], response_lengths: Sequence[int]
    ) -> _OrderedRows:
        rows_of_prompts = [sorted(prompt_rows, key=lambda i: response_lengths[i]) for prompt_rows in rows_by_prompt]
        rows_of_prompts.sort(
            key=lambda prompt_rows: prompt_lengths[prompt_rows[-1]] + response_lengths[prompt_rows[-1]]
        )
        order = tuple(i for prompt_rows in rows_of_prompts for i in prompt_rows)
        sizes = np.asarray([len(prompt_rows) for prompt_rows in rows_of_prompts])
        ends = np.repeat(sizes.cumsum(), sizes)
        ordered_prompts, ordered_responses = (
            np.asarray(prompt_lengths, np.int64)[[*order]],
            np.asarray(response_lengths, np.int64)[[*order]],
        )
        offsets = np.concatenate([[0], ordered_responses.cumsum()])
        rows = np.arange(len(order))
        starts = ends - np.repeat(sizes, sizes)
        costs = cost_tokens(ends - rows, ordered_prompts, offsets[ends] - offsets[rows])
        before_prompt = np.zeros(len(order) + 1, np.int64)
        before_prompt[sizes.cumsum()] = costs[starts[sizes.cumsum() - 1]].cumsum()
        return cls(
            order=order, lengths=ordered_prompts + ordered_responses,
            prompt_lengths=ordered_prompts, starts=starts, ends=ends, response_offsets=offsets,
            cost_to_prompt_end=costs, cost_before_prompt=before_prompt,
        )  # fmt: skip

    def cost_tokens(self, firsts: Ints, end: int) -> Ints:
        """Cost of the rows from each of `firsts` up to row `end`, exclusive."""
        start = int(self.starts[end - 1])
        first_in_prompt = np.maximum(firsts, start)
        last_prompt = cost_tokens(
            end - first_in_prompt,
            self.prompt_lengths[end - 1],
            self.response_offsets[end] - self.response_offsets[first_in_prompt],
        )
        earlier_prompts = (
            self.cost_to_prompt_end[firsts]
            + self.cost_before_prompt[start]
            - self.cost_before_prompt[self.ends[firsts]]
        )
        costs: Ints = last_prompt + np.where(firsts < start, earlier_prompts, 0)
        return costs

    def cost_of(self, part: RowRange) -> int:
        start, end = part
        return int(self.cost_tokens(np.asarray([start]), end)[0])

    def split(self, token_budget: int) -> list[RowRange]:
        """Split the rows into parts. By dynamic programming: the best split of the first rows is the best split of
        fewer rows plus one part."""
        num_rows = len(self.order)
        cost, starts = np.zeros(num_rows + 1, np.int64), np.zeros(num_rows + 1, np.int64)
        for end in range(1, num_rows + 1):
            max_rows = max(1, MAX_PADDING_FACTOR * token_budget // int(self.lengths[end - 1]))
            min_first = int(np.searchsorted(self.response_offsets, self.response_offsets[end] - token_budget))
            firsts = np.arange(min(end - 1, max(min_first, end - max_rows)), end)
            part_costs = self.cost_tokens(firsts, end)
            max_lengths = np.maximum.accumulate(self.lengths[firsts][::-1])[::-1]
            padded_tokens = (end - firsts) * max_lengths
            is_allowed = (part_costs <= token_budget) & (padded_tokens <= MAX_PADDING_FACTOR * token_budget)
            is_allowed[-1] = True
            firsts = firsts[is_allowed]
            costs = cost[firsts] + part_costs[is_allowed] + PASS_OVERHEAD_TOKENS
            best = int(costs.argmin())
            cost[end], starts[end] = costs[best], firsts[best]
        return _row_ranges(starts)

    def deal(self, parts: Sequence[RowRange], num_ranks: int) -> list[tuple[RowRange, ...]]:
        """Form micro-batches of parts with similar costs, and deal them to ranks back and forth, so that no
        rank always has the larger one. If the number of parts is no multiple of the ranks, empty parts are added."""
        sorted_parts = [*[(0, 0)] * (-len(parts) % num_ranks), *sorted(parts, key=self.cost_of)]
        batches = [tuple(sorted_parts[i : i + num_ranks]) for i in range(0, len(sorted_parts), num_ranks)]
        return [batch if index % 2 == 0 else batch[::-1] for index, batch in enumerate(batches)]

    def estimated_time(self, parts: Sequence[RowRange], num_ranks: int) -> int:
        """Time in which ranks compute these parts, as a number of tokens; a micro-batch takes that of its largest."""
        largest = sorted(map(self.cost_of, parts), reverse=True)[::num_ranks]
        return sum(largest) + GATHER_OVERHEAD_TOKENS * len(largest)
