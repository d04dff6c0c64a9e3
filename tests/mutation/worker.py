"""A pytest plugin that collects the tests once and runs them with mutations in forked processes.

Invariants:
- The process itself runs no test: a fork starts from the state after imports, without threads and without a mistake.
- A mistake is in the file, for processes that a test starts, and in the functions that the fork has already imported.
- A fork's child processes end with it.

It reads requests and writes answers, one JSON value in a line, from and to the file descriptors of PIPES. Standard
input is closed while pytest captures.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

PIPES = "MUTATION_PIPES"
"""Environment variable: the file descriptors of requests and answers."""
MEMORY_BYTES = 6 * 2**30
"""Additional memory in bytes for a fork with a mistake, since some loops never end."""
FUNCTION = 0x1
"""Flag of code objects of functions, which class bodies do not have."""
REPEATED = 1000
"""Number of calls of a function in one test without a new executed line after which it is no longer traced."""
PR_SET_CHILD_SUBREAPER = 36


_during_imports: set[tuple[str, str, int]] = set()
"""Functions called during imports and collection: file, qualified name, first line."""


def _called_by_import(frame: FrameType, event: str, arg: object) -> None:
    code = frame.f_code
    _during_imports.add((code.co_filename, code.co_qualname, code.co_firstlineno))


def pytest_load_initial_conftests() -> None:
    """Start to record the functions called during imports."""
    sys.settrace(_called_by_import)


def pytest_configure(config: pytest.Config) -> None:
    """Start worker processes in forks only: those of a server started here would have imported the original code."""
    from staleflow.pipeline.processes import local_cluster

    local_cluster.start_fork_server = lambda threads, preload_modules: None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Answer requests instead of running the tests."""
    sys.settrace(None)
    requests_at, replies = map(int, os.environ.pop(PIPES).split(","))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.unfreeze()
    functions = [item for item in gc.get_objects() if type(item) is FunctionType]  # some proxies answer no isinstance
    gc.freeze()
    answer: dict[str, Any] = {"collected": len(session.items) if not session.testsfailed else 0}
    with os.fdopen(requests_at) as requests:
        while True:
            with os.fdopen(os.dup(replies), "w") as stream:
                stream.write(json.dumps(answer) + "\n")
            if not (line := requests.readline()):
                return True
            answer = _forked(session, functions, json.loads(line))


def _forked(session: pytest.Session, functions: list[FunctionType], request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request in a fork. A fork that ends without an answer or takes too long has failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = _answer(session, functions, request)
        except BaseException as error:  # noqa: BLE001  also what a mistake raises that ends a process
            answer = {"failed": repr(error)}
        with os.fdopen(writing, "wb") as stream:
            stream.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    parts = []
    deadline = time.monotonic() + request["limit_s"]
    with os.fdopen(reading, "rb", buffering=0) as stream:
        while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := stream.read(2**20)):
                break
            parts.append(part)
        else:
            parts = []
    _end_children()
    answer = json.loads(b"".join(parts) or '{"failed": "took too long, or ended its process"}')
    return dict(answer)


def _end_children() -> None:
    """Kill the fork and all processes that it started, which become children of this process."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _answer(session: pytest.Session, functions: list[FunctionType], request: dict[str, Any]) -> dict[str, Any]:
    if "targets" in request:
        return _measured(session, [str(Path(path).resolve()) for path in request["targets"]])
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime + request["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    data_kb = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                   if line.startswith("VmData"))  # fmt: skip
    resource.setrlimit(resource.RLIMIT_DATA, (data_kb * 1024 + MEMORY_BYTES,) * 2)
    path = Path(request["path"]).resolve()
    in_place, called = _replace(functions, path, request["original"], path.read_text())
    if not in_place:
        return {"fresh": True}
    failed = Failures()
    session.config.pluginmanager.register(failed)
    items = [item for name in request["tests"] for item in _named(session, name)]
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed.names:
            return {"failed": failed.names[0]}
    return {"fresh": called}


def _named(session: pytest.Session, name: str) -> list[pytest.Item]:
    """Return the tests of a name: one, those of a module, or all parameters."""
    return [item for item in session.items if item.nodeid == name or item.nodeid.startswith((f"{name}::", f"{name}["))]


class Failures:
    """Records the failing tests."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Return the functions of a module or class body that are not nested in another function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & FUNCTION:
                yield constant
            else:
                yield from _codes(constant)


def _replace(functions: list[FunctionType], path: Path, original: str, mutated: str) -> tuple[bool, bool]:
    """Plant a mutation in the functions of an imported module. Returns whether all functions could be replaced, and
    whether one of them was called during imports."""
    before, after = (list(_codes(compile(text, str(path), "exec"))) for text in (original, mutated))
    assert len(before) == len(after)
    new = {(a.co_qualname, a.co_firstlineno): b for a, b in zip(before, after, strict=True) if a != b}
    called = any((name, line) in new and os.path.realpath(file) == str(path) for file, name, line in _during_imports)
    for function in functions:
        code = function.__code__
        result = new.get((code.co_qualname, code.co_firstlineno))
        if result is not None and os.path.realpath(code.co_filename) == str(path):
            if code.co_freevars != result.co_freevars:
                return False, called
            function.__code__ = result
    return True, called


class Coverage:
    """Records the lines that each test executes and its duration."""

    def __init__(self, targets: list[str]) -> None:
        self._targets = {target: target for target in targets}
        self._is: dict[str, str | None] = {}
        self._lines: set[tuple[str, int]] = set()
        self._repeated: Counter[CodeType] = Counter()
        self._shared: dict[str, set[tuple[str, int]]] = {}
        self.tests: dict[str, tuple[float, set[tuple[str, int]]]] = {}

    def start(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if name not in self._is:
            self._is[name] = self._targets.get(os.path.realpath(name))
        target, repeated, lines, code = self._is[name], self._repeated, self._lines, frame.f_code
        if target is None or repeated[code] > REPEATED:
            return None
        repeated[code] += 1

        def executed(frame: FrameType, event: str, arg: object) -> Any:
            line = (target, frame.f_lineno)
            if line not in lines:
                lines.add(line)
                repeated[code] = 0
            return executed

        return executed

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        """Lines executed by a shared fixture count for each test that uses it."""
        if fixturedef.scope == "function":
            return (yield)
        before, self._lines = self._lines, set()
        try:
            return (yield)
        finally:
            self._shared.setdefault(fixturedef.argname, set()).update(self._lines)
            self._lines = before | self._lines

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._lines, self._repeated = set(), Counter()
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = (time.monotonic() - begin, self._lines)

    def of(self, item: pytest.Item) -> tuple[float, list[tuple[str, int]]]:
        elapsed_s, lines = self.tests[item.nodeid]
        shared = [self._shared.get(name, set()) for name in getattr(item, "fixturenames", ())]
        return elapsed_s, sorted(lines.union(*shared))


def _measured(session: pytest.Session, targets: list[str]) -> dict[str, Any]:
    """Run all tests without a mistake."""
    coverage, failed = Coverage(targets), Failures()
    for plugin in (coverage, failed):
        session.config.pluginmanager.register(plugin)
    coverage.start()
    for item, following in zip(session.items, [*session.items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    sys.settrace(None)
    threading.settrace(None)
    return {"failures": failed.names, "tests": {item.nodeid: coverage.of(item) for item in session.items}}
