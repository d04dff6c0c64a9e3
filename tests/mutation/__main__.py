"""`python -m tests.mutation`: plant mistakes one by one, run the tests of their modules, and say which survive.

    python -m tests.mutation --sample 150 --seed 0 --processes 2
    python -m tests.mutation --package protocol

Each mistake is planted in a copy of the repository. Every survivor belongs into tests/mutation/survivors.toml, with
what it is: "hole", to be closed by a test, or "equivalent", with the reason why nothing can tell it from what was
written. The exit code is 1 if there is one that is not there, or if less than LEAST of those that are not equivalent
are killed in some package.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.targets import PACKAGES, Package

LEAST = 0.9
"""Share of the mistakes, without those that are equivalent, that the tests of a package must kill."""
FEWEST = 12
"""Mistakes of a sample in each package, at least."""
SURVIVORS = Path(__file__).with_name("survivors.toml")
PATIENCE_S = 120.0
"""Seconds beyond twice those of the tests without a mistake, after which a mistake counts as noticed: it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A mistake, and whether the tests noticed it."""

    package: str
    mutant: Mutant
    killed: bool


class Copies:
    """Copies of the repository's files, one for each process."""

    def __init__(self, folder: Path, count: int) -> None:
        listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True)
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            copy = folder / str(number)
            for name in filter(None, listed.stdout.split("\0")):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, copy / name, follow_symlinks=False)
            self._free.put(copy)

    def test(self, tests: Sequence[str], limit_s: float, mutant: Mutant | None = None) -> bool:
        """Run tests in a copy with a mistake; returns whether they pass, within a time."""
        copy = self._free.get()
        try:
            if mutant is None:
                return _passes(copy, tests, limit_s)
            path = copy / mutant.path
            source = path.read_bytes()
            try:
                path.write_bytes(mutant.planted(source))
                return _passes(copy, tests, limit_s)
            finally:
                path.write_bytes(source)
        finally:
            self._free.put(copy)


def _passes(copy: Path, tests: Sequence[str], limit_s: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    variables = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "mutants"}
    process = subprocess.Popen(
        command, cwd=copy, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def chosen(packages: Sequence[Package], sample: int | None, seed: int) -> list[tuple[Package, Mutant]]:
    """The mistakes to plant: all, or of each package as many as its share is, but FEWEST at least."""
    rng = random.Random(seed)
    found = {
        package.name: [m for path in package.modules() for m in mutants(path, Path(path).read_bytes())]
        for package in packages
    }
    total = sum(map(len, found.values()))
    picked = []
    for package in packages:
        of_it = found[package.name]
        count = len(of_it) if sample is None else min(len(of_it), max(FEWEST, round(sample * len(of_it) / total)))
        picked += [(package, mutant) for mutant in rng.sample(of_it, count)]
    rng.shuffle(picked)
    return picked


def run(picked: Sequence[tuple[Package, Mutant]], processes: int) -> list[Planted]:
    """Plant mistakes one by one in each of so many processes."""
    done: list[Planted] = []
    limits: dict[tuple[str, ...], float] = {}
    lock, locks = threading.Lock(), dict[tuple[str, ...], threading.Lock]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(processes) as pool:
        copies = Copies(Path(folder), processes)

        def limit_s(tests: tuple[str, ...]) -> float:
            with lock:
                one_at_a_time = locks.setdefault(tests, threading.Lock())
            with one_at_a_time:
                if tests not in limits:
                    begin = time.monotonic()
                    if not copies.test(tests, 3600.0):
                        raise SystemExit(f"these tests fail without a mistake: {' '.join(tests)}")
                    limits[tests] = 2 * (time.monotonic() - begin) + PATIENCE_S
                return limits[tests]

        def plant(package: Package, mutant: Mutant) -> Planted:
            tests = package.tests_of(mutant.path)
            killed = not copies.test(tests, limit_s(tests), mutant)
            return Planted(package=package.name, mutant=mutant, killed=killed)

        for future in as_completed([pool.submit(plant, *one) for one in picked]):
            done.append(future.result())
            last = done[-1]
            print(
                f"{len(done)}/{len(picked)} {'killed  ' if last.killed else 'SURVIVED'} {last.mutant.key}", flush=True
            )
    return done


def report(done: Sequence[Planted], known: dict[str, dict[str, str]]) -> int:
    """Print the score of each package and what survives; returns the exit code."""
    counts = Counter((one.package, one.killed) for one in done)
    verdicts = {one.mutant.key: known.get(one.mutant.key, {}).get("verdict", "") for one in done if not one.killed}
    failed = False
    for name in dict.fromkeys(one.package for one in done):
        equivalent = sum(
            one.package == name and not one.killed and verdicts[one.mutant.key] == "equivalent" for one in done
        )
        killed, left = counts[name, True], counts[name, True] + counts[name, False] - equivalent
        score = killed / left if left else 1.0
        failed |= score < LEAST
        print(f"{name:14} {killed:4} of {left:4} killed, {score:.2f}; {equivalent} equivalent")
    for one in done:
        if not one.killed and not verdicts[one.mutant.key]:
            failed = True
            print(f"not in {SURVIVORS.name}: [{one.mutant.kind}, line {one.mutant.line}] {one.mutant.key}")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant mistakes, and say which of them no test notices.")
    parser.add_argument("--package", choices=[package.name for package in PACKAGES], help="of this one alone")
    parser.add_argument("--sample", type=int, help="plant so many, chosen at random; all if it is left out")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that run tests side by side")
    arguments = parser.parse_args()
    packages = [package for package in PACKAGES if arguments.package in (None, package.name)]
    known = {one["mutant"]: one for one in tomllib.loads(SURVIVORS.read_text()).get("survivor", [])}
    return report(run(chosen(packages, arguments.sample, arguments.seed), arguments.processes), known)


if __name__ == "__main__":
    sys.exit(main())
