"""What only root may do to a machine: a disk that fills up, and a second host with a network of its own.

Both live in namespaces of this process and its children, so nobody else sees them and nothing of them is left: mounts
and network interfaces vanish with the last process. Without the privileges there is neither, and the soak says so.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NEW_MOUNTS, NEW_NETWORK = 0x0002_0000, 0x4000_0000
"""Flags of unshare(2)."""
HERE, THERE = "10.77.0.1", "10.77.0.2"
"""Addresses of the two hosts."""
LINK, FAR_LINK = "soak0", "soak1"
FAR_MEMORY = "/run/netns/memory"
"""Shared memory of the second host, as this one sees it."""
TOOLS = ("mount", "ip", "tc", "ss", "unshare")
SPARE = 64 * 2**20
"""Bytes that the disk has free while it is not full."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a soak. namespace: of the second host's network; empty if there is no second host. disk: the mount
    that can fill up; None if there is none."""

    namespace: str = ""
    disk: Path | None = None

    @property
    def address(self) -> str:
        return HERE if self.namespace else "127.0.0.1"

    def on_second_host(self, command: list[str]) -> list[str]:
        """A command that runs there: with another network and another shared memory."""
        mount = f'mount --bind {FAR_MEMORY} /dev/shm && exec "$@"'
        return [
            *("ip", "netns", "exec", self.namespace),
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"),
            *command,
        ]

    # -- the disk ------------------------------------------------------------------------------------------------

    def fill_disk(self) -> bool:
        """Take all free space of the disk. False if what it holds grew meanwhile."""
        return self._resize(_used(self.disk)) if self.disk else False

    def free_disk(self) -> None:
        if self.disk:
            self._resize(_used(self.disk) + SPARE)

    def keep_space(self) -> None:
        """Let the disk grow with what it holds, while it is not meant to be full."""
        if self.disk and shutil.disk_usage(self.disk).free < SPARE // 2:
            self.free_disk()

    def _resize(self, size: int) -> bool:
        return _do("mount", "-o", f"remount,size={size}", str(self.disk))

    # -- the network ---------------------------------------------------------------------------------------------

    def slow_network(self) -> None:
        """Let 64 kbit a second through to the second host."""
        _do("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", "rate", "64kbit", "burst", "8kb", "latency", "2s")

    def fast_network(self) -> None:
        _do("tc", "qdisc", "del", "dev", LINK, "root")

    def cut_connections(self) -> None:
        """Tear every connection to the second host; new ones can be made."""
        _do("ss", "-K", "dst", THERE)

    def part_network(self) -> None:
        """Refuse the way to the second host, and tear what there is."""
        _do("ip", "link", "set", LINK, "down")
        self.cut_connections()

    def join_network(self) -> None:
        _do("ip", "link", "set", LINK, "up")


def isolated(disk: Path) -> Machine:
    """Move this process to namespaces of its own, with a disk at `disk` and a second host; as much of it as it may."""
    disk.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        return Machine()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) != 0 or not _do("mount", "--make-rprivate", "/"):
        return Machine()
    has_disk = _do("mount", "-t", "tmpfs", "-o", f"size={SPARE}", "tmpfs", str(disk))
    # Names of network namespaces are files in a folder of the machine's; it does not see this one.
    Path("/run/netns").mkdir(exist_ok=True)
    apart = _do("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
    Path(FAR_MEMORY).mkdir(exist_ok=True)
    apart = apart and _do("mount", "-t", "tmpfs", "tmpfs", FAR_MEMORY)
    # Last: a network of its own has nothing yet, not even itself.
    apart = apart and libc.unshare(NEW_NETWORK) == 0
    second = "second" if apart and _second_host("second") else ""
    return Machine(namespace=second, disk=disk if has_disk else None)


def _second_host(name: str) -> bool:
    there = ("ip", "netns", "exec", name)
    return all(
        _do(*command)
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "netns", "add", name),
            ("ip", "link", "add", LINK, "type", "veth", "peer", "name", FAR_LINK, "netns", name),
            ("ip", "addr", "add", f"{HERE}/24", "dev", LINK),
            ("ip", "link", "set", LINK, "up"),
            (*there, "ip", "addr", "add", f"{THERE}/24", "dev", FAR_LINK),
            (*there, "ip", "link", "set", FAR_LINK, "up"),
            (*there, "ip", "link", "set", "lo", "up"),
        )
    )


def _used(disk: Path) -> int:
    return shutil.disk_usage(disk).used


def _do(*command: str) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0
