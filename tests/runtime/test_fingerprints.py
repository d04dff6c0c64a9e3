"""Fingerprints of reward, data and template: the report of changes between two starts of a run."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading
from staleflow.pipeline.recovery import source_fingerprints
from staleflow.stores.errors import StoreError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("def score(answer, record):\n    return 0.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    return tmp_path


def changes_since(job: Path, sources: Path, *after: str) -> list[str]:
    """Return the changes caused by these overrides and by edits since the fingerprints were written."""
    config = loading.load(job, (*_sets(sources), *after))
    return source_fingerprints.describe_changes(source_fingerprints.read(sources), source_fingerprints.compute(config))


def _sets(sources: Path) -> tuple[str, ...]:
    return f"reward.function={sources}/mine.py:score", f"task.source=jsonl:{sources}/rows.jsonl"


def write_fingerprints(job: Path, sources: Path) -> source_fingerprints.Fingerprints:
    result = source_fingerprints.compute(loading.load(job, _sets(sources)))
    source_fingerprints.write(sources, result)
    return result


def test_a_changed_source_is_named(job: Path, sources: Path) -> None:
    before = write_fingerprints(job, sources)
    assert changes_since(job, sources) == []
    (sources / "mine.py").write_text("def score(answer, record):\n    return 1.0\n")
    (line,) = changes_since(job, sources)
    assert line.startswith(f"reward changed since the run began: code was {before.reward['code']!r}, is '")
    (sources / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 3}\n')
    assert [line.split(" was ")[0] for line in changes_since(job, sources)] == [
        "reward changed since the run began: code",
        "data changed since the run began: file",
    ]
    after = source_fingerprints.compute(loading.load(job, _sets(sources)))
    same = {k for k, v in before.digests().items() if after.digests()[k] == v}
    assert same == {"template"}
    (line, *_) = changes_since(job, sources, "task.template=Q: {prompt}")[2:]
    assert line == "template changed since the run began: task.template was '{prompt}', is 'Q: {prompt}'"


def test_changed_rows_of_an_environment_are_named(job: Path, sources: Path) -> None:
    own = (*_sets(sources), "task.source=skyrl_gym:gsm8k", f"task.options={{rows='jsonl:{sources}/rows.jsonl'}}")
    before = source_fingerprints.compute(loading.load(job, own))
    assert "rows.jsonl" not in str(before.data)
    (sources / "rows.jsonl").write_text('{"prompt": "c"}\n')
    (line,) = source_fingerprints.describe_changes(before, source_fingerprints.compute(loading.load(job, own)))
    assert line.startswith(f"data changed since the run began: file was {before.data['file']!r}, is '")


def test_code_in_another_folder_has_the_same_fingerprint(job: Path, sources: Path) -> None:
    write_fingerprints(job, sources)
    (sources / "code").mkdir()
    (sources / "code" / "reward_mine.py").write_text((sources / "mine.py").read_text())
    assert changes_since(job, sources, f"reward.function={sources}/code/reward_mine.py:score") == []


def test_an_evaluation_set_has_fingerprints_of_its_reward_and_data(job: Path, sources: Path) -> None:
    (sources / "theirs.jsonl").write_text('{"prompt": "c", "answer": 3}\n')
    (sources / "strict.py").write_text("def score(answer, record):\n    return 0.0\n")
    sets = (
        f'evaluation.sets.other={{source="jsonl:{sources}/theirs.jsonl", reward="{sources}/strict.py:score"}}',
        f'evaluation.sets.harder={{reward="{sources}/strict.py:score"}}',
    )

    def now(*after: str) -> source_fingerprints.Fingerprints:
        return source_fingerprints.compute(loading.load(job, (*_sets(sources), *sets, *after)))

    def same(one: source_fingerprints.Fingerprints, two: source_fingerprints.Fingerprints, name: str) -> set[str]:
        return {part for part, digest in one.digests(name).items() if two.digests(name)[part] == digest}

    before = now()
    source_fingerprints.write(sources, before)
    read = source_fingerprints.read(sources)
    assert read == before
    (sources / "mine.py").write_text("def score(answer, record):\n    return 1.0\n")
    (sources / "rows.jsonl").write_text('{"prompt": "a", "answer": 2}\n')
    after = now()
    assert same(before, after, "held-out") == {"template"}
    assert same(before, after, "harder") == {"reward", "template"}
    assert same(before, after, "other") == {"reward", "data", "template"}
    lines = source_fingerprints.describe_changes(read, after)
    assert [line.split(" changed")[0] for line in lines] == ["reward", "data", "evaluation.sets.harder: data"]
    assert source_fingerprints.select_changes(lines, "held-out") == lines[:2]
    assert source_fingerprints.select_changes(lines, "harder") == lines[2:]
    assert source_fingerprints.select_changes(lines, "other") == []

    (sources / "strict.py").write_text("def score(answer, record):\n    return 1.0\n")
    (sources / "theirs.jsonl").write_text('{"prompt": "c", "answer": 4}\n')
    assert same(after, now(), "held-out") == {"reward", "data", "template"}
    assert same(after, now(), "harder") == {"data", "template"}
    assert same(after, now(), "other") == {"template"}
    lines = source_fingerprints.describe_changes(after, now("task.template=Q: {prompt}"))
    assert [line.split(" changed")[0] for line in source_fingerprints.select_changes(lines, "other")] == [
        "evaluation.sets.other: reward",
        "evaluation.sets.other: data",
        "template",
    ]


def test_packages_and_the_chat_template_are_part_of_the_fingerprint(
    job: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loading.load(job)
    source_fingerprints.write(sources, source_fingerprints.compute(config))
    monkeypatch.setattr(metadata, "version", lambda package: "99")
    lines = source_fingerprints.describe_changes(source_fingerprints.read(sources), source_fingerprints.compute(config))
    assert [line.split(" was ")[0] for line in lines] == [
        "reward changed since the run began: package reasoning-gym",
        "data changed since the run began: package reasoning-gym",
    ]
    chat = source_fingerprints.compute(loading.load(job, ("task.chat=true",)))
    assert len(chat.template["chat template"]) == source_fingerprints.HASH_DIGITS
    module = source_fingerprints.compute(loading.load(job, ("reward.function=operator:contains",)))
    assert len(module.reward["code"]) == source_fingerprints.HASH_DIGITS


@pytest.mark.parametrize("use", ["steps=1", "weight=0.1"])
def test_a_change_of_the_examples_is_reported(job: Path, sources: Path, use: str) -> None:
    examples = sources / "examples.jsonl"
    examples.write_text('{"prompt": "a", "answer": "1"}\n')
    config = loading.load(job, (f"training.sft={{{use}, source='jsonl:{examples}'}}",))
    source_fingerprints.write(sources, source_fingerprints.compute(config))
    examples.write_text('{"prompt": "a", "answer": "2"}\n')
    (line,) = source_fingerprints.describe_changes(
        source_fingerprints.read(sources), source_fingerprints.compute(config)
    )
    assert line.startswith("data changed since the run began: examples' file was")


def test_each_reward_part_and_its_weight_are_part_of_the_fingerprint(job: Path, sources: Path) -> None:
    source = f"task.source=jsonl:{sources}/rows.jsonl"
    parts = (source, f"reward.parts.mine.function={sources}/mine.py:score", "reward.parts.verifier={}")
    source_fingerprints.write(sources, source_fingerprints.compute(loading.load(job, parts)))
    (sources / "mine.py").write_text("def score(answer, record):\n    return 1.0\n")
    now = source_fingerprints.compute(loading.load(job, (*parts, "reward.parts.verifier.weight=2")))
    lines = source_fingerprints.describe_changes(source_fingerprints.read(sources), now)
    assert [line.split(" was ")[0] for line in lines] == [
        "reward changed since the run began: mine's code",
        "reward changed since the run began: verifier's weight",
    ]


def test_missing_fingerprints_are_ignored_and_a_corrupt_file_gives_a_remedy(job: Path, sources: Path) -> None:
    assert changes_since(job, sources) == []
    write_fingerprints(job, sources)
    assert [p.name for p in sources.iterdir() if "fingerprints" in p.name] == [source_fingerprints.FILE]
    assert set(json.loads((sources / source_fingerprints.FILE).read_text())) == {"reward", "data", "template", "sets"}
    for content in ("{", '{"reward": 3, "data": {}, "template": {}}'):
        (sources / source_fingerprints.FILE).write_text(content)
        with pytest.raises(StoreError, match=r"fingerprints\.json: cannot be read: .*; remove it to resume"):
            changes_since(job, sources)
