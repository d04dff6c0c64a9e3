"""`python -m tests.mutation`: plant mistakes one by one, run the tests of their modules, and list survivors.

    python -m tests.mutation --sample 150 --seed 0 --processes 2
    python -m tests.mutation --package protocol

Each mistake is planted in a copy of the repository, and the tests that execute its line run. Every survivor is listed
in tests/mutation/survivors.toml with a verdict: "hole", to be closed by a test, or "equivalent", with the reason why
no test can detect it. The exit code is 1 if a survivor is not listed, or if less than MIN_SCORE of the mistakes that
are not equivalent are detected in some package.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, mutants, replaced
from tests.mutation.targets import PACKAGES, Package
from tests.mutation.worker import PIPES

MIN_SCORE = 0.9
"""Minimum share of the mistakes, without equivalent ones, that the tests of a package must detect."""
MIN_MISTAKES = 12
"""Minimum number of sampled mistakes in each package."""
PLANTED = Path(__file__).with_name("planted.toml")
SURVIVORS = Path(__file__).with_name("survivors.toml")
PATIENCE_S = 120.0
"""Seconds beyond ten times the duration of the tests after which a mistake counts as detected, because it hangs."""
PATIENCE_CPU_S = 20.0
"""CPU-seconds beyond five times those of the tests after which a mistake counts as detected, because it loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A mistake and the test that detected it, if one did."""

    package: str
    mutant: Mutant
    killer: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A test run without a mistake. lines: executed lines of modules, by path."""

    elapsed_s: float
    lines: frozenset[tuple[str, int]]


class Worker:
    """A process that has collected tests in a copy of the repository and runs them with planted mistakes
    (worker.py)."""

    def __init__(self, copy: Path, tests: Sequence[str]) -> None:
        self.copy = copy
        replies, answered = os.pipe()
        asked, requests = os.pipe()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.worker"]
        self._process = subprocess.Popen(
            [*command, "--tb=no", f"--basetemp={copy}.tmp", *tests],
            cwd=copy,
            env=_variables(copy, **{PIPES: f"{asked},{answered}"}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[asked, answered],
            start_new_session=True,
        )
        os.close(asked)
        os.close(answered)
        self._replies, self._requests = os.fdopen(replies), os.fdopen(requests, "w")
        if not self._answer().get("collected"):
            raise SystemExit(f"these tests cannot be collected: {' '.join(tests)}")

    def _answer(self) -> dict[str, Any]:
        return dict(json.loads(self._replies.readline() or "{}"))

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return self._answer()

    def measure(self, targets: Sequence[str]) -> dict[str, Measured]:
        """Run every test without a mistake; raises SystemExit if one fails."""
        answer = self._ask(targets=targets, limit_s=3600.0)
        if answer.get("failures") != []:
            raise SystemExit(f"tests fail without a mistake: {answer.get('failures', answer)}")
        root = str(self.copy.resolve()) + "/"
        return {
            name: Measured(elapsed_s, frozenset((path.removeprefix(root), line) for path, line in lines))
            for name, (elapsed_s, lines) in answer["tests"].items()
        }

    def killer(self, mutant: Mutant, tests: Sequence[str], usual_s: float, fallback: Sequence[str]) -> str | None:
        """Return the first test that detects a mistake. An undetected one is tried again in a process that imports it
        if its function runs during imports or cannot be replaced. fallback: tests to run if there are none."""
        path = self.copy / mutant.path
        source = path.read_bytes()
        try:
            path.write_bytes(mutant.planted(source))
            if tests:
                answer = self._ask(
                    path=mutant.path,
                    original=source.decode(),
                    tests=tests,
                    cpu_s=5 * usual_s + PATIENCE_CPU_S,
                    limit_s=10 * usual_s + PATIENCE_S,
                )
                if "failed" in answer:
                    return str(answer["failed"])
                if not answer["fresh"]:
                    return None
            passed = _passes(self.copy, tests or fallback, 10 * usual_s + 10 * PATIENCE_S)
            return None if passed else "in a process of its own"
        finally:
            path.write_bytes(source)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._replies.close()
        self._requests.close()


def _variables(copy: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "mutants"}
    return {**os.environ, **own, **more}


def _passes(copy: Path, tests: Sequence[str], limit_s: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=_variables(copy),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _copied(folder: Path) -> Path:
    """Copy the files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, folder / name, follow_symlinks=False)
    return folder


def planted() -> int:
    """Plant the mistakes of planted.toml and print those that their tests do not detect; returns the exit code."""
    mistakes = tomllib.loads(PLANTED.read_text())["mistake"]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        worker = Worker(
            _copied(Path(folder) / "0"), sorted({item["noticed_by"].partition("::")[0] for item in mistakes})
        )
        try:
            for item in mistakes:
                mutant = replaced(item["path"], Path(item["path"]).read_bytes(), item["old"], item["new"])
                killer = worker.killer(mutant, [item["noticed_by"]], 60.0, ())
                missed += killer is None
                print(f"{killer or 'NOT NOTICED'}: {item['breaks']}", flush=True)
        finally:
            worker.close()
    print(f"{len(mistakes) - missed} of {len(mistakes)} planted mistakes are noticed")
    return int(missed > 0)


def chosen(packages: Sequence[Package], sample: int | None, seed: int) -> list[tuple[Package, Mutant]]:
    """Return the mistakes to plant: all, or a sample with at least MIN_MISTAKES of each package."""
    rng = random.Random(seed)
    results = {
        package.name: [m for path in package.modules() for m in mutants(path, Path(path).read_bytes())]
        for package in packages
    }
    total = sum(map(len, results.values()))
    picked = []
    for package in packages:
        of_it = results[package.name]
        count = len(of_it) if sample is None else min(len(of_it), max(MIN_MISTAKES, round(sample * len(of_it) / total)))
        picked += [(package, mutant) for mutant in rng.sample(of_it, count)]
    rng.shuffle(picked)
    return picked


class Trial:
    """The mistakes of one package and what is known about its tests."""

    def __init__(self, package: Package, measured: dict[str, Measured]) -> None:
        self._package, self._measured = package, measured
        self._kills: Counter[tuple[str, str]] = Counter()

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the line of a mistake: short ones first, and those that detected others
        nearby."""
        spans = {(mutant.path, line) for line in range(mutant.first, mutant.last + 1)}
        names = [name for name, test in self._measured.items() if not spans.isdisjoint(test.lines)]
        return sorted(names, key=lambda name: self._measured[name].elapsed_s / (1 + self._kills[mutant.function, name]))

    def planted(self, worker: Worker, mutant: Mutant) -> Planted:
        tests = self.tests(mutant)
        usual_s = sum(self._measured[name].elapsed_s for name in tests)
        killer = worker.killer(mutant, tests, usual_s, self._package.tests_of(mutant.path))
        if killer is not None:
            self._kills[mutant.function, killer] += 1
        return Planted(package=self._package.name, mutant=mutant, killer=killer)


def run(picked: Sequence[tuple[Package, Mutant]], processes: int) -> list[Planted]:
    """Plant mistakes package by package, one at a time in each of the processes."""
    done: list[Planted] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(processes) as pool:
        copies = [_copied(Path(folder) / str(number)) for number in range(processes)]
        for package in {package.name: package for package, _ in picked}.values():
            tests = list(dict.fromkeys(test for path in package.modules() for test in package.tests_of(path)))
            workers = list(pool.map(lambda copy, tests=tests: Worker(copy, tests), copies))
            try:
                free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
                for worker in workers:
                    free.put(worker)
                trial = Trial(package, workers[0].measure(package.modules()))

                def plant(mutant: Mutant, trial: Trial = trial, free: queue.SimpleQueue[Worker] = free) -> Planted:
                    worker = free.get()
                    try:
                        return trial.planted(worker, mutant)
                    finally:
                        free.put(worker)

                for future in as_completed([pool.submit(plant, mutant) for of, mutant in picked if of == package]):
                    done.append(future.result())
                    last = done[-1]
                    verdict = f"killed by {last.killer}" if last.killer else "SURVIVED"
                    print(f"{len(done)}/{len(picked)} {last.mutant.key}: {verdict}", flush=True)
            finally:
                for worker in workers:
                    worker.close()
    return done


def report(done: Sequence[Planted], known: dict[str, dict[str, str]]) -> int:
    """Print the score of each package and its survivors; returns the exit code."""
    failed = False
    print(f"{'package':14} planted  killed  equivalent  holes  score")
    for name in dict.fromkeys(item.package for item in done):
        of_it = [item for item in done if item.package == name]
        survivors = [item for item in of_it if item.killer is None]
        equivalent = sum(known.get(item.mutant.key, {}).get("verdict") == "equivalent" for item in survivors)
        killed, holes = len(of_it) - len(survivors), len(survivors) - equivalent
        score = killed / (killed + holes) if killed + holes else 1.0
        failed |= score < MIN_SCORE
        print(f"{name:14} {len(of_it):7} {killed:7} {equivalent:11} {holes:6}  {score:.2f}")
    for item in done:
        if item.killer is None and item.mutant.key not in known:
            failed = True
            print(f"not in {SURVIVORS.name}: [{item.mutant.kind}, line {item.mutant.line}] {item.mutant.key}")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant mistakes, and say which of them no test notices.")
    parser.add_argument("--package", choices=[package.name for package in PACKAGES], help="of this one alone")
    parser.add_argument("--sample", type=int, help="plant so many, chosen at random; all if it is left out")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that run tests side by side")
    parser.add_argument("--planted", action="store_true", help="plant those of planted.toml instead")
    arguments = parser.parse_args()
    if arguments.planted:
        return planted()
    packages = [package for package in PACKAGES if arguments.package in (None, package.name)]
    known = {item["mutant"]: item for item in tomllib.loads(SURVIVORS.read_text()).get("survivor", [])}
    return report(run(chosen(packages, arguments.sample, arguments.seed), arguments.processes), known)


if __name__ == "__main__":
    sys.exit(main())
