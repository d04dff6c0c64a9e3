"""Access to vLLM's scheduler where vLLM has no interface: load statistics, and the policy version of pages in the
prefix cache.

vLLM counts preemptions and cache hits only if its logging is on, which costs time in every step. This module counts the
calls instead. Only the engine's thread uses it.
"""

from __future__ import annotations

from typing import Any

from staleflow.stores.errors import ActorLost, raised_as
from staleflow.stores.trajectory import PolicyVersion


def version_salt(version: PolicyVersion) -> str:
    """The salt of a version's page hashes in vLLM. Requests share cached pages only if their salts are equal, so a
    request uses pages of its own version only, or, if the cache is kept, goes on with those that it had before."""
    return f"v{version}"


class VllmScheduler:
    """The scheduler of an LLMEngine in this process."""

    def __init__(self, engine: Any, page_tokens: int) -> None:
        self._engine = engine
        self._page_tokens = page_tokens
        self._preemptions = self._prefilled_tokens = self._cached_tokens = 0
        self._install_counters()

    def statistics(self) -> dict[str, int]:
        """Current values of the EngineLoad fields that the scheduler knows. kept_tokens counts cached pages outside the
        batch, whether of coming turns or of ended trajectories; pages with equal contents count once. It may be too
        low: of the pages of running requests, all but one per request are taken to be cached."""
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        num_used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # vLLM keeps one for itself
        # A page is cached once it is full, and the last page of each request is not.
        num_used_cached_blocks = max(0, num_used_blocks - len(scheduler.running))
        return {
            "waiting": len(scheduler.waiting),
            "preemptions": self._preemptions,
            "kept_tokens": self._page_tokens * max(0, len(pool.cached_block_hash_to_block) - num_used_cached_blocks),
            "prefilled_tokens": self._prefilled_tokens,
            "cached_tokens": self._cached_tokens,
        }

    def reset(self) -> None:
        """Drop all cached pages and counts, so that a later run's version of the same number cannot use them. No
        request may be running. Raises ActorLost if pages are in use nevertheless."""
        if not self._engine.reset_prefix_cache():
            raise ActorLost("vLLM keeps pages of its cache although no request is running")
        self._preemptions = self._prefilled_tokens = self._cached_tokens = 0

    def change_version(self, version: PolicyVersion, *, keep: bool) -> None:
        """Restrict all requests to cached pages of the loaded version. keep: requests that have pages already continue
        with them. Raises ActorLost if vLLM keeps other pages nevertheless."""
        if not keep:
            # Running requests return to vLLM's waiting queue with the tokens they have, and are prefilled again.
            num_preemptions = self._preemptions
            with raised_as(ActorLost, "vLLM keeps pages of the version before", RuntimeError):
                self._engine.reset_prefix_cache(reset_running_requests=True)
            self._preemptions = num_preemptions
        for request in self._scheduler.requests.values():
            if request.num_computed_tokens == 0:
                # With its old salt it would reuse pages of the old version, and the next turn could not reuse its own.
                request.cache_salt = version_salt(version)
                request.block_hashes.clear()
                request.update_block_hashes()

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def _install_counters(self) -> None:
        """Replace methods of vLLM's scheduler by ones that count preemptions, and cached and prefilled tokens."""
        scheduler = self._scheduler
        preempt = scheduler._preempt_request

        def count_and_preempt(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **kwargs)

        def count_admission(request: Any, num_cached_tokens: int) -> None:
            if not request.skip_reading_prefix_cache:  # else a probe
                self._cached_tokens += num_cached_tokens
                self._prefilled_tokens += request.num_tokens - num_cached_tokens

        scheduler._preempt_request = count_and_preempt
        scheduler.kv_cache_manager.record_prefix_cache_stats = count_admission
