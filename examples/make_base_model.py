"""Make the demo's base model: a 0.6M-parameter Llama pretrained on noisy worked examples of running sums.

The examples write out each step (`7+8=15;15-9=6;so6.`), so responses differ in length. In about four of five steps any
carry or borrow is forgotten, and later steps continue with the wrong result. The model learns both the right rule and
the mistake, and is right less than half of the time at first; reinforcement learning has to tell them apart.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

INSTRUCTION = "State the final answer to the following arithmetic problem:"
SYMBOLS = ["<pad>", "<eos>", "<unk>", INSTRUCTION, *"0123456789+-=;.", "so"]
TASK = {"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 1}
"""Options of reasoning-gym's chain_sum, the same as in examples/demo.toml."""
SLIP = 0.82
"""Share of steps in which the examples forget carries and borrows."""
FIRST_SEED = 1
"""Seed of the examples. The run draws its prompts with other seeds."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per digit and sign and one for the instruction; white space is dropped."""
    vocabulary = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = Regex(rf"{INSTRUCTION}|so|\S")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def careless(x: int, y: int) -> int:
    """x + y with every carry and borrow forgotten.

    >>> careless(17, 8), careless(12, -5)
    (15, 17)
    """
    large, small = (x, y) if abs(x) >= abs(y) else (y, x)
    sign, direction = (-1 if large < 0 else 1), (1 if (large < 0) == (small < 0) else -1)
    a, b, place, total = abs(large), abs(small), 1, 0
    while a or b:
        total += (a % 10 + direction * (b % 10)) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return sign * total


def worked_example(expression: str, rng: random.Random, slip: float) -> str:
    """All steps of a sum and the resulting answer. slip: probability that a step is computed carelessly."""
    terms = expression.split()
    total, lines = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        y = int(term) if sign == "+" else -int(term)
        result = careless(total, y) if rng.random() < slip else total + y
        lines.append(f"{total}{sign}{term}={result};")
        total = result
    return "".join(lines) + f"so{total}."


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input ids, labels), each [size, L]; labels cover only the worked example, not the question."""
    rng = random.Random(seed)
    dataset = reasoning_gym.create_dataset("chain_sum", size=10**9, seed=FIRST_SEED, **TASK)
    index = 0
    while True:
        rows = []
        for _ in range(size):
            entry = dataset[index]
            index += 1
            question = tokenizer(entry["question"])["input_ids"]
            answer = tokenizer(worked_example(entry["metadata"]["expression"], rng, SLIP) + "<eos>")["input_ids"]
            rows.append((question, answer))
        longest = max(len(q) + len(a) for q, a in rows)
        ids = torch.full((size, longest), tokenizer.pad_token_id)
        labels = torch.full((size, longest), -100)
        for i, (question, answer) in enumerate(rows):
            end = len(question) + len(answer)
            ids[i, :end] = torch.tensor(question + answer)
            labels[i, len(question) : end] = torch.tensor(answer)
        yield ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps of 32 examples")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        print(f"{args.out} already exists")
        return
    torch.manual_seed(args.seed)
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = make_tokenizer()
    # head_dim 32: the smallest that every engine's attention kernels take.
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    begin = time.monotonic()
    print(f"base model: {model.num_parameters():,} parameters, {args.steps} steps", flush=True)
    for step, (ids, labels) in zip(range(args.steps), batches(tokenizer, 32, args.seed), strict=False):
        decay = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 100) * max(0.02, decay)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"  step {step + 1}: loss {float(loss.detach()):.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
