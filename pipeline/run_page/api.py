"""The API of the run page: answers as plain values for JSON, without HTTP."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from staleflow.pipeline.config.knob_tree import explain_values, toml_value
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.journal import list_files, list_start_files, uncompressed_bytes
from staleflow.pipeline.coordination.mixture import count_by_source
from staleflow.pipeline.jobs.replaying import replay_run
from staleflow.pipeline.recovery.run_folder import read_summary
from staleflow.pipeline.run_page import listing
from staleflow.pipeline.run_page.charts import chart_values, charts, have_many_turns, outcome_in_words
from staleflow.pipeline.run_page.run_reader import RunReader, StoredSnapshot
from staleflow.pipeline.runtime.evaluation_results import Evaluation, explain_not_comparable
from staleflow.pipeline.stored_runs.branch_diff import compare_branches
from staleflow.pipeline.stored_runs.comparison import compare, make_result_tables
from staleflow.pipeline.stored_runs.response_texts import message_spans
from staleflow.pipeline.stored_runs.run_facts import read_run_facts
from staleflow.pipeline.stored_runs.views import make_facts, make_trajectory_view
from staleflow.stores.auditing.audit import audit
from staleflow.stores.errors import ConfigError, StaleflowError
from staleflow.stores.trajectories.reader import UnreadableRow
from staleflow.stores.trajectories.repository import MAIN
from staleflow.stores.trajectory import NO_VERSION, EndedTrajectory, EnvSpan, Span, Trajectory, TrajectoryId

MAX_TEXT_CHARACTERS, MAX_PAGE_CHARACTERS = 6_000, 400_000
"""Most characters of a prompt or response shown beside siblings, and of all on a page; a trajectory's own page shows
all of its own."""
EXCERPT_CHARS, PROMPT_EXCERPT_CHARS = 240, 2_000
"""Characters of a response and of a prompt in a list; of the prompt the last, where most differ."""
MAX_AUDITED_TOKENS = 50_000_000
"""Most tokens of a store that is audited for a page: some ten seconds; larger ones by the command line."""
MAX_REPLAYED_BYTES = 32 * 2**20
"""Largest journal that is replayed for a page: some 15 seconds; longer ones by the command line."""


class RunApi:
    """Answers questions about one run. Thread-safe. The public methods are the addresses of the API, with their
    parameters. They raise ConfigError for invalid arguments, StoreError for data that cannot be read."""

    def __init__(self, reader: RunReader, other: RunReader | None = None) -> None:
        """other: a second run, whose steps and settings are shown beside those of the first."""
        self._reader, self._other = reader, other
        self._replay_lock = threading.Lock()
        self._audit_lock = threading.Lock()

    def overview(self, branch: str = MAIN) -> dict[str, Any]:
        """Facts about the run as a whole."""
        config, snapshot = self._reader.config, self._reader.read_snapshot(branch)
        evaluations = self._reader.evaluations()
        state = self._reader.state()
        summary = read_summary(self._reader.run_dir) if state != "running" else {}
        num_ended = snapshot.records[-1].ledger.num_ended if snapshot and snapshot.records else {}
        return {
            "name": config.name,
            "folder": str(self._reader.run_dir),
            "other": self._other
            and {
                "name": _other_name(config, self._other),
                "folder": str(self._other.run_dir),
                "snapshot": _snapshot_of(self._other),
            },
            "state": state,
            "steps": config.steps,
            "num_steps": len(snapshot.steps) if snapshot else 0,
            "snapshot": snapshot.store.snapshot if snapshot else "",
            "eta": config.staleness.eta,
            "admission": config.staleness.admission.name,
            "model": config.model.path if not config.emulated else "emulated",
            "groups_per_step": config.batch.groups_per_step,
            "group_size": config.batch.group_size,
            "branches": [MAIN, *sorted(snapshot.store.branches())] if snapshot else [MAIN],
            "ended": {outcome_in_words(key): count for key, count in num_ended.items()},
            "in_flight": snapshot.records[-1].ledger.num_live if snapshot and snapshot.records else 0,
            "evaluations": [_evaluation_values(evaluation) for evaluation in evaluations],
            "notes": [
                *summary_notes(summary),
                *_source_lines(config, snapshot),
                *(snapshot.weight_lines if snapshot and "weights" not in summary else ()),
                *explain_not_comparable(evaluations),
            ],
            "many_turns": have_many_turns(snapshot.records) if snapshot else False,
            "charts": [
                chart.page_values() for chart in charts(snapshot.records if snapshot else (), [*config.task.sources])
            ],
        }

    def steps(self, branch: str = MAIN, first: int = 0, run: str = "", after: str = "") -> dict[str, Any]:
        """Values of the charts for the steps from index `first` on.

        Args:
            run: "other" for the second run's main branch.
            after: The snapshot whose steps the page has; "" if it has none. If steps of it were undone, the answer is
                `{"reload": True}`.
        """
        if run == "other":
            snapshot = self._other.read_snapshot() if self._other else None
            return chart_values(snapshot.records if snapshot else (), max(0, first))
        snapshot = self._require_snapshot(branch)
        if after and not snapshot.store.is_at_or_after(after):
            return {"reload": True}
        return {
            "snapshot": snapshot.store.snapshot,
            "state": self._reader.state(),
            **chart_values(snapshot.records, max(0, first)),
        }

    def settings(self) -> dict[str, Any]:
        """All settings of the job as TOML, with their defaults and the values of the second run."""
        others = {row.key: row for row in explain_values(self._other.config)} if self._other else {}
        rows = {row.key: row for row in explain_values(self._reader.config)}
        return {
            "settings": [
                {
                    "key": key,
                    "value": toml_value(rows[key].value) if key in rows else None,
                    "other": toml_value(others[key].value) if key in others else None,
                    "default": None
                    if (default := (rows.get(key) or others[key]).default) is None
                    else toml_value(default),
                    "doc": (rows.get(key) or others[key]).doc,
                }
                for key in {**rows, **others}
            ]
        }

    def result_tables(self) -> dict[str, Any]:
        """The results of both runs side by side, as tables of text; none before both have stored a step."""
        first, second = self._reader.read_snapshot(), self._other.read_snapshot() if self._other else None
        if self._other is None or first is None or second is None:
            return {"tables": []}
        runs = [
            read_run_facts(self._reader.run_dir, first.store, self._reader.config.name, {}),
            read_run_facts(self._other.run_dir, second.store, _other_name(self._reader.config, self._other), {}),
        ]
        return {"tables": [asdict(table) for table in make_result_tables(compare(runs)) if table.rows]}

    def audit(self) -> dict[str, Any]:
        """Audit the stored main branch of the run. One audit runs at a time."""
        snapshot = self._require_snapshot(MAIN)
        if snapshot.store.summary().num_tokens > MAX_AUDITED_TOKENS:
            raise ConfigError(
                f"the store has more tokens than a page audits ({MAX_AUDITED_TOKENS:,}); use staleflow store audit "
                f"{self._reader.run_dir}"
            )
        with self._audit_lock:
            report = audit(snapshot.store)
        return {"verdict": report.verdict, "proves": report.is_verified, "lines": report.lines}

    def groups(
        self, branch: str = MAIN, step: int = 0, where: str = "", order: str = "trained", page: int = 1
    ) -> dict[str, Any]:
        """A page of the groups a step trained on, with all their members."""
        snapshot = self._require_snapshot(branch)
        record = next((r for r in snapshot.steps if r.step == step), None)
        if record is None:
            raise ConfigError(f"step {step} is not stored; there are {len(snapshot.steps)} steps, counted from 0")
        page_of_rows = listing.group_page(snapshot.columns, step, where, order, page)
        return {
            "step": step,
            "num_steps": len(snapshot.steps),
            "metrics": _json_values(record.metrics),
            "page": page_of_rows.page,
            "pages": page_of_rows.num_pages,
            "total": page_of_rows.total,
            "note": self._reader.token_ids_note,
            "groups": self._groups(snapshot, page_of_rows.items, where),
        }

    def batch(self, branch: str = MAIN, step: int = 0) -> dict[str, Any]:
        """A step's whole batch with a value per trajectory: reward, length, staleness, and its phases from the
        journal."""
        columns = self._require_snapshot(branch).columns
        positions = listing.batch_positions(columns, step)
        names = ("trajectory", "reward", "response_tokens", "staleness", "finish")
        ids = columns["trajectory"][positions].tolist()
        with self._reader.journal_index() as journal:
            lives, read_share = journal.phase_intervals(ids), journal.read_share
        return {
            "read_share": read_share,
            "lives": [[[round(a, 4), round(b, 4), phase, v] for a, b, phase, v in life] for life in lives],
            **{name: [_json_value(value) for value in columns[name][positions].tolist()] for name in names},
        }

    def group(self, branch: str = MAIN, group: int = 0) -> dict[str, Any]:
        """One group with all its members."""
        snapshot = self._require_snapshot(branch)
        if not (snapshot.columns["group"] == group).any():
            raise ConfigError(f"no stored group {group}")
        return {"note": self._reader.token_ids_note, "groups": self._groups(snapshot, np.asarray([group]), "")}

    def _groups(self, snapshot: StoredSnapshot, ids: listing.Positions, where: str) -> list[dict[str, Any]]:
        matching_mask = listing.selection_mask(snapshot.columns, where)
        positions_by_group = listing.positions_by_group(snapshot.columns, ids)
        all_positions = sorted(np.concatenate([*positions_by_group.values(), np.zeros(0, np.int64)]).tolist())
        rows = dict(zip(all_positions, snapshot.store.trajectories_at(all_positions), strict=True))
        limit = min(MAX_TEXT_CHARACTERS, max(EXCERPT_CHARS, MAX_PAGE_CHARACTERS // max(1, len(rows))))
        groups = []
        for id, positions in positions_by_group.items():
            page_rows = [rows[position] for position in positions.tolist()]
            readable = [row for row in page_rows if isinstance(row, EndedTrajectory)]
            prompt = readable[0].trajectory.prompt_tokens.tolist() if readable else []
            groups.append(
                {
                    "group": id,
                    "prompt": self._reader.detokenizer.text(prompt[: MAX_TEXT_CHARACTERS + 1], keep_special=True)[
                        :MAX_TEXT_CHARACTERS
                    ],
                    "prompt_cut": len(prompt) > MAX_TEXT_CHARACTERS,
                    "members": [
                        {**self._member(row, limit), "matches": bool(matching_mask[position])}
                        for position, row in zip(positions.tolist(), page_rows, strict=True)
                    ],
                }
            )
        return groups

    def _member(self, row: EndedTrajectory | UnreadableRow, limit: int) -> dict[str, Any]:
        if isinstance(row, UnreadableRow):
            return {"trajectory": int(row.trajectory), "damaged": row.error}
        t = row.trajectory
        # Decoding stops soon after the limit: a token is rarely less than a character.
        text = self._reader.detokenizer.text(t.response_tokens[: limit + 1].tolist(), keep_special=True)
        return {
            **_json_values(make_facts(row)),
            "response_tokens": t.num_sampled,
            "turns": len(t.turns),
            "messages": self._messages_of(t, limit) if t.has_env_steps else [],
            "scored": bool(t.timings.rewarded_s > 0 or row.staleness >= 0),
            "loss_mask": row.loss_mask,
            "error": t.error,
            "text": text[:limit],
            "cut": len(text) > limit or t.num_tokens > limit + 1,
            "segments": [_span_values(span) for span in t.spans],
        }

    def _messages_of(self, trajectory: Trajectory, limit: int) -> list[dict[str, Any]]:
        """The beginning of a conversation, by who speaks, of about so many characters."""
        messages = []
        for span in message_spans(trajectory):
            if limit <= 0:
                break
            ids = trajectory.response_tokens[span.start : min(span.stop, span.start + limit + 1)]
            text = self._reader.detokenizer.text(ids.tolist(), keep_special=True)[:limit]
            messages.append({"role": span.role, "sampled": span.sampled, "seconds": span.seconds, "text": text})
            limit -= len(text)
        return messages

    def trajectories(self, branch: str = MAIN, where: str = "", sort: str = "-step", page: int = 1) -> dict[str, Any]:
        """A page of trajectories, as values of columns."""
        snapshot = self._require_snapshot(branch)
        page_of_rows = listing.trajectory_page(snapshot.columns, where, sort, page)
        columns = {name: column[page_of_rows.items].tolist() for name, column in snapshot.columns.items()}
        return {
            "page": page_of_rows.page,
            "pages": page_of_rows.num_pages,
            "total": page_of_rows.total,
            "stored": len(snapshot.columns["trajectory"]),
            "columns": {name: [_json_value(value) for value in values] for name, values in columns.items()},
            "names": {name: column.dtype.kind for name, column in snapshot.columns.items()},
        }

    def excerpts(self, branch: str = MAIN, ids: str = "") -> dict[str, Any]:
        """The beginnings of some trajectories' prompts and responses, by id. ids: with spaces between them."""
        snapshot, numbers = self._require_snapshot(branch), re.findall(r"\d{1,18}", ids)[: listing.ROWS_PER_PAGE]
        positions = sorted(snapshot.position(int(id)) for id in numbers)  # near ones are read together
        texts_by_trajectory = {}
        for row in snapshot.store.trajectories_at(positions):
            if isinstance(row, UnreadableRow):
                texts_by_trajectory[int(row.trajectory)] = {"damaged": row.error}
                continue
            t, decode = row.trajectory, self._reader.detokenizer.text
            texts_by_trajectory[int(t.id)] = {
                "prompt": decode(t.prompt_tokens[-PROMPT_EXCERPT_CHARS:].tolist(), keep_special=True)[
                    -PROMPT_EXCERPT_CHARS:
                ],
                "response": decode(t.response_tokens[:EXCERPT_CHARS].tolist(), keep_special=True)[:EXCERPT_CHARS],
            }
        return {"texts": texts_by_trajectory}

    def distribution(self, branch: str = MAIN, where: str = "", column: str = "reward") -> dict[str, Any]:
        """Histograms of a column over the selected trajectories, trained and dropped, and how these differ in the whole
        run."""
        snapshot = self._require_snapshot(branch)
        columns = snapshot.columns
        return {
            **listing.histograms_by_fate(columns, where, column),
            "by_fate": listing.statistics_by_outcome(columns, where),
            "bias": snapshot.drop_bias_lines,
        }

    def trajectory(self, branch: str = MAIN, id: int = 0) -> dict[str, Any]:
        """One trajectory with its tokens, the ids of its group's other members, and its marks in the journal."""
        snapshot = self._require_snapshot(branch)
        position = snapshot.position(id)
        (row,) = snapshot.store.trajectories_at([position])
        columns = snapshot.columns
        siblings = listing.positions_by_group(columns, columns["group"][[position]])[int(columns["group"][position])]
        around = {
            "note": self._reader.token_ids_note,
            "siblings": [
                {"trajectory": int(columns["trajectory"][i]), "reward": _json_value(float(columns["reward"][i]))}
                for i in siblings.tolist()
            ],
        }
        if isinstance(row, UnreadableRow):
            return {"trajectory": id, "damaged": row.error, **around}
        view = make_trajectory_view(row, self._reader.detokenizer, snapshot.store.recomputed_logprobs(TrajectoryId(id)))
        with self._reader.journal_index() as journal:
            story, read_share = journal.story(id), journal.read_share
        ratios = [None if t.ratio is None else _json_value(round(t.ratio, 5)) for t in view.tokens]
        return {
            **around,
            **self._member(row, 0),
            "message_spans": [asdict(span) for span in view.message_spans],
            "facts": _json_values(view.facts),
            "prompt": view.prompt,
            "text": view.response,
            "tokens": {
                "text": [t.text for t in view.tokens],
                "id": [t.id for t in view.tokens],
                "version": [t.version for t in view.tokens],
                "logprob": [_json_value(round(t.logprob, 5)) for t in view.tokens],
                "ratio": ratios if any(ratio is not None for ratio in ratios) else None,
            },
            "reward_parts": _json_values(view.reward_parts),
            "timings": _json_values(view.timings),
            "story": story,
            "read_share": read_share,
        }

    def story(self, id: int = 0) -> dict[str, Any]:
        """A trajectory's story with the coordinator's reasons, from replaying the journal."""
        run_dir = self._reader.run_dir
        size = sum(uncompressed_bytes(file) for _, events in list_start_files(run_dir) for file in list_files(events))
        if size > MAX_REPLAYED_BYTES:
            raise ConfigError(
                f"the journal has {size / 2**20:.0f} MiB, a page replays {MAX_REPLAYED_BYTES / 2**20:.0f}; use "
                f"staleflow replay {run_dir} --trajectory {id}"
            )
        with self._replay_lock:
            result = replay_run(run_dir, TrajectoryId(id))
        return {"lines": list(result.story), "difference": result.difference}

    def lanes(self, begin_s: float = 0.0, end_s: float = 1e18, bins: int = 400) -> dict[str, Any]:
        """Instances, trainer and queues over time."""
        with self._reader.journal_index() as journal:
            return journal.window(begin_s, end_s, bins)

    def compare(self, first: str = MAIN, second: str = MAIN) -> dict[str, Any]:
        """Compare two branches' rewards for the same trajectories, in total and by step."""
        first_rows, second_rows = self._require_snapshot(first), self._require_snapshot(second)
        return {
            "first": first,
            "second": second,
            **asdict(compare_branches(self._reader.run_dir, first, second)),
            "lineage": {branch.branch: branch.store.lineage for branch in (first_rows, second_rows)},
            "by_step": listing.mean_reward_by_step([first_rows.columns, second_rows.columns]),
        }

    def _require_snapshot(self, branch: str) -> StoredSnapshot:
        snapshot = self._reader.read_snapshot(branch)
        if snapshot is None:
            raise ConfigError("nothing is stored yet: the first step has not ended")
        return snapshot


def _other_name(config: RunConfig, other: RunReader) -> str:
    """The second run's name; its folder where the names are equal."""
    return other.config.name if other.config.name != config.name else str(other.run_dir)


def _evaluation_values(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation in values, and as the lines that people read."""
    values = asdict(evaluation)
    for hidden in ("reward_fingerprint", "data_fingerprint", "template_fingerprint", "figures"):
        del values[hidden]
    means = {"sampled_mean": evaluation.sampled_text, "greedy_mean": evaluation.greedy_text}
    return values | means | {"lines": evaluation.figures.lines(evaluation.samples)}


def _span_values(span: Span) -> list[Any]:
    """[version, instance, tokens] of a segment; [NO_VERSION, role, tokens, seconds] of given tokens."""
    if isinstance(span, EnvSpan):
        return [int(NO_VERSION), span.role, len(span.tokens), span.seconds]
    return [int(span.version), str(span.instance), len(span.tokens)]


def _source_lines(config: RunConfig, snapshot: StoredSnapshot | None) -> list[str]:
    """What was drawn from and trained on of each of several task sources, by the newest commit."""
    if not config.task.sources or snapshot is None or not snapshot.records:
        return []
    ratios = {name: source.ratio for name, source in config.task.sources.items()}
    return [view.line for view in count_by_source(ratios, snapshot.records[-1].ledger.sources)]


def _snapshot_of(reader: RunReader) -> str:
    """Snapshot of a run's main branch; "" before its first, and if it cannot be read, which `steps` reports."""
    with contextlib.suppress(StaleflowError):
        snapshot = reader.read_snapshot()
        return snapshot.store.snapshot if snapshot else ""
    return ""


def summary_notes(summary: Mapping[str, Any]) -> list[str]:
    """Lines of a run's summary about the run as a whole: why it stopped, its bottleneck, and what was lost.

    >>> summary_notes({"stopped": "Ctrl-C", "losses": ["rollout-0: gone"], "diagnosis": {"line": "the trainer waits"}})
    ['stopped: Ctrl-C', 'the trainer waits', 'lost: rollout-0: gone']
    """
    diagnosis = summary.get("diagnosis")
    lines = [f"stopped: {summary['stopped']}"] if summary.get("stopped") else []
    lines += [str(diagnosis["line"])] if isinstance(diagnosis, dict) and diagnosis.get("line") else []
    forecast = summary.get("forecast")
    lines += ["; ".join(map(str, _list(forecast.get("lines"))))] if isinstance(forecast, dict) else []
    lines += [f"lost: {loss}" for loss in _list(summary.get("losses"))]
    weights = summary.get("weights")
    lines += [str(line) for line in _list(weights.get("lines"))] if isinstance(weights, dict) else []
    return lines + [str(line) for key in ("alarms", "notes") for line in _list(summary.get(key))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _json_values(values: Any) -> dict[str, Any]:
    """Convert values for JSON. Numbers that are not finite become text."""
    return {name: _json_value(value) for name, value in values.items()}


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
