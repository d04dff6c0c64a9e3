"""Audits a store within a memory limit, with several processes if it is large."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from staleflow.stores.auditing.audit import MAX_BLOCK_TOKENS, AuditReport, audit
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.versioned import VersionedStore

MIB = 2**20
PROCESS_MIB, PROCESS_WITH_POOL_MIB, WORKER_MIB = 200, 330, 230
"""Resident sizes of this process, of this process with local workers, and of a worker, before they read tokens."""
BYTES_PER_TOKEN = 64
"""Maximum memory per token in a block."""
MIN_TOKENS = 2**18
"""Minimum tokens per block; reading smaller blocks is slow."""
POOL_MIN_TOKENS = 2**25
"""Tokens of a store above which starting processes saves time."""


def plan_processes(memory_mib: int, workers: int, num_tokens: int) -> tuple[int, int]:
    """Plan the audit of a store of `num_tokens` tokens with at most `workers` processes.

    Returns the number of local worker processes, 0 for only this process, and the tokens per block of each process.
    Raises ConfigError if the limit is too low for one.

    >>> plan_processes(1024, 2, 10**9)
    (2, 1277952)
    >>> plan_processes(512, 2, 10**9)
    (0, 2097152)
    """
    if workers > 1 and num_tokens > POOL_MIN_TOKENS:
        for count in range(workers, 1, -1):
            # This process reads blocks, too: those of steps whose rows several workers have read.
            block_mib = (memory_mib - PROCESS_WITH_POOL_MIB - count * WORKER_MIB) // (count + 1)
            max_tokens = block_mib * MIB // BYTES_PER_TOKEN
            if max_tokens >= MIN_TOKENS:
                return count, min(max_tokens, MAX_BLOCK_TOKENS)
    max_tokens = (memory_mib - PROCESS_MIB) * MIB // BYTES_PER_TOKEN
    if max_tokens < MIN_TOKENS:
        min_mib = PROCESS_MIB + MIN_TOKENS * BYTES_PER_TOKEN // MIB
        raise ConfigError(f"memory limit of {memory_mib} MiB: an audit takes at least {min_mib} MiB")
    return 0, min(max_tokens, MAX_BLOCK_TOKENS)


def audit_within_memory(store: VersionedStore, memory_mib: int, workers: int, client: Any = None) -> AuditReport:
    """Audit a store within a limit of memory.

    Args:
        store: The store, whose current snapshot is audited.
        memory_mib: Maximum resident memory of all local processes together, MiB. A cluster's workers read blocks of the
            same size, whatever else they use.
        workers: Maximum number of local worker processes; none are started for a small store.
        client: A `distributed.Client` whose workers read the tokens, instead of local processes.

    Raises:
        ConfigError: The limit is too low, the client is asynchronous, or jobs have all workers of its cluster.
        StoreUnavailable: The store cannot be reached.
        ActorLost: Tasks killed the workers, or the scheduler is gone.
    """
    try:
        num_tokens = store.summary().num_tokens
    except StoreError:
        num_tokens = 0  # the audit reports the damage
    num_workers, max_tokens = plan_processes(memory_mib, workers if client is None else 0, num_tokens)
    if client is None and not num_workers:
        return audit(store, max_tokens=max_tokens)
    from staleflow.pipeline.stored_runs.pool import open_pool  # takes a second

    with open_pool(client, num_workers) as pool:
        return audit(store, pool.run, max_tokens)


def add_history_findings(report: AuditReport, path: Path) -> AuditReport:
    """Add findings about earlier steps and other branches to a report. Raises StoreError."""
    from staleflow.stores.auditing import snapshot_audit

    history_findings = snapshot_audit.audit_history(path)
    checks = (*report.checks, snapshot_audit.CHECK)
    return dataclasses.replace(report, checks=checks, findings=(*report.findings, *history_findings))
