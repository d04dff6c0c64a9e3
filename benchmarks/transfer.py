"""A version's way to the instances of another host: bytes read from the source, seconds, memory; and its hash.

Two hosts, as worker processes on 127.0.0.1 and 127.0.0.2 with a folder in memory each, four instances on either. The
version is on the first host; all instances ask for it at once. Seconds are compared with a plain copy of the same bytes
from memory to memory, made in the same run before and after. "Resident" is the growth of the receiving process' largest
resident set (VmHWM) over what it was before. The hash is that of stores/weights/weight_hash.py and that of earlier
versions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")

from distributed import Client, Nanny, Scheduler, SpecCluster

from staleflow.pipeline.weights.weight_transfers import WeightTransfers
from staleflow.stores.trajectory import PolicyVersion
from staleflow.tasks.actors.actor_calls import call_actor, remote_methods
from staleflow.tasks.actors.parameter_server import ParameterServer

HOSTS = ("127.0.0.1", "127.0.0.2")
INSTANCES = 4
"""On each host."""
CALL_S = 60.0
MIB = 2**20


@remote_methods
class Resident:
    """Measures the largest resident set of the process it is in."""

    async def begin(self) -> float:
        """Forget the largest so far; returns the present one, MiB."""
        Path("/proc/self/clear_refs").write_text("5")
        return self._mib("VmRSS")

    async def most(self) -> float:
        """The largest since `begin`, MiB."""
        return self._mib("VmHWM")

    def _mib(self, name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@remote_methods
class Instance:
    """What reads the version in place of an engine."""

    async def pull(self, path: str) -> str:
        """Hash of a file."""
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class Actors:
    """The actors of both hosts, by name."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._actors: dict[str, Any] = {}

    async def place(self, name: str, address: str, cls: type[Any], *args: Any) -> None:
        self._actors[name] = await self._client.submit(cls, *args, actor=True, workers=[address], key=name, pure=False)

    def actor(self, name: str) -> Any:
        return self._actors[name]

    async def ask(self, name: str, method: str, *args: Any) -> Any:
        return await call_actor(self._actors[name], method, *args, timeout_s=CALL_S, actor_name=name)


async def transfer(num_bytes: int, instances: int, times: int, folder: Path) -> None:
    """Fetch `times` versions, one after another, and print a table."""
    spec = {
        f"{host}-{i}": {"cls": Nanny, "options": {"host": host, "nthreads": 1, "memory_limit": 0}}
        for host in HOSTS
        for i in range(instances)
    }
    scheduler = {"cls": Scheduler, "options": {"host": HOSTS[0], "port": 0, "dashboard_address": ":0"}}
    async with (
        SpecCluster(spec, scheduler=scheduler, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        workers = {str(w["name"]): address for address, w in (await client.scheduler.identity())["workers"].items()}
        actors = Actors(client)
        for host in HOSTS:
            await actors.place(f"parameters-{host}", workers[f"{host}-0"], ParameterServer, str(folder / host), CALL_S)
            await actors.place(f"resident-{host}", workers[f"{host}-0"], Resident)
            for i in range(instances):
                await actors.place(f"rollout-{host}-{i}", workers[f"{host}-{i}"], Instance)
        transfers = WeightTransfers(actors, CALL_S)
        data = os.urandom(MIB)
        ratios, rows = [], []
        for number in range(times):
            version = PolicyVersion(number)
            source = folder / HOSTS[0] / f"v{number:08d}.safetensors"
            with source.open("wb") as file:
                for _ in range(num_bytes // MIB):
                    file.write(data)
                file.write(data[: num_bytes % MIB])
            transfers.record_published(version, HOSTS[0], num_bytes)
            before = copied_s(source, folder / "copy")
            read = await actors.ask(f"parameters-{HOSTS[0]}", "bytes_read")
            resident = await actors.ask(f"resident-{HOSTS[1]}", "begin")
            begin = time.perf_counter()
            paths = await asyncio.gather(*(transfers.fetch(version, h) for h in HOSTS for _ in range(instances)))
            took_s = time.perf_counter() - begin
            most = await actors.ask(f"resident-{HOSTS[1]}", "most") - resident
            read = await actors.ask(f"parameters-{HOSTS[0]}", "bytes_read") - read
            copy_s = (before + copied_s(source, folder / "copy")) / 2
            names = [f"rollout-{h}-{i}" for h in HOSTS for i in range(instances)]
            hashes = [await actors.ask(name, "pull", path) for name, path in zip(names, paths, strict=True)]
            assert len(set(hashes)) == 1 and len(set(paths)) == len(HOSTS), "an instance has other bytes"
            ratios.append(took_s / copy_s)
            rows.append(f"| {read / num_bytes:.3f} | {took_s:.2f} | {copy_s:.2f} | {ratios[-1]:.1f} | {most:.0f} |")
            for host in HOSTS:
                (folder / host / source.name).unlink()
        print(
            f"\n{num_bytes / MIB:,.0f} MiB to {2 * instances} instances on 2 hosts; median ratio {median(ratios):.1f}\n"
        )
        print("| read from the source, times its bytes | seconds | a plain copy, seconds | ratio | resident, MiB |")
        print("|---|---|---|---|---|")
        print("\n".join(rows), flush=True)
        for host in HOSTS:
            with contextlib.suppress(Exception):
                await actors.ask(f"parameters-{host}", "close")


def copied_s(source: Path, target: Path) -> float:
    """Seconds that a plain copy takes."""
    begin = time.perf_counter()
    shutil.copyfile(source, target)
    took_s = time.perf_counter() - begin
    target.unlink()
    return took_s


def hashing(num_bytes: int) -> None:
    """Print what hashing a model of so many bytes costs."""
    import torch

    from staleflow.stores.weights.weight_hash import fingerprint

    # One tensor in four is large, as embeddings are.
    sizes = [num_bytes // 4, *[num_bytes // 256] * 192]
    tensors = {f"layer.{i}": torch.empty(size, dtype=torch.uint8).random_() for i, size in enumerate(sizes)}
    total = sum(sizes)
    works: dict[str, Callable[[], object]] = {
        "sha256-tree, one thread": lambda: fingerprint(tensors, 1),
        "sha256-tree, two threads": lambda: fingerprint(tensors, 2),
    }
    print("\n| fingerprint | GB/s | GB per CPU-second |\n|---|---|---|")
    for name, work in works.items():
        walls, cpus = [], []
        for _ in range(3):
            begin, used = time.perf_counter(), time.process_time()
            work()
            walls.append(time.perf_counter() - begin)
            cpus.append(time.process_time() - used)
        print(f"| {name} | {total / min(walls) / 1e9:.2f} | {total / min(cpus) / 1e9:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small file and two instances on each host")
    parser.add_argument("--mib", type=int, default=1024, help="size of the version (default 1024)")
    args = parser.parse_args()
    mib, instances, times = (20, 2, 2) if args.quick else (args.mib, INSTANCES, 3)
    with tempfile.TemporaryDirectory(prefix="transfer-", dir="/dev/shm") as folder:
        for host in HOSTS:
            (Path(folder) / host).mkdir()
        asyncio.run(transfer(mib * MIB + 1, instances, times, Path(folder)))
    hashing(mib * MIB)


if __name__ == "__main__":
    main()
