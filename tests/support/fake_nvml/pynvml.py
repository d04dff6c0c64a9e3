"""A fake of NVIDIA's management library. The environment variable FAKE_GPUS describes the GPUs, such as 8xH100-80,
4xL4-24-pcie, or MIG-7xA100-10 for slices. Tests add its folder to PYTHONPATH."""

from __future__ import annotations

import os
from dataclasses import dataclass

NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0


class NVMLError(Exception):
    """An error of the library."""


@dataclass
class Pci:
    """The PCI address of a GPU."""

    busId: bytes


@dataclass
class Memory:
    """The memory of a GPU in bytes."""

    total: int


def _gpus() -> list[str]:
    count, _, kind = os.environ.get("FAKE_GPUS", "").removeprefix("MIG-").partition("x")
    return [kind] * int(count or 0)


def _mig() -> bool:
    return os.environ.get("FAKE_GPUS", "").startswith("MIG-")


def nvmlInit() -> None:
    if "FAKE_GPUS" not in os.environ:
        raise NVMLError("no driver")


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return 1 if _mig() else len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA " + _gpus()[0].split("-")[0]


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"{'MIG' if _mig() else 'GPU'}-{os.environ.get('FAKE_HOST', 'host')}-{handle}"


def nvmlDeviceGetPciInfo(handle: int) -> Pci:
    return Pci(f"00000000:{handle:02X}:00.0".encode())


def nvmlDeviceGetMemoryInfo(handle: int) -> Memory:
    return Memory(int(_gpus()[0].split("-")[1]) * 10**9)


def nvmlDeviceGetMigMode(handle: int) -> tuple[int, int]:
    if not _mig():
        raise NVMLError("not supported")
    return 1, 1


def nvmlDeviceGetMaxMigDeviceCount(handle: int) -> int:
    return 8


def nvmlDeviceGetMigDeviceHandleByIndex(handle: int, number: int) -> int:
    if number >= len(_gpus()):
        raise NVMLError("not found")
    return number


def nvmlDeviceGetP2PStatus(one: int, other: int, index: int) -> int:
    return 1 if _gpus()[0].endswith("pcie") else NVML_P2P_STATUS_OK
