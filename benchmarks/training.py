"""Tokens per CPU second of a training step, against TRL's GRPOTrainer and against forward and backward alone.

    pip install trl==1.16.0    # in an environment of its own; not needed for the rest of the table
    python -m benchmarks.training --vocabulary 8192 65536

Same model, rows and loss in one process, one thread, float32, turn about. TRL's trainer is built with its own
configuration and makes its own batches, padded as ever; timed are its compute_loss, backward, clipping and optimizer,
and with old logprobs its pass for them. Its head scores valid positions only, as on a GPU: everywhere else it computes
those of padding, too.

With --prompts: a step on groups of which 10, 36 and 60 % of the tokens are prompts', computed once for a group and for
each response, turn about.

With --memory: the peak memory of a step on 2,048 sampled tokens at a vocabulary of 152,000, with all logits at once and
in chunks, and with activations kept and computed again, each in a process of its own. With --resident: what each of 1,
2 and 4 ranks holds between two steps.

The limit is what no trainer of this model can be much below: forward, cross-entropy and backward of each row alone,
without padding, with logits of response tokens only; or of rows of like length in padded batches, if that is less.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.tasks.training.loss import LOSSES
from staleflow.tasks.training.microbatches import Row, microbatches
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from staleflow.tasks.training.trainer_settings import TrainingConfig

GROUP = 8
MEDIAN, SPREAD, LONGEST = 70, 0.8, 512
"""Of the lognormal response lengths: 96 tokens on average."""
BUDGET = 4096
SHARES = (0.1, 0.36, 0.6)
"""Of prompts' tokens in all tokens of groups, where each response is counted with its prompt."""
CAP = 5.0
LIMIT = "forward and backward"
OURS = "staleflow "
TRL = "TRL "
PPO, DECOUPLED = "ppo_clip", "decoupled_ppo"


@dataclass(frozen=True, slots=True)
class Contest:
    """What is timed, by name; each returns the gradient's norm, or nothing."""

    steps: dict[str, Callable[[], float | None]]
    tokens: int


def make_model(folder: Path, vocabulary: int) -> None:
    """Write a Llama of 10.6 M parameters besides embeddings and output layer, at random, with a tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from staleflow.tasks.training.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    make_tokenizer(("<pad>", "<eos>", "<unk>", *"0123456789")).save_pretrained(folder)


def make_rows(groups: int, vocabulary: int, prompts: Sequence[int] = range(16, 64)) -> list[Row]:
    """Rows of groups with one prompt each. prompts: lengths that they may have."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        length = int(rng.integers(prompts[0], prompts[-1] + 1))
        prompt = rng.integers(3, vocabulary, length).astype(np.int32)
        for _ in range(GROUP):
            length = int(np.clip(rng.lognormal(np.log(MEDIAN), SPREAD), 1, LONGEST))
            rows.append(
                Row(
                    prompt=prompt,
                    response=rng.integers(3, vocabulary, length).astype(np.int32),
                    behaviour=rng.normal(-np.log(vocabulary), 0.1, length).astype(np.float32),
                    sampled=np.ones(length, bool),
                    advantage=float(rng.normal()),
                    staleness=1,
                )
            )
    return rows


def our_step(model: Path, loss: str, rank: Rank = SINGLE_RANK, **changes: Any) -> Callable[[Sequence[Row]], float]:
    """A step of this project's trainer on rows; gives the gradient's norm."""
    from staleflow.tasks.training.policy_trainer import PolicyTrainer

    training = TrainingConfig(
        learning_rate=1e-9, microbatch_tokens=BUDGET, loss=LOSSES.find(loss)(), measured_rows=0, **changes
    )
    settings = TrainerSettings(
        model=str(model), dtype="float32", device="cpu", training=training, num_steps=1, temperature=1.0,
        max_response_tokens=LONGEST, seed=0,
    )  # fmt: skip
    trainer = PolicyTrainer(settings, rank)
    return lambda rows: trainer.step(0, rows)["grad_norm"]


def alone(path: Path, rows: Sequence[Row]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward, cross-entropy and backward of the rows one by one, and in padded batches."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def one_by_one() -> None:
        model.zero_grad(set_to_none=True)
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt, row.response]).astype(np.int64))[None]
            keep = torch.arange(len(row.prompt) - 1, ids.shape[1] - 1)
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0]
            torch.nn.functional.cross_entropy(logits, ids[0, len(row.prompt) :]).backward()

    def batched() -> None:
        model.zero_grad(set_to_none=True)
        for batch in microbatches(rows, range(len(rows)), np.ones(len(rows), np.float32), BUDGET):
            ids, mask = torch.from_numpy(batch.input_ids), torch.from_numpy(np.ascontiguousarray(batch.mask)) > 0
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, batch.response_start : -1][mask]
            targets = torch.from_numpy(np.ascontiguousarray(batch.targets))[mask]
            torch.nn.functional.cross_entropy(model.lm_head(hidden), targets).backward()

    return one_by_one, batched


def trl_step(model: Path, rows: Sequence[Row], folder: Path, *, old: bool) -> Callable[[], float]:
    """A step of TRL's GRPOTrainer on the rows. old: with its own logprobs from before the step, as proximal ones."""
    import torch
    import trl.trainer.utils
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    # What says whether its head scores valid positions only. The kernels ask a name of their own.
    trl.trainer.utils._use_triton = lambda device: True
    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=GROUP, gradient_accumulation_steps=len(rows) // GROUP,
        num_generations=GROUP, max_completion_length=LONGEST, beta=0.0, loss_type="dapo", epsilon=0.2,
        epsilon_high=0.28, learning_rate=1e-9, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
        gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True,
    )  # fmt: skip
    prompts = [str(i) for i in range(len(rows) // GROUP)]

    def given(asked: Sequence[str], trainer: Any) -> dict[str, Any]:
        """The rows, as if they had just been generated."""
        seen = [rows[int(prompt) * GROUP + i % GROUP] for i, prompt in enumerate(asked)]
        return {
            "prompt_ids": [row.prompt.tolist() for row in seen],
            "completion_ids": [row.response.tolist() for row in seen],
            "logprobs": [row.behaviour.tolist() for row in seen],
            "advantage": [row.advantage for row in seen],
        }

    def reward(completions: Sequence[str], advantage: Sequence[float], **_: Any) -> list[float]:
        return list(advantage)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=reward, args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=given,
    )  # fmt: skip
    trainer.create_optimizer_and_scheduler(num_training_steps=1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    whole = next(iter(trainer.get_train_dataloader()))
    # Its batches: split and padded by itself, one a call, and shuffled, so rows are known by their tokens.
    batches = []
    for number in range(config.gradient_accumulation_steps):
        trainer._step = number
        batches.append(trainer._prepare_inputs(whole))
    by_tokens = {row.response.tobytes(): row for row in rows}
    for batch in batches:
        ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
        behaviour = torch.zeros(ids.shape)
        for k in range(len(ids)):
            row = by_tokens[ids[k][mask[k]].numpy().astype(np.int32).tobytes()]
            behaviour[k, : len(row.response)] = torch.from_numpy(row.behaviour)
            batch["advantages"][k] = row.advantage
        batch["behaviour"] = behaviour
    trainer.use_vllm = old  # Its correction for engines that sample by other logprobs.

    def step() -> float:
        trainer.model.zero_grad(set_to_none=True)
        for batch in batches:
            if old:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
                attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
                with torch.no_grad():
                    logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
                        trainer.model, ids, attention, batch["completion_ids"].shape[1], batch_size=GROUP
                    )
                batch["old_per_token_logps"] = logprobs
                batch["importance_sampling_ratio"] = (logprobs - batch["behaviour"]).exp().clamp(max=CAP)
            else:
                batch["old_per_token_logps"] = batch["behaviour"]
            trainer.accelerator.backward(trainer.compute_loss(trainer.model, batch))
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        return float(norm)

    return step


def contest(folder: Path, vocabulary: int, groups: int) -> Contest:
    """All that is timed at a vocabulary."""
    make_model(folder / "model", vocabulary)
    rows = make_rows(groups, vocabulary)
    one_by_one, batched = alone(folder / "model", rows)
    steps: dict[str, Callable[[], float | None]] = {
        f"{LIMIT}, rows alone": one_by_one,
        f"{LIMIT}, padded": batched,
        OURS + PPO: functools.partial(our_step(folder / "model", PPO), rows),
        OURS + DECOUPLED: functools.partial(our_step(folder / "model", DECOUPLED), rows),
        OURS + "decoupled_ppo, 4 minibatches": functools.partial(
            our_step(folder / "model", DECOUPLED, minibatches=4), rows
        ),
    }
    if importlib.util.find_spec("trl") is not None:
        steps[TRL + PPO] = trl_step(folder / "model", rows, folder, old=False)
        steps[TRL + DECOUPLED] = trl_step(folder / "model", rows, folder, old=True)
    return Contest(steps, sum(len(row.prompt) + len(row.response) for row in rows))


def timed(step: Callable[[], float | None]) -> tuple[float, float | None]:
    """CPU seconds, and what the step returns."""
    gc.collect()
    begin = time.process_time()
    result = step()
    return time.process_time() - begin, result


def measured(folder: Path, vocabulary: int, groups: int, rounds: int) -> list[dict[str, float]]:
    """CPU seconds by name, of each round."""
    all_steps = contest(folder, vocabulary, groups)
    taken: list[dict[str, float]] = []
    norms: dict[str, float] = {}
    for _ in range(rounds):
        taken.append({})
        for name, step in all_steps.steps.items():
            taken[-1][name], norm = timed(step)
            norms |= {} if norm is None else {name: norm}
        print("  ".join(f"{name} {seconds:.1f}" for name, seconds in taken[-1].items()), flush=True)
    print("gradient norms: " + ", ".join(f"{name} {norm:.6g}" for name, norm in norms.items()))
    print(table(vocabulary, all_steps.tokens, taken), flush=True)
    return taken


def table(vocabulary: int, tokens: int, rounds: Sequence[dict[str, float]]) -> str:
    """Medians over the rounds of each round's own ratios, with the least and the most."""
    lines = [
        f"vocabulary {vocabulary:,}, {tokens:,} tokens, {len(rounds)} rounds",
        "| step | tokens per CPU second | limit / step | TRL / step |",
        "|---|---|---|---|",
    ]
    for name in rounds[0]:
        limits = [min(s for other, s in taken.items() if other.startswith(LIMIT)) / taken[name] for taken in rounds]
        rival = TRL + (DECOUPLED if DECOUPLED in name else PPO)
        against = [taken[rival] / taken[name] for taken in rounds if rival in taken and not name.startswith(LIMIT)]
        rate = statistics.median(tokens / taken[name] for taken in rounds)
        lines.append(f"| {name} | {rate:.0f} | {_spread(limits)} | {_spread(against)} |")
    return "\n".join(lines)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def prompts_table(vocabulary: int, groups: int, rounds: int) -> None:
    """Print the CPU seconds of a step with each group's prompt computed once, over those of one without that."""
    from staleflow.tasks.training import shared_prompts

    least = shared_prompts.MIN_SAVED_TOKENS
    print(f"vocabulary {vocabulary:,}, {groups} groups of {GROUP}, {rounds} rounds")
    print("| prompts, of all tokens | tokens computed | CPU seconds | gradient norms |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), vocabulary)
        step = our_step(Path(name), PPO)
        for share in SHARES:
            responses = make_rows(groups, vocabulary, [1])
            length = round(share / (1 - share) * sum(len(row.response) for row in responses) / len(responses))
            rows = make_rows(groups, vocabulary, [length])
            step(rows)  # after which the optimizer has its moments
            ratios, norms = list[float](), set[str]()
            for _ in range(rounds):
                once, norm = timed(functools.partial(step, rows))
                norms.add(f"{norm:.6g}")
                shared_prompts.MIN_SAVED_TOKENS = 2**40
                each, norm = timed(functools.partial(step, rows))
                shared_prompts.MIN_SAVED_TOKENS = least
                norms.add(f"{norm:.6g}")
                ratios.append(once / each)
            tokens = sum(len(row.response) for row in rows)
            left = (tokens + groups * length) / (tokens + len(rows) * length)
            print(f"| {share:.0%} | {left:.2f} | {_spread(ratios)} | {', '.join(sorted(norms))} |", flush=True)


def memory(model: Path, rows: Sequence[Row], *, chunks: bool, again: bool) -> tuple[float, float]:
    """Bytes of weights, gradients and optimizer, and those that a step takes at most besides. For a fresh process."""
    import torch

    from staleflow.stores.weights import weight_folder
    from staleflow.tasks.training import lm_head, policy_trainer

    torch.set_num_threads(1)
    assert policy_trainer  # loaded before memory is looked at
    if not chunks:
        lm_head.CHUNK_BYTES = 2**40
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = our_step(model, PPO, recompute_activations=again)
    step(rows[:1])  # after which the optimizer has its moments
    step(rows)
    state_bytes = 16 * sum(tensor.numel() for tensor in weight_folder.read(model / "model.safetensors").values())
    return state_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - state_bytes


def resident(model: Path, rows: Sequence[Row], rank: Rank) -> float:
    """Bytes that a rank holds after two steps, besides what it had before it was given the model. For a fresh
    process."""
    import psutil
    import torch

    from staleflow.tasks.training import policy_trainer

    torch.set_num_threads(1)
    assert policy_trainer
    process = psutil.Process()
    before = process.memory_info().rss
    step = our_step(model, PPO, rank)
    for _ in range(2):
        step(rows)
    gc.collect()
    return float(process.memory_info().rss - before)


def resident_table(vocabulary: int, length: int) -> None:
    """Print what each of several ranks holds."""
    import torch.distributed as dist

    rows = [row_of(vocabulary, length)] * 8
    print("| ranks | resident, GiB, each | the largest, of one rank's |\n|---|---|---|")
    alone = 0.0
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), vocabulary)
        for count in (1, 2, 4):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            place = Rank(count=count, host="127.0.0.1", port=store.port) if count > 1 else SINGLE_RANK
            with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as fresh:
                requests = [fresh.submit(resident, Path(name), rows, replace(place, number=i)) for i in range(count)]
                values = [item.result() for item in requests]
            alone = alone or max(values)
            each = ", ".join(f"{item / 2**30:.2f}" for item in values)
            print(f"| {count} | {each} | {max(values) / alone:.2f} |", flush=True)


def row_of(vocabulary: int, length: int) -> Row:
    """A response of a length to a prompt of 32 tokens."""
    rng = np.random.default_rng(0)
    return Row(
        prompt=np.full(32, 5, np.int32), response=rng.integers(3, vocabulary, length).astype(np.int32),
        behaviour=np.full(length, -np.log(vocabulary), np.float32), sampled=np.ones(length, bool), advantage=1.0,
        staleness=1,
    )  # fmt: skip


def format_memory_table(vocabulary: int, count: int, length: int) -> None:
    """Print the peak memory of a step on so many responses of a length."""
    row = row_of(vocabulary, length)
    print(f"vocabulary {vocabulary:,}, {count * length:,} sampled tokens in a micro-batch")
    print("| logits | activations | weights, gradients, optimizer | peak besides |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), vocabulary)
        for chunks, again in ((False, False), (True, False), (True, True)):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                state_bytes, peak = fresh.submit(memory, Path(name), [row] * count, chunks=chunks, again=again).result()
            logits, kept = "in chunks" if chunks else "at once", "computed again" if again else "kept"
            print(f"| {logits} | {kept} | {state_bytes / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--groups", type=int, default=4, help=f"of {GROUP} rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", action="store_true", help="prompts computed once for a group, and with each row")
    parser.add_argument("--memory", action="store_true", help="peak memory of a step instead")
    parser.add_argument("--resident", action="store_true", help="what each of several ranks holds instead")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if args.memory:
        format_memory_table(512 if args.quick else 152_000, 8, 16 if args.quick else 256)
        return
    if args.resident:
        resident_table(512 if args.quick else 152_000, 16)
        return
    if args.prompts:
        prompts_table(64, 1, 1) if args.quick else prompts_table(args.vocabulary[0], args.groups, args.rounds)
        return
    if importlib.util.find_spec("trl") is None:
        print("without TRL; to measure it, too: pip install trl==1.16.0")
    for vocabulary in [64] if args.quick else args.vocabulary:
        with tempfile.TemporaryDirectory() as name:
            run = functools.partial(measured, Path(name), vocabulary)
            run(1, 1) if args.quick else run(args.groups, args.rounds)


if __name__ == "__main__":
    main()
