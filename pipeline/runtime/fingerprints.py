"""What a run's rewards and prompts come from, in fingerprints kept in its folder: so that going on with another reward,
other data or another template is noticed, and named.

Not the model, whose weights have fingerprints of their own. Of a user's code the file that is named counts, not what it
imports.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from pipeline.config.schema import RunConfig, TaskConfig
from stores.errors import StoreError
from stores.files import replace_text

FILE = "fingerprints.json"
DIGITS = 12
"""Hex digits of a SHA-256 that are kept: 48 bits, for a handful of values."""
Facts = dict[str, str]
"""What something is made of: by name, a value or the hash of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Of one start of a run. Empty where there is nothing to tell, as in an emulated run."""

    reward: Facts
    data: Facts
    template: Facts

    def digests(self) -> dict[str, str]:
        """One short hash for each: what an evaluation carries."""
        return {part: _hash(json.dumps(facts, sort_keys=True).encode()) for part, facts in asdict(self).items()}


def taken(config: RunConfig) -> Fingerprints:
    """Of a job, as its files and packages are now. A file that cannot be read is one without content: who needs it says
    what is wrong."""
    if config.emulated:
        return Fingerprints(reward={}, data={}, template={})
    task = config.task
    source, function = _source(task, config.seed), config.reward.function
    verifier = {"reward.function": function}
    if function == "task":
        verifier |= {k: v for k, v in source.items() if k not in ("file", "task.options", "seed")}
        verifier |= {"package staleflow": _version("staleflow")} if task.source.startswith("jsonl:") else {}
    elif function == "math_verify":
        verifier["package math-verify"] = _version("math-verify")
    else:
        verifier = {"reward.function": _name(function), "code": _code(function)}
    template = {"task.template": task.template, "task.chat": str(task.chat)}
    if task.chat:
        template["chat template"] = _chat_template(config.model.path)
    return Fingerprints(reward={**verifier, "task.answer_pattern": task.answer_pattern}, data=source, template=template)


def write(run_dir: Path, fingerprints: Fingerprints) -> None:
    """Keep them in the run's folder. Raises StoreError."""
    text = json.dumps(asdict(fingerprints), indent=2) + "\n"
    replace_text(run_dir / FILE, text, "free space or set runs_dir to another folder")


def read(run_dir: Path) -> Fingerprints | None:
    """Those of the run's start; None in folders of earlier versions. Raises StoreError."""
    path = run_dir / FILE
    try:
        return Fingerprints(**json.loads(path.read_text())) if path.is_file() else None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; remove it to go on without comparing") from error


def changes(then: Fingerprints | None, now: Fingerprints) -> list[str]:
    """What differs, a line each; none if nothing is known of the start."""
    if then is None:
        return []
    lines = []
    for part, facts in asdict(now).items():
        before: Mapping[str, str] = getattr(then, part)
        lines += [
            f"{part} changed since the run began: {key} was {before.get(key, 'not there')!r}, is "
            f"{facts.get(key, 'not there')!r}"
            for key in sorted({*before, *facts})
            if before.get(key) != facts.get(key)
        ]
    return lines


def _source(task: TaskConfig, seed: int) -> Facts:
    kind, _, name = task.source.partition(":")
    if kind == "jsonl":
        return {"task.source": "jsonl", "file": _hash_of(Path(name))}
    drawn = {"task.options": json.dumps(task.options, sort_keys=True, default=repr), "seed": str(seed)}
    if kind == "reasoning_gym":
        return {"task.source": task.source, **drawn, "package reasoning-gym": _version("reasoning-gym")}
    return {"task.source": _name(task.source), **drawn, "code": _code(task.source)}


def _name(named: str) -> str:
    """Of what is in a file, without the file's place: a submitted job has its code elsewhere."""
    where, _, name = named.rpartition(":")
    return name if where.endswith(".py") else named


def _code(named: str) -> str:
    """Hash of the file that a user's function is in; empty if it cannot be found."""
    where = named.rpartition(":")[0]
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
    """Of a file's bytes; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError:
        return ""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]
