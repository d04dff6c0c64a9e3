"""The GPUs of this machine, from NVIDIA's management library. Neither initializes CUDA nor imports torch."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.pipeline.placement.devices import Device

logger = logging.getLogger(__name__)

VISIBLE_DEVICES, DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_INITIAL_VISIBLE: dict[str, str | None] = {}
"""The CUDA_VISIBLE_DEVICES that this process was started with, if `restrict_devices` has set another."""


def read_devices() -> tuple[Device, ...]:
    """The GPUs that this process may use according to its initial CUDA_VISIBLE_DEVICES, in that order; numbers in it
    count in PCI order. A GPU in MIG mode is replaced by its slices. Empty without the driver or the package
    nvidia-ml-py."""
    try:
        import pynvml as nvml
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        initial_value = _INITIAL_VISIBLE.get(VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES))
        return _visible_devices(list(_all_devices(nvml)), initial_value)
    finally:
        nvml.nvmlShutdown()


def restrict_devices(visible: str) -> None:
    """Restrict this process to these GPUs. Raises RuntimeError if CUDA is initialized already. visible: value of
    CUDA_VISIBLE_DEVICES; empty: none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and os.environ.get(VISIBLE_DEVICES) != visible:
        raise RuntimeError(f"this process uses GPUs already: {VISIBLE_DEVICES}={visible} has no effect; restart it")
    _INITIAL_VISIBLE.setdefault(VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES))
    # vLLM takes numbers only, and they have to mean here what they mean to NVIDIA's management library.
    os.environ[DEVICE_ORDER] = "PCI_BUS_ID"
    os.environ[VISIBLE_DEVICES] = visible


def _all_devices(nvml: Any) -> Iterator[Device]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    domains = _link_domains(nvml, handles)
    for index, handle in enumerate(handles):
        try:
            devices = list(_devices_of(nvml, handle, index, domains[index]))
        except nvml.NVMLError as error:
            logger.warning("GPU %d is not used: the driver does not describe it (%s)", index, error)
        else:
            yield from devices


def _devices_of(nvml: Any, handle: Any, index: int, link_domain: str) -> Iterator[Device]:
    """A GPU, or its slices if it is in MIG mode, in which it can be used by them alone."""
    model = _text(nvml.nvmlDeviceGetName(handle)).removeprefix("NVIDIA ")
    numa_node = _numa_node(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    if not _is_in_mig_mode(nvml, handle):
        yield Device(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            visible_id=str(index),
            model=model,
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            link_domain=link_domain,
            numa_node=numa_node,
        )
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # a MIG index without a slice
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuid = _text(nvml.nvmlDeviceGetUUID(part))
            memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(part).total)
            yield Device(
                uuid=uuid, visible_id=uuid, model=f"{model} MIG", memory_bytes=memory_bytes, link_domain=uuid,
                numa_node=numa_node,
            )  # fmt: skip


def _is_in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # a GPU that has no MIG
        return False


def _link_domains(nvml: Any, handles: list[Any]) -> list[str]:
    """Return the link domain of each GPU: those joined by NVLink, directly or through others; without it, the host."""
    domain = list(range(len(handles)))
    any_linked = False
    for i, handle in enumerate(handles):
        for j in range(i):
            with contextlib.suppress(nvml.NVMLError):
                status = nvml.nvmlDeviceGetP2PStatus(handle, handles[j], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                if status == nvml.NVML_P2P_STATUS_OK:
                    any_linked = True
                    domain = [domain[j] if number == domain[i] else number for number in domain]
    return [f"nvlink-{number}" if any_linked else "pcie" for number in domain]


def _numa_node(bus_id: str) -> int:
    """The processor's memory that a PCI device is attached to; 0 if the system does not say."""
    path = Path("/sys/bus/pci/devices") / bus_id.lower()[-12:] / "numa_node"
    try:
        return max(0, int(path.read_text("utf-8")))
    except (OSError, ValueError):
        return 0


def _visible_devices(devices: list[Device], variable: str | None) -> tuple[Device, ...]:
    """The devices that a value of CUDA_VISIBLE_DEVICES names, in its order; as CUDA does, up to the first that is not
    there."""
    if variable is None:
        return tuple(devices)
    visible: list[Device] = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        match = [d for d in devices if d.visible_id == entry or (not entry.isdigit() and d.uuid.startswith(entry))]
        if not match:
            break
        visible.append(match[0])
    return tuple(visible)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
