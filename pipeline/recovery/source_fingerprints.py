"""Fingerprints of a run's reward, data and prompt template, in its folder, by which a resume detects and reports
changes.

The model is not included, since weights have their own fingerprints. For user code only the named file counts, not its
imports. An evaluation set has a reward of its own, and may have data of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from staleflow.pipeline.config.evaluation_settings import HELD_OUT
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.user_files import data_file, split_code
from staleflow.stores.errors import StoreError
from staleflow.stores.files import replace_text
from staleflow.stores.serialization import parse_json
from staleflow.tasks.settings import extensions, reward_functions
from staleflow.tasks.settings.dataset_columns import Columns
from staleflow.tasks.settings.source_kinds import SourceType, kind_of

PARTS = ("reward", "data", "template")
FILE = "fingerprints.json"
DIGITS = 12
"""Hex digits kept of a SHA-256: 48 bits are enough for a handful of values."""
Facts = dict[str, str]
"""Inputs by name: each a value, or the hash of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Fingerprints of one start of a run; empty for an emulated run."""

    reward: Facts
    data: Facts
    template: Facts
    sets: dict[str, dict[str, Facts]] = field(default_factory=dict)
    """Of each set in [evaluation.sets] its reward and its data."""

    def digests(self, name: str = HELD_OUT) -> dict[str, str]:
        """One short hash each of reward, data and template, as recorded in an evaluation. name: name of its set."""
        run = {"reward": self.reward, "data": self.data, "template": self.template}
        parts = run | self.sets.get(name, {})
        return {part: _hash(json.dumps(facts, sort_keys=True).encode()) for part, facts in parts.items()}


def compute(config: RunConfig) -> Fingerprints:
    """Compute fingerprints of the current files and packages of a job. An unreadable file counts as empty; the code
    that uses it reports the error."""
    if not config.has_texts:
        return Fingerprints(reward={}, data={}, template={})
    if config.task.sources:
        return _of_several(config)
    task = config.task
    source = _source(task.source, task.options, config.seed)
    verifier: Facts = {} if config.reward.parts else _function(config.reward.function, task.source, source)
    for name, part in config.reward.parts.items():
        facts = _function(part.function, task.source, source) | {"reward.weight": f"{part.weight:g}"}
        verifier |= {f"{name}'s {key.removeprefix('reward.')}": value for key, value in facts.items()}
    if task.columns != Columns():
        source["task.columns"] = f"{task.columns.prompt}, {task.columns.answer}"
    if task.eval_source:
        theirs = _source(task.eval_source, task.eval_options, config.seed)
        source |= {f"evaluation's {key.removeprefix('task.')}": value for key, value in theirs.items()}
    sft = config.training.sft
    if sft.steps and sft.source:
        theirs = _source(sft.source, sft.options, config.seed)
        source |= {f"examples' {key.removeprefix('task.')}": value for key, value in theirs.items()}
    template = {"task.template": task.template, "task.chat": str(task.chat)}
    if task.system:
        template["task.system"] = task.system
    template |= {f"tool {_name(named)}": _code(named) for named in config.environment.tools if ":" in named}
    if task.chat:
        template["chat template"] = _chat_template(config.model.path)
    pattern = {"task.answer_pattern": task.answer_pattern}
    sets: dict[str, dict[str, Facts]] = {}
    for name, evaluation_set in config.evaluation.sets.items():
        theirs = source
        if evaluation_set.source:
            theirs = _source(evaluation_set.source, evaluation_set.options, config.seed)
            if task.columns != Columns():
                theirs["task.columns"] = f"{task.columns.prompt}, {task.columns.answer}"
        reward = _function(evaluation_set.reward, evaluation_set.source or task.source, theirs)
        sets[name] = {"reward": reward | pattern, "data": theirs}
    return Fingerprints(reward=verifier | pattern, data=source, template=template, sets=sets)


def _of_several(config: RunConfig) -> Fingerprints:
    """Fingerprints of a job with several task sources: each one's, under its name."""
    combined = Fingerprints(reward={}, data={}, template={})
    for name, job in config.jobs_by_source.items():
        fingerprints = compute(job)
        for part in PARTS:
            getattr(combined, part).update(
                {f"{name}: {key}": value for key, value in getattr(fingerprints, part).items()}
            )
        combined.sets.update(fingerprints.sets)
        combined.sets[name] = {"reward": fingerprints.reward, "data": fingerprints.data}
    return combined


def write(run_dir: Path, fingerprints: Fingerprints) -> None:
    """Write fingerprints to the run's folder atomically. Raises StoreError."""
    text = json.dumps(asdict(fingerprints), indent=2) + "\n"
    replace_text(run_dir / FILE, text, "free space or set runs_dir to another folder")


def read(run_dir: Path) -> Fingerprints | None:
    """Read the fingerprints of the run's first start; None if the file was removed. Raises StoreError."""
    path, remedy = run_dir / FILE, "remove it to resume without comparing"
    try:
        return Fingerprints(**parse_json(path.read_bytes())) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; {remedy}") from error
    except TypeError as error:
        raise StoreError(f"{path}: has not the fingerprints of a run; {remedy}") from error


def changes(then: Fingerprints | None, now: Fingerprints) -> list[str]:
    """The differences, one line each; empty if the fingerprints of the first start are unknown."""
    if then is None:
        return []
    lines = []
    for part in PARTS:
        lines += _differences(part, getattr(then, part), getattr(now, part))
    for name in sorted(then.sets.keys() & now.sets.keys()):
        for part, facts in now.sets[name].items():
            lines += _differences(f"{_of_set(name)}{part}", then.sets[name].get(part, {}), facts)
    return lines


def changes_of(lines: Sequence[str], name: str) -> list[str]:
    """The `changes` that affect an evaluation set. name: its name."""
    set_lines = [line for line in lines if line.startswith(_of_set(name))]
    return set_lines + [line for line in lines if line.startswith("template" if name != HELD_OUT else PARTS)]


def _of_set(name: str) -> str:
    return f"evaluation.sets.{name}: "


def _differences(subject: str, before: Mapping[str, str], facts: Mapping[str, str]) -> list[str]:
    return [
        f"{subject} changed since the run began: {key} was {before.get(key, 'absent')!r}, is "
        f"{facts.get(key, 'absent')!r}"
        for key in sorted({*before, *facts})
        if before.get(key) != facts.get(key)
    ]


def _source(source: str, options: Mapping[str, Any], seed: int) -> Facts:
    kind, path = data_file(source)
    known = kind_of(source)
    if known is not None and known.name_is_path and path is not None:
        return {"task.source": kind, "file": _hash_of(path)}
    options_facts = {"task.options": json.dumps(options, sort_keys=True, default=repr)}
    if kind:
        reference = source if path is None else kind
        return {"task.source": reference, **options_facts} | ({} if path is None else {"file": _hash_of(path)})
    drawn = {**options_facts, "seed": str(seed)}
    if known is not None and known.type is SourceType.PROCEDURAL:
        packages = (package.replace("_", "-") for package in known.packages)
        return {"task.source": source, **drawn} | {f"package {name}": _version(name) for name in packages}
    return {"task.source": _name(source), **drawn, "code": _code(source)}


def _function(function: str, reference: str, source: Facts) -> Facts:
    """Of one reward function. reference: the source of prompts, and source: its facts."""
    if function == "task":
        verifier = {k: v for k, v in source.items() if k not in ("file", "task.options", "seed")}
        package = {"package staleflow": _version("staleflow")} if data_file(reference)[0] else {}
        return {"reward.function": function} | verifier | package
    if function == "math_verify":
        return {"reward.function": function, "package math-verify": _version("math-verify")}
    if (point := extensions.entry_points_of(reward_functions.GROUP).get(function)) is not None:
        return {"reward.function": function, "package": extensions.package_of(point)}
    return {"reward.function": _name(function), "code": _code(function)}


def _name(reference: str) -> str:
    """A function's name without its file's path: a submitted job has its code elsewhere."""
    _, where, name = split_code(reference)
    return name if where.endswith(".py") else reference


def _code(reference: str) -> str:
    """Hash of the file that defines a user's function; empty if it cannot be found."""
    where = split_code(reference)[1]
    if where.endswith(".py"):
        return _hash_of(Path(where))
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError, AttributeError):
        return ""
    return _hash_of(Path(spec.origin)) if spec is not None and spec.origin is not None else ""


def _chat_template(model: str) -> str:
    from transformers import AutoTokenizer

    return _hash(str(AutoTokenizer.from_pretrained(model).chat_template).encode())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _hash_of(path: Path) -> str:
    """Hash of a file's bytes, or of those of a folder's files; empty if it cannot be read."""
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
        return _hash("\n".join(f"{file.relative_to(path)} {_hash_of(file)}" for file in files).encode())
    except OSError:
        return ""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]
