"""Fingerprints of a run's reward, data and prompt template, by which a resume detects and reports changes.

The model is not included, because weights have their own fingerprints. The fingerprint of user code is that of its
file, without its imports. An evaluation set has its own reward, and may have its own data.
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
from staleflow.pipeline.config.user_files import split_code_reference, split_data_source, takes_rows
from staleflow.pipeline.recovery.run_folder import DISK_REMEDY, read_json_file
from staleflow.stores.files import replace_text
from staleflow.tasks.settings import extensions, reward_functions
from staleflow.tasks.settings.dataset_columns import Columns
from staleflow.tasks.settings.source_kinds import SourceType, kind_of

PARTS = ("reward", "data", "template")
FILE = "fingerprints.json"
HASH_DIGITS = 12
"""Hex digits of a hash, the first of a SHA-256: 48 bits are enough for a few values."""
Inputs = dict[str, str]
"""Inputs of a fingerprint by name: values, or hashes of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Fingerprints of one start of a run; empty for an emulated run."""

    reward: Inputs
    data: Inputs
    template: Inputs
    sets: dict[str, dict[str, Inputs]] = field(default_factory=dict)
    """Inputs of the reward and the data of each set in [evaluation.sets], by its name."""

    def digests(self, set_name: str = HELD_OUT) -> dict[str, str]:
        """Return short hashes of reward, data and template, which an evaluation records. set_name: of its set."""
        run = {"reward": self.reward, "data": self.data, "template": self.template}
        parts = run | self.sets.get(set_name, {})
        return {part: _hash_inputs(inputs) for part, inputs in parts.items()}

    def digests_without_seed(self) -> dict[str, str]:
        """Return short hashes of reward, data, template and evaluation sets that are the same for another seed."""
        sets = {f"{name} {part}": inputs for name, parts in self.sets.items() for part, inputs in parts.items()}
        parts = {"reward": self.reward, "data": self.data, "template": self.template}
        parts |= {"evaluation sets": {f"{s}: {key}": value for s in sets for key, value in sets[s].items()}}
        return {
            part: _hash_inputs({key: value for key, value in inputs.items() if key.split()[-1] != "seed"})
            for part, inputs in parts.items()
            if inputs
        }


def compute(config: RunConfig) -> Fingerprints:
    """Compute fingerprints of the current files and packages of a job. An unreadable file counts as empty; the code
    that uses it reports the error."""
    if not config.has_texts:
        return Fingerprints(reward={}, data={}, template={})
    if config.task.sources:
        return _compute_for_sources(config)
    task = config.task
    source = _source_inputs(task.source, task.options, config.seed)
    reward_inputs: Inputs = {} if config.reward.parts else _reward_inputs(config.reward.function, task.source, source)
    for name, part in config.reward.parts.items():
        inputs = _reward_inputs(part.function, task.source, source) | {"reward.weight": f"{part.weight:g}"}
        reward_inputs |= {f"{name}'s {key.removeprefix('reward.')}": value for key, value in inputs.items()}
    if task.columns != Columns():
        source["task.columns"] = f"{task.columns.prompt}, {task.columns.answer}"
    if task.eval_source:
        other_inputs = _source_inputs(task.eval_source, task.eval_options, config.seed)
        source |= {f"evaluation's {key.removeprefix('task.')}": value for key, value in other_inputs.items()}
    sft = config.training.sft
    if sft.uses_examples and sft.source:
        other_inputs = _source_inputs(sft.source, sft.options, config.seed)
        source |= {f"examples' {key.removeprefix('task.')}": value for key, value in other_inputs.items()}
    template = {"task.template": task.template, "task.chat": str(task.chat)}
    if task.system:
        template["task.system"] = task.system
    template |= {f"tool {_portable_name(name)}": _code_hash(name) for name in config.environment.tools if ":" in name}
    if task.chat:
        template["chat template"] = _chat_template(config.model.path)
    pattern = {"task.answer_pattern": task.answer_pattern}
    sets: dict[str, dict[str, Inputs]] = {}
    for name, evaluation_set in config.evaluation.sets.items():
        other_inputs = source
        if evaluation_set.source:
            other_inputs = _source_inputs(evaluation_set.source, evaluation_set.options, config.seed)
            if task.columns != Columns():
                other_inputs["task.columns"] = f"{task.columns.prompt}, {task.columns.answer}"
        reward = _reward_inputs(evaluation_set.reward, evaluation_set.source or task.source, other_inputs)
        sets[name] = {"reward": reward | pattern, "data": other_inputs}
    return Fingerprints(reward=reward_inputs | pattern, data=source, template=template, sets=sets)


def _compute_for_sources(config: RunConfig) -> Fingerprints:
    """Compute fingerprints of a job with several task sources: those of each, with the source's name as prefix."""
    result = Fingerprints(reward={}, data={}, template={})
    for name, job in config.jobs_by_source.items():
        fingerprints = compute(job)
        for part in PARTS:
            getattr(result, part).update(
                {f"{name}: {key}": value for key, value in getattr(fingerprints, part).items()}
            )
        result.sets.update(fingerprints.sets)
        result.sets[name] = {"reward": fingerprints.reward, "data": fingerprints.data}
    return result


def write(run_dir: Path, fingerprints: Fingerprints) -> None:
    """Write fingerprints to the run's folder atomically. Raises StoreError."""
    text = json.dumps(asdict(fingerprints), indent=2) + "\n"
    replace_text(run_dir / FILE, text, DISK_REMEDY)


def read(run_dir: Path) -> Fingerprints | None:
    """Read the fingerprints of the run's first start; None if the file was removed. Raises StoreError."""
    return read_json_file(run_dir / FILE, Fingerprints, "remove it to resume without comparing")


def describe_changes(first: Fingerprints | None, current: Fingerprints) -> list[str]:
    """Describe the changes since the first start, one line each; none if its fingerprints are unknown."""
    if first is None:
        return []
    lines = []
    for part in PARTS:
        lines += _differences(part, getattr(first, part), getattr(current, part))
    for name in sorted(first.sets.keys() & current.sets.keys()):
        for part, inputs in current.sets[name].items():
            lines += _differences(f"{_set_prefix(name)}{part}", first.sets[name].get(part, {}), inputs)
    return lines


def select_changes(lines: Sequence[str], set_name: str) -> list[str]:
    """Select the lines of `describe_changes` that affect an evaluation set."""
    set_lines = [line for line in lines if line.startswith(_set_prefix(set_name))]
    return set_lines + [line for line in lines if line.startswith("template" if set_name != HELD_OUT else PARTS)]


def _set_prefix(name: str) -> str:
    return f"evaluation.sets.{name}: "


def _differences(subject: str, previous_inputs: Mapping[str, str], inputs: Mapping[str, str]) -> list[str]:
    return [
        f"{subject} changed since the run began: {key} was {previous_inputs.get(key, 'absent')!r}, is "
        f"{inputs.get(key, 'absent')!r}"
        for key in sorted({*previous_inputs, *inputs})
        if previous_inputs.get(key) != inputs.get(key)
    ]


def _source_inputs(source: str, options: Mapping[str, Any], seed: int) -> Inputs:
    kind_name, path = split_data_source(source)
    source_kind = kind_of(source)
    if source_kind is not None and source_kind.name_is_path and path is not None:
        return {"task.source": kind_name, "file": _hash_path(path)}
    file_facts = {}
    if takes_rows(source):
        rows_kind, path = split_data_source(str(options.get("rows", "")))
        if path is not None:
            options, file_facts = {**options, "rows": rows_kind}, {"file": _hash_path(path)}
    options_facts = {"task.options": json.dumps(options, sort_keys=True, default=repr), **file_facts}
    if kind_name:
        reference = source if path is None else kind_name
        return {"task.source": reference, **options_facts} | ({} if path is None else {"file": _hash_path(path)})
    seed_facts = {**options_facts, "seed": str(seed)}
    if source_kind is not None and source_kind.type is SourceType.PROCEDURAL:
        packages = (package.replace("_", "-") for package in source_kind.packages)
        return {"task.source": source, **seed_facts} | {f"package {name}": _package_version(name) for name in packages}
    return {"task.source": _portable_name(source), **seed_facts, "code": _code_hash(source)}


def _reward_inputs(function: str, reference: str, source: Inputs) -> Inputs:
    """Return the inputs of a reward function. reference: name of the task source. source: inputs of that source."""
    if function == "task":
        reward_inputs = {k: v for k, v in source.items() if k not in ("file", "task.options", "seed")}
        package = {"package staleflow": _package_version("staleflow")} if split_data_source(reference)[0] else {}
        return {"reward.function": function} | reward_inputs | package
    if function == "math_verify":
        return {"reward.function": function, "package math-verify": _package_version("math-verify")}
    if (entry_point := extensions.entry_points_of(reward_functions.GROUP).get(function)) is not None:
        return {"reward.function": function, "package": extensions.package_of(entry_point)}
    return {"reward.function": _portable_name(function), "code": _code_hash(function)}


def _portable_name(reference: str) -> str:
    """Return the name of user code without the path of its file, which differs between machines."""
    _, location, name = split_code_reference(reference)
    return name if location.endswith(".py") else reference


def _code_hash(reference: str) -> str:
    """Return the hash of the file that defines user code; empty if it cannot be found."""
    location = split_code_reference(reference)[1]
    if location.endswith(".py"):
        return _hash_path(Path(location))
    try:
        spec = importlib.util.find_spec(location)
    except (ImportError, ValueError, AttributeError):
        return ""
    return _hash_path(Path(spec.origin)) if spec is not None and spec.origin is not None else ""


def _chat_template(model: str) -> str:
    from transformers import AutoTokenizer

    try:
        return _hash_bytes(str(AutoTokenizer.from_pretrained(model).chat_template).encode())
    except (OSError, ValueError):
        return ""


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _hash_path(path: Path) -> str:
    """Return the hash of a file, or of the files of a folder; empty if it cannot be read."""
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:HASH_DIGITS]
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
        return _hash_bytes("\n".join(f"{file.relative_to(path)} {_hash_path(file)}" for file in files).encode())
    except OSError:
        return ""


def _hash_inputs(inputs: Inputs) -> str:
    return _hash_bytes(json.dumps(inputs, sort_keys=True).encode())


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HASH_DIGITS]
