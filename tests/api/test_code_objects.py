"""Functions and classes written as files and loaded in a process that has none of their modules."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.api.code_objects import write_code
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings import user_code

BONUS = 0.5
LOCK = threading.Lock()


def bonus(text: str) -> float:
    return BONUS * len(text)


def reward(text: str, row: Any) -> float:
    """Return half a point per character."""
    return bonus(text) + float(row)


def locked(text: str, row: Any) -> float:
    with LOCK:
        return 1.0


def calls_locked(text: str, row: Any) -> float:
    return locked(text, row)


@functools.cache
def cached(text: str) -> float:
    return 1.0


def uses_cached(text: str, row: Any) -> float:
    return cached(text)


class Counting:
    """A callable that counts its calls."""

    step = 2

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += self.step
        return self.count + bonus("ab")


def evaluate_in_subprocess(folder: Path, *code_and_expression: tuple[str, str]) -> Any:
    """Return the values of expressions of `f`, the named object, in a separate process."""
    script = (
        "import json, sys; from staleflow.tasks.settings import user_code\n"
        "print(json.dumps([eval(e, {'sys': sys, 'f': user_code.load(n, 'reward.function')})"
        " for n, e in json.loads(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", script, json.dumps(code_and_expression)]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


def test_a_function_is_written_with_the_names_it_uses(tmp_path: Path) -> None:
    named = write_code(reward, tmp_path / "code", "reward")
    assert named == f"{tmp_path}/code/reward.py:reward"
    assert evaluate_in_subprocess(tmp_path, (named, "[f('abc', 1), 'tests' in sys.modules]")) == [[2.5, False]]


def test_the_file_has_the_source_of_the_function_and_its_helpers(tmp_path: Path) -> None:
    text = Path(write_code(reward, tmp_path, "reward").rpartition(":")[0]).read_text()
    assert "#     def reward(text: str, row: Any) -> float:" in text
    assert "#         return BONUS * len(text)" in text
    compile(text, "reward.py", "exec")


def test_classes_instances_partials_and_lambdas_are_restored(tmp_path: Path) -> None:
    """A function of an installed package is imported from there; the file says if an object has no source."""
    counting = Counting()
    counting()
    made: dict[str, Any] = {"__name__": "__main__"}
    exec("def plain(text, row):\n    return 1.0", made)
    cases: tuple[tuple[Any, str, str, Any], ...] = (
        (Counting, "Counting", "[isinstance(f, type), f()(), f.__doc__]", [True, 3.0, Counting.__doc__]),
        (counting, "mine_1", "f()", 5.0),
        (functools.partial(reward, row=2), "mine_2", "f('ab')", 3.0),
        (lambda text, row: row * BONUS, "mine_3", "f('', 4)", 2.0),
        (pytest.approx, "approx", "f.__module__ in sys.modules", True),
        (made["plain"], "plain", "f('', 0)", 1.0),
    )
    named = [write_code(obj, tmp_path, f"mine_{number}") for number, (obj, *_) in enumerate(cases)]
    assert named == [f"{tmp_path}/mine_{number}.py:{name}" for number, (_, name, *_) in enumerate(cases)]
    assert evaluate_in_subprocess(tmp_path, *zip(named, (case[2] for case in cases), strict=True)) == [
        case[3] for case in cases
    ]
    assert len((tmp_path / "mine_4.py").read_text()) < 1500
    assert "Its source text is not known." in (tmp_path / "mine_5.py").read_text()


@pytest.mark.parametrize(("obj", "culprit"), [(locked, r"locked\.LOCK"), (calls_locked, r"calls_locked\.locked\.LOCK")])
def test_an_object_that_cannot_be_pickled_is_named(tmp_path: Path, obj: Any, culprit: str) -> None:
    with pytest.raises(ConfigError, match=rf"{culprit} cannot be pickled \(cannot pickle '_thread.lock' object\)"):
        write_code(obj, tmp_path, "reward")
    assert not list(tmp_path.iterdir())


def test_a_decorated_function_that_pickles_by_reference_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cached of tests.api.test_code_objects is not pickled by value"):
        write_code(uses_cached, tmp_path, "reward")


def test_code_larger_than_64_mib_is_rejected(tmp_path: Path) -> None:
    data = b"x" * (2**26 + 1)
    with pytest.raises(ConfigError, match="64 MiB; load large data"):
        write_code(lambda text, row: data[0], tmp_path, "reward")


def test_another_python_version_gives_a_one_line_error(tmp_path: Path) -> None:
    path = Path(write_code(reward, tmp_path, "reward").rpartition(":")[0])
    path.write_text(path.read_text().replace(f"!= {sys.version_info[:2]}", "!= (3, 9)"))
    with pytest.raises(ConfigError, match=r"cannot be loaded: it was pickled by Python .*, and this is Python"):
        user_code.load(f"{path}:reward", "reward.function")


def test_line_of_finds_the_line_of_an_error_in_restored_code(tmp_path: Path) -> None:
    loaded = user_code.load(write_code(reward, tmp_path, "reward"), "reward.function")
    with pytest.raises(ValueError, match="could not convert") as error:
        loaded("abc", "x")
    function, _, line = user_code.user_code_line(error.value).partition(":")
    assert function == "reward"
    assert "float(row)" in Path(__file__).read_text().splitlines()[int(line) - 1]
