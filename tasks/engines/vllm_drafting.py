"""Speculation in vLLM: its arguments, our own drafts through its interface for proposers, the verifier, and the counts.

Drafts are verified by vLLM's own sampler, the one that samples all other tokens: it samples a token after each drafted
one, and the first that differs is the last one kept (drafted_steps.py says why that is rejection sampling). vLLM's
rejection sampler is not used: in its CPU build 0.32 it divides logits by uninitialised memory in place of the
temperature. Only the driving thread uses this.
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

NEEDED = {"ngram": ("numba", "numba"), "suffix": ("arctic_inference", "arctic-inference==0.1.1")}
"""By source: the module that vLLM needs for it, and the package that has it."""
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""Tokens that an n-gram has."""
REJECTED = -1
"""vLLM's mark of a token that is not kept."""


def arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's arguments for speculation; none if there is none. Raises ConfigError if a package is missing."""
    speculation = settings.speculation
    if not speculation.num_speculative_tokens:
        return {}
    module, package = NEEDED.get(speculation.source, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"rollout.engine.speculation.source = {speculation.source!r} needs {package}, which is not installed; "
            "install it beside vLLM, or use 'responses'"
        )
    own: dict[str, Any]
    if speculation.source == "responses":
        own = {"method": "custom_class", "model": f"{__name__}.{ResponsesProposer.__name__}"}
    else:
        own = {"method": speculation.source, **(NGRAM if speculation.source == "ngram" else {})}
    return {"speculative_config": {**own, "num_speculative_tokens": speculation.num_speculative_tokens}}


class ResponsesProposer:
    """Proposes what a Drafter drafts. vLLM makes it and calls it after each step."""

    def __init__(self, config: Any) -> None:
        self._length: int = config.speculative_config.num_speculative_tokens
        self._drafter: Drafter | None = None
        self._runner: Any = None

    def load_model(self, *args: Any) -> None:
        """There is no model to load."""

    def connect(self, drafter: Drafter, runner: Any) -> None:
        """Begin to propose. runner: vLLM's, which knows the requests of a batch by their keys."""
        self._drafter, self._runner = drafter, runner

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Drafts by row of the batch. sampled_token_ids: by row, of this step, none while a prompt is computed.
        token_ids_cpu: by row, all tokens of a request, of which num_tokens_no_spec are known."""
        drafter = self._drafter
        if drafter is None:
            return [[] for _ in sampled_token_ids]
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            key = self._runner.input_batch.req_ids[row]
            known, count = drafter.length(key), int(num_tokens_no_spec[row])
            if not sampled or known is None:
                drafts.append([])
                continue
            # Not only the tokens of this step: vLLM asks for no drafts where a sequence has almost its full length.
            drafter.extend(key, token_ids_cpu[row, known:count].tolist())
            drafts.append(drafter.draft(key, self._length))
        return drafts


class SampledVerifier:
    """Verifies drafts in place of vLLM's rejection sampler, by its ordinary sampler. Requests have no seeds, penalties
    or processors of logits of their own."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, drafted: Any, draft_probs: None, logits: torch.Tensor, sampling: Any) -> Any:
        """The tokens that each request keeps, -1 behind them, and logprobs of all. logits: of each request's rows, one
        after another, those of its last token and of its drafted ones."""
        import torch
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        device = logits.device
        counts = torch.tensor(drafted.num_draft_tokens, device=device) + 1
        requests = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        if sampling.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=sampling.temperature[requests])
        output = self._sampler(logits=logits, sampling_metadata=sampling)
        sampled = output.sampled_token_ids[:, 0]
        expected = torch.full_like(sampled, REJECTED)
        expected[drafted.target_logits_indices.long()] = drafted.draft_token_ids.to(expected.dtype)

        width = drafted.max_spec_len + 1
        rows = torch.arange(len(sampled), device=device)
        places = requests * width + rows - (counts.cumsum(0) - counts)[requests]
        tokens = sampled.new_full((len(counts) * width,), REJECTED)
        tokens[places] = sampled
        right = torch.zeros_like(tokens)
        right[places] = (sampled == expected).to(right.dtype)
        kept = right.view(-1, width).cumprod(1).roll(1, 1)
        kept[:, 0] = 1
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            row = torch.zeros_like(tokens, dtype=torch.long)
            row[places] = rows
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[row], logprobs.logprobs[row], logprobs.selected_token_ranks[row]
            )
        return SamplerOutput(
            sampled_token_ids=torch.where(kept > 0, tokens.view(-1, width), REJECTED), logprobs_tensors=logprobs
        )


class VllmSpeculation:
    """The speculation of an LLMEngine in this process. drafter: of our own drafts, else None."""

    def __init__(self, engine: Any, settings: Speculation, ends: tuple[int, ...]) -> None:
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.drafted: dict[str, int] = {}
        """Drafted tokens that the last step verified, by request."""
        self._asked = settings
        self._length = settings.first_length
        self.drafter: Drafter | None = None
        if not settings.num_speculative_tokens:
            return
        engine.collective_rpc(_verify)
        if settings.source == "responses":
            self.drafter = Drafter(settings.first_length, settings.cap, ends)
            engine.collective_rpc(_connect, args=(self.drafter,))
        self._scheduler = scheduler = engine.engine_core.engine_core.scheduler
        self._take_drafts = scheduler.update_draft_token_ids
        self._schedule, self._verified = scheduler.schedule, scheduler.make_spec_decoding_stats
        scheduler.update_draft_token_ids = self._take
        scheduler.schedule, scheduler.make_spec_decoding_stats = self._scheduled, self._count

    def reset(self) -> None:
        """Forget all drafts and counts. No request is left."""
        self.drafts = self.drafted_tokens = self.accepted_tokens = 0
        self.set_length(self._asked.first_length)
        if self.drafter is not None:
            self.drafter.forget_all()

    def set_length(self, length: int) -> None:
        """Set how many tokens are drafted at most, up to what vLLM was set up for."""
        self._length = min(length, self._asked.num_speculative_tokens)
        if self.drafter is not None:
            self.drafter.most = self._length

    def _take(self, drafts: Any) -> None:
        """Have drafts verified by the next step, as long as they may be, unless too many requests run."""
        if self._length and len(self._scheduler.running) <= self._asked.cap:
            drafts.draft_token_ids = [draft[: self._length] for draft in drafts.draft_token_ids]
            self._take_drafts(drafts)

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        step = self._schedule(*args, **kwargs)
        # vLLM pads some drafts with -1.
        self.drafted = {
            key: sum(token >= 0 for token in draft) for key, draft in step.scheduled_spec_decode_tokens.items()
        }
        self.drafts += sum(count > 0 for count in self.drafted.values())
        self.drafted_tokens += sum(self.drafted.values())
        return step

    def _count(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
        self.accepted_tokens += num_accepted_tokens
        return self._verified(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)


def _verify(worker: Any) -> None:
    worker.model_runner.rejection_sampler = SampledVerifier(worker.model_runner.sampler)


def _connect(worker: Any, drafter: Drafter) -> None:
    worker.model_runner.drafter.connect(drafter, worker.model_runner)
