"""Speculation in vLLM: engine arguments, our own drafts through vLLM's proposer interface, and the verifier.

Drafts are verified by vLLM's ordinary sampler. It samples one token at each draft position. Tokens are kept up to and
including the first that differs from the draft; transformers.py explains why that is rejection sampling. vLLM's
rejection sampler is not used: its CPU build 0.32 divides logits by uninitialized memory instead of the temperature.

Only the thread that calls LLMEngine.step uses this module.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.engines.engine_settings import Speculation, VllmSettings
from staleflow.tasks.engines.response_drafter import Drafter

if TYPE_CHECKING:
    import torch

SUFFIX_PACKAGE = "arctic-inference==0.1.1"
"""Package that vLLM imports for suffix drafts."""
REJECTED = -1
"""vLLM's placeholder for a rejected token, and for positions without a draft."""


def arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's arguments for speculation; empty without speculation. Raises ConfigError if a package is missing."""
    speculation = settings.speculation
    if not speculation.num_speculative_tokens:
        return {}
    if speculation.source == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            f"rollout.engine.speculation.source = 'suffix' needs {SUFFIX_PACKAGE}, which is not installed; install it "
            "beside vLLM, or use 'responses'"
        )
    method = {"method": "custom_class", "model": f"{__name__}.{ResponsesProposer.__name__}"}
    if speculation.source == "suffix":
        method = {"method": "suffix"}
    return {"speculative_config": {**method, "num_speculative_tokens": speculation.num_speculative_tokens}}


class ResponsesProposer:
    """A vLLM proposer that returns the Drafter's drafts. vLLM creates it and calls it after each step."""

    def __init__(self, config: Any) -> None:
        self._max_length: int = config.speculative_config.num_speculative_tokens
        self._drafter: Drafter | None = None
        self._model_runner: Any = None

    def load_model(self, *args: Any) -> None:
        """Required by vLLM. There is no model to load."""

    def connect(self, drafter: Drafter, model_runner: Any) -> None:
        """Set the drafter to use. model_runner: vLLM's model runner, used to map batch rows to request ids."""
        self._drafter, self._model_runner = drafter, model_runner

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Draft for each row of the batch.

        Args:
            sampled_token_ids: Tokens sampled in this step, per row; empty during prefill.
            num_tokens_no_spec: Number of valid tokens per row of token_ids_cpu.
            token_ids_cpu: All tokens of each row's request.
        """
        drafter = self._drafter
        if drafter is None:
            return [[] for _ in sampled_token_ids]
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            request = self._model_runner.input_batch.req_ids[row]
            num_known, num_valid = drafter.num_known_tokens(request), int(num_tokens_no_spec[row])
            if not sampled or num_known is None:
                drafts.append([])
                continue
            # Catch up from token_ids_cpu: vLLM skips this call near the maximum length, so earlier tokens may be
            # missing.
            drafter.extend(request, token_ids_cpu[row, num_known:num_valid].tolist())
            drafts.append(drafter.draft(request, self._max_length))
        return drafts


class DraftVerifier:
    """Verifies drafts with vLLM's ordinary sampler, in place of its rejection sampler. Requests must not have seeds,
    penalties or logits processors of their own."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, metadata: Any, draft_probs: None, logits: torch.Tensor, sampling: Any) -> Any:
        """Return kept tokens padded with -1, and logprobs for all positions.

        Args:
            metadata: vLLM's SpecDecodeMetadata.
            logits: Rows grouped by request, one for the last token plus one per draft token.
            sampling: vLLM's SamplingMetadata, one row per request.
        """
        import torch
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        device = logits.device
        logits_per_request = torch.tensor(metadata.num_draft_tokens, device=device) + 1
        request_of_row = torch.repeat_interleave(
            torch.arange(len(logits_per_request), device=device), logits_per_request
        )
        if sampling.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=sampling.temperature[request_of_row])
        output = self._sampler(logits=logits, sampling_metadata=sampling)
        sampled = output.sampled_token_ids[:, 0]
        # By logits row, the draft token to compare with; the last row of a request has none, and never matches.
        expected_tokens = torch.full_like(sampled, REJECTED)
        expected_tokens[metadata.target_logits_indices.long()] = metadata.draft_token_ids.to(expected_tokens.dtype)

        # Logits rows are ragged. Scatter them into a table [request, width], given as flat positions.
        width = metadata.max_spec_len + 1
        logit_rows = torch.arange(len(sampled), device=device)
        flat_positions = (
            request_of_row * width + logit_rows - (logits_per_request.cumsum(0) - logits_per_request)[request_of_row]
        )
        tokens = sampled.new_full((len(logits_per_request) * width,), REJECTED)
        tokens[flat_positions] = sampled
        matches = torch.zeros_like(tokens)
        matches[flat_positions] = (sampled == expected_tokens).to(matches.dtype)
        # A token is kept if all drafts before it matched: the running product, shifted right by one, first column 1.
        keep = matches.view(-1, width).cumprod(1).roll(1, 1)
        keep[:, 0] = 1
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            # Table slots without a logits row read row 0; their tokens are REJECTED, so nobody reads them.
            row_of_slot = torch.zeros_like(tokens, dtype=torch.long)
            row_of_slot[flat_positions] = logit_rows
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[row_of_slot],
                logprobs.logprobs[row_of_slot],
                logprobs.selected_token_ranks[row_of_slot],
            )
        return SamplerOutput(
            sampled_token_ids=torch.where(keep > 0, tokens.view(-1, width), REJECTED), logprobs_tensors=logprobs
        )


class VllmSpeculation:
    """Speculation of an LLMEngine in this process. drafter: set only for source "responses"."""

    def __init__(self, engine: Any, speculation: Speculation, end_token_ids: tuple[int, ...]) -> None:
        self.num_drafted_by_request: dict[str, int] = {}
        """Draft tokens that the last step verified, by request id."""
        self._speculation = speculation
        self.drafter: Drafter | None = None
        if not speculation.num_speculative_tokens:
            return
        engine.collective_rpc(_install_verifier)
        if speculation.source == "responses":
            self.drafter = Drafter(speculation.num_speculative_tokens, speculation.max_running, end_token_ids)
            engine.collective_rpc(_connect_proposer, args=(self.drafter,))
        self._scheduler = scheduler = engine.engine_core.engine_core.scheduler
        self._original_schedule = scheduler.schedule
        self._original_update_drafts = scheduler.update_draft_token_ids
        scheduler.schedule = self._schedule_and_count
        scheduler.update_draft_token_ids = self._update_drafts

    def reset(self) -> None:
        """Drop all drafts. Call while no request is running."""
        if self.drafter is not None:
            self.drafter.reset()

    def _update_drafts(self, drafts: Any) -> None:
        """Pass drafts to the scheduler; drop them while too many requests run."""
        if len(self._scheduler.running) <= self._speculation.max_running:
            self._original_update_drafts(drafts)

    def _schedule_and_count(self, *args: Any, **kwargs: Any) -> Any:
        step = self._original_schedule(*args, **kwargs)
        # vLLM pads some drafts with -1.
        self.num_drafted_by_request = {
            request: sum(token >= 0 for token in draft) for request, draft in step.scheduled_spec_decode_tokens.items()
        }
        return step


def _install_verifier(worker: Any) -> None:
    worker.model_runner.rejection_sampler = DraftVerifier(worker.model_runner.sampler)


def _connect_proposer(worker: Any, drafter: Drafter) -> None:
    worker.model_runner.drafter.connect(drafter, worker.model_runner)
