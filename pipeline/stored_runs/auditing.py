"""An audit within a limit of memory, by several processes if a store is large."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.stores.auditing.audit import MAX_TOKENS, AuditReport, audit
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.versioned import VersionedStore

MIB = 2**20
ALONE_MIB, WITH_POOL_MIB, WORKER_MIB = 200, 330, 230
"""Resident sizes of this process, of this process with local workers, and of a worker, before they read tokens."""
BYTES_A_TOKEN = 64
"""Most memory per token that is read together."""
MIN_TOKENS = 2**18
"""Tokens read together below which reading becomes slow."""
SEVERAL_TOKENS = 2**25
"""Tokens of a store above which starting processes pays off."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How an audit keeps its memory limit."""

    workers: int
    """Local worker processes; 0: this process audits alone."""
    most_tokens: int
    """Tokens that each process reads together."""


def planned(memory_mib: int, workers: int, num_tokens: int) -> Plan:
    """Plan the audit of a store of `num_tokens` tokens with at most `workers` processes. Raises ConfigError if the
    limit is too low for one.

    >>> planned(1024, 2, 10**9)
    Plan(workers=2, most_tokens=1916928)
    >>> planned(512, 2, 10**9)
    Plan(workers=0, most_tokens=2097152)
    """
    if workers > 1 and num_tokens > SEVERAL_TOKENS:
        for count in range(workers, 1, -1):
            max_tokens = ((memory_mib - WITH_POOL_MIB) // count - WORKER_MIB) * MIB // BYTES_A_TOKEN
            if max_tokens >= MIN_TOKENS:
                return Plan(count, min(max_tokens, MAX_TOKENS))
    max_tokens = (memory_mib - ALONE_MIB) * MIB // BYTES_A_TOKEN
    if max_tokens < MIN_TOKENS:
        least = ALONE_MIB + MIN_TOKENS * BYTES_A_TOKEN // MIB
        raise ConfigError(f"--memory {memory_mib}: an audit takes at least {least} MiB")
    return Plan(0, min(max_tokens, MAX_TOKENS))


def audit_within(store: VersionedStore, memory_mib: int, workers: int, client: Any = None) -> AuditReport:
    """Audit a store within a limit of memory.

    Args:
        store: The store, of which the present snapshot is audited.
        memory_mib: Most resident memory of all local processes together, MiB. Workers of a cluster have their own.
        workers: Most local worker processes; there are none for a small store.
        client: A `distributed.Client` whose workers read the tokens, instead of local processes.

    Raises:
        ConfigError: The limit is too low.
        ActorLost: Tasks killed the workers, or the scheduler is gone.
    """
    try:
        num_tokens = store.summary().num_tokens
    except StoreError:
        num_tokens = 0  # the audit says what is damaged
    plan = planned(memory_mib, workers, num_tokens)
    if client is None and not plan.workers:
        return audit(store, most_tokens=plan.most_tokens)
    from staleflow.pipeline.stored_runs.pool import pool_of  # takes a second

    with pool_of(client, plan.workers) as pool:
        return audit(store, pool.run, plan.most_tokens if client is None else MAX_TOKENS)


def with_history(report: AuditReport, path: Path) -> AuditReport:
    """Add to a report what earlier steps and other branches read. Raises StoreError."""
    from staleflow.stores.auditing import snapshot_audit

    earlier = snapshot_audit.audit_history(path)
    checks = (*report.checks, snapshot_audit.CHECK)
    return dataclasses.replace(report, checks=checks, findings=(*report.findings, *earlier))
