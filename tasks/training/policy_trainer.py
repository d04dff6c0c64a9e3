"""Trains a Hugging Face causal LM with AdamW. `PolicyTrainer` is the plain object, `Trainer` its Dask actor.

It may be one of several processes that train one model together (tasks/training/rank_group.py), each with its share of
every minibatch's rows and of the parameters. The number of processes changes results only by rounding.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_hash import TensorStream, Weights
from staleflow.tasks.engines import adapters
from staleflow.tasks.engines.transformers import forward_logprobs, load_model, resolve_device
from staleflow.tasks.rendering.chat_tokenizer import load_tokenizer
from staleflow.tasks.rendering.file_tokenizer import check_same_tokens
from staleflow.tasks.settings.seeds import Stream, generator
from staleflow.tasks.training import lora
from staleflow.tasks.training.blocks import compile_blocks, enable_recomputation
from staleflow.tasks.training.branch_sequences import BranchSequences
from staleflow.tasks.training.logprobs import LogprobModel, split_by_row, to_device
from staleflow.tasks.training.loss import Dpo, Tokens
from staleflow.tasks.training.microbatches import LogprobsByRow, MicroBatch, Row, minibatches, token_weights
from staleflow.tasks.training.objective import Objective, select_pairs, with_finite_logprobs, with_pair_advantages
from staleflow.tasks.training.packed_attention import exclude_attention_from_compilation
from staleflow.tasks.training.rank import SINGLE_RANK, Rank
from staleflow.tasks.training.rank_group import RankGroup
from staleflow.tasks.training.step_metrics import RowSample, TokenSums, mismatch_metrics
from staleflow.tasks.training.trainer_settings import ExampleRows, PolicyTrainerSettings, fine_tuning_config
from staleflow.tasks.training.trainer_state import HostMemory, TrainerState, trained_parameters

logger = logging.getLogger(__name__)

T = TypeVar("T")
MIN_SAMPLE_ROWS = 2
"""Minimum number of rows of a sample: a single row has no standard error."""


def use_fused_adamw(parameters: Iterable[torch.Tensor]) -> bool | None:
    """AdamW's `fused` argument: True for parameters on a GPU. None on CPU, where PyTorch's default repeats steps of
    resumed runs bit for bit."""
    return all(parameter.is_cuda for parameter in parameters) or None


class PolicyTrainer:
    """Trains a model on rows. Deterministic for a seed and an order of calls.

    The weights it trains are float32 whatever is published: at usual learning rates an AdamW step on bfloat16 weights
    is mostly rounded away. With dtype bfloat16 forward and backward run under autocast.
    """

    def __init__(self, settings: PolicyTrainerSettings, rank: Rank = SINGLE_RANK) -> None:
        """Load the model. rank: rank of this process; the call waits for the others."""
        self.settings = settings
        training = settings.training
        self.objective = Objective.of(training)
        self.device = resolve_device(settings.device)
        uses_bfloat16 = settings.dtype == "bfloat16"
        self.rank_group = RankGroup(
            rank,
            self.device,
            uses_bfloat16=uses_bfloat16,
            offload=training.offload,
            collective_timeout_s=settings.collective_timeout_s,
        )
        model = self._load_model()
        if training.lora.rank:
            model = lora.inject_adapter(model, training.lora, settings.seed)
        self._moves_to_host = settings.shares_device and not self.rank_group.is_sharded
        """Whether the model is moved to the device and back. A sharded model is offloaded block by block instead."""
        self.model: Any = self.rank_group.shard(model, torch.float32)
        self.optimizer = torch.optim.AdamW(
            self._trained_parameters().values(),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
            fused=use_fused_adamw(self._trained_parameters().values()),
        )
        self.logprob_model = LogprobModel(
            model=self.model,
            device=self.device,
            uses_bfloat16=uses_bfloat16,
            temperature=settings.temperature,
            token_budget=training.microbatch_tokens,
            rank=rank.number,
            num_ranks=rank.count,
        )
        holds_reference = self.objective.needs_reference and not settings.has_stored_reference
        self.reference = self._load_reference() if holds_reference else None
        # What each LogprobModel tried on its model is not compiled, because it would take as long as a training step's,
        # and it switches the exclusion off.
        if training.compile:
            exclude_attention_from_compilation()
            compile_blocks(self.model)
        if training.recompute_activations:
            enable_recomputation(self.model)
        if rank.leads and self.logprob_model.padding_reason:
            logger.warning("micro-batches are not packed: %s", self.logprob_model.padding_reason)
        self._rng = generator(settings.seed, Stream.MINIBATCHES)
        self._state = TrainerState(
            self.model, self.optimizer, self._rng, self.rank_group, adapter_only=training.lora.rank > 0
        )
        self._has_warned_unmeasured = False
        self._examples: ExampleRows | None = None
        self._host_memory = HostMemory(self.device)
        self.sleep()

    def wake(self) -> None:
        if self._moves_to_host:
            self._move(lambda name, tensor: tensor.to(self.device, copy=True))

    def sleep(self) -> None:
        if not self.settings.shares_device:
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.rank_group.reshard(self.model)
        if self._moves_to_host:
            self._move(self._host_memory.put)
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _move(self, move: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace all tensors that the trainer has on its device. move: returns the new tensor, from a name and the old
        one."""
        models = {"model": self.model} | ({} if self.reference is None else {"reference": self.reference.model})
        for model_name, model in models.items():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.data = move(f"{model_name}.{name}", tensor.data)
        for name, parameter in self._trained_parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "step" or self.optimizer.defaults["fused"]:
                    self.optimizer.state[parameter][key] = move(f"{key}.{name}", value)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then constant, or a cosine or linear decay to schedule_floor."""
        training = self.settings.training
        if step < training.warmup_steps:
            return training.learning_rate * (step + 1) / (training.warmup_steps + 1)
        if training.schedule == "constant":
            return training.learning_rate
        num_steps = training.schedule_steps or self.settings.num_steps
        progress = min(1.0, (step - training.warmup_steps) / max(1, num_steps - training.warmup_steps))
        factor = 0.5 * (1 + math.cos(math.pi * progress)) if training.schedule == "cosine" else 1 - progress
        return training.learning_rate * (training.schedule_floor + (1 - training.schedule_floor) * factor)

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train a step on all rows with `epochs` x `minibatches` optimizer updates. Mutates the model; returns metrics.
        rows: in a group, only those of the leading rank are used. Minibatches and token weights are made from rows; the
        model computes their sequences."""
        training = self.settings.training
        sft, compares_pairs = training.sft, self.objective.loss.compares_pairs
        # Each step has the next examples after those of the steps before the first training step.
        examples = self._draw_examples(sft.steps + step) if sft.weight else ()
        all_rows, examples = self.rank_group.broadcast((rows, examples))
        if compares_pairs:
            all_rows = select_pairs(all_rows)
        sequences = BranchSequences.of(all_rows)
        rows = sequences.rows
        learning_rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        rows_per_pair = 2 if compares_pairs else 1  # rows that stay in one minibatch
        epochs = [
            minibatches(len(all_rows), training.minibatches, self._rng, rows_per_pair) for _ in range(training.epochs)
        ]
        updates = list(itertools.chain.from_iterable(epochs))
        example_parts = [
            part.tolist() for epoch in epochs if epoch for part in np.array_split(np.arange(len(examples)), len(epoch))
        ]
        proximal_logprobs = self._logprobs_before_step(rows, single_update=len(updates) == 1)
        reference = self._reference_logprobs(rows)
        sums, example_sums, grad_norms = TokenSums(), TokenSums(), list[float]()
        sample = self._measure_untrained(step, rows, proximal_logprobs, sums)
        first_pass_logprobs: dict[int, npt.NDArray[np.float32]] = {}
        losses = list[float]()
        for indices, example_indices in zip(updates, example_parts, strict=True):
            weights = token_weights(
                training.aggregation, [all_rows[i].num_sampled for i in indices], self.settings.max_response_tokens
            )
            if compares_pairs:
                weights = np.full(len(indices), 2 / len(indices), np.float32)
                rows, loss = self._with_pair_advantages(all_rows, indices, sequences, reference)
                losses.append(loss)
            self.optimizer.zero_grad(set_to_none=True)
            trained_indices = [k for k, i in enumerate(indices) if self.objective.trains(all_rows[i])]
            sequence_indices, row_positions = sequences.select(int(indices[k]) for k in trained_indices)
            for batch in self.logprob_model.microbatches(
                rows, sequence_indices, weights[trained_indices][row_positions]
            ):
                logprobs = self._add_gradients(batch, rows, proximal_logprobs, reference, sums)
                if len(updates) == 1:
                    first_pass_logprobs |= split_by_row(batch, rows, logprobs)
            if sft.weight:
                self._add_example_gradients(examples, example_indices, example_sums)
            grad_norm = self.rank_group.full_tensor(
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.grad_clip)
            )
            if torch.isfinite(grad_norm):
                # A step on a non-finite gradient would destroy the model for good.
                self.optimizer.step()
            grad_norms.append(float(grad_norm))
        sums = TokenSums(torch.tensor(self.rank_group.all_reduce(sums.values), dtype=torch.float64))
        mismatch = mismatch_metrics(rows, proximal_logprobs | self.rank_group.all_gather(first_pass_logprobs))
        metrics = sums.metrics(training.epochs, sample)
        if reference is None:
            del metrics["kl_reference"]
        if sft.weight and updates:
            (example_loss,) = self.rank_group.all_reduce([example_sums.loss])
            metrics["sft_loss"] = example_loss / sft.weight / len(updates)
            metrics["sft_tokens"] = float(sum(row.num_sampled for row in examples))
        return {
            "loss": (sums.loss + sum(losses)) / max(1, len(grad_norms)),
            "grad_norm": float(np.mean(grad_norms or [0.0])),
            "updates_dropped": float(np.count_nonzero(~np.isfinite(grad_norms))),
            "tokens_dropped": float(sum(row.num_unusable for row in all_rows if self.objective.trains(row))),
            **metrics,
            "learning_rate": learning_rate,
            **mismatch,
        }

    def fine_tune(self, step: int) -> dict[str, float]:
        """Run step `step` of supervised fine-tuning on its examples. After the last step AdamW's moments are reset,
        because they belong to another loss."""
        rows = self._draw_examples(step)
        with self._fine_tuning():
            metrics = self.step(step, rows)
        if step + 1 == self.settings.training.sft.steps:
            self._examples = None
            self.optimizer.state.clear()
        return metrics

    def _draw_examples(self, step: int) -> Sequence[Row]:
        """The examples of a step; empty on ranks other than the leading one. step: counts all steps with examples."""
        if not self.rank_group.rank.leads:
            return ()
        if self._examples is None and self.settings.examples is not None:
            self._examples = self.settings.examples.build()
        assert self._examples is not None, "training.sft without examples"
        return self._examples.rows(step)

    def _add_example_gradients(self, examples: Sequence[Row], indices: Sequence[int], sums: TokenSums) -> None:
        """Add the gradient of training.sft.weight x the mean cross-entropy of the chosen examples' answer tokens, on
        all ranks together."""
        training = self.settings.training
        weights = token_weights(
            "token_mean", [examples[i].num_sampled for i in indices], self.settings.max_response_tokens
        )
        with self._fine_tuning():
            for batch in self.logprob_model.microbatches(examples, indices, training.sft.weight * weights):
                self._add_gradients(batch, examples, {}, None, sums)

    @contextmanager
    def _fine_tuning(self) -> Iterator[None]:
        """Train with the settings of supervised fine-tuning in the block, at temperature 1: nothing has sampled its
        examples."""
        settings, objective, logprob_model = self.settings, self.objective, self.logprob_model
        training = fine_tuning_config(settings.training)
        self.settings, self.objective = replace(settings, training=training), Objective.of(training)
        self.logprob_model = logprob_model.at_temperature(1.0)
        try:
            yield
        finally:
            self.settings, self.objective, self.logprob_model = settings, objective, logprob_model

    def apply_to_weights(self, function: Callable[[Weights], T]) -> T:
        """Call `function` with a TensorStream of the trained weights as engines load them, and return its result. Each
        tensor is gathered from all ranks when it is read, so there is no second copy of the model."""
        dtype = getattr(torch, self.settings.dtype)
        parameters = self._trained_parameters()
        if self.settings.training.lora.rank:
            parameters = {adapters.name_in_file(name): parameter for name, parameter in parameters.items()}
        parameters = dict(sorted(parameters.items()))
        tensors = ((name, self.rank_group.full_tensor(p.detach().to(dtype))) for name, p in parameters.items())
        meta_tensors = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in parameters.items()}
        result = function(TensorStream(meta_tensors, tensors))
        for _ in tensors:
            continue  # gather tensors that `function` did not read: the other ranks gather all of them
        return result

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprobs of tokens[1:], nats, at temperature 1: the reference for every engine."""
        uses_bfloat16 = self.settings.dtype == "bfloat16"
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=uses_bfloat16):
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
            weight_folder.save_checkpoint(
                base,
                tokenizer,
                folder,
                lora.merge_adapter(base.state_dict(), weights, config),
                lambda tmp_path: lora.save(weights, config, path, tmp_path / lora.ADAPTER_FOLDER),
            )
            return
        names = {*self.model.state_dict()}
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in names}
        weight_folder.save_checkpoint(self.model, tokenizer, folder, {**buffers, **weights})

    def begin_save(self, path: Path) -> None:
        self._state.begin_save(path)

    def end_save(self) -> None:
        self._state.end_save()

    def load_state(self, path: Path) -> None:
        """Restore a state that was saved, with a group of this or any other size. Raises StoreError."""
        self._state.load(path)

    def close(self) -> None:
        """Leave the group. No method may be called afterwards."""
        self.rank_group.leave()

    def _trained_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that are trained, by name: all, or an adapter's. Each is this rank's shard."""
        return trained_parameters(self.rank_group, self.model)

    def _logprobs_before_step(self, rows: Sequence[Row], *, single_update: bool) -> dict[int, npt.NDArray[np.float32]]:
        """Compute logprobs of rows' responses before the step, where they are needed: of fresh rows, since only they
        must agree with the stored ones, and of all trained rows if the loss needs the proximal policy. single_update:
        the step has one update, so that its own pass gives the logprobs of the rows it trains."""
        needs_all = self.objective.loss.needs_proximal
        trains = [self.objective.trains(row) for row in rows]
        indices = [
            i
            for i, row in enumerate(rows)
            if (row.staleness == 0 or (needs_all and trains[i])) and not (single_update and trains[i])
        ]
        return self.rank_group.all_gather(self.logprob_model.row_logprobs(rows, indices))

    def _reference_logprobs(self, rows: Sequence[Row]) -> LogprobsByRow | None:
        """The logprobs under the reference model of all rows that have a gradient. Raises StoreError if a row should
        have them from a teacher and does not."""
        if not self.objective.needs_reference:
            return None
        indices = [i for i, row in enumerate(rows) if self.objective.trains(row)]
        if self.reference is None:
            stored = {i: logprobs for i in indices if (logprobs := rows[i].reference_logprobs) is not None}
            if any(i not in stored and rows[i].num_sampled for i in indices):
                raise StoreError(
                    "a row has no logprobs of the reference, which a teacher computes; with teacher.instances = 0 the "
                    "trainer itself does"
                )
            return stored
        is_reference = self.reference is self.logprob_model
        with lora.without_adapter(self.model) if is_reference else nullcontext():
            reference_logprobs = self.reference.row_logprobs(rows, indices)
        self.rank_group.reshard(self.reference.model)
        return self.rank_group.all_gather(reference_logprobs)

    def _with_pair_advantages(
        self,
        all_rows: Sequence[Row],
        indices: npt.NDArray[np.int64],
        sequences: BranchSequences,
        reference: LogprobsByRow | None,
    ) -> tuple[Sequence[Row], float]:
        """Return the sequences, where those of the chosen pairs have their advantages under the current weights, and
        the pairs' mean loss. reference: logprobs of the sequences under the reference model."""
        assert reference is not None
        sequence_indices, _ = sequences.select(indices)
        logprobs = self.rank_group.all_gather(self.logprob_model.row_logprobs(sequences.rows, sequence_indices))
        policy, reference_logprobs = (sequences.merge_by_row(all_rows, values) for values in (logprobs, reference))
        config = self.objective.loss
        assert isinstance(config, Dpo)
        weighted_rows, loss = with_pair_advantages(all_rows, indices.tolist(), policy, reference_logprobs, config.beta)
        rows = list(sequences.rows)
        for i, row in weighted_rows.items():
            for k in sequences.sequences_of_row[i]:
                rows[k] = replace(rows[k], advantage=row.advantage)
        return rows, loss

    def _measure_untrained(
        self, step: int, rows: Sequence[Row], proximal_logprobs: LogprobsByRow, sums: TokenSums
    ) -> RowSample | None:
        """Measure rows without a gradient: all rows whose logprobs are in `proximal_logprobs`, and a random sample of
        the others. Returns the sample; None if there is none."""
        untrained_indices = [i for i, row in enumerate(rows) if not self.objective.trains(row) and row.num_sampled]
        self._measure([i for i in untrained_indices if i in proximal_logprobs], rows, proximal_logprobs, sums)
        untrained_indices = [i for i in untrained_indices if i not in proximal_logprobs]
        count = min(self.settings.training.measured_rows, len(untrained_indices))
        if count == 0:
            return None
        count = min(max(count, MIN_SAMPLE_ROWS), len(untrained_indices))
        rng = generator(self.settings.seed, Stream.MEASURED_ROWS, step)
        sample = sorted(untrained_indices[k] for k in rng.choice(len(untrained_indices), count, replace=False))
        sums_by_row = self.rank_group.all_gather(self._measure(sample, rows, {}, sums, len(untrained_indices) / count))
        return (
            RowSample(rows=list(sums_by_row.values()), population_size=len(untrained_indices))
            if len(sums_by_row) == count
            else None
        )

    def _measure(
        self,
        indices: Sequence[int],
        rows: Sequence[Row],
        proximal_logprobs: LogprobsByRow,
        sums: TokenSums,
        multiplicity: float = 1.0,
    ) -> dict[int, list[float]]:
        """Add the metrics of rows without a gradient. Returns the sums over each row of this rank, by row index.

        Args:
            proximal_logprobs: Known logprobs of all chosen rows; empty if the model must compute them.
            multiplicity: Number of rows that each row represents.
        """
        sums_by_row: dict[int, list[float]] = {}
        with torch.no_grad():
            for batch in self.logprob_model.microbatches(rows, indices, np.ones(len(indices), np.float32)):
                logprobs = to_device(batch.scatter(rows, proximal_logprobs), self.device) if proximal_logprobs else None
                tokens = self._loss_tokens(batch, self.logprob_model.logprobs(batch) if logprobs is None else logprobs)
                tokens = replace(tokens, proximal=tokens.logprobs)
                # Rows with a gradient are measured in each epoch.
                weight = self.settings.training.epochs * multiplicity
                try:
                    result = self.objective.loss.token_loss(tokens)
                    row_sums = sums.add(tokens, result, self.objective.old_logprobs(tokens), weight)
                    sums_by_row |= zip(batch.row_indices, row_sums.tolist(), strict=False)
                except Exception as error:  # noqa: BLE001  a user's loss; for trained rows its error is raised
                    self._warn_unmeasured(error)
        return sums_by_row

    def _warn_unmeasured(self, error: Exception) -> None:
        """Log, once, that a loss cannot measure rows that it does not train."""
        if not self._has_warned_unmeasured:
            self._has_warned_unmeasured = True
            name, error_type = type(self.objective.loss).__name__, type(error).__name__
            logger.warning(
                "%s fails on rows without a gradient, which are left out of the metrics: %s: %s; "
                "with training.measured_rows = 0 it is not called for them",
                name,
                error_type,
                error,
            )

    def _add_gradients(
        self,
        batch: MicroBatch,
        rows: Sequence[Row],
        proximal_logprobs: LogprobsByRow,
        reference: LogprobsByRow | None,
        sums: TokenSums,
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch; gradients add up in the model. Returns [N, T] logprobs. Losses
        at padding and tokens of environments are replaced with 0, because an infinite loss times a mask of 0 would be
        NaN. proximal_logprobs: logprobs under the proximal policy; those of other rows are taken from this pass."""

        def loss_of(part: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
            is_known = to_device(np.array([[i in proximal_logprobs] for i in part.row_indices]), self.device)
            batch_logprobs = to_device(part.scatter(rows, proximal_logprobs), self.device)
            tokens = self._loss_tokens(part, logprobs, proximal=batch_logprobs.where(is_known, logprobs.detach()))
            padding = ~tokens.sampled
            reference_logprobs = None
            if reference is not None:
                reference_logprobs = to_device(part.scatter(rows, reference), self.device).masked_fill(padding, 0)
            result = self.objective.token_loss(tokens, reference_logprobs, entropy)
            loss = (result.loss.masked_fill(padding, 0) * to_device(part.token_weight, self.device)).sum()
            with torch.no_grad():
                sums.add_loss(loss, tokens, reference_logprobs)
                sums.add(tokens, result, self.objective.old_logprobs(tokens))
            return loss

        return self.logprob_model.backward(
            batch, loss_of, with_entropy=self.objective.needs_entropy, is_tokenwise=self.objective.is_tokenwise
        )

    def _loss_tokens(self, batch: MicroBatch, logprobs: torch.Tensor, proximal: torch.Tensor | None = None) -> Tokens:
        """Build a loss's view of a micro-batch, with zeros at padding, tokens of environments and tokens without a
        finite stored logprob."""
        padding = to_device(batch.mask == 0, self.device)
        behaviour = to_device(batch.behaviour, self.device)
        tokens = Tokens(
            logprobs=logprobs.masked_fill(padding, 0),
            proximal=(behaviour if proximal is None else proximal).masked_fill(padding, 0),
            behaviour=behaviour.masked_fill(padding, 0),
            advantage=to_device(batch.advantage, self.device),
            sampled=~padding,
            lags=to_device(batch.lags, self.device),
        )
        return with_finite_logprobs(tokens)

    def _load_model(self) -> Any:
        """Load the model to train. A sharded model keeps the type of its file, and each rank converts its shards to
        float32; with an adapter it is loaded in float32."""
        if self.rank_group.is_sharded and not self.settings.training.lora.rank:
            model = load_model(self.settings.model, "auto", "cpu", attention="sdpa")
            if all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point()):
                return model
        return load_model(self.settings.model, "float32", "cpu", attention="sdpa")

    def _load_reference(self) -> LogprobModel:
        """Load the reference model, in the type in which weights are published. Returns the trained model itself if it
        is the reference without its adapter. Raises ConfigError."""
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
        reference = replace(self.logprob_model, model=self.rank_group.shard(model))
        self.rank_group.reshard(reference.model)  # it has tried passes
        return reference
