"""Publishes a checkpoint of a run on the Hugging Face hub, with a model card that says how it was trained."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import knob_tree
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import certificate, run_folder
from staleflow.pipeline.recovery.run_folder import find_checkpoint
from staleflow.pipeline.runtime.evaluation_results import Evaluation, read_evaluations, read_suites
from staleflow.stores.auditing.audit import audit
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.versioned import VersionedStore

CARD_FILE = "README.md"
UNPUBLISHED_SETTINGS = ("name", "runs_dir", "store", "profile", "model.path")
"""Settings that say where a run is, or that the card has in words."""


def push_checkpoint(run_dir: Path, repo: str, *, step: int | None = None, private: bool = False) -> str:
    """Upload a checkpoint of a run and its model card in one commit; `Run.push` describes the arguments."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    card = model_card(run_dir, step=step, title=repo.rpartition("/")[2])
    _, checkpoint = find_checkpoint(run_dir, step)
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    operations = [CommitOperationAdd(str(path.relative_to(checkpoint)), path) for path in files]
    operations.append(CommitOperationAdd(CARD_FILE, card.encode()))
    hub = HfApi()
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        commit = hub.create_commit(repo, operations, commit_message=f"{checkpoint.name} of {run_dir.name}")
    except HFValidationError as error:
        raise ConfigError(f"{repo}: not the name of a repository, such as OWNER/NAME: {error}") from error
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise ConfigError(
            f"{repo}: {hub.endpoint} refuses: {reason}; `hf auth login` or HF_TOKEN gives access"
        ) from error
    except Exception as error:  # of the HTTP client, which differs between versions of huggingface_hub
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{repo}: the upload to {hub.endpoint} failed: {type(error).__name__}: {reason}; try again"
        ) from error
    return str(commit.commit_url)


def model_card(run_dir: Path, *, title: str, step: int | None = None) -> str:
    """The model card of a run's checkpoint in Markdown: base model, data, settings, audit and evaluations.

    Args:
        run_dir: The run's folder, whose store is audited now.
        title: The card's title.
        step: Step of the checkpoint; the newest if None.

    Raises:
        ConfigError: It is no run's folder, or has no such checkpoint.
    """
    from huggingface_hub import ModelCardData

    config = run_folder.load_job(run_dir)
    if config.emulated:
        raise ConfigError(f"{run_dir}: its engine is emulated, so it has no policy to push")
    version, checkpoint = find_checkpoint(run_dir, step)
    store = VersionedStore.open(run_dir / "store")
    base = config.model.path
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=None if Path(base).is_absolute() else base,
        tags=["reinforcement-learning", "staleflow"],
    )
    lines = [
        "---",
        data.to_yaml(),
        "---",
        f"# {title}",
        "",
        f"{without_folders(base)} after {version} steps of reinforcement learning with staleflow "
        f"{importlib.metadata.version('staleflow')}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in _facts(config, store, checkpoint)),
        "",
        "## Evaluation",
        "",
        *_evaluations([e for e in read_evaluations(run_dir) if e.version <= version]),
        *_suites([e for e in read_suites(run_dir) if e.version <= version]),
        "",
        "## Settings",
        "",
        "Those that differ from the defaults.",
        "",
        "```toml",
        *_settings(config),
        "```",
        "",
    ]
    return "\n".join(lines)


def _facts(config: RunConfig, store: VersionedStore, checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Rows of the card's first table."""
    yield "data", ", ".join(f"`{without_folders(task.source)}`" for task in config.task.sources_by_name.values())
    yield "reward", f"`{without_folders(config.reward.setting)}`"
    report = audit(store)
    yield "stored by the run", f"{report.num_trajectories:,} responses, {report.num_tokens:,} tokens with prompts"
    yield "staleness bound", f"{config.staleness.eta} versions; largest in the run {report.max_staleness}"
    yield "audit of the run", f"{report.verdict}; {'; '.join(report.weights.lines)}"
    if (checkpoint / certificate.FILE).is_file():
        yield "entry in the run's chain", f"`{certificate.read(checkpoint).entry}`"


def _evaluations(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """A table of mean rewards on held-out prompts, with their standard errors."""
    if not evaluations:
        yield "The run was not evaluated."
        return
    yield "Mean rewards on held-out prompts: sampled at the training temperature, and greedy."
    yield ""
    yield "| version | prompts | basis | sampled | greedy |"
    yield "|---|---|---|---|---|"
    for e in evaluations:
        yield f"| {e.version} | {e.name} | {e.basis} | {e.sampled_text} | {e.greedy_text} |"


def _suites(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """A table of benchmark tasks."""
    if evaluations:
        yield from ("", "Benchmark tasks by lm-eval:", "", "| version | task and metric | value |", "|---|---|---|")
        yield from (f"| {e.version} | {e.name} | {e.greedy_text} |" for e in evaluations)


def _settings(config: RunConfig) -> Iterator[str]:
    """The settings that differ from their defaults, as lines of TOML."""
    for row in knob_tree.explain_values(config):
        if row.value != row.default and row.key not in UNPUBLISHED_SETTINGS:
            yield f"{row.key} = {knob_tree.toml_value(without_folders(row.value))}"


def without_folders(value: Any) -> Any:
    """Replace each absolute path in a value by its last part, because folders mean nothing to other people.

    >>> without_folders("/home/me/rewards.py:short"), without_folders("jsonl:/data/sums.jsonl"), without_folders("a/b")
    ('rewards.py:short', 'jsonl:sums.jsonl', 'a/b')
    """
    if isinstance(value, str):
        return re.sub(r"(^|(?<=[\s'\"=:]))/[^\s'\"]*/", "", value)
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, (list, tuple)) else value
