"""Describes the software and hardware on which the exact bits of a trainer's results depend."""

from __future__ import annotations

import sys


def describe_numerics() -> str:
    """Describe this process's torch, instruction set, threads and GPU; empty if torch is not loaded. Steps are expected
    to repeat bit for bit only where all of these are equal."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    parts = [f"torch {torch.__version__}", f"CPU {torch.backends.cpu.get_cpu_capability()}"]
    parts.append(f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        parts.append(str(torch.cuda.get_device_name()))
    return ", ".join(parts)
