"""What the bits of a trainer's results depend on besides its inputs."""

from __future__ import annotations

import sys


def numerics() -> str:
    """This process's torch, instruction set, threads and GPU, in words; empty where no torch is loaded. Steps are
    expected to repeat bit for bit only where all of it is the same."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    parts = [f"torch {torch.__version__}", f"CPU {torch.backends.cpu.get_cpu_capability()}"]
    parts.append(f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        parts.append(str(torch.cuda.get_device_name()))
    return ", ".join(parts)
