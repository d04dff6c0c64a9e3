"""Evaluation results: distinct prompts, failed responses, standard errors and comparability."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli.display import Display
from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import FinishEvaluation
from staleflow.pipeline.jobs import summary as report
from staleflow.pipeline.jobs.execution import RunEnd
from staleflow.pipeline.processes.clock import RunClock
from staleflow.pipeline.runtime.evaluation_driver import EvaluationDriver
from staleflow.pipeline.runtime.evaluation_figures import PromptRewards, compute_figures
from staleflow.pipeline.runtime.evaluation_results import (
    Evaluation,
    explain_not_comparable,
    fewer_prompts_warning,
    read_evaluations,
    read_rewards,
    write_evaluations,
    write_rewards,
)
from staleflow.pipeline.runtime.run_report import RunReport
from staleflow.stores.errors import StoreError
from staleflow.stores.metrics import step_with_tokens_per_s
from staleflow.stores.trajectory import PolicyVersion, TrajectoryId
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.engines.base import FailedRequest, SampledTokens
from staleflow.tasks.engines.engine_builder import generate_responses
from staleflow.tasks.rendering.chat_tokenizer import load_chat_tokenizer
from staleflow.tasks.sources.reward_process import ScoredResponse
from tests.support.route_items import route_item
from tests.support.segments import delivery, sampled_segment


class LocalActors:
    """The actors of a run in this process; none of them is ever lost."""

    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors
        self.clock = RunClock()

    async def ask(self, name: str, method: str, *args: Any, deadline: str = "") -> Any:
        return await getattr(self._actors[name], method)(*args)


def evaluate(
    config: RunConfig, answer: dict[str, str | None], folder: Path, earlier: tuple[Evaluation, ...] = ()
) -> Evaluation:
    """Evaluate with a real server and a real scoring process. answer: by prompt; None where the engine fails. earlier:
    evaluations before this one."""

    async def scenario() -> Evaluation:
        settings = actor_settings.server_settings(config, folder / "store", 128)
        server, reward = TrajectoryServer(settings, 0.0), RewardWorker(actor_settings.scoring_settings(config), 30.0)
        ids = load_chat_tokenizer(config.model.path).ids
        answers = {ids(prompt): text for prompt, text in answer.items()}
        actors: Any = LocalActors({"server": server, "reward-0": reward})
        requests: list[Any] = []
        results: list[Evaluation] = []
        evaluating = EvaluationDriver(
            config, actors, folder, results, requests.append, lambda _: None,
            lambda name: {"reward": "r", "data": "d", "template": "t"}, lambda name: [f"a change of {name}"],
        )  # fmt: skip
        try:
            await evaluating.begin(PolicyVersion(0))
            results += earlier
            members = [TrajectoryId(g.group * config.members_started_per_group) for g in requests[0].groups]
            requests_of: list[Any] = await server.record_routes(tuple(map(route_item, members)))
            messages = {request.trajectory: answers[request.tokens] for request in requests_of}
            await server.deliver([_sampled(member, ids(text)) for member, text in messages.items() if text is not None])
            await reward.score(server, tuple(members), (0,) * len(members))
            failed = tuple(member for member, text in messages.items() if text is None)
            concluded = FinishEvaluation(evaluation=0, version=PolicyVersion(3), failed=failed)
            await evaluating.finish(concluded)
            assert server._in_flight.live == {} == server._in_flight.routings
        finally:
            await reward.close()
            await server.close()
        assert read_evaluations(folder) == results
        return results[-1]

    return asyncio.run(scenario())


def _sampled(member: TrajectoryId, tokens: tuple[int, ...]) -> SampledTokens:
    return delivery(member, sampled_segment(tokens, version=3, instance="rollout-0"))


def job_on(rows: list[dict[str, Any]], job: Path, tmp_path: Path, *overrides: str) -> RunConfig:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    return loading.load(job, (f"task.source=jsonl:{tmp_path}/rows.jsonl", "task.options={}", *overrides))


def test_failed_responses_are_excluded_and_repeated_prompts_count_once(job: Path, tmp_path: Path) -> None:
    """The last 6 of 60 rows are held out, two of them equal, so there are 5 prompts although 200 are requested."""
    prompts = [f"{i}+{i}=" for i in range(58)] + ["1-1=", "1-1="]
    (tmp_path / "mine.py").write_text(
        "def moody(answer, record):\n    if answer == '7':\n        raise ValueError('no\\nmore')\n"
        "    return float(answer)\n"
    )
    config = job_on(
        [{"prompt": p, "answer": "0"} for p in prompts], job, tmp_path, "task.eval_prompts=200",
        f"reward.function={tmp_path}/mine.py:moody",
    )  # fmt: skip
    answer: dict[str, str | None] = {"54+54=": "1", "55+55=": "0", "56+56=": "7", "57+57=": None, "1-1=": "1"}
    result = evaluate(config, answer, tmp_path)
    assert (result.version, result.num_prompts) == (3, 5)
    assert result.sampled == result.greedy == pytest.approx(2 / 3)
    assert result.sampled_stderr == pytest.approx(math.sqrt(2 / 9 * 3 / 2 / 3))
    assert (result.sampled_failed, result.greedy_failed) == (2, 2)
    assert (result.reward_fingerprint, result.input_changes) == ("r", ("a change of held-out",))
    assert result.line == (
        "held-out reward at version 3: 0.667 ± 0.333 [0.208, 0.939] at temperature, 0.667 ± 0.333 [0.208, 0.939] "
        f"greedy (5 prompts, 2 not scored; first: {result.failure})"
    )
    assert "\n" not in result.line
    assert fewer_prompts_warning(200, 5, "jsonl:x") == (
        "task.eval_prompts = 200: jsonl:x gives only 5 distinct held-out prompts that are short enough"
    )
    assert fewer_prompts_warning(5, 5, "jsonl:x") == ""


def test_a_change_since_version_0_needs_the_same_reward_data_and_template(job: Path, tmp_path: Path) -> None:
    config = job_on([{"prompt": f"{i}+{i}=", "answer": "0"} for i in range(120)], job, tmp_path, "task.eval_prompts=12")
    answer: dict[str, str | None] = {f"{i}+{i}=": "0" for i in range(120)}
    first = tmp_path / "first"
    first.mkdir()
    result = evaluate(config, answer, first)
    for changed in ("", "data", "template"):
        folder = tmp_path / f"changed-{changed}"
        folder.mkdir()
        write_rewards(folder, 0, read_rewards(first, 3))
        fingerprints = {"reward": "r", "data": "d", "template": "t"} | ({changed: "other"} if changed else {})
        base = Evaluation.summarize(0, [score(1)] * 3, [score(1)] * 3, fingerprints, name=result.name)
        figures = evaluate(config, answer, folder, (base,)).figures
        assert figures is not None and (figures.sampled_change is None) == bool(changed), changed


def score(reward: float, error: str = "") -> ScoredResponse:
    return ScoredResponse(reward=reward, error=error)


@pytest.mark.usefixtures("drawn_summary")
def test_an_evaluation_without_scores_is_reported_and_drawn(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = Evaluation.summarize(0, [score(0, "no")] * 3, [score(1), score(0, "no"), score(0)], {})
    assert (none.sampled, none.sampled_stderr, none.greedy) == (None, None, 0.5)
    assert none.line == (
        "held-out reward at version 0: none scored at temperature, 0.500 ± 0.500 greedy (3 prompts, not scored: 3 at "
        "temperature, 1 greedy; first: no)"
    )
    config = loading.load(job, (f"runs_dir={tmp_path}",))
    config.run_dir.mkdir()
    step = dict.fromkeys(
        (
            "step", "reward", "staleness_mean", "staleness_max", "staleness_in_flight", "staleness_in_queue",
            "response_mean", "response_max", "response_tokens", "elapsed_s", "probe_drift",
        ),
        0.0,
    )  # fmt: skip
    fewer = Evaluation.summarize(0, [score(1)], [score(1)], {})
    outcomes = RunReport(steps=[step_with_tokens_per_s(step, None)], evaluations=[none, fewer], notes=["one"])
    summary = json.loads(json.dumps(report.write_summary(config, outcomes, config.run_dir)))
    assert summary["evaluations"][0]["sampled"] is None
    assert summary["logprob_mismatch"] == {"mean": None, "max": None}
    assert summary["notes"] == ["one"]
    assert (config.run_dir / "summary.png").stat().st_size > 10_000
    Display(config, quiet=True).summarize(RunEnd(run_dir=config.run_dir, summary=summary, stop_reason=""))
    shown = " ".join(capsys.readouterr().err.split())
    assert "none scored" in shown
    assert "cannot be compared" in shown
    assert "see: " in shown
    assert "talk to it" not in shown, "there is no checkpoint"
    (config.run_dir / "checkpoints" / "step-000001").mkdir(parents=True)
    Display(config, quiet=True).summarize(RunEnd(run_dir=config.run_dir, summary=summary, stop_reason=""))
    assert "step-000001; talk to it: staleflow chat" in " ".join(capsys.readouterr().err.split())
    none_trained = {**summary, "steps": 0, "staleness_histogram": {}}
    Display(config, quiet=True).summarize(
        RunEnd(run_dir=config.run_dir, summary=none_trained, stop_reason="interrupted")
    )
    shown = " ".join(capsys.readouterr().err.split())
    assert "no step was finished; go on: staleflow resume" in shown
    assert "train" not in shown.partition("go on")[2]


def test_evaluations_round_trip(tmp_path: Path) -> None:
    rewards = {f"p{i}": PromptRewards(sampled=(0.0, 1.0), answers=("a", "b"), greedy=(1.0,)) for i in range(20)}
    figures = compute_figures(rewards, 2, rewards)
    scores = [score(1)] * 200
    written = Evaluation.summarize(5, scores, scores, {"reward": "a"}, ["changed"], samples=2, figures=figures)
    write_evaluations(tmp_path, [written])
    write_rewards(tmp_path, 5, {"held-out": rewards})
    assert read_rewards(tmp_path, 5) == {"held-out": rewards}
    assert read_rewards(tmp_path, 6) == {}
    assert read_evaluations(tmp_path) == [written]
    (tmp_path / "evaluations.json").write_text('[{"version"')
    with pytest.raises(StoreError, match=r"evaluations\.json: cannot be read"):
        read_evaluations(tmp_path)
    (tmp_path / "evaluations.json").write_text('[{"version": 5}]')
    with pytest.raises(
        StoreError, match=r"evaluations\.json: cannot be read: \[0\].*; remove it to resume without earlier evaluations"
    ):
        read_evaluations(tmp_path)


def test_statistics_use_prompts_with_all_responses_scored(tmp_path: Path) -> None:
    """Twelve prompts with three answers each: one correct and two equal wrong ones. One prompt has an unscored
    response, and another an unscored greedy response."""
    right_once = PromptRewards(sampled=(0.0, 1.0, 0.0), answers=("a", "b", "a"), greedy=(1.0,))
    rewards = {f"p{i}": right_once for i in range(10)}
    rewards["one is missing"] = PromptRewards(sampled=(1.0, 1.0), answers=("b", "b"), greedy=(1.0,))
    rewards["no greedy one"] = PromptRewards(sampled=(0.0, 1.0, 0.0), answers=("a", "b", "a"))
    base = {prompt: PromptRewards(sampled=(0.0, 1.0, 0.0), greedy=(0.0,)) for prompt in [*rewards, "only before"]}
    figures = compute_figures(rewards, 3, base)
    assert figures.best_of == pytest.approx({2: 2 / 3, 3: 1.0})
    assert figures.majority == 0.0
    assert figures.greedy_change is not None and figures.sampled_change is not None
    assert (figures.greedy_change.num_prompts, figures.greedy_change.mean) == (11, 1.0)
    assert figures.sampled_change.num_prompts == 12
    assert figures.sampled_change.mean == pytest.approx(2 / 3 / 12)
    assert figures.lines(3) == [
        "pass@2 0.667",
        "pass@3 1.000 [0.741, 1.000]",
        "majority@3 0.000 [0.000, 0.259]",
        "sampled since version 0: +0.056 [-0.067, 0.178], p = 1.000",
        "greedy since version 0: +1.000 [1.000, 1.000], p < 0.001",
    ]
    graded = compute_figures({"p": PromptRewards(sampled=(0.5, 0.25))}, 2, {})
    assert graded.lines(2) == ["best@2 0.500"], "no interval of one prompt, no majority of two"


def test_evaluations_with_different_rewards_are_not_compared() -> None:
    def by(version: int, reward: str, count: int = 4, data: str = "d") -> Evaluation:
        scores = [score(1)] * count
        return Evaluation.summarize(version, scores, scores, {"reward": reward, "data": data, "template": "t"})

    assert explain_not_comparable([by(0, "a"), by(5, "a")]) == []
    assert explain_not_comparable([by(0, "a"), by(5, "b"), by(9, "b", 3, "e")]) == [
        "held-out rewards at versions 0 and 5 cannot be compared: different reward functions",
        "held-out rewards at versions 5 and 9 cannot be compared: different data, 4 and 3 prompts",
    ]
    assert explain_not_comparable([by(0, ""), by(5, "b")]) == []  # one is not known


def test_an_engine_failure_is_an_empty_response() -> None:
    class Failing:
        def submit(self, requests: Any) -> None: ...

        def events(self, within_s: float) -> list[FailedRequest]:
            return [FailedRequest(trajectory=TrajectoryId(-1), route_number=0, error="out of memory")]

    engine: Any = Failing()
    assert generate_responses(engine, [(1, 2)], max_new_tokens=[4], greedy=True, timeout_s=5) == [None]
