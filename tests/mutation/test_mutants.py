"""The mutation tool: which mutations it creates, where, and that its lists match the code."""

from __future__ import annotations

import ast
import tomllib
import types
from pathlib import Path

import pytest

from tests.mutation import worker
from tests.mutation.__main__ import PLANTED, SURVIVORS, Measured, Planted, Trial, chosen, report
from tests.mutation.mutants import mutants, replaced
from tests.mutation.targets import PACKAGES
from tests.mutation.worker import _replace

SOURCE = b'''
class Server:
    """Text."""

    limit: int = 3

    async def take(self, count: int = 1) -> int:
        """Text."""
        logger.info("took %d", count)
        if count < 0 or not self.open:
            raise ValueError(f"{count + 1}")
        self.total = count * 2
        assert dict(zip(self.names, self.values, strict=True))
        self.pairs = list(zip(self.names, self.values, strict=True))
        await self.written
        return self.total
'''


def test_mutants_are_the_listed_kinds_and_skip_texts_and_annotations() -> None:
    result = mutants("server.py", SOURCE)
    assert sorted((item.kind, item.old, item.new) for item in result) == [
        ("arithmetic", "count * 2", "(count / 2)"),
        ("await", "await self.written", "__import__('asyncio').ensure_future(self.written)"),
        ("boolean", "count < 0 or not self.open", "(count < 0 and (not self.open))"),
        ("boolean", "not self.open", "(self.open)"),
        ("comparison", "count < 0", "(count <= 0)"),
        ("condition", "count < 0 or not self.open", "(not (count < 0 or not self.open))"),
        ("constant", "0", "1"),
        ("constant", "2", "3"),
        ("return", "return self.total", "return None"),
        ("statement", "await self.written", "pass"),
        ("statement", 'raise ValueError(f"{count + 1}")', "pass"),
        ("statement", "self.pairs = list(zip(self.names, self.values, strict=True))", "pass"),
        ("statement", "self.total = count * 2", "pass"),
    ]
    assert {item.function for item in result} == {"Server.take"}
    assert all(ast.parse(item.planted(SOURCE)) for item in result)


def test_every_module_has_tests_and_mutants_with_unique_names() -> None:
    for package in PACKAGES:
        for path in package.modules():
            assert all(Path(test.partition("::")[0]).exists() for test in package.tests_of(path)), path
            source = Path(path).read_bytes()
            result = mutants(path, source)
            assert len({item.key for item in result}) == len(result)


def test_a_sample_is_the_same_for_a_seed() -> None:
    first, again = (chosen(PACKAGES[:2], 20, seed=3) for _ in range(2))
    assert first == again != chosen(PACKAGES[:2], 20, seed=4)


def test_listed_survivors_can_still_be_planted() -> None:
    keys = {m.key for package in PACKAGES for path in package.modules() for m in mutants(path, Path(path).read_bytes())}
    for item in tomllib.loads(SURVIVORS.read_text()).get("survivor", []):
        assert item["mutant"] in keys
        assert item["verdict"] in ("hole", "equivalent") and item["why"]


def test_manual_mutants_and_their_tests_exist() -> None:
    for item in tomllib.loads(PLANTED.read_text())["mistake"]:
        source = Path(item["path"]).read_bytes()
        ast.parse(replaced(item["path"], source, item["old"], item["new"]).planted(source))
        path, _, name = item["noticed_by"].partition("::")
        text = Path(path).read_text()
        assert not name or f"def {name}(" in text or f"class {name}(" in text


def test_the_score_excludes_equivalent_mutants_and_has_a_minimum(capsys: pytest.CaptureFixture[str]) -> None:
    planted = mutants("server.py", SOURCE)[:11]
    done = [Planted(package="p", mutant=one, killer="a test" if i > 1 else None) for i, one in enumerate(planted)]
    known = {planted[0].key: {"verdict": "equivalent"}, planted[1].key: {"verdict": "hole"}}
    assert report(done, known) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["p", "11", "9", "1", "1", "0.90"]
    assert report(done[:10], known) == 1, "8 of 9"
    assert report(done, {planted[0].key: {"verdict": "equivalent"}}) == 1, "a survivor without a verdict"
    assert planted[1].key in capsys.readouterr().out


def test_only_tests_that_execute_the_statement_run_shortest_first() -> None:
    (one,) = [mutant for mutant in mutants("server.py", SOURCE) if mutant.old == "count < 0"]
    assert (one.line, one.first, one.last) == (10, 10, 10)
    lines = {"long": (5.0, {10, 11}), "short": (1.0, {10}), "elsewhere": (0.1, {12, 13})}
    measured = {
        name: Measured(elapsed_s, frozenset(("server.py", line) for line in found))
        for name, (elapsed_s, found) in lines.items()
    }
    assert Trial(PACKAGES[0], measured).tests(one) == ["short", "long"]


def test_a_mutant_is_planted_into_imported_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "doubled.py"
    source = "def twice(n):\n    return n * 2\n\n\nclass Doubled:\n    def of(self, n):\n        return n * 2\n"
    path.write_text(source)
    module = types.ModuleType("doubled")
    exec(compile(source, str(path), "exec"), module.__dict__)
    functions = [module.twice, module.Doubled.of]
    (mutant,) = [item for item in mutants("doubled.py", source.encode())
                 if item.function == "Doubled.of" and item.kind == "arithmetic"]  # fmt: skip
    mutated = mutant.planted(source.encode()).decode()
    assert _replace(functions, path, source, mutated) == (True, False)
    assert (module.twice(3), module.Doubled().of(3)) == (6, 1.5)
    code = module.Doubled.of.__code__
    called = {(str(path), code.co_qualname, code.co_firstlineno)}
    monkeypatch.setattr(worker, "_during_imports", called)
    assert _replace([], path, source, mutated) == (True, True), "values returned during imports are not mutated"
