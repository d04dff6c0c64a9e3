"""Run folders with chosen texts, rewards and fates, written without a run, cluster or model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.pipeline.config import actor_settings, knob_tree, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.trajectories.records import CommitRecord, LedgerState, batch_fingerprint
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import (
    AbortReason,
    EndedTrajectory,
    EnvSpan,
    Fate,
    FinishReason,
    GroupId,
    PolicyVersion,
    Segment,
    Span,
    Timings,
    Trajectory,
    TrajectoryId,
)
from tests.support.segments import sampled_segment


def byte_tokenizer(folder: Path) -> Any:
    """Return a tokenizer with one token per byte, saved as in a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return tokenizer


@dataclass
class Response:
    """A response to store. versions: those of its segments, which divide the text evenly. turns: (role, observation,
    seconds, sampled text under the last version) after the text."""

    text: str
    reward: float = 0.0
    versions: tuple[int, ...] = ()
    fate: Fate = Fate.CONSUMED
    reason: AbortReason = AbortReason.NONE
    finish: FinishReason = FinishReason.STOP
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    turns: tuple[tuple[str, str, float, str], ...] = ()


class StoredRun:
    """A run whose steps a test stores one by one. group: number of members of each group."""

    def __init__(
        self, folder: Path, *, group: int = 2, groups: int = 1, steps: int = 3, eta: int = 1, **more: Any
    ) -> None:
        self.tokenizer = byte_tokenizer(folder / "model")
        tree = {
            "name": "page", "runs_dir": str(folder / "runs"), "steps": steps, "model": {"path": str(folder / "model")},
            "batch": {"groups_per_step": groups, "group_size": group}, "staleness": {"eta": eta}, **more,
        }  # fmt: skip
        self.config: RunConfig = loading.from_tree(tree)
        self.run_dir = self.config.run_dir
        self.run_dir.mkdir(parents=True)
        (self.run_dir / "config.toml").write_text(knob_tree.to_toml(self.config))
        self.store = VersionedStore.create(self.run_dir / "store", actor_settings.run_header(self.config))
        self._ended: Counter[str] = Counter()
        self._next = 0
        self.step = 0

    def ids(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.asarray(self.tokenizer.encode(text).ids, np.int32)

    def train(self, groups: Sequence[tuple[str, Sequence[Response]]], **metrics: float) -> None:
        """Store a step that trained these (prompt, responses), and trajectories dropped with it."""
        rows = []
        size = self.config.members_started_per_group
        for prompt, responses in groups:
            rewards = [r.reward for r in responses if r.fate is Fate.CONSUMED]
            mean = sum(rewards) / max(1, len(rewards))
            for i, response in enumerate(responses):
                row = self._row(prompt, response, self._next * size + i, mean)
                self._ended[f"{row.fate.value}:{row.reason.value}"] += 1
                rows.append(row)
            self._next += 1
        consumed = [r for r in rows if r.fate is Fate.CONSUMED]
        lengths = [r.trajectory.num_sampled for r in consumed] or [0]
        values = {
            "reward": float(np.mean([r.trajectory.reward for r in consumed])) if consumed else 0.0,
            "response_mean": float(np.mean(lengths)), "response_max": float(max(lengths)),
            "response_tokens": float(sum(lengths)), "staleness_mean": 0.5, "staleness_max": 1.0, "loss": -0.01,
            "grad_norm": 0.5, "elapsed_s": 2.0 * (self.step + 1), **metrics,
        }  # fmt: skip
        self._commit("step", self.step, values, rows)
        self.step += 1

    def end(self) -> None:
        """Store the end of the run."""
        self._commit("end", self.step, {}, [])

    def _commit(self, kind: str, step: int, metrics: dict[str, float], rows: list[EndedTrajectory]) -> None:
        started = self._next * self.config.members_started_per_group
        ledger = LedgerState(
            num_started=started, num_ended=dict(self._ended), live=(), next_step=step + 1, version=step + 1
        )
        consumed = [(row.trajectory, row.advantage) for row in rows if row.fate is Fate.CONSUMED]
        fingerprint = batch_fingerprint(consumed) if kind == "step" else ""
        self.store.commit(
            CommitRecord(kind=kind, step=step, ledger=ledger, metrics=metrics, batch_fingerprint=fingerprint), rows
        )

    def _row(self, prompt: str, response: Response, id: int, mean: float) -> EndedTrajectory:
        tokens = self.ids(response.text)
        versions = response.versions or (max(0, self.step - 1),)
        pieces = np.array_split(tokens, len(versions))
        consumed = response.fate is Fate.CONSUMED
        spans: list[Span] = [
            self._segment(version, part) for version, part in zip(versions, pieces, strict=True) if len(part)
        ]
        for role, given, seconds, text in response.turns:
            spans.append(EnvSpan(role=role, tokens=self.ids(given), seconds=seconds))
            spans += [self._segment(versions[-1], self.ids(text))] if text else []
        trajectory = Trajectory(
            id=TrajectoryId(id),
            group=GroupId(id // self.config.members_started_per_group),
            prompt_tokens=self.ids(prompt),
            v_traj=PolicyVersion(versions[0]),
            spans=tuple(spans),
            finish=response.finish,
            reward=response.reward,
            reward_parts=response.parts,
            error=response.error,
            timings=Timings(arrived_s=1.0, routed_s=2.0, sampled_s=3.0, rewarded_s=4.0 if consumed else 0.0),
        )
        advantage = response.reward - mean if response.advantage is None else response.advantage
        return EndedTrajectory(
            trajectory=trajectory, fate=response.fate, reason=response.reason, step=self.step,
            advantage=advantage if consumed else 0.0, loss_mask=consumed and not response.error,
        )  # fmt: skip

    def _segment(self, version: int, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> Segment:
        return sampled_segment(
            tokens,
            np.linspace(-3.0, -0.01, len(tokens), dtype=np.float32),
            version=version,
            instance=f"rollout-{version % 2}",
        )
