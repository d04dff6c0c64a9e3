"""Task sources, rewards and their scoring process, and published weights."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights import weight_folder
from staleflow.stores.weights.weight_folder import WeightFolder
from staleflow.stores.weights.weight_hash import fingerprint
from staleflow.tasks.rendering.task_source import TaskSource, distinct_held_out
from staleflow.tasks.settings.task_config import RewardConfig, RewardPart, TaskConfig
from staleflow.tasks.sources import reward_process
from staleflow.tasks.sources.reasoning_gym_tasks import ReasoningGym
from staleflow.tasks.sources.reward_process import Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import SourceSettings, extract_answer, make_reward, make_source

OPTIONS = {"min_terms": 2, "max_terms": 3}

REWARDS = """
import math, os, time

def length(answer, record):
    return len(answer) / 10, {"length": len(answer)}

def moody(answer, record):
    print("a reward may print")
    if answer == "raise":
        raise ValueError("I do not like it")
    if answer == "hang":
        time.sleep(1000)
    if answer == "nan":
        return math.nan
    if answer == "text":
        return "good"
    if answer == "die":
        os._exit(3)
    return 1.0

def typed(answer, record):
    import fractions
    import numpy as np
    return {
        "numpy": (np.float32(0.5), {"n": np.int64(3), "f": np.float32(2), "b": np.bool_(True), 7: 1}),
        "array": np.array(0.25), "fraction": fractions.Fraction(1, 4), "bool": True, "none": None, "digits": "1",
        "vector": np.zeros(2), "three": (1, 2, 3), "parts": (1.0, [1]), "huge": 1e300,
        "part text": (1.0, {"a": "1"}), "part nan": (1.0, {"a": math.nan}), "part none": (1.0, {"a": None}),
    }[answer]

def sometimes(answer, record):
    if answer == "raise":
        raise ValueError("not this one")
    return math.nan if answer == "nan" else 1
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 2)
    return path


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def scorer(
    function: str,
    timeout_s: float = 1.0,
    pattern: str = "",
    rows: Path | None = None,
    parts: Mapping[str, RewardPart] = MappingProxyType({}),
) -> Scorer:
    """Return a scorer. rows: a file of prompts used instead of chain_sum, whose package takes seconds to import."""
    return Scorer(
        ScoringSettings(
            source=SourceSettings(
                task=TaskConfig(
                    source="reasoning_gym:chain_sum" if rows is None else f"jsonl:{rows}",
                    options=OPTIONS if rows is None else {},
                    answer_pattern=pattern,
                ),
                seed=1,
            ),
            reward=RewardConfig(function=function, parts=dict(parts), timeout_s=timeout_s),
        )
    )


def test_a_source_is_a_function_of_the_index() -> None:
    first, second = ReasoningGym("chain_sum", OPTIONS, 4), ReasoningGym("chain_sum", OPTIONS, 4)
    assert [first.task(i).prompt for i in range(5)] == [second.task(i).prompt for i in range(5)]
    assert first.task(0).prompt != ReasoningGym("chain_sum", OPTIONS, 5).task(0).prompt


def test_a_data_set_that_cannot_draw_a_prompt_gives_a_one_line_error() -> None:
    with pytest.raises(ConfigError, match=r"pool_matrix: it cannot draw prompt 10{12}: ValueError: Seed must be"):
        ReasoningGym("pool_matrix", {}, 0).task(0, held_out=True)


def test_held_out_prompts_differ_from_training_prompts() -> None:
    source = ReasoningGym("chain_sum", {"min_digits": 4, "max_digits": 4}, 4)
    train = {source.task(i).prompt for i in range(200)}
    assert not train & {source.task(i, held_out=True).prompt for i in range(200)}


def prompts_of(source: TaskSource, count: int) -> list[Any]:
    return [source.task(i).prompt for i in range(count)]


def test_held_out_prompts_are_never_drawn_for_training() -> None:
    """Many two-digit sums are held out here, so random draws repeat them often."""
    source = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1}, 4)
    held_out = {t.prompt for t in distinct_held_out(source, 110)}
    assert len(held_out) == 110
    assert len({source.task(i, held_out=True).prompt for i in range(110)}) < 110, "some are drawn twice"
    drawn, excluding_held_out = prompts_of(source, 300), source.excluding_held_out(110)
    kept = prompts_of(excluding_held_out, 300)
    assert set(drawn) & held_out
    assert not set(kept) & held_out
    # All others keep their places, and each draw is a function of its index alone.
    assert [b for a, b in zip(drawn, kept, strict=True) if a not in held_out] == [d for d in drawn if d not in held_out]
    again = source.excluding_held_out(110)
    assert [again.task(i).prompt for i in reversed(range(300))] == kept[::-1]
    replaced = sum(d in held_out for d in drawn)
    assert (
        excluding_held_out.held_out_notice
        == f"{replaced} of 300 prompts drawn for training were held out, and replaced"
    )
    assert prompts_of(source.excluding_held_out(0), 300) == drawn


def test_excluding_held_out_keeps_the_index_of_distinct_prompts() -> None:
    source = ReasoningGym("chain_sum", {"min_terms": 4, "min_digits": 4}, 4)
    excluding_held_out = source.excluding_held_out(50)
    assert prompts_of(excluding_held_out, 100) == prompts_of(source, 100)
    assert excluding_held_out.held_out_notice == ""


def test_a_source_with_only_held_out_prompts_gives_a_one_line_error() -> None:
    source = ReasoningGym("chain_sum", {"min_terms": 1, "max_terms": 1, "max_digits": 1}, 4).excluding_held_out(200)
    with pytest.raises(ConfigError, match=r"draws gave only prompts that are held out; lower task\.eval_prompts = 200"):
        source.task(0)


def write_rows(path: Path, prompts: Sequence[str]) -> Path:
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": "a"}) for p in prompts))
    return path


def rows_of(path: Path) -> TaskSource:
    return make_source(f"jsonl:{path}", {}, 0)


def test_rows_with_a_held_out_prompt_are_not_trained(tmp_path: Path) -> None:
    rows = [f"p{i}" for i in range(17)]
    source = rows_of(write_rows(tmp_path / "data.jsonl", [*rows[:3], "same", *rows[3:], "other", "same"]))
    assert "same" in prompts_of(source, 18)
    excluding_held_out = source.excluding_held_out(1)
    assert prompts_of(excluding_held_out, 36) == ["p0", "p1", "p2", *rows[3:], "p0", "p1", "p2", *rows[3:], "p0", "p1"]
    assert "1 of 20 rows" in excluding_held_out.held_out_notice
    assert [t.prompt for t in distinct_held_out(excluding_held_out, 200)] == ["other", "same"]
    repeated = rows_of(write_rows(tmp_path / "repeated.jsonl", [*(f"p{i}" for i in range(36)), "a", "a", "b", "c"]))
    assert [t.prompt for t in distinct_held_out(repeated, 2)] == ["a", "b"], "later rows replace duplicates"
    unique = rows_of(write_rows(tmp_path / "unique.jsonl", rows))
    assert prompts_of(unique.excluding_held_out(5), 40) == prompts_of(unique, 40)
    assert unique.excluding_held_out(5).held_out_notice == ""


@pytest.mark.parametrize("count", [1, 2, 10])
def test_rows_of_one_prompt_are_trained_on_if_none_are_held_out(tmp_path: Path, count: int) -> None:
    source = rows_of(write_rows(tmp_path / "one.jsonl", ["same"] * count))
    assert prompts_of(source.excluding_held_out(0), 2) == ["same", "same"]
    message = rf"held-out row \(the last 1 of {count}\); add rows with other prompts, or set task\.eval_prompts = 0$"
    with pytest.raises(ConfigError, match=message):
        source.excluding_held_out(1)


def test_held_out_prompts_trained_by_a_user_source_are_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Few:\n    def __init__(self, options, seed): pass\n"
        "    def record(self, index, held_out): return {'prompt': str(index % 9)}\n"
        "    def score(self, answer, record): return 0.0\n"
    )
    source = make_source(f"{tmp_path}/mine.py:Few", {}, 0).excluding_held_out(4)
    assert prompts_of(source, 9) == [str(i) for i in range(9)]
    assert "4 of 9 prompts that were trained on are also held out" in source.held_out_notice


def test_reasoning_gym_scores_with_its_verifier() -> None:
    source = ReasoningGym("chain_sum", OPTIONS, 4)
    task = source.task(0)
    assert source.score(task.record["answer"], task.record) == 1.0
    assert source.score("no number", task.record) < 0.5


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": f" a {i}"}) for i in range(20)))
    source = rows_of(path)
    assert [source.task(i).prompt for i in (0, 17, 18, 19)] == ["p0", "p17", "p0", "p1"]
    assert {source.task(i, held_out=True).prompt for i in range(5)} == {"p18", "p19"}
    assert source.score("a  3", source.task(3).record) == 1.0


@pytest.mark.parametrize("source", ["chain_sum", "reasoning_gym:", "reasoning_gym:no_such_thing", "http:x"])
def test_an_unknown_source_gives_a_one_line_error(source: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.source"):
        make_source(source, {}, 0)


OWN = """
class Doubles:
    def __init__(self, options, seed):
        self.first = options.get("first", 0) + seed

    def record(self, index, held_out):
        number = self.first + index + (10**6 if held_out else 0)
        return {"prompt": f"{number}+{number}=", "answer": str(2 * number)}

    def score(self, answer, record):
        return float(answer == record["answer"]), {"letters": float(len(answer))}


def broken(options, seed):
    raise KeyError("first")


class Silent(Doubles):
    def record(self, index, held_out):
        return {"prompt": "", "answer": "1"}


class Speechless(Doubles):
    def record(self, index, held_out):
        return {"answer": "1"}
"""


def test_a_user_task_source_gives_prompts_and_scores(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    source = make_source(f"{tmp_path}/mine.py:Doubles", {"first": 3}, 2)
    task = source.task(4)
    assert task.prompt == "9+9="
    assert source.task(4, held_out=True).prompt == "1000009+1000009="
    settings = ScoringSettings(
        source=SourceSettings(task=TaskConfig(source=f"{tmp_path}/mine.py:Doubles", options={"first": 3}), seed=2),
        reward=RewardConfig(),
    )
    with closing(Scorer(settings)) as scorer:
        assert [s.reward for s in scorer.score([("18", task.record), ("8", task.record)])] == [1.0, 0.0]
    for name, message in (
        ("broken", "cannot be created: KeyError: 'first'"),
        ("Speechless", "record 0 must be a dict with a `prompt`"),
        ("Silent", "the prompt of record 0 is empty; a prompt must have a text that the model answers"),
        ("Nothing", "has no function Nothing"),
    ):
        with pytest.raises(ConfigError, match=r"task\.source = ") as caught:
            make_source(f"{tmp_path}/mine.py:{name}", {}, 0)
        assert message in str(caught.value)


def test_extract_answer_returns_the_last_match() -> None:
    assert extract_answer(r"so(-?\d+)\.", "1+1=2;so2.so-3.") == "-3"
    assert extract_answer(r"so(-?\d+)\.", "nothing") == ""
    assert extract_answer("", "  all of it ") == "all of it"


def test_math_verify_accepts_equal_expressions() -> None:
    """Whole responses, and expressions without dollar signs as answer_pattern finds them."""
    equal = [
        (r"$\frac{1}{2}$", "0.5"), (r"\sqrt{2}", r"\sqrt{2}"), (r"2\pi", r"$2\pi$"), ("1+x^2", "x^2+1"),
        ("(1,2)", "(1, 2)"), ("The answer is 3/4.", "0.75"), (r"So \(2\pi\)", r"2\pi"), ("5 apples", "5"),
        (r"It is \boxed{\sqrt{2}}.", r"\sqrt{2}"),
    ]  # fmt: skip
    different = [(r"$\frac{1}{3}$", "0.5"), (r"2\pi", "2"), ("", "2"), ("no idea", "2"), (r"\sqrt{2}", "2")]
    with closing(scorer("math_verify", timeout_s=20)) as reward_scorer:
        scores = reward_scorer.score([(answer, {"answer": gold}) for answer, gold in (*equal, *different)])
    assert [s.reward for s in scores] == [1.0] * len(equal) + [0.0] * len(different)


def test_a_users_reward_with_parts(rewards: Path, rows: Path) -> None:
    with closing(scorer(f"{rewards}:length", pattern="<(.*)>", rows=rows)) as reward_scorer:
        (score,) = reward_scorer.score([("x <abc>", {})])
    assert score.reward == pytest.approx(0.3)
    assert (score.parts, score.error) == ({"length": 3.0}, "")


def test_a_reward_whose_process_ends_while_it_loads_gives_a_one_line_error(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "aborts.py").write_text("import os\n\nos.abort()\n")
    with (
        closing(scorer(f"{tmp_path}/aborts.py:reward", rows=rows)) as reward_scorer,
        pytest.raises(ConfigError, match=r"aborts\.py:reward': its process ended while it loaded"),
    ):
        reward_scorer.check()


def test_ctrl_c_does_not_end_the_reward_process(rows: Path) -> None:
    with closing(scorer("task", rows=rows)) as reward_scorer:
        reward_scorer.check()
        process = reward_scorer._process
        assert process is not None
        process.send_signal(signal.SIGINT)
        assert reward_scorer.score([("2", {"answer": "2"})])[0].error == ""
        assert reward_scorer._process is process


def test_the_error_names_a_scoring_process_that_starts_too_slowly(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_process, "START_S", 0.0)
    reward_scorer = scorer("task", rows=rows)
    slow = "the scoring process took longer than 0 s to load the reward"
    with pytest.raises(TimeoutError, match=slow):
        reward_scorer.check()
    assert [score.error for score in reward_scorer.score([("2", {})])] == [slow]
    reward_scorer.close()


def test_reward_faults_are_recorded_and_other_responses_are_scored(rewards: Path, rows: Path) -> None:
    with closing(scorer(f"{rewards}:moody", rows=rows)) as reward_scorer:
        scores = reward_scorer.score([(a, {}) for a in ("ok", "raise", "hang", "nan", "text", "die", "ok")])
    assert [s.reward for s in scores] == [1.0, 0, 0, 0, 0, 0, 1.0]
    ok, raised, hung, nan, text, died, again = (s.error for s in scores)
    assert ok == again == ""
    assert raised == "ValueError: I do not like it (rewards.py, line 10)"
    assert hung == "the reward took longer than 1 s"
    assert nan == "the reward is nan; it must be a finite number"
    assert text == "the reward is 'good'; it must be a number"
    assert died.startswith("the reward process died")


def test_rewards_and_parts_are_stored_as_floats_and_other_types_are_rejected(rewards: Path, rows: Path) -> None:
    reward_scorer = scorer(f"{rewards}:typed", rows=rows, timeout_s=20)
    answers = ("numpy", "array", "fraction", "bool")
    refused = {
        "none": "the reward is None; it must be a number",
        "digits": "the reward is '1'; it must be a number",
        "vector": "the reward is array([0., 0.]); it must be a number",
        "three": "the reward is (1, 2, 3); it must be a number, or (number, its parts by name)",
        "parts": "the reward is (1.0, [1]); it must be a number, or (number, its parts by name)",
        "huge": "the reward is 1e+300; it must be a finite number",
        "part text": "part a of the reward is '1'; it must be a number",
        "part nan": "part a of the reward is nan; it must be a finite number",
        "part none": "part a of the reward is None; it must be a number",
    }
    try:
        scores = reward_scorer.score([(a, {}) for a in (*answers, *refused)])
    finally:
        reward_scorer.close()
    assert [s.reward for s in scores[:4]] == [0.5, 0.25, 0.25, 1.0]
    assert scores[0].parts == {"n": 3.0, "f": 2.0, "b": 1.0, "7": 1.0}
    assert {type(value) for value in (scores[0].reward, *scores[0].parts.values())} == {float}
    assert [s.error for s in scores[4:]] == list(refused.values())
    assert {(s.reward, *s.parts) for s in scores[4:]} == {(0.0,)}


def test_a_weighted_sum_of_rewards_fails_if_any_part_fails(rewards: Path, rows: Path) -> None:
    parts = {
        "right": RewardPart(),
        "long": RewardPart(function=f"{rewards}:length", weight=-0.5),
        "moody": RewardPart(function=f"{rewards}:sometimes", weight=2),
    }
    with closing(scorer("task", rows=rows, parts=parts, timeout_s=20)) as reward_scorer:
        right, wrong, raised, nan = reward_scorer.score([(a, {"answer": "2"}) for a in ("2", "444", "raise", "nan")])
    assert right.reward == pytest.approx(1.0 - 0.5 * 0.1 + 2)
    assert right.parts == {"right": 1.0, "long": 0.1, "long.length": 1.0, "moody": 1.0}
    assert wrong.reward == pytest.approx(-0.5 * 0.3 + 2)
    assert (raised.reward, raised.parts, raised.error) == (
        0.0,
        {},
        "part moody: ValueError: not this one (rewards.py, line 33)",
    )
    assert nan.error == "part moody: the reward is nan; it must be a finite number"


def test_reward_parts_that_cannot_be_loaded_are_named(rewards: Path, rows: Path) -> None:
    for function, parts, message in (
        ("task", {"a": RewardPart(function="none.py:f")}, r"^reward\.parts\.a\.function = 'none\.py:f': cannot be l"),
        ("task", {"a": RewardPart(function="bare")}, r"^reward\.parts\.a\.function must be one of task, math_"),
        ("math_verify", {"a": RewardPart()}, r"^reward\.function = 'math_verify': there are reward\.parts too"),
    ):
        with pytest.raises(ConfigError, match=message):
            scorer(function, rows=rows, parts=parts).check()


@pytest.mark.parametrize(
    "definition", ["f(answer)", "f()", "f(answer, record, *, k)", "f(answer, record, k)", "f(answer, source)"]
)
def test_a_reward_with_other_arguments_is_rejected(tmp_path: Path, rows: Path, definition: str) -> None:
    (tmp_path / "mine.py").write_text(f"def {definition}:\n    return 1\n")
    with pytest.raises(ConfigError, match=r"mine\.py:f': must take \(answer, record\): "):
        make_reward(f"{tmp_path}/mine.py:f", make_source(f"jsonl:{rows}", {}, 0))


def test_a_reward_without_a_signature_is_rejected(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"'builtins:max': its arguments are unknown"):
        make_reward("builtins:max", make_source(f"jsonl:{rows}", {}, 0))


def test_an_optional_group_without_text_gives_an_empty_answer() -> None:
    assert [extract_answer("so( [0-9]+)?", text) for text in ("so 7", "so", "no")] == [" 7", "", ""]


def test_rewards_may_be_functions_of_an_installed_module() -> None:
    reward: Any = make_reward("operator:contains", ReasoningGym("chain_sum", OPTIONS, 0))
    assert reward("abc", "b") == 1.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(7, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def test_weights_are_published_atomically_with_their_fingerprint(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    held, path = folder.publish(PolicyVersion(3), tensors(0)), folder.path(PolicyVersion(3))
    assert held == fingerprint(weight_folder.read(path)) == fingerprint(tensors(0)) != fingerprint(tensors(1))
    assert [p.name for p in folder.folder.iterdir() if not p.name.startswith(".")] == [path.name]


def test_prune_removes_unused_old_versions(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    for version in range(5):
        folder.publish(PolicyVersion(version), tensors(version))
    assert folder.prune([PolicyVersion(2)]) == [0, 1, 3]
    assert folder.versions() == [2, 4]
    folder.remove()
    assert not folder.folder.exists()


def test_the_folder_of_a_killed_run_is_removed_and_that_of_a_live_run_is_not(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from staleflow.stores.weights.weight_folder import WeightFolder
import os, signal
folder = WeightFolder(Path({str(tmp_path)!r}) / "staleflow-dead-1")
(folder.folder / "v00000001.safetensors").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""
    living = WeightFolder(tmp_path / "staleflow-living-2")
    subprocess.run([sys.executable, "-c", script], check=False)
    assert [p.name for p in weight_folder.remove_unused_folders(tmp_path)] == ["staleflow-dead-1"]
    assert [p.name for p in tmp_path.iterdir()] == ["staleflow-living-2"]
    living.remove()


@pytest.mark.parametrize(("owner", "step"), [(Path, "mkdir"), (fcntl, "flock")])
def test_a_folder_removed_during_its_creation_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    """Another run removes orphan folders after the mkdir or before the lock."""
    path, real = tmp_path / "staleflow-new", getattr(owner, step)
    swept = []

    def disturbed(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(owner, step, real)
        if step == "mkdir":
            real(*args, **options)
            path.rmdir()
            swept.append(path)
        else:
            swept.extend(weight_folder.remove_unused_folders(tmp_path))
            real(*args, **options)

    monkeypatch.setattr(owner, step, disturbed)
    folder = WeightFolder(path)
    assert swept == [path]
    published = folder.publish(PolicyVersion(1), tensors(1))
    assert fingerprint(weight_folder.read(folder.path(PolicyVersion(1)))) == published
    assert weight_folder.remove_unused_folders(tmp_path) == []
    assert (path / weight_folder.LOCK_FILE).exists(), "else files of a killed run would not be removed"
    folder.remove()


def test_truncated_weights_are_rejected(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    folder.publish(PolicyVersion(0), tensors(0))
    path = folder.path(PolicyVersion(0))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StoreError, match="cannot be read"):
        weight_folder.read(path)
