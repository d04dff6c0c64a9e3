"""Training with several ranks gives the result of one rank up to rounding."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.stores.errors import StoreError
from staleflow.stores.weights import weight_file, weight_folder
from staleflow.stores.weights.weight_hash import sorted_tensors
from staleflow.tasks.actors.trainer_rank import is_lost_rank_error
from staleflow.tasks.settings.choice_names import AGGREGATION_NAMES
from staleflow.tasks.training import microbatch_split, rank_group
from staleflow.tasks.training.blocks import blocks
from staleflow.tasks.training.loss import LOSSES
from staleflow.tasks.training.microbatch_split import split_by_length
from staleflow.tasks.training.microbatches import Row
from staleflow.tasks.training.policy import TrainerSettings
from staleflow.tasks.training.policy_trainer import PolicyTrainer
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from staleflow.tasks.training.rank_group import RankGroup
from staleflow.tasks.training.trainer_settings import KlConfig, SftConfig, TrainingConfig
from tests.support.entries import entry
from tests.support.rank_processes import run_ranks
from tests.tasks.test_numerics import groups

STEPS = 5

# -- how rows are divided -----------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 200))
def test_every_row_is_in_one_part_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    batches = split_by_length(lengths, ranks, budget)
    assert sorted(i for batch in batches for part in batch for i in part) == list(range(len(lengths)))
    for batch in batches:
        sizes = [len(part) for part in batch]
        assert len(batch) == ranks
        assert max(sizes) > 0
        assert max(sizes) - min(sizes) <= 1
        for part in batch:
            assert len(part) <= 1 or len(part) * max(lengths[i] for i in part) <= budget


@given(lengths=LENGTHS, ranks=st.integers(2, 5), budget=st.integers(1, 200))
def test_parts_of_the_ranks_take_about_equal_time(lengths: list[int], ranks: int, budget: int) -> None:
    """Parts of a batch have equal numbers of rows, except one, and neighbouring lengths."""
    for batch in split_by_length(lengths, ranks, budget):
        rows = [[lengths[i] for i in part] for part in batch]
        everything = sorted(n for part in rows for n in part)
        spread = everything[-1] - everything[0]
        for first, second in itertools.combinations(rows, 2):
            more = everything[-1] * abs(len(first) - len(second))
            assert abs(sum(first) - sum(second)) <= spread + more


@given(lengths=st.lists(st.integers(1, 20), max_size=7), ranks=st.integers(1, 3), budget=st.integers(1, 60))
def test_the_split_of_sorted_rows_is_optimal(lengths: list[int], ranks: int, budget: int) -> None:
    """Compared with all possible splits."""
    ordered, overhead = sorted(lengths), 7

    def price(part: list[int]) -> int | None:
        rows = -(-len(part) // ranks)
        return rows * part[-1] + overhead if rows == 1 or rows * part[-1] <= budget else None

    prices = []
    for cuts in itertools.product([False, True], repeat=max(0, len(ordered) - 1)):
        ends = [i for i, cut in enumerate(cuts, start=1) if cut] + [len(ordered)] * bool(ordered)
        paid = [price(ordered[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
        if None not in paid:
            prices.append(sum(p for p in paid if p is not None))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PASS_OVERHEAD_TOKENS", "GATHER_OVERHEAD_TOKENS"):
            patch.setattr(microbatch_split, name, overhead)
        batches = split_by_length(lengths, ranks, budget)
    padded = [max(len(part) for part in batch) * max(lengths[i] for part in batch for i in part) for batch in batches]
    assert sum(padded) + overhead * len(batches) == min(prices)


# -- what they train ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A job of several steps and the rows of each step."""

    settings: TrainerSettings
    batches: tuple[tuple[Row, ...], ...]


@dataclass(frozen=True)
class Trained:
    """The metrics of each step and the final weights as published by the leading rank."""

    metrics: list[dict[str, float]]
    weights: dict[str, Any]
    probe: tuple[float, ...]


def ragged_rows(count: int, rng: np.random.Generator) -> tuple[Row, ...]:
    """Return rows of 1 to 30 tokens: some without advantage, some with env tokens, some stale."""

    def one(i: int) -> Row:
        length = int(rng.integers(1, 24)) if i % 5 else 1
        return Row(
            prompt=rng.integers(3, 20, int(rng.integers(2, 9))).astype(np.int32),
            response=rng.integers(3, 20, length).astype(np.int32),
            behaviour=rng.normal(-3, 0.4, length).astype(np.float32),
            sampled=rng.random(length) > 0.2,
            advantage=0.0 if i % 7 == 3 else float(rng.normal()),
            staleness=i % 2,
        )

    return tuple(one(i) for i in range(count))


def training(model: Path, sizes: Sequence[int], loss: str, aggregation: str, **changes: Any) -> Training:
    """Return a job. sizes: number of rows of each step."""
    rng = np.random.default_rng(7)
    config = TrainingConfig(
        microbatch_tokens=64,
        loss=entry(LOSSES, loss),
        aggregation=aggregation,
        **{"minibatches": 2, "learning_rate": 1e-5, **changes},
    )
    settings = TrainerSettings(
        model=str(model), dtype="float32", device="cpu", training=config, num_steps=STEPS, temperature=1.0,
        max_response_tokens=24, seed=0,
    )  # fmt: skip
    return Training(settings, tuple(ragged_rows(size, rng) for size in sizes))


def torch_tensors(weights: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a trainer's weights, which are tensors of torch, in the order of their names."""
    return sorted_tensors(weights)


def train(rank: Rank, job: Training, begin: str = "", point: str = "") -> Trained:
    """Train the steps of a job. begin, point: resume points to load before and to write after; empty for none."""
    torch.set_num_threads(1)
    trainer = PolicyTrainer(job.settings, rank)
    if begin:
        trainer.load_state(Path(begin))
    rows: tuple[Row, ...]
    metrics = []
    for step, rows in enumerate(job.batches):
        metrics.append(trainer.step(step, rows if rank.leads else ()))
    probe = trainer.logprobs([3, 4, 5, 6])
    weights = trainer.apply_to_weights(
        lambda item: {name: t.float().numpy().copy() for name, t in torch_tensors(item) if rank.leads}
    )
    if point:
        trainer.begin_save(Path(point))
        trainer.step(len(job.batches), job.batches[0] if rank.leads else ())
        trainer.end_save()
    trainer.close()
    return Trained(metrics, weights, probe)


def check_same(actual: Trained, expected: Trained) -> None:
    assert len(actual.metrics) == len(expected.metrics)
    for a, b in zip(actual.metrics, expected.metrics, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-6), name
    assert actual.weights.keys() == expected.weights.keys()
    for name, weights in actual.weights.items():
        # Processors round differently; a step changes weights by some 1e-3.
        np.testing.assert_allclose(weights, expected.weights[name], rtol=0, atol=5e-6, err_msg=name)
    np.testing.assert_allclose(actual.probe, expected.probe, atol=1e-5)


def test_two_ranks_train_as_one_rank(tiny_model: Path) -> None:
    """The fourth step has one row, so one rank has none."""
    job = training(tiny_model, (11, 8, 2, 1, 9), "decoupled_ppo", "token_mean")
    lead, other = run_ranks(2, train, job)
    check_same(lead, train(SINGLE_RANK, job))
    assert other.weights == {}
    assert other.metrics == lead.metrics


def test_two_ranks_train_as_one_rank_with_kl_entropy_and_recomputation(tiny_model: Path) -> None:
    kl = KlConfig(coefficient=0.1, estimator="k3", place="loss")
    job = training(tiny_model, (7, 3), "gspo", "sequence_mean", kl=kl, epochs=2, entropy_bonus=0.01)
    again = replace(job.settings, training=replace(job.settings.training, recompute_activations=True))
    check_same(run_ranks(2, train, replace(job, settings=again))[0], train(SINGLE_RANK, job))


@pytest.mark.parametrize("offload", [False, True])
def test_activations_are_recomputed_also_if_the_model_is_sharded(tiny_model: Path, offload: bool) -> None:
    passes = dict[bool, int]()
    for recompute in (False, True):
        job = training(
            tiny_model, (3,), "ppo_clip", "token_mean", minibatches=1, offload=offload, recompute_activations=recompute
        )
        trainer, calls = PolicyTrainer(job.settings), list[Any]()
        trainer.model.model.layers[1].mlp.register_forward_pre_hook(lambda *args, calls=calls: calls.append(args))
        trainer.step(0, job.batches[0])
        trainer.close()
        passes[recompute] = len(calls)
    assert passes[True] == passes[False] + 1, "the backward pass computes the block again"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("loss", LOSSES.names)
def test_any_number_of_ranks_trains_alike_for_every_loss_and_aggregation(
    tiny_model: Path, loss: str, ranks: int
) -> None:
    for aggregation in AGGREGATION_NAMES:
        job = training(tiny_model, (17, 5, 3, 1, 26), loss, aggregation)
        if loss == "dpo":
            job = replace(job, batches=tuple(tuple(groups([*batch], 3)) for batch in job.batches))
        results = run_ranks(ranks, train, job)
        check_same(results[0], train(SINGLE_RANK, job))
        assert all(result.metrics == results[0].metrics for result in results)


@dataclass(frozen=True)
class RandomExamples:
    """Settings that return three random examples for each step."""

    def build(self) -> RandomExamples:
        return self

    def rows(self, step: int) -> Sequence[Row]:
        return [replace(row, advantage=0.0) for row in ragged_rows(3, np.random.default_rng(step))]


def gradient(rank: Rank, job: Training) -> Any:
    """The gradient of the last update of a job's first step, all parameters one after another."""
    torch.set_num_threads(1)
    trainer = PolicyTrainer(job.settings, rank)
    trainer.step(0, job.batches[0] if rank.leads else ())
    parts = [trainer.rank_group.full_tensor(p.grad).flatten() for p in trainer.model.parameters()]
    trainer.close()
    return torch.cat(parts).numpy()


def test_two_ranks_train_as_one_rank_with_examples(tiny_model: Path) -> None:
    """One of two minibatches has one example, so one rank has none; the last step has one row and all examples."""
    job = training(tiny_model, (7, 5, 1), "decoupled_ppo", "token_mean", sft=SftConfig(weight=0.5))
    job = replace(job, settings=replace(job.settings, examples=RandomExamples()))
    trained = train(SINGLE_RANK, job)
    assert all(metrics["sft_loss"] > 1 for metrics in trained.metrics)
    check_same(run_ranks(2, train, job)[0], trained)
    expected = gradient(SINGLE_RANK, job)
    difference = run_ranks(2, gradient, job)[0] - expected
    assert np.linalg.norm(difference) < 1e-6 * np.linalg.norm(expected)


def split_job(model: Path) -> tuple[Training, Training, Training]:
    """Return a job of four steps, its first two and its last two steps. The last part starts with other weights and
    another order."""
    whole = training(model, (9, 7, 8, 5), "ppo_clip", "sequence_mean")
    first, last = replace(whole, batches=whole.batches[:2]), replace(whole, batches=whole.batches[2:])
    return whole, first, replace(last, settings=replace(last.settings, seed=5))


def test_any_number_of_ranks_may_load_a_resume_point(tiny_model: Path, tmp_path: Path) -> None:
    """Resume points of two ranks are loaded by one and vice versa."""
    whole, first, last = split_job(tiny_model)
    expected = train(SINGLE_RANK, whole)
    shards, file = tmp_path / "v00000002.shards", tmp_path / "v00000002.pt"
    shards.mkdir()
    run_ranks(2, train, first, "", str(shards))
    train(SINGLE_RANK, first, "", str(file))
    for again in (train(SINGLE_RANK, last, str(shards)), run_ranks(2, train, last, str(file))[0]):
        check_same(again, replace(expected, metrics=expected.metrics[2:]))


def test_offloaded_weights_train_and_resume_as_others(tiny_model: Path, tmp_path: Path) -> None:
    """With one process and with two."""
    whole, first, last = split_job(tiny_model)
    expected = train(SINGLE_RANK, whole)

    def offloaded(job: Training) -> Training:
        return replace(job, settings=replace(job.settings, training=replace(job.settings.training, offload=True)))

    check_same(run_ranks(2, train, offloaded(whole))[0], expected)
    file = tmp_path / "v00000002.pt"
    check_same(train(SINGLE_RANK, offloaded(first), "", str(file)), train(SINGLE_RANK, first))
    for again in (last, offloaded(last)):
        check_same(train(SINGLE_RANK, again, str(file)), replace(expected, metrics=expected.metrics[2:]))


def test_a_reference_model_is_sharded_again_after_its_passes(tiny_model: Path) -> None:
    job = training(tiny_model, (5,), "ppo_clip", "token_mean", offload=True, kl=KlConfig(coefficient=0.1))
    trainer = PolicyTrainer(job.settings)
    assert trainer.reference is not None
    assert all(isinstance(p, DTensor) for p in trainer.reference.model.parameters())
    trainer.step(0, job.batches[0])
    is_sharded = [isinstance(p, DTensor) for p in trainer.reference.model.parameters()]
    trainer.close()
    assert all(is_sharded)


def step_dtypes(rank: Rank, job: Training) -> dict[str, Any]:
    """Return the dtypes of a training step: of the weights and inputs of a block, and of stored values."""
    torch.set_num_threads(1)
    trainer, found = PolicyTrainer(job.settings, rank), dict[str, Any]()

    def look(block: Any, args: Any) -> None:
        found.update(weight=block.mlp.up_proj.weight.dtype, hidden=args[0].dtype)

    trainer.model.model.layers[1].register_forward_pre_hook(look)
    metrics = trainer.step(0, job.batches[0])
    kept = trainer.model.model.layers[1].mlp.up_proj.weight
    trainer.close()
    return found | {"kept": kept.dtype, "gradient": kept.grad.dtype, "loss": metrics["loss"]}


def test_blocks_are_gathered_in_bfloat16_and_stored_in_float32(tiny_model: Path) -> None:
    """Residual values are in float32, as in one process."""
    job = training(tiny_model, (11,), "ppo_clip", "token_mean")
    job = replace(job, settings=replace(job.settings, dtype="bfloat16"))
    one, (several, _) = step_dtypes(SINGLE_RANK, job), run_ranks(2, step_dtypes, job)
    assert several == {
        "weight": torch.bfloat16, "hidden": torch.float32, "kept": torch.float32, "gradient": torch.float32,
        "loss": pytest.approx(one["loss"], rel=2e-2),
    }  # fmt: skip
    assert one == {**several, "weight": torch.float32, "loss": one["loss"]}


def test_ranks_train_in_bfloat16_as_one_process(tiny_model: Path) -> None:
    job = training(tiny_model, (11, 8, 9), "decoupled_ppo", "token_mean", learning_rate=1e-3)
    job = replace(job, settings=replace(job.settings, dtype="bfloat16"))
    several, one = run_ranks(2, train, job)[0], train(SINGLE_RANK, job)
    for a, b in zip(several.metrics, one.metrics, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
        assert a["mismatch_mean"] == pytest.approx(b["mismatch_mean"], rel=1e-2)
    np.testing.assert_allclose(several.probe, one.probe, atol=2e-2)


def test_a_model_is_cast_to_float32_block_by_block(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its tensors are memory-mapped from the file."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    whole: list[int] = []

    def counted(module: Any, **options: Any) -> Any:
        parts = [p for p in loaded[0].parameters() if not isinstance(p, DTensor) and p.dtype == torch.float32]
        whole.append(sum(p.numel() for p in parts))
        return fully_shard(module, **options)

    loaded: list[Any] = []

    def recorded_blocks(model: Any) -> Any:
        loaded.append(model)
        return blocks(model)

    monkeypatch.setattr(rank_group, "blocks", recorded_blocks)
    monkeypatch.setattr(rank_group, "fully_shard", counted)
    job = training(tmp_path, (), "ppo_clip", "token_mean", offload=True)  # so that one process is a group
    trainer = PolicyTrainer(job.settings)
    weights = trainer.apply_to_weights(lambda item: {name: t.clone() for name, t in torch_tensors(item)})
    trainer.close()
    first, second = (sum(p.numel() for p in block.parameters()) for block in blocks(model))
    rest = sum(p.numel() for p in model.parameters()) - first - second
    assert whole == [first, second, rest]
    for name, wanted in model.named_parameters():
        assert torch.equal(weights[name], wanted.float())


def save_checkpoint(rank: Rank, job: Training, folder: Path) -> None:
    """Publish the weights of a group and save them on the leading rank."""
    torch.set_num_threads(1)
    trainer = PolicyTrainer(job.settings, rank)
    trainer.step(0, job.batches[0] if rank.leads else ())
    trainer.apply_to_weights(lambda weights: weight_file.write(folder / "weights", weights) if rank.leads else None)
    if rank.leads:
        trainer.save(folder / "checkpoint", folder / "weights")
    trainer.close()


def test_a_checkpoint_has_the_published_weights_in_the_engine_dtype(tiny_model: Path, tmp_path: Path) -> None:
    """No weights are gathered for the checkpoint."""
    job = training(tiny_model, (5,), "ppo_clip", "token_mean")
    run_ranks(2, save_checkpoint, replace(job, settings=replace(job.settings, dtype="bfloat16")), tmp_path)
    published = weight_folder.read(tmp_path / "weights")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, published[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint") is not None


def save_apart(rank: Rank, job: Training, folder: Path) -> str:
    """Return the error of the leading rank for a resume point written to different folders."""
    torch.set_num_threads(1)
    rank_group.FILE_VISIBLE_S = 1.0
    trainer = PolicyTrainer(job.settings, rank)
    own = folder / f"host-{rank.number}"
    own.mkdir()
    try:
        trainer.begin_save(own)
        trainer.end_save()
    except RuntimeError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def wait_for_late_rank(rank: Rank) -> str:
    """Return the outcome on each rank when the other rank is late for a collective."""
    told = RankGroup(rank, collective_timeout_s=15.0)  # they have as long to find each other
    if not rank.leads:
        time.sleep(60.0)
        return ""
    with pytest.raises(RuntimeError) as failed:
        told.all_reduce([1.0])
    return f"{failed.value}" if is_lost_rank_error(failed.value) else ""


@pytest.mark.slow
def test_a_collective_with_a_hung_rank_times_out() -> None:
    assert "Timed out waiting 15000ms" in run_ranks(2, wait_for_late_rank)[0]


def test_saving_fails_when_the_ranks_do_not_share_a_folder(tiny_model: Path, tmp_path: Path) -> None:
    """The error comes when saving, and not only when resuming."""
    said, _ = run_ranks(2, save_apart, training(tiny_model, (2,), "ppo_clip", "token_mean"), tmp_path)
    assert said == (
        "1 of 2 files that the trainer's ranks have written are not there, the first is __1_0.distcp: runs_dir has to "
        "be a folder that the hosts of all ranks share"
    )


def test_a_resume_point_of_another_model_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
    _, first, _ = split_job(tiny_model)
    empty = tmp_path / "v00000001.shards"
    empty.mkdir()
    trainer = PolicyTrainer(first.settings)
    with pytest.raises(StoreError, match=r"v00000001.shards: no resume point of this job"):
        trainer.load_state(empty)
    state = {"model": {"w": torch.zeros(1)}, "optimizer": {"state": {}, "param_groups": []}, "random": {}}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(StoreError, match=r"other.pt: no resume point of this job: .*tensors differ from the model's"):
        trainer.load_state(tmp_path / "other.pt")
    trainer.begin_save(tmp_path / "narrow.pt")
    trainer.end_save()
    narrow = torch.load(tmp_path / "narrow.pt")
    name = "model.norm.weight"
    narrow["model"][name] = narrow["model"][name][:1].clone()
    torch.save(narrow, tmp_path / "narrow.pt")
    with pytest.raises(StoreError, match=r"narrow.pt: no resume point of this job: a tensor has shape \(1,\)"):
        trainer.load_state(tmp_path / "narrow.pt")
