"""The trainer: a Hugging Face causal LM and AdamW. `PolicyTrainer` is the plain object, `Trainer` its Dask actor.

A step's weights are published as a new policy version before the step counts as finished: a published version can
always be fetched, also while the next step trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stores import parameters, resume_points
from tasks.engines.transformers import forward_logprobs, load_model, resolve_device
from tasks.seeds import Stream, generator
from tasks.training.logprobs import LogprobModel
from tasks.training.loss import LOSSES, MOST_LOG_RATIO, Loss, Tokens, log_ratio
from tasks.training.packing import MicroBatch, Row, microbatches, minibatches, token_weights
from tasks.training.policy import TrainerSettings


@dataclass(slots=True)
class _Sums:
    """Running sums over a step's tokens; means are taken at its end."""

    tokens: float = 0.0
    clipped: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    grad_norms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Stored behaviour logprobs against the trainer's own: absolute differences per token, nats, and
    KL(rollout || trainer) by the k3 estimate."""

    mean: float
    max: float
    kl: float
    num_tokens: int


class PolicyTrainer:
    """Trains a model on rows; publishes nothing. Deterministic for a seed and an order of calls.

    The weights it trains are float32 whatever is published: at usual learning rates an AdamW step on bfloat16 weights
    is mostly rounded away. With dtype bfloat16 forward and backward run under autocast.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        training = settings.training
        self.loss: Loss = LOSSES.make(training.loss)
        self.device = resolve_device(settings.device)
        self.model: Any = load_model(settings.model, "float32", self.device, attention="sdpa")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
        )
        self.logprob_model = LogprobModel(
            model=self.model,
            device=self.device,
            half=settings.dtype == "bfloat16",
            temperature=settings.temperature,
            token_budget=training.microbatch_tokens,
        )
        self._rng = generator(settings.seed, Stream.MINIBATCHES)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then constant or a cosine down to a tenth."""
        s = self.settings.training
        if step < s.warmup_steps:
            return s.learning_rate * (step + 1) / (s.warmup_steps + 1)
        if s.schedule == "constant":
            return s.learning_rate
        last = s.schedule_steps or self.settings.num_steps
        progress = (step - s.warmup_steps) / max(1, last - s.warmup_steps)
        return s.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))

    def step(self, step: int, rows: Sequence[Row]) -> dict[str, float]:
        """Train one step on all rows: `minibatches` optimizer updates. Mutates the model; returns metrics."""
        s = self.settings.training
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        proximal, mismatch = self._before(rows)
        sums = _Sums()
        for chosen in minibatches(len(rows), s.minibatches, self._rng):
            weights = token_weights(s.loss.aggregation, [rows[i].num_sampled for i in chosen], self.settings.max_length)
            self.optimizer.zero_grad(set_to_none=True)
            trained = [k for k, i in enumerate(chosen) if rows[i].has_gradient]
            picked = [int(chosen[k]) for k in trained]
            for batch in microbatches(rows, picked, weights[trained], s.microbatch_tokens):
                self._accumulate(batch, rows, proximal, sums)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
            if torch.isfinite(norm):
                # A step on a non-finite gradient would destroy the model for good; it shows in grad_norm instead.
                self.optimizer.step()
            sums.grad_norms.append(float(norm))
        tokens = max(sums.tokens, 1.0)
        return {
            "loss": sums.loss / s.minibatches,
            "grad_norm": float(np.mean(sums.grad_norms)),
            "clip_share": sums.clipped / tokens,
            "ratio_mean": sums.ratio / tokens,
            "learning_rate": rate,
            "mismatch_mean": mismatch.mean,
            "mismatch_max": mismatch.max,
            "kl_rollout": mismatch.kl,
            "tokens_trained": sums.tokens,
        }

    def published(self) -> dict[str, torch.Tensor]:
        """The weights as engines load them."""
        dtype = getattr(torch, self.settings.dtype)
        return {name: p.detach().to(dtype) for name, p in self.model.named_parameters()}

    def probe(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Logprobs of tokens[1:], nats, at temperature 1: the reference for every engine."""
        half = self.settings.dtype == "bfloat16"
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=half):
            return forward_logprobs(self.model, tokens)

    def save(self, folder: Path) -> None:
        """Save the present weights and the tokenizer where `from_pretrained` finds them."""
        from transformers import AutoTokenizer

        parameters.checkpoint(self.model, AutoTokenizer.from_pretrained(self.settings.model), folder)

    def save_state(self, path: Path) -> None:
        """Write all that the next step depends on: weights, optimizer, random state."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self._rng.bit_generator.state,
        }
        torch.save(state, path)

    def load_state(self, path: Path) -> None:
        """Restore what `save_state` wrote. Raises StoreError."""
        with resume_points.loading(path):
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self._rng.bit_generator.state = state["random"]

    def _before(self, rows: Sequence[Row]) -> tuple[list[np.ndarray[Any, Any]], Mismatch]:
        """Compute each row's response logprobs before the step (the proximal policy), and compare the stored ones. If
        the loss does not need the proximal policy, only those of fresh rows are computed: only they must agree."""
        needs_all = self.loss.needs_proximal
        chosen = [i for i, r in enumerate(rows) if r.staleness == 0 or (needs_all and r.has_gradient)]
        proximal: list[np.ndarray[Any, Any]] = [r.behaviour for r in rows]
        for i, logprobs in self.logprob_model.rows(rows, chosen).items():
            proximal[i] = logprobs
        fresh = [i for i in chosen if rows[i].staleness == 0 and rows[i].num_sampled]
        if not fresh:
            return proximal, Mismatch(mean=0.0, max=0.0, kl=0.0, num_tokens=0)
        difference = np.concatenate([(proximal[i] - rows[i].behaviour)[rows[i].sampled] for i in fresh])
        bounded = np.clip(difference, -MOST_LOG_RATIO, MOST_LOG_RATIO)
        return proximal, Mismatch(
            mean=float(np.abs(difference).mean()),
            max=float(np.abs(difference).max()),
            kl=float((np.exp(bounded) - bounded - 1).mean()),
            num_tokens=len(difference),
        )

    def _accumulate(
        self, batch: MicroBatch, rows: Sequence[Row], proximal: list[np.ndarray[Any, Any]], sums: _Sums
    ) -> None:
        """Forward and backward of one micro-batch; gradients add up in the model. At padding and given tokens the loss
        sees zeros, and what it returns there is cut off: an infinite ratio times a mask of 0 would be no number."""
        device = self.device
        old = np.zeros_like(batch.behaviour)
        for k, i in enumerate(batch.rows):
            begin = len(rows[i].prompt) - 1 - batch.start
            old[k, begin : begin + len(rows[i].response)] = proximal[i]
        others = torch.from_numpy(batch.mask == 0).to(device)
        behaviour = torch.from_numpy(np.ascontiguousarray(batch.behaviour)).to(device).masked_fill(others, 0)
        proximal_t = torch.from_numpy(old).to(device).masked_fill(others, 0)
        logprobs = self.logprob_model.batch(batch).masked_fill(others, 0)
        result = self.loss.token_loss(
            Tokens(
                logprobs=logprobs,
                proximal=proximal_t,
                behaviour=behaviour,
                advantage=torch.from_numpy(batch.advantage).to(device),
                sampled=~others,
                lags=torch.from_numpy(np.ascontiguousarray(batch.lags)).to(device),
            )
        )
        loss = (result.loss.masked_fill(others, 0) * torch.from_numpy(batch.weight).to(device)).sum()
        loss.backward()
        with torch.no_grad():
            sums.tokens += float(batch.mask.sum())
            sums.loss += float(loss)
            sums.clipped += float(result.clipped.masked_fill(others, 0).sum())
            sums.ratio += float(log_ratio(logprobs, behaviour).exp().masked_fill(others, 0).sum())
