"""The tool that plants mistakes: which it plants, where, and that its lists are of this code."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from tests.mutation.__main__ import SURVIVORS, chosen
from tests.mutation.mutants import mutants
from tests.mutation.targets import PACKAGES

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
        await self.written
        return self.total
'''


def test_it_plants_what_it_says_and_nothing_into_texts_and_annotations() -> None:
    found = mutants("server.py", SOURCE)
    assert sorted((one.kind, one.old, one.new) for one in found) == [
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
        ("statement", "self.total = count * 2", "pass"),
    ]
    assert {one.function for one in found} == {"Server.take"}
    assert all(ast.parse(one.planted(SOURCE)) for one in found)


def test_every_module_has_tests_and_mistakes_with_names_of_their_own() -> None:
    for package in PACKAGES:
        for path in package.modules():
            assert all(Path(test).exists() for test in package.tests_of(path)), path
            source = Path(path).read_bytes()
            found = mutants(path, source)
            assert len({one.key for one in found}) == len(found)


def test_a_sample_is_the_same_for_a_seed() -> None:
    first, again = (chosen(PACKAGES[:2], 20, seed=3) for _ in range(2))
    assert first == again != chosen(PACKAGES[:2], 20, seed=4)


def test_what_is_listed_as_a_survivor_can_still_be_planted() -> None:
    keys = {m.key for package in PACKAGES for path in package.modules() for m in mutants(path, Path(path).read_bytes())}
    for one in tomllib.loads(SURVIVORS.read_text()).get("survivor", []):
        assert one["mutant"] in keys
        assert one["verdict"] in ("hole", "equivalent") and one["why"]
