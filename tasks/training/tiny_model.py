"""Tiny language models, pretrained on worked sums or on other symbols and examples.

Examples of sums write out each step (`7+8=15;15-9=6;so6.`), so responses differ in length. Some are flawed, and the
model learns these, too; reinforcement learning has to tell them apart.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

INSTRUCTION = "State the final answer to the following arithmetic problem:"
SPECIAL_SYMBOLS = ("<pad>", "<eos>", "<unk>")
SYMBOLS = (*SPECIAL_SYMBOLS, INSTRUCTION, *"0123456789+-=;.", "so")
"""The tokens of sums."""
NUM_HEADS = 4
EXAMPLES_PER_STEP = 32
"""Examples of each optimizer step."""
CARELESS_SHARE = 0.82
"""Share of an example's steps that forget carries and borrows, by default."""


def make_tokenizer(symbols: Sequence[str] = SYMBOLS) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per symbol; the first symbols are SPECIAL_SYMBOLS. White space is dropped."""
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longer = [re.escape(symbol) for symbol in symbols[len(SPECIAL_SYMBOLS) :] if len(symbol) > 1]
    pattern = Regex("|".join([*longer, r"\S"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def add_without_carries(x: int, y: int) -> int:
    """x + y without carries and borrows.

    >>> add_without_carries(17, 8), add_without_carries(12, -5)
    (15, 17)
    """
    large, small = (x, y) if abs(x) >= abs(y) else (y, x)
    sign, direction = (-1 if large < 0 else 1), (1 if (large < 0) == (small < 0) else -1)
    a, b, factor, total = abs(large), abs(small), 1, 0
    while a or b:
        total += (a % 10 + direction * (b % 10)) % 10 * factor
        a, b, factor = a // 10, b // 10, factor * 10
    return sign * total


def worked_example(expression: str, rng: random.Random, careless_share: float = CARELESS_SHARE) -> str:
    """All steps of a sum and the answer that follows from them. Each step forgets carries with probability
    `careless_share`."""
    terms = expression.split()
    total, lines = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        y = int(term) if sign == "+" else -int(term)
        result = add_without_carries(total, y) if rng.random() < careless_share else total + y
        lines.append(f"{total}{sign}{term}={result};")
        total = result
    return "".join(lines) + f"so{total}."


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainingSettings:
    """Size of a tiny model, and settings of its pretraining."""

    steps: int
    hidden_size: int
    num_layers: int
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    initializer_range: float = 0.02
    seed: int = 0


def pretrain(
    folder: Path,
    examples: Iterator[tuple[str, ...]],
    settings: PretrainingSettings,
    on_start: Callable[[int], None],
    on_step: Callable[[int, float], None],
    symbols: Sequence[str] = SYMBOLS,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> None:
    """Train a Llama model and write it to `folder`.

    Args:
        examples: Each (question, answer), or (question, answer, question, answer, ...) for several turns; answers are
            learned.
        on_start: Called with the number of parameters.
        on_step: Called with (steps done, loss) after each step.
        symbols: The tokens; the first ones are SPECIAL_SYMBOLS.
        tokenizer: Replaces the tokenizer made from the symbols.
    """
    logging.disable_progress_bar()  # of writing one small file
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # several wait for each other by spinning: slower at this size, and by far on busy cores
    tokenizer = tokenizer or make_tokenizer(symbols)
    # head_dim 32: the smallest that every engine's attention kernels take.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=settings.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    on_start(model.num_parameters())
    for step, (ids, labels) in zip(range(settings.steps), _batches(tokenizer, examples), strict=False):
        decay = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.warmup_steps) * max(0.02, decay)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1, float(loss.detach()))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _batches(
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[tuple[str, ...]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (input ids, labels), each [EXAMPLES_PER_STEP, L]; labels cover only the answers, each with its end."""
    while True:
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(EXAMPLES_PER_STEP):
            row: list[int] = []
            labels: list[int] = []
            for turn, text in enumerate(next(examples)):
                is_answer = turn % 2 == 1
                ids = tokenizer(text + tokenizer.eos_token if is_answer else text)["input_ids"]
                row += ids
                labels += ids if is_answer else [-100] * len(ids)
            rows.append((row, labels))
        max_length = max(len(row) for row, _ in rows)
        ids = torch.full((EXAMPLES_PER_STEP, max_length), tokenizer.pad_token_id)
        all_labels = torch.full((EXAMPLES_PER_STEP, max_length), -100)
        for i, (row, labels) in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            all_labels[i, : len(row)] = torch.tensor(labels)
        yield ids, all_labels
