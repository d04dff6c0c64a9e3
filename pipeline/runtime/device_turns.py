"""Tracks whether the trainer or rollout instances use their shared GPUs, in the layout "turns".

Invariant: while the trainer computes, no instance is awake, and no instance wakes or is built.

The coordinator orders sleeps and pulls so that calls rarely wait here. This module also covers calls that it does not
order: placing instances, restoring the trainer, publishing weights before the first step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

GPU_METHODS = frozenset({"train", "publish_initial", "fine_tune", "logprobs"})
"""Methods of the trainer that need its GPUs. Between such calls it has freed them."""


class DeviceTurns:
    """Which actors are on the shared GPUs. shared: whether GPUs are shared; if not, no call waits."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self._awake: set[str] = set()
        self._training = False
        self._changed = asyncio.Event()

    async def mark_awake(self, instance: str) -> None:
        """Wait until the trainer is not computing, and mark an instance as awake."""
        while self.shared and self._training:
            await self._wait()
        if self.shared:
            self._awake.add(instance)

    def mark_asleep(self, instance: str) -> None:
        """Mark an instance as asleep or gone."""
        self._awake.discard(instance)
        self._changed.set()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context manager: waits until no instance is awake, and lets none wake inside the block."""
        while self.shared and (self._awake or self._training):
            await self._wait()
        self._training = True
        try:
            yield
        finally:
            self._training = False
            self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
