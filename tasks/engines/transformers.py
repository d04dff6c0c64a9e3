"""The embedded engine: a plain decoding loop over a transformers model, on CPU or GPU. The reference for other engines.

Requests are rows of one batch. Each step computes the new tokens of each row (row_scheduler.py chooses them,
row_model.py calls the model), samples one token per row, and appends it to its request. Rows join and leave between
steps. Of transformers it uses only a model's forward, its cache and its attention interface.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from staleflow.stores.errors import ConfigError, WeightsRefused, raised_as
from staleflow.stores.trajectory import FinishReason, InstanceId, PolicyVersion, TrajectoryId
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_comparison import compare_by_name
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.engines import row_attention
from staleflow.tasks.engines.base import Engine, EngineLoad, LoadResult, TokenScores
from staleflow.tasks.engines.engine_settings import TransformersSettings
from staleflow.tasks.engines.engine_thread import EngineThread
from staleflow.tasks.engines.response_drafter import Drafter
from staleflow.tasks.engines.row_model import RowModel
from staleflow.tasks.engines.row_scheduler import RequestRow, RowScheduler
from staleflow.tasks.engines.row_storage import BatchRow
from staleflow.tasks.engines.running_requests import RunningRequest
from staleflow.tasks.engines.served_adapters import ServedAdapters

_load_lock = threading.Lock()
"""Lock for loading a model. `from_pretrained` patches torch and transformers for the whole process meanwhile; two
concurrent calls could leave a patch behind."""

ALIGNMENT_BYTES = 64
"""Alignment of CPU tensors that PyTorch allocates, in bytes. Tensors of a memory-mapped model file have any alignment,
and matrix products may round differently there: an engine that has slept would differ from others in the last bits."""

MAX_COPIED_POSITIONS = 64
"""Positions whose logits are copied at a time, to sample or to score tokens: copies of all would take many times the
memory of logits."""


def build(settings: TransformersSettings, instance: InstanceId, threads: int) -> Engine:
    """Build the engine of an instance. Sets the number of PyTorch's threads in this process."""
    torch.set_num_threads(threads)
    return TransformersEngine(settings, instance)


class TransformersEngine(EngineThread):
    """See tasks/engines/base.py for the contract."""

    def __init__(self, settings: TransformersSettings, instance: InstanceId) -> None:
        super().__init__(instance, settings.model)
        self._settings = settings
        device = resolve_device(settings.device)
        self._model: Any = load_model(settings.model, settings.dtype, device, row_attention.ATTENTION_NAME)
        self._shapes = weight_folder.shapes(dict(self._model.named_parameters()))
        self._adapters = ServedAdapters(self._model, settings.lora) if settings.num_served_versions else None
        self._generator = torch.Generator(device).manual_seed(settings.seed)
        self._rows: dict[str, RequestRow] = {}
        """By the requests' keys."""
        self._row_model = RowModel(self._model, settings.page_tokens, self._select_versions)
        self._drafter = self._make_drafter()
        self._scheduler = RowScheduler(settings, self._row_model.cache, self._drafter)
        self._thread.start()

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        published = weight_folder.read(weights)
        if self._adapters is not None:
            layers, tensors = self._adapters.prepare(published, weights)
            self._call(lambda: self._serve_adapter(version, layers, tensors)).result()
        else:
            tensors = dict(self._model.named_parameters())
            weight_folder.check_shapes(self._shapes, weight_folder.shapes(published), weights)
            self._call(lambda: self._replace_weights(version, tensors, published)).result()
        return LoadResult(fingerprint=fingerprint(published), weights=compare_by_name(tensors, published))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        passes = split_passes(sequences, self._settings.max_batch_tokens if self._row_model.cache.can_crop else 0)
        futures = [
            self._call(partial(self._score_in_one_pass, pass_sequences, temperature)) for pass_sequences in passes
        ]
        return [scores for future in futures for scores in future.result()]

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            super()._run()

    def _step(self) -> None:
        """Compute the new tokens of each row, and sample."""
        for pass_rows in self._scheduler.plan_passes():
            new_tokens = [(row, [*row.tokens[row.length : row.length + count], *row.draft]) for row, count in pass_rows]
            num_logits = [len(row.draft) + 1 if count == row.num_pending else 0 for row, count in pass_rows]
            logits = self._row_model.logits(new_tokens, num_logits)
            temperatures = [
                row.temperature for (row, _), n in zip(pass_rows, num_logits, strict=True) for _ in range(n)
            ]
            positions = [position for row_logits in logits for position in row_logits]
            tokens, logprobs = sample(positions, temperatures, self._generator) if positions else ([], [])
            del logits, positions  # before the next pass has its own
            start = 0
            with self._condition:
                for (row, count), n in zip(pass_rows, num_logits, strict=True):
                    row.length += count
                    if n:
                        self._add_tokens(row, tokens[start : start + n], logprobs[start : start + n])
                    start += n
                # After all lengths are set: ending a row may move another row together with its computed tokens.
                for (row, _), n in zip(pass_rows, num_logits, strict=True):
                    if n:
                        self._end_if_complete(row)
        with self._condition:
            self._fail_without_memory()

    def _add_tokens(self, row: RequestRow, tokens: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens to a request: the accepted drafts and one more."""
        running, draft = row.running_request, row.draft
        num_accepted_drafts = num_accepted(draft, tokens, row.eos_ids, row.max_context_tokens - len(row.tokens))
        new_ids = tokens[: num_accepted_drafts + 1]
        if running.stop_check is not None:
            new_ids = new_ids[: running.stop_check.add(new_ids)]
        row.draft = []
        row.tokens += new_ids
        row.length += len(new_ids) - 1
        self._requests.extend(running, new_ids, logprobs[: len(new_ids)], len(draft))
        if self._drafter is not None:
            self._drafter.extend(running.key, new_ids)

    def _end_if_complete(self, row: RequestRow) -> None:
        running = row.running_request
        has_stopped = running.has_stopped or row.tokens[-1] in row.eos_ids
        if has_stopped or len(row.tokens) >= row.max_context_tokens:
            self._scheduler.end(row)
            self._drop_request(running)
            self._emit(running.sampled_tokens(FinishReason.STOP if has_stopped else FinishReason.LENGTH))

    def _fail_without_memory(self) -> None:
        for row in self._scheduler.failed_rows:
            self._drop_request(row.running_request)
            message = f"rollout.engine.kv_tokens = {self._settings.kv_tokens} is too small for {len(row.tokens)} tokens"
            self._fail(row.running_request.request, message)
        self._scheduler.failed_rows.clear()

    def _admit(self, running: RunningRequest) -> None:
        request, vocabulary = running.request, self._model.config.get_text_config().vocab_size
        if max(request.tokens) >= vocabulary:  # an invalid token would fail the pass, and so the engine
            raise ValueError(f"token {max(request.tokens)} is not in the model's vocabulary of {vocabulary}")
        row = self._rows[running.key] = RequestRow(
            running_request=running,
            tokens=list(request.tokens),
            max_context_tokens=len(request.tokens) + request.max_new_tokens,
            eos_ids=frozenset((*self._settings.eos, *request.stop.token_ids)),
            temperature=0.0 if request.greedy else request.temperature or self._settings.temperature,
        )
        self._scheduler.add(row)

    def _remove(self, requests: Sequence[RunningRequest]) -> None:
        for running in requests:
            self._scheduler.remove(self._rows[running.key])

    def _drop_request(self, running: RunningRequest) -> None:
        self._rows.pop(running.key, None)
        super()._drop_request(running)

    def _abort(self, trajectories: frozenset[TrajectoryId]) -> None:
        super()._abort(trajectories)
        for trajectory in trajectories:
            self._scheduler.forget(trajectory)

    def _drop_caches_and_counts(self) -> None:
        self._scheduler.clear()
        if self._drafter is not None:
            self._drafter.reset()
        if self._adapters is not None:
            self._adapters.clear()

    def _free_device(self) -> None:
        self._scheduler.drop_old_caches(keep_decoding=False)
        for parameter in self._model.parameters():
            parameter.data = parameter.new_empty(0)
        if self._generator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load_statistics(self) -> EngineLoad:
        return dataclasses.replace(
            self._requests.load_statistics(self._scheduler.num_waiting, self._scheduler.preemptions),
            kept_tokens=self._scheduler.kept_tokens,
            prefilled_tokens=self._scheduler.prefilled_tokens,
            cached_tokens=self._scheduler.cached_tokens,
        )

    def _serve_adapter(self, version: PolicyVersion, layers: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Serve a version's adapter beside the others."""
        assert self._adapters is not None
        self._adapters.add(version, layers, tensors)
        with self._condition:
            for old_version in self._requests.drop_old_versions(version, self._settings.num_served_versions):
                self._adapters.drop(old_version)
            self._requests.serve(version)

    def _replace_weights(self, version: PolicyVersion, parameters: dict[str, Any], published: dict[str, Any]) -> None:
        """Replace all weights in place. Raises WeightsRefused, which ends the engine, because its weights are of two
        versions then."""
        with raised_as(WeightsRefused, f"{self._instance}: version {version} cannot be loaded", Exception):
            for name, parameter in parameters.items():
                if self._is_asleep or parameter.data_ptr() % ALIGNMENT_BYTES:
                    parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=parameter.device)
                parameter.copy_(published[name])
        self._is_asleep = False
        with self._condition:
            self._requests.change_version(version)
            self._scheduler.drop_old_caches(keep_decoding=self._settings.keep_cache)

    def _score_in_one_pass(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[TokenScores]:
        """Score sequences in one forward pass, or a single long one in several."""
        rows, cache = [BatchRow() for _ in sequences], self._row_model.new_cache()
        longest = max(map(len, sequences))
        pass_tokens = self._settings.max_batch_tokens if self._row_model.cache.can_split_input else longest
        parts: list[list[TokenScores]] = [[] for _ in sequences]
        for start in range(0, longest, pass_tokens):
            new_tokens = [tokens[start : start + pass_tokens] for tokens in sequences]
            lengths = [len(tokens) for tokens in new_tokens]
            all_logits = self._row_model.logits(list(zip(rows, new_tokens, strict=True)), lengths, cache)
            for row, tokens, logits, row_parts in zip(rows, sequences, all_logits, parts, strict=True):
                targets = tokens[start + 1 : start + 1 + len(logits)]
                for first in range(0, len(logits), MAX_COPIED_POSITIONS):
                    positions = slice(first, first + MAX_COPIED_POSITIONS)
                    row_parts.append(score_tokens(logits[positions].float() / temperature, targets[positions]))
                row.length += len(logits)
            del all_logits, logits  # before the next pass has its own
        return [
            TokenScores(
                logprobs=tuple(x for part in row_parts for x in part.logprobs),
                top_tokens=tuple(x for part in row_parts for x in part.top_tokens),
                top_logprobs=tuple(x for part in row_parts for x in part.top_logprobs),
            )
            for row_parts in parts
        ]

    def _make_drafter(self) -> Drafter | None:
        speculation = self._settings.speculation
        if not speculation.num_speculative_tokens:
            return None
        if not self._row_model.cache.can_crop:
            raise ConfigError(
                f"rollout.engine.speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: the model "
                "has layers whose states cannot remove rejected tokens; use 0"
            )
        return Drafter(speculation.num_speculative_tokens, speculation.max_running, self._settings.eos)

    def _select_versions(self, rows: Sequence[BatchRow]) -> None:
        """Select the adapter of each row for the next pass; the newest for a probe."""
        if self._adapters is not None:
            self._adapters.versions.select(
                [row.running_request.version if isinstance(row, RequestRow) else self.version for row in rows]
            )


def resolve_device(name: str) -> str:
    """Resolve a configured device to cpu or cuda; auto takes CUDA if there is a GPU. On CUDA, enables TF32 for products
    of float32 matrices, which makes them several times as fast."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        torch.set_float32_matmul_precision("high")
    return name


def split_passes(sequences: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Split sequences into forward passes of at most so many tokens, but at least one sequence, in order.

    >>> list(split_passes([[1, 2], [3], [4, 5, 6, 7], [8]], max_tokens=3))
    [[[1, 2], [3]], [[4, 5, 6, 7]], [[8]]]
    """
    pass_sequences: list[Sequence[int]] = []
    for tokens in sequences:
        if pass_sequences and sum(map(len, pass_sequences)) + len(tokens) > max_tokens:
            yield pass_sequences
            pass_sequences = []
        pass_sequences.append(tokens)
    if pass_sequences:
        yield pass_sequences


def score_tokens(logits: torch.Tensor, next_tokens: Sequence[int]) -> TokenScores:
    """Score tokens by the [positions, vocabulary] logits before each of them. At a sequence's end there is one more
    position than tokens."""
    logprobs = logits.float().log_softmax(-1)
    targets = torch.tensor(next_tokens, device=logits.device, dtype=torch.long)[:, None]
    top_logprobs, top_tokens = logprobs.max(-1)
    return TokenScores(
        logprobs=tuple(logprobs[: len(targets)].gather(1, targets)[:, 0].tolist()),
        top_tokens=tuple(top_tokens.tolist()),
        top_logprobs=tuple(top_logprobs.tolist()),
    )


def forward_logprobs(model: Any, tokens: Sequence[int], device: str = "") -> tuple[float, ...]:
    """Compute the logprobs of tokens[1:] in nats, each given all tokens before it, by one plain forward pass.

    Args:
        device: Where the model computes; by default where its weights are, which offloaded weights are not.
    """
    ids = torch.tensor([list(tokens)], device=device or model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return tuple(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist())


def load_model(path: str, dtype: str, device: str, attention: str) -> Any:
    """Load a causal LM from a folder or the hub, in eval mode. dtype: "auto" for that of its file, which is then
    memory-mapped. attention: with "sdpa", a model that does not support it computes with "eager". Thread-safe."""
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    with _load_lock:
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation=attention)
        except ValueError:  # the model does not support this attention, such as gpt-oss, whose attention has sinks
            if attention != "sdpa":  # the engine's rows need its own
                raise
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation="eager")
    return model.to(device).eval()


def sample(
    logits: Sequence[torch.Tensor], temperatures: Sequence[float], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """Sample a token after each of at least one position.

    Args:
        logits: Of each position, [vocabulary].
        temperatures: Of each position; 0 for its most likely token.

    Returns:
        The tokens, and their logprobs in nats at that temperature, or at 1 for a most likely token.
    """
    device = logits[0].device
    divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)[:, None]
    greedy = torch.tensor([temperature == 0.0 for temperature in temperatures], device=device)
    uniform = None
    if any(temperatures):
        uniform = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64, device=device)
    tokens, token_logprobs = [], []
    for first in range(0, len(logits), MAX_COPIED_POSITIONS):
        positions = slice(first, first + MAX_COPIED_POSITIONS)
        logprobs = torch.stack(logits[positions]).float().div_(divisors[positions]).log_softmax(-1)
        chosen = None if uniform is None else _draw(logprobs, uniform[positions])
        if chosen is None or not all(temperatures[positions]):
            most_likely = logprobs.argmax(-1)
            chosen = most_likely if chosen is None else torch.where(greedy[positions], most_likely, chosen)
        tokens.append(chosen)
        token_logprobs.append(logprobs.gather(1, chosen[:, None])[:, 0])
    return torch.cat(tokens).tolist(), torch.cat(token_logprobs).tolist()


def _draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row of [rows, vocabulary] logprobs with [rows, 1] uniform numbers."""
    # In double precision, where rounding of a sum over the vocabulary is far below any sampled probability.
    cumulative = logprobs.exp().double().cumsum_(-1)
    threshold = uniform * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)


def num_accepted(draft_tokens: Sequence[int], sampled: Sequence[int], eos_ids: Collection[int], max_tokens: int) -> int:
    """Number of draft tokens that are accepted. One more token is sampled after them.

    The first sampled token that differs from its draft is the last one kept, because later ones were computed after a
    token that is not in the response. So each kept token is drawn from the policy's distribution after the tokens
    before it. For drafts without a distribution this equals the rule of speculative sampling (arXiv 2302.01318: accept
    draft d with probability p(d), else draw from p without d).

    Args:
        draft_tokens: draft tokens after the last known token.
        sampled: the tokens sampled after the last known token and after each draft token.
        eos_ids: tokens that end the response.
        max_tokens: maximum number of further tokens of the response.

    >>> num_accepted([5, 6, 7], [5, 9, 7, 8], (), 10)
    1
    """
    count = 0
    while (
        count < len(draft_tokens)
        and draft_tokens[count] == sampled[count]
        and sampled[count] not in eos_ids
        and count + 1 < max_tokens
    ):
        count += 1
    return count
