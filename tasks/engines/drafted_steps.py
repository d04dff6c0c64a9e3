"""Decode steps of transformers' continuous batching in which a request verifies drafted tokens.

A step computes a request's last token and its drafted ones, as it computes parts of a prompt, and samples a token after
each of them. The first that differs from what was drafted is the last one kept: what comes after it was computed after
a token that is none. So each kept token is drawn from the policy's own distribution after the tokens before it, and has
its logprob there. Speculative sampling's rule (accept draft d with probability p(d), else draw from p without d) is the
same for drafts without a distribution of their own: the token that is drawn is d with probability p(d), and otherwise
distributed as p without d.

What was computed of rejected tokens stays in the request's pages, beyond its position, and is overwritten by the next
step. Sliding windows have no room for that: models that have them are refused. Runs in the manager's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.response_drafter import Drafter


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens of one request that were verified, and those of them that were sampled too."""

    drafted: int = 0
    accepted: int = 0


class DraftedSteps:
    """Lets a batch processor, which nothing was given yet, sample after each of several tokens of a request."""

    def __init__(self, processor: Any, drafter: Drafter) -> None:
        if sliding := [name for name in processor.cache.cache_allocators if name != "full_attention"]:
            raise ConfigError(
                f"rollout.engine.speculation.length: the model has {', '.join(sliding)} layers, whose caches cannot "
                "take back rejected tokens; use 0"
            )
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.counts: dict[str, DraftCounts] = {}
        """By request that the engine has begun and not taken out."""
        self._drafter = drafter
        self._scheduler = processor.scheduler
        self._queries: list[list[int]] = []
        """By request of the batch that samples: the tokens that it samples after."""
        self._indices = torch.zeros(0)
        self._inputs = inputs = processor.inputs_and_outputs
        self._prepare, self._arguments, self._updated = (
            inputs.prepare_batch_tensors, inputs.get_model_kwargs, inputs.prepare_batch_update,
        )  # fmt: skip
        inputs.prepare_batch_tensors = self._prepare_batch_tensors
        inputs.get_model_kwargs = self._get_model_kwargs
        inputs.prepare_batch_update = self._prepare_batch_update

    def forget_all(self) -> None:
        """Forget all counts. No request is left."""
        self.drafts = self.drafted_tokens = self.accepted_tokens = 0
        self.counts.clear()

    def _prepare_batch_tensors(self, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        self._queries, first = [], 0
        indices: list[int] = []
        for future in requests_in_batch:
            if future.has_new_token:
                # Only a request that decodes has drafts; of a prompt only the last token is followed by a new one.
                decodes = future.state.generated_len() > 0
                self._queries.append(future.state.tokens_to_process[:] if decodes else [0])
                start = first if decodes else first + future.query_length - 1
                indices += range(start, first + future.query_length)
            first += future.query_length
        self._prepare(requests_in_batch, *args, **kwargs)
        self._indices = torch.tensor(indices, dtype=torch.int32, device=self._inputs.device)

    def _get_model_kwargs(self, use_padding: bool = False) -> Any:
        arguments = self._arguments(use_padding=use_padding)
        arguments["logits_indices"] = self._indices
        return arguments

    def _prepare_batch_update(self) -> tuple[list[Any], list[int], list[float]]:
        """The batch, and of each of its requests that samples the last token that it keeps; the others are in its state
        already."""
        requests_in_batch, _, _ = self._updated()
        outputs = self._inputs.output_ids[:, : len(self._indices)]
        tokens: list[int] = outputs[0].tolist()
        logprobs: list[float] = outputs[1].view(dtype=torch.float32).tolist()
        last_tokens, last_logprobs, first = [], [], 0
        queries = iter(self._queries)
        for future in requests_in_batch:
            if not future.has_new_token:
                continue
            state, query = future.state, next(queries)
            sampled = tokens[first : first + len(query)]
            kept = accepted(query[1:], sampled, state._eos_token_ids, state._new_tokens_limit - state.generated_len())
            if (stop := self._scheduler.stops.get(state.request_id)) is not None:
                kept = stop.add(sampled[:kept]) - stop.found
            state.generated_tokens += sampled[:kept]
            state.logprobs += logprobs[first : first + kept]
            state.position_offset -= len(query) - 1 - kept
            last_tokens.append(sampled[kept])
            last_logprobs.append(logprobs[first + kept])
            self._drafter.extend(state.request_id, sampled[: kept + 1])
            self.drafts += len(query) > 1
            self.drafted_tokens += len(query) - 1
            self.accepted_tokens += kept
            if (counts := self.counts.get(state.request_id)) is not None:
                counts.drafted += len(query) - 1
                counts.accepted += kept
            first += len(query)
        return requests_in_batch, last_tokens, last_logprobs


def accepted(drafted: list[int], sampled: list[int], ends: set[int], most: int) -> int:
    """How many drafted tokens a response keeps, before one more sampled token. sampled: one after each of the last
    known token and the drafted ones. most: tokens that it may still have. Nothing follows a token that ends it."""
    kept = 0
    while kept < len(drafted) and drafted[kept] == sampled[kept] and sampled[kept] not in ends and kept + 1 < most:
        kept += 1
    return kept
