"""The trainer: a Hugging Face causal LM and AdamW. `PolicyTrainer` is the plain object, `Trainer` its Dask actor.

A step's weights are published as a new policy version before the step counts as finished: a published version can
always be fetched, also while the next step trains.

It may be one of several processes that train one model together (tasks/training/rank_group.py). They all do what
follows, each with its share of every minibatch's rows and of the parameters; how many there are changes nothing but
rounding.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import serialization
from torch.utils._pytree import tree_map_only

from staleflow.stores.errors import ConfigError
from staleflow.stores.weights import resume_points, weight_folder
from staleflow.stores.weights.weight_hash import TensorStream, Weights
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.transformers import forward_logprobs, load_model, resolve_device
from staleflow.tasks.rendering.chat_tokenizer import load_tokenizer
from staleflow.tasks.rendering.file_tokenizer import check_same_tokens
from staleflow.tasks.settings.seeds import Stream, generator
from staleflow.tasks.training import lora
from staleflow.tasks.training.async_save import copy_to_cpu, run_in_background
from staleflow.tasks.training.blocks import enable_recomputation
from staleflow.tasks.training.branch_sequences import BranchSequences
from staleflow.tasks.training.host_memory import HostMemory
from staleflow.tasks.training.logprobs import LogprobModel, by_row
from staleflow.tasks.training.loss import MAX_LOG_RATIO, Dpo, Sft, Tokens
from staleflow.tasks.training.microbatches import MicroBatch, Row, minibatches, token_weights
from staleflow.tasks.training.objective import Objective, with_finite_logprobs
from staleflow.tasks.training.preference_pairs import select_pairs, weighted_pairs
from staleflow.tasks.training.rank import ALONE, Rank
from staleflow.tasks.training.rank_group import RankGroup
from staleflow.tasks.training.step_metrics import RowSample, TokenSums
from staleflow.tasks.training.trainer_settings import ExampleRows, KlConfig, PolicyTrainerSettings, TrainingConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
MIN_SAMPLE_ROWS = 2
"""Rows of a sample, at least: one alone has no standard error."""
ByRow = Mapping[int, npt.NDArray[np.float32]]
"""[T] logprobs of rows' responses, by row index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Differences between stored behaviour logprobs and the trainer's own: absolute differences per token, nats, and
    KL(rollout || trainer) by the k3 estimate."""

    mean: float
    max: float
    kl: float

    @classmethod
    def of(cls, rows: Sequence[Row], before: ByRow) -> Mismatch | None:
        """Compute the differences over the fresh rows; None if there are none. before: the trainer's logprobs, at least
        of these rows."""
        fresh = [i for i, row in enumerate(rows) if row.staleness == 0 and row.usable.any()]
        if not fresh:
            return None
        difference = np.concatenate([(before[i] - rows[i].behaviour)[rows[i].usable] for i in fresh])
        bounded = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(
            mean=float(np.abs(difference).mean()),
            max=float(np.abs(difference).max()),
            kl=float((np.exp(bounded) - bounded - 1).mean()),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The three values by their names in stores/metrics.py."""
        return {"mismatch_mean": self.mean, "mismatch_max": self.max, "kl_rollout": self.kl}


def use_fused_adamw(parameters: Iterable[torch.Tensor]) -> bool | None:
    """AdamW's `fused` argument: True for parameters on a GPU. None on CPU, where PyTorch's default repeats steps of
    resumed runs bit for bit."""
    return all(parameter.is_cuda for parameter in parameters) or None


def _write_state(state: dict[str, Any], path: Path) -> None:
    """Save a state with torch, without the checksums of its archive: they are three quarters of the time, and a file
    that is loaded by mmap is not checked against them."""
    with serialization.config.patch("save.compute_crc32", False):
        torch.save(state, path)


def fine_tuning(training: TrainingConfig) -> TrainingConfig:
    """The training settings of supervised fine-tuning: one update per step, with the cross-entropy averaged over the
    step's tokens. Settings of memory, AdamW and adapters are those of RL."""
    return replace(
        training,
        loss=Sft(),
        aggregation="token_mean",
        kl=KlConfig(),
        entropy_bonus=0.0,
        epochs=1,
        minibatches=1,
        measured_rows=0,
        learning_rate=training.sft.learning_rate,
        schedule="constant",
        warmup_steps=0,
    )


class PolicyTrainer:
    """Trains a model on rows. Deterministic for a seed and an order of calls.

    The weights it trains are float32 whatever is published: at usual learning rates an AdamW step on bfloat16 weights
    is mostly rounded away. With dtype bfloat16 forward and backward run under autocast.
    """

    def __init__(self, settings: PolicyTrainerSettings, rank: Rank = ALONE) -> None:
        """Load the model. rank: rank of this process; the call waits for the others."""
        self.settings = settings
        training = settings.training
        self.objective = Objective.of(training)
        self.device = resolve_device(settings.device)
        half = settings.dtype == "bfloat16"
        self.group = RankGroup(
            rank, self.device, half=half, offload=training.offload, collective_s=settings.collective_s
        )
        model = self._load_model()
        if training.lora.rank:
            model = lora.inject_adapter(model, training.lora, settings.seed)
        if training.recompute_activations:
            enable_recomputation(model)
        self._moves = settings.turns and not self.group.shards
        """Whether the model is moved to the device and back. A divided one is there a block at a time (offload)."""
        self.model: Any = model.to(self.device) if self._moves else self.group.sharded(model, torch.float32)
        self.optimizer = torch.optim.AdamW(
            self._trained().values(),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
            fused=(self.device == "cuda" or None) if self._moves else use_fused_adamw(self._trained().values()),
        )
        self.logprob_model = LogprobModel(
            model=self.model,
            device=self.device,
            half=half,
            temperature=settings.temperature,
            token_budget=training.microbatch_tokens,
            rank=rank.number,
            ranks=rank.count,
        )
        if rank.leads and self.logprob_model.padded_because:
            logger.warning("micro-batches are not packed: %s", self.logprob_model.padded_because)
        self.reference = self._load_reference() if self.objective.needs_reference else None
        self._rng = generator(settings.seed, Stream.MINIBATCHES)
        self._saving: Future[None] | None = None
        self._warned_unmeasured = False
        self._examples: ExampleRows | None = None
        self._host = HostMemory(self.device)
        self.sleep()

    def wake(self) -> None:
        if self._moves:
            self._move(lambda name, tensor: self._host.take(tensor))

    def sleep(self) -> None:
        if not self.settings.turns:
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.group.parameters(self.model)  # which frees what is gathered
        if self._moves:
            self._move(self._host.put)
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _move(self, moved: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace all that the trainer has on its device. moved: given a tensor's name and the tensor, the new one."""
        models = {"model": self.model} | ({} if self.reference is None else {"reference": self.reference.model})
        for kind, model in models.items():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.data = moved(f"{kind}.{name}", tensor.data)
        for name, parameter in self._trained().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "step" or self.optimizer.defaults["fused"]:
                    self.optimizer.state[parameter][key] = moved(f"{key}.{name}", value)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then constant, or a cosine or linear decay to schedule_floor."""
        s = self.settings.training
        if step < s.warmup_steps:
            return s.learning_rate * (step + 1) / (s.warmup_steps + 1)
        if s.schedule == "constant":
            return s.learning_rate
        num_steps = s.schedule_steps or self.settings.num_steps
        progress = min(1.0, (step - s.warmup_steps) / max(1, num_steps - s.warmup_steps))
        factor = 0.5 * (1 + math.cos(math.pi * progress)) if s.schedule == "cosine" else 1 - progress
        return s.learning_rate * (s.schedule_floor + (1 - s.schedule_floor) * factor)

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train a step on all rows with `epochs` x `minibatches` optimizer updates. Mutates the model; returns metrics.
        rows: in a group, only those of the leading rank are used. Minibatches and token weights are made from rows; the
        model computes their sequences."""
        s = self.settings.training
        all_rows, pairs = self.group.broadcast(rows), self.objective.loss.compares_pairs
        if pairs:
            all_rows = select_pairs(all_rows)
        sequences = BranchSequences.of(all_rows)
        rows = sequences.rows
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        count = 2 if pairs else 1  # rows that stay in one minibatch
        epochs = [minibatches(len(all_rows), s.minibatches, self._rng, count) for _ in range(s.epochs)]
        updates = list(itertools.chain.from_iterable(epochs))
        before = self._before(rows, once=len(updates) == 1)
        reference = self._under_reference(rows)
        sums, norms = TokenSums(), list[float]()
        sample = self._measure_others(step, rows, before, sums)
        first: dict[int, npt.NDArray[np.float32]] = {}
        losses = list[float]()
        for indices in updates:
            weights = token_weights(s.aggregation, [all_rows[i].num_sampled for i in indices], self.settings.max_length)
            if pairs:
                weights = np.full(len(indices), 2 / len(indices), np.float32)
                rows, loss = self._weighted(all_rows, indices, sequences, reference)
                losses.append(loss)
            self.optimizer.zero_grad(set_to_none=True)
            trained = [k for k, i in enumerate(indices) if self.objective.trains(all_rows[i])]
            picked, of_row = sequences.chosen(int(indices[k]) for k in trained)
            for batch in self.logprob_model.microbatches(rows, picked, weights[trained][of_row]):
                logprobs = self._accumulate(batch, rows, before, reference, sums)
                if len(updates) == 1:
                    first |= by_row(batch, rows, logprobs)
            norm = self.group.full_tensor(torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip))
            if torch.isfinite(norm):
                # A step on a non-finite gradient would destroy the model for good.
                self.optimizer.step()
            norms.append(float(norm))
        sums = TokenSums(self.group.all_reduce(sums.values))
        mismatch = Mismatch.of(rows, before | self.group.all_gather(first))
        figures = sums.metrics(s.epochs, sample)
        if reference is None:
            del figures["kl_reference"]
        return {
            "loss": (sums.loss + sum(losses)) / max(1, len(norms)),
            "grad_norm": float(np.mean(norms or [0.0])),
            "updates_dropped": float(np.count_nonzero(~np.isfinite(norms))),
            "tokens_dropped": float(sum(row.num_unusable for row in all_rows if self.objective.trains(row))),
            **figures,
            "learning_rate": rate,
            **(mismatch.metrics if mismatch else {}),
        }

    def fine_tune(self, step: int) -> dict[str, float]:
        """Run step `step` of supervised fine-tuning on its examples. After the last step AdamW's moments are reset,
        because they belong to another loss."""
        config = self.settings.training.sft
        rows: Sequence[Row] = ()
        if self.group.rank.leads:
            if self._examples is None and self.settings.examples is not None:
                self._examples = self.settings.examples.build()
            assert self._examples is not None, "training.sft without examples"
            rows = self._examples.rows(step)
        with self._training_with(fine_tuning(self.settings.training)):
            metrics = self.step(step, rows)
        if step + 1 == config.steps:
            self._examples = None
            self.optimizer.state.clear()
        return metrics

    @contextmanager
    def _training_with(self, training: TrainingConfig) -> Iterator[None]:
        """Train with other settings in the block."""
        settings, objective = self.settings, self.objective
        self.settings, self.objective = replace(settings, training=training), Objective.of(training)
        try:
            yield
        finally:
            self.settings, self.objective = settings, objective

    def apply_to_weights(self, function: Callable[[Weights], T]) -> T:
        """Call `function` with a TensorStream of the trained weights as engines load them, and return its result. Each
        tensor is gathered from all ranks when it is read, so there is no second copy of the model."""
        dtype = getattr(torch, self.settings.dtype)
        parameters = self._trained()
        if self.settings.training.lora.rank:
            parameters = {adapters.name_in_file(name): parameter for name, parameter in parameters.items()}
        parameters = dict(sorted(parameters.items()))
        tensors = ((name, self.group.full_tensor(p.detach().to(dtype))) for name, p in parameters.items())
        meta_tensors = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in parameters.items()}
        result = function(TensorStream(meta_tensors, tensors))
        for _ in tensors:
            continue  # gather tensors that `function` did not read: the other ranks take part in all of them
        return result

    def probe(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprobs of tokens[1:], nats, at temperature 1: the reference for every engine."""
        half = self.settings.dtype == "bfloat16"
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=half):
            return forward_logprobs(self.model, tokens, self.device)

    def save(self, folder: Path, published: Path) -> None:
        """Save published weights and the tokenizer for `from_pretrained`. Tensors are read from `published`, their
        file, one by one. An adapter is merged into the model's weights, and also saved in a folder. Only on the leading
        rank."""
        from transformers import AutoTokenizer

        path, config = self.settings.model, self.settings.training.lora
        weights, tokenizer = weight_folder.read(published), AutoTokenizer.from_pretrained(path)
        if config.rank:
            base = load_model(path, self.settings.dtype, "cpu", attention="sdpa")
            weight_folder.checkpoint(
                base,
                tokenizer,
                folder,
                lora.merge_adapter(base.state_dict(), weights, config),
                lambda tmp_path: lora.save(weights, config, path, tmp_path / lora.FOLDER),
            )
            return
        names = {*self.model.state_dict()}
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in names}
        weight_folder.checkpoint(self.model, tokenizer, folder, {**buffers, **weights})

    def save_state(self, path: Path) -> None:
        """Write the state that the next step depends on: trained weights, optimizer, random state."""
        self.begin_save(path)
        self.end_save()

    def begin_save(self, path: Path) -> None:
        """Copy the state that the next step depends on to host memory, 12 bytes per parameter of this rank, and start
        writing the copy. In a group each rank writes its shards into an existing folder."""
        if self._saving is not None:  # on a rank that does not lead: the leading one knows how it went
            wait({self._saving})
        if self.group.rank.count > 1:
            self._saving = self.group.begin_save(self._state(), path)
            return
        state = {
            "model": self._kept(),
            "optimizer": self.optimizer.state_dict(),
            "random": self._rng.bit_generator.state,
        }
        state = copy_to_cpu(tree_map_only(torch.Tensor, self.group.full_tensor, state))
        self._saving = run_in_background(lambda: _write_state(state, path))

    def end_save(self) -> None:
        """Wait until the state is written, and raise the error of writing it. Does nothing if no save was started."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_state(self, path: Path) -> None:
        """Restore a state that `save_state` wrote, with a group of this or any other size. Raises StoreError."""
        with resume_points.loading(path):
            state_in_use = self._state()
            if path.is_dir():
                self.group.load(state_in_use, path)
                self._rng.bit_generator.state = json.loads(state_in_use["random"])
                return
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if differing := sorted(state["model"].keys() ^ self._kept().keys()):
                raise KeyError(f"{len(differing)} tensors differ from the model's, the first is {differing[0]}")
            moments = state["optimizer"]["state"]
            for number, name in enumerate(state_in_use["model"]):
                self.group.fill(state_in_use["model"][name], state["model"][name])
                for key, value in moments.get(number, {}).items():
                    self.group.fill(state_in_use["optimizer"][name][key], value)
            self._rng.bit_generator.state = state["random"]

    def close(self) -> None:
        """Leave the group. No method may be called afterwards."""
        self.group.leave()

    def _trained(self) -> dict[str, torch.Tensor]:
        """The parameters that are trained, by name: all, or an adapter's. Of each, this rank's shard."""
        return {name: p for name, p in self.group.parameters(self.model).items() if p.requires_grad}

    def _kept(self) -> dict[str, torch.Tensor]:
        """What of the model's state a resume point has: all, or an adapter's."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        if self.settings.training.lora.rank:
            trained = self._trained()
            return {name: tensor for name, tensor in state.items() if name in trained}
        return state

    def _state(self) -> dict[str, Any]:
        """All that the next step depends on, by the parameters' names; the tensors are those in use, not copies."""
        parameters = self._trained()
        for parameter in parameters.values():
            if not self.optimizer.state[parameter]:  # as AdamW begins, which only does so when there is a gradient
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                on = parameter.device if self.optimizer.defaults["fused"] else "cpu"
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0, device=on), **zeros}
        return {
            "model": {name: parameter.detach() for name, parameter in parameters.items()},
            "optimizer": {name: self.optimizer.state[parameter] for name, parameter in parameters.items()},
            "random": json.dumps(self._rng.bit_generator.state),
        }

    def _before(self, rows: Sequence[Row], *, once: bool) -> dict[int, npt.NDArray[np.float32]]:
        """Compute logprobs of rows' responses before the step, where they are needed: of fresh rows, since only they
        must agree with the stored ones, and of all that are trained if the loss needs the proximal policy. once: the
        step has one update. Its own pass over the rows it trains is one before the step."""
        needs_all = self.objective.loss.needs_proximal
        trains = [self.objective.trains(row) for row in rows]
        indices = [
            i
            for i, row in enumerate(rows)
            if (row.staleness == 0 or (needs_all and trains[i])) and not (once and trains[i])
        ]
        return self.group.all_gather(self.logprob_model.rows(rows, indices))

    def _under_reference(self, rows: Sequence[Row]) -> ByRow | None:
        """The logprobs under the reference model of all rows that have a gradient."""
        if self.reference is None or not self.objective.needs_reference:
            return None
        indices = [i for i, row in enumerate(rows) if self.objective.trains(row)]
        is_reference = self.reference is self.logprob_model
        with lora.without_adapter(self.model) if is_reference else nullcontext():
            return self.group.all_gather(self.reference.rows(rows, indices))

    def _weighted(
        self,
        all_rows: Sequence[Row],
        indices: npt.NDArray[np.int64],
        sequences: BranchSequences,
        reference: ByRow | None,
    ) -> tuple[Sequence[Row], float]:
        """The sequences, those of the chosen pairs with their advantages under the present weights, and the pairs' mean
        loss. reference: logprobs of the sequences under the reference model."""
        assert reference is not None
        picked, _ = sequences.chosen(indices)
        present = self.group.all_gather(self.logprob_model.rows(sequences.rows, picked))
        policy, under_reference = (sequences.by_row(all_rows, values) for values in (present, reference))
        config = self.objective.loss
        assert isinstance(config, Dpo)
        weighted, loss = weighted_pairs(all_rows, indices.tolist(), policy, under_reference, config.beta)
        rows = list(sequences.rows)
        for i, row in weighted.items():
            for k in sequences.of_row[i]:
                rows[k] = replace(rows[k], advantage=row.advantage)
        return rows, loss

    def _measure_others(self, step: int, rows: Sequence[Row], before: ByRow, sums: TokenSums) -> RowSample | None:
        """Measure rows without a gradient: all whose logprobs are in `before`, and of the others a random sample, which
        represents them. Returns the sample; None if there is none."""
        untrained = [i for i, row in enumerate(rows) if not self.objective.trains(row) and row.num_sampled]
        self._measure([i for i in untrained if i in before], rows, before, sums)
        untrained = [i for i in untrained if i not in before]
        count = min(self.settings.training.measured_rows, len(untrained))
        if count == 0:
            return None
        count = min(max(count, MIN_SAMPLE_ROWS), len(untrained))
        rng = generator(self.settings.seed, Stream.MEASURED_ROWS, step)
        sample = sorted(untrained[k] for k in rng.choice(len(untrained), count, replace=False))
        sums_by_row = self.group.all_gather(self._measure(sample, rows, {}, sums, len(untrained) / count))
        return (
            RowSample(rows=list(sums_by_row.values()), population=len(untrained)) if len(sums_by_row) == count else None
        )

    def _measure(
        self, indices: Sequence[int], rows: Sequence[Row], before: ByRow, sums: TokenSums, times: float = 1.0
    ) -> dict[int, list[float]]:
        """Add the figures of rows without a gradient; returns the sums over each row that is this rank's, by row index.

        Args:
            before: Logprobs of rows that need no pass through the model: of all chosen ones, or of none.
            times: How many rows each stands for.
        """
        sums_by_row: dict[int, list[float]] = {}
        with torch.no_grad():
            for batch in self.logprob_model.microbatches(rows, indices, np.ones(len(indices), np.float32)):
                known = torch.from_numpy(batch.scatter(rows, before)).to(self.device) if before else None
                tokens = self._tokens(batch, self.logprob_model.batch(batch) if known is None else known)
                tokens = replace(tokens, proximal=tokens.logprobs)
                # Those with a gradient are measured in each epoch.
                counted = self.settings.training.epochs * times
                try:
                    result = self.objective.loss.token_loss(tokens)
                    sums_by_row |= zip(
                        batch.rows, sums.add(tokens, result, self.objective.old(tokens), counted), strict=False
                    )
                except Exception as error:  # noqa: BLE001  a user's; where it matters it is raised
                    self._warn_unmeasured(error)
        return sums_by_row

    def _warn_unmeasured(self, error: Exception) -> None:
        """Log, once, that a loss cannot measure rows that it does not train."""
        if not self._warned_unmeasured:
            self._warned_unmeasured = True
            name, kind = type(self.objective.loss).__name__, type(error).__name__
            logger.warning(
                "%s fails on rows without a gradient, which are left out of the figures: %s: %s; "
                "training.measured_rows = 0 asks it for none",
                name,
                kind,
                error,
            )

    def _accumulate(
        self,
        batch: MicroBatch,
        rows: Sequence[Row],
        before: ByRow,
        reference: ByRow | None,
        sums: TokenSums,
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; gradients add up in the model. Returns [N, T] the logprobs. What the
        loss returns at padding and given tokens is cut off: an infinite ratio times a mask of 0 would be no number.
        before: logprobs under the proximal policy; of a row that is not there, they are this pass's."""

        def loss_of(part: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
            known = torch.tensor([[i in before] for i in part.rows], device=self.device)
            earlier = torch.from_numpy(part.scatter(rows, before)).to(self.device)
            tokens = self._tokens(part, logprobs, proximal=earlier.where(known, logprobs.detach()))
            padding = ~tokens.sampled
            reference_logprobs = None
            if reference is not None:
                reference_logprobs = (
                    torch.from_numpy(part.scatter(rows, reference)).to(self.device).masked_fill(padding, 0)
                )
            result = self.objective.token_loss(tokens, reference_logprobs, entropy)
            loss = (result.loss.masked_fill(padding, 0) * torch.from_numpy(part.weight).to(self.device)).sum()
            with torch.no_grad():
                sums.add_loss(loss, tokens, reference_logprobs)
                sums.add(tokens, result, self.objective.old(tokens))
            return loss

        return self.logprob_model.backward(
            batch, loss_of, entropy=self.objective.needs_entropy, by_token=self.objective.by_token
        )

    def _tokens(self, batch: MicroBatch, logprobs: torch.Tensor, proximal: torch.Tensor | None = None) -> Tokens:
        """A micro-batch as losses see it, with zeros at padding, given tokens and those without a finite stored
        logprob."""
        padding = torch.from_numpy(batch.mask == 0).to(self.device)
        behaviour = torch.from_numpy(np.ascontiguousarray(batch.behaviour)).to(self.device)
        tokens = Tokens(
            logprobs=logprobs.masked_fill(padding, 0),
            proximal=(behaviour if proximal is None else proximal).masked_fill(padding, 0),
            behaviour=behaviour.masked_fill(padding, 0),
            advantage=torch.from_numpy(batch.advantage).to(self.device),
            sampled=~padding,
            lags=torch.from_numpy(np.ascontiguousarray(batch.lags)).to(self.device),
        )
        return with_finite_logprobs(tokens)

    def _load_model(self) -> Any:
        """The model to train. One that is divided is left in its file's type: each rank makes float32 of its part. Not
        with an adapter, which begins in the model's type."""
        if self.group.shards and not self.settings.training.lora.rank:
            model = load_model(self.settings.model, "auto", "cpu", attention="sdpa")
            if all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point()):
                return model
        return load_model(self.settings.model, "float32", "cpu", attention="sdpa")

    def _load_reference(self) -> LogprobModel:
        """The reference model, in the type that weights are published in; the trained one itself, if that is to be used
        without its adapter. Raises ConfigError."""
        if self.settings.training.lora.rank and not self.settings.training.kl.reference:
            return self.logprob_model
        key, path = "training.kl.reference", self.settings.training.kl.reference or self.settings.model
        if path != self.settings.model:
            policy, reference = load_tokenizer(self.settings.model), load_tokenizer(path, key)
            check_same_tokens(f"{key} = {path!r}", policy.get_vocab(), reference.get_vocab())
        model = load_model(path, self.settings.dtype, "cpu", attention="sdpa")
        vocab_size, other_vocab_size = self.model.config.vocab_size, model.config.vocab_size
        if other_vocab_size < vocab_size:  # more rows than tokens only pad a model's embeddings
            raise ConfigError(
                f"{key} = {path!r}: its embeddings have {other_vocab_size} rows, fewer than the policy's {vocab_size}, "
                "which may sample any of them; name a model with as many"
            )
        return replace(self.logprob_model, model=model if self._moves else self.group.sharded(model))
