"""The calculator, the sandbox, and tasks with a verifier and tools."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.pipeline.config import actor_settings, loading
from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_config import TOOL_NAMES
from staleflow.tasks.episodes.calculator import calculate
from staleflow.tasks.episodes.episode_host import EpisodeHost, EpisodeHostSettings
from staleflow.tasks.episodes.sandbox import MAX_OUTPUT_BYTES, _reap, run_python
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.episodes.tools import MAX_CALLS_PER_TURN, TOOLS, parse_tool_calls
from staleflow.tasks.rendering.task_source import Message, Task
from staleflow.tasks.sources.task_sources import EvalSourceRecord
from tests.support.games import host_episode


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("-(2 - 5)^2", "-9"),
        ("(1 + 2) * 4 / 8 =", "1.5"),
        ("1,234 × 2", "2468"),
        ("9 ÷ 3 − 1", "2"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 100", str(2**100)),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + abs(-2) + max(1, 2) + min(3, 4) + round(2.567, 1)", "13.6"),
        ("1e300 * 1e300", "error: the result is not a finite real number"),
        ("1 / 0", "error: division by zero"),
        ("(-8) ** 0.5", "error: the result is not a finite real number"),
        ("9 ** 9 ** 9", "error: the result is too large"),
        ("(2 ** 4000) * (2 ** 4000)", "error: the result is too large"),
        ("0 ** -1", "error: 0.0 cannot be raised to a negative power"),
        ("", "error: the expression is empty"),
        ("two", "error: only numbers, + - * / // % **, parentheses and abs, round, sqrt, min, max are supported"),
        (
            "__import__('os').system('ls')",
            "error: only numbers, + - * / // % **, parentheses and abs, round, sqrt, min",
        ),
        ("open(1)", "error: unknown function open; there are abs, round, sqrt, min, max"),
        ("round(1, 2, 3)", "error: round does not take 3 numbers"),
        ("1 +", "error: not an arithmetic expression"),
        ("(" * 500, "error: not an arithmetic expression"),
        ("1" * 1001, "error: the expression has 1001 characters; at most 1000 are read"),
        ("True + 1", "error: only numbers"),
        ("sqrt(-1)", "error: not an arithmetic expression"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    outcome = calculate(expression)
    assert outcome.startswith(result) if result.startswith("error") else outcome == result


@given(st.text("0123456789+-*/%^(). ,esqrtminab×", max_size=60))
def test_the_calculator_returns_quickly_for_any_expression(expression: str) -> None:
    begin = time.thread_time()
    assert calculate(expression)
    assert time.thread_time() - begin < 1


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from(["+", "-", "*"]))
def test_the_calculator_is_exact_on_whole_numbers(a: int, b: int, sign: str) -> None:
    exact = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert calculate(f"({a}) {sign} ({b})") == str(exact)


def run_code(code: str, within_s: float = 20.0, memory_mib: int = 256) -> str:
    return asyncio.run(run_python(code, timeout_s=within_s, memory_mib=memory_mib))


def test_the_sandbox_returns_printed_output_and_the_last_value() -> None:
    assert run_code("import math\nprint('a')\nmath.comb(5, 2)") == "a\n10"
    assert run_code("x = 3") == "(no output)"
    assert run_code("print('é'); None") == "é"
    assert run_code("def f():\n    return 1 / 0\nf()") == (
        'Traceback (most recent call last):\n  File "code", line 3, in <module>\n  File "code", line 2, in f\n'
        "ZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in run_code("1 +")
    assert run_code("raise SystemExit(7)") == "(no output)"


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('1.1.1.1', 53), 1)",
        "import urllib.request; urllib.request.urlopen('http://1.1.1.1', timeout=1)",
        "open('/tmp/staleflow-sandbox', 'w')",
        "import os; os.open('/tmp/staleflow-sandbox', os.O_CREAT | os.O_WRONLY)",
        "import os; os.remove('/etc/hostname')",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['ls'])",
        "import os; os.system('ls') and 1 / 0",
        "import ctypes; ctypes.CDLL(None).fork()",
        "import os; os.kill(os.getppid(), 9)",
    ],
)
def test_the_sandbox_has_no_network_no_writable_files_and_no_other_processes(code: str) -> None:
    result = run_code(code)
    assert "Error" in result, result
    assert not Path("/tmp/staleflow-sandbox").exists()


def test_the_sandbox_hides_user_files_where_landlock_exists(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    result = run_code(f"print(open({str(tmp_path / 'secret')!r}).read())")
    assert ("PermissionError" in result) == has_landlock()
    assert run_code("import json, random, decimal, datetime, collections; print(1)") == "1"


def has_landlock() -> bool:
    import ctypes

    return int(ctypes.CDLL(None).syscall(444, None, 0, 1)) >= 1


def test_the_sandbox_limits_time_memory_and_output() -> None:
    begin = time.monotonic()
    assert run_code("print('on')\nwhile True: pass", 2.0) == "on\nerror: stopped after 2 s"
    assert run_code("import time; time.sleep(1000)", 2.0) == "error: stopped after 2 s"
    assert time.monotonic() - begin < 20
    assert run_code("x = bytearray(10**10)").endswith("MemoryError")
    long = run_code("while True: print('a' * 1000)")
    assert long.endswith("error: stopped after 2000 bytes of output") and len(long) < MAX_OUTPUT_BYTES + 100
    assert "error: the process was killed" in run_code("import os, signal; os.abort()")


async def test_a_killed_process_with_unread_output_is_reaped() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("yes", stdout=pipe)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while not getattr(process.stdout, "_paused"):  # noqa: B009  mypy does not know it
            await asyncio.sleep(0.01)
        process.kill()
        await _reap(process)
    assert process.returncode == -signal.SIGKILL


async def test_a_cancelled_sandbox_leaves_no_process() -> None:
    task = asyncio.ensure_future(run_python("import time; time.sleep(1000)", timeout_s=100, memory_mib=256))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await task


async def test_a_cancellation_while_a_process_ends_is_raised() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "1000", stdout=asyncio.subprocess.PIPE)
    task = asyncio.ensure_future(_reap(process))
    await asyncio.sleep(0)  # it waits now
    task.cancel()
    await asyncio.sleep(0.01)
    process.kill()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert process.returncode == -signal.SIGKILL


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tool_calls_are_parsed_in_order() -> None:
    text = f"First <calculator>1+1</calculator>, then {call('python', code='print(1)')} and <python>2"
    assert [(c.name, c.argument, c.is_tagged, c.error) for c in parse_tool_calls(text, TOOLS)] == [
        ("calculator", "1+1", True, ""),
        ("python", "print(1)", False, ""),
        ("python", "2", True, ""),
    ]
    assert parse_tool_calls("the answer is <b>4</b>", TOOLS) == []
    assert set(TOOLS) == set(TOOL_NAMES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{oops}</tool_call>", "the call is not JSON: Expecting property name"),
        ("<tool_call>[1]</tool_call>", 'a call is {"name": ..., "arguments": {...}}'),
        (call("search", query="x"), "there is no tool search; there are calculator, python"),
        (call("calculator", formula="1"), 'calculator takes {"expression": text}'),
        ('<tool_call>{"name": "calculator"}</tool_call>', 'calculator takes {"expression": text}'),
        (call("calculator", expression=4), ""),
    ],
)
def test_an_invalid_tool_call_reports_its_problem(text: str, problem: str) -> None:
    (found,) = parse_tool_calls(text, TOOLS)
    assert found.error.startswith(problem) if problem else not found.error


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<python>", "</python>", "{", '"name"', ":", "}", "1 "]))
)
def test_arbitrary_text_parses_to_valid_calls_or_problems(pieces: list[str]) -> None:
    text = "".join(pieces)
    calls = parse_tool_calls(text, TOOLS)
    assert bool(calls) == ("<tool_call>" in text or "<python>" in text)
    assert all(call.error or call.name in TOOLS for call in calls)


@pytest.fixture
def tool_job(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12 * 12?", "answer": "144"}\n' * 3)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\npath = "x"\n[task]\nsource = "jsonl:{tmp_path}/rows.jsonl"\nanswer_pattern = "so (\\\\d+)"\n'
        '[environment]\ntools = ["calculator", "python"]\nmax_turns = 3\n'
    )
    return job


def settings(job: Path, *overrides: str) -> EpisodeHostSettings:
    return actor_settings.episode_settings(loading.load(job, overrides))


async def answers(episodes: EpisodeHost, turns: Sequence[str], task: Task, **key: Any) -> list[HostedStepResult]:
    of = EpisodeKey(group=0, **key)
    cut = [turn.endswith("...") for turn in turns]
    return [await episodes.step(of, task.record, turns[: i + 1], truncated=cut[i]) for i in range(len(turns))]


async def test_a_task_with_a_verifier_is_played_with_tools(tool_job: Path) -> None:
    episode_settings = settings(tool_job)
    assert episode_settings.roles == ("tool",)
    async with host_episode(episode_settings) as (episodes, task):
        await episodes.check()
        first, second, last = await answers(
            episodes, ["<calculator>12*12</calculator>", call("python", code="12 ** 2"), "so 144"], task
        )
        assert first.messages == (Message("tool", "<result>144</result>"),)
        assert second.messages == (Message("tool", "144"),)
        assert (last.ended, last.reward, last.error) == (True, 1.0, "")
        await answers(episodes, ["so 144 <calculator>1"], task, member=4)
        early = await episodes.end(EpisodeKey(group=0, member=4), task.record)
        assert (early.ended, early.reward) == (True, 1.0), "the last turn is scored"
        (wrong,) = await answers(episodes, ["so 143"], task, member=1)
        assert (wrong.ended, wrong.reward) == (True, 0.0)
        (cut,) = await answers(episodes, ["so 144 <calculator>..."], task, member=2)
        assert (cut.ended, cut.reward) == (True, 1.0)
        *_, third = await answers(episodes, ["<calculator>1"] * 2 + ["so 144 <calculator>1"], task, member=3)
        assert (third.ended, third.reward) == (True, 1.0)
        (invalid,) = await answers(
            episodes, ['<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'], task, member=5
        )
        assert invalid.messages[0].content.startswith("error: there is no tool ?; there are ")
        (many,) = await answers(episodes, ["<calculator>1</calculator>" * 20], task, member=4)
        assert len(many.messages) == MAX_CALLS_PER_TURN + 1
        assert (
            many.messages[-1].content == f"<result>error: a turn may call at most {MAX_CALLS_PER_TURN} tools</result>"
        )


async def test_a_generated_task_is_played_with_tools(tool_job: Path) -> None:
    episode_settings = settings(tool_job, "task.source=reasoning_gym:chain_sum", "task.answer_pattern=")
    async with host_episode(episode_settings) as (episodes, task):
        first, last = await answers(episodes, ["<calculator>1 + 1</calculator>", task.record["answer"]], task)
        assert (first.error, first.messages) == ("", (Message("tool", "<result>2</result>"),))
        assert (last.error, last.reward) == ("", 1.0)


async def test_an_evaluation_set_uses_its_source_and_reward_with_tools(tool_job: Path) -> None:
    (tool_job.parent / "other.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    (tool_job.parent / "mine.py").write_text(
        "def half(answer, record):\n    return 0.5 * (answer == record['answer'])\n"
    )
    episode_settings = settings(
        tool_job,
        f"evaluation.sets.other.source=jsonl:{tool_job.parent}/other.jsonl",
        f"evaluation.sets.other.reward={tool_job.parent}/mine.py:half",
    )
    assert episode_settings.scoring is not None
    (own,) = episode_settings.scoring.eval_sets
    task = own.build().task(0, held_out=True)
    record = pickle.loads(pickle.dumps(EvalSourceRecord.of("other", task.record)))
    async with host_episode(episode_settings) as (episodes, _):
        key = EpisodeKey(group=-1, held_out=True)
        first = await episodes.step(key, record, ["<calculator>2+2</calculator>"], truncated=False)
        assert first.messages == (Message("tool", "<result>4</result>"),)
        last = await episodes.step(key, record, ["<calculator>2+2</calculator>", "so 4"], truncated=False)
        assert (last.ended, last.reward, last.error) == (True, 0.5, "")


async def test_a_tool_timeout_is_reported_to_the_model(tool_job: Path) -> None:
    async with host_episode(settings(tool_job, "environment.tool_timeout_s=1")) as (episodes, task):
        (late,) = await answers(episodes, ["<python>while True: pass</python><calculator>1</calculator>"], task)
        assert [m.content for m in late.messages] == [
            "<result>error: stopped after 1 s</result>",
            "<result>error: the calls of this turn took longer than 1 s</result>",
        ]
        assert not late.ended and not late.error


async def test_a_tool_that_fails_on_this_machine_is_rejected_before_the_run(tool_job: Path) -> None:
    async with host_episode(settings(tool_job, "environment.memory_mib=1")) as (episodes, _):
        with pytest.raises(ConfigError, match=r"environment\.tools: python does not work on this machine: import math"):
            await episodes.check()


async def test_a_verifier_exception_is_an_error_and_not_a_zero_reward(tool_job: Path) -> None:
    (tool_job.parent / "mine.py").write_text("def angry(answer, record):\n    raise ValueError('no')\n")
    async with host_episode(settings(tool_job, f"reward.function={tool_job.parent}/mine.py:angry")) as (episodes, task):
        (answer,) = await answers(episodes, ["so 144"], task)
        assert (answer.ended, answer.error) == (True, "ValueError: no (mine.py, line 2)")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'environment.tools=["calculater"]',
            "each must be one of calculator, python, or your own, file.py:NAME, not 'calculater'; did you mean",
        ),
        ("environment.tools=calculator", "environment.tools must be a list, not 'calculator'"),
        ("environment.tools=[3]", "environment.tools: each must be a string, not 3"),
        (
            "environment.tool_timeout_s=30",
            "environment.tool_timeout_s = 30 must be less than environment.step_timeout_s = 30",
        ),
        ("task.source=gymnasium:Taxi-v3", "environment.tools: task.source = 'gymnasium:Taxi-v3' is an environment of"),
        ("task.eval_source=gymnasium:Taxi-v3", "either both it and task.source = .* are environments of many turns"),
    ],
)
def test_settings_incompatible_with_tools_give_a_one_line_error(tool_job: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(tool_job, override)
    assert "\n" not in str(caught.value)
