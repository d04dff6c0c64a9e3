"""Output and names of user code are escaped for the terminal."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.stores.printable import printable
from staleflow.tasks.environments.child_programs import ChildPrograms
from staleflow.tasks.environments.terminal_output import MAX_LINE_CHARS, RelayedOutput
from staleflow.tasks.rendering.reward_values import MAX_NAME_CHARS, MAX_PARTS, InvalidReward, parse_reward
from staleflow.tasks.settings.task_config import RewardConfig, TaskConfig
from staleflow.tasks.sources.reward_process import Scorer, ScoringSettings
from staleflow.tasks.sources.task_sources import SourceSettings
from tests.support.games import host_episode
from tests.tasks.test_agents import acted, settings

CLEAR = "\\x1b[2J\\x07"
AGENT = f"""
import subprocess, sys
import httpx


async def run(base_url, key, task):
    print("begin{CLEAR}")
    sys.stderr.write("part {CLEAR}")
    print("end", file=sys.stderr)
    subprocess.run([sys.executable, "-c", "print('child{CLEAR}')"], check=True)
    async with httpx.AsyncClient(timeout=60) as client:
        messages = [{{"role": "user", "content": "what now?"}}]
        for does in ("go on", "raise"):
            answer = await client.post(
                base_url + "/chat/completions", headers={{"Authorization": "Bearer " + key}},
                json={{"model": "policy", "messages": messages}},
            )
            messages += [{{"role": "assistant", "content": "a"}}, {{"role": "user", "content": does}}]
    raise ValueError("it is {CLEAR} broken")


def score(answer, record):
    print("scoring{CLEAR}")
    if answer == "raise":
        raise ValueError("bad {CLEAR}\\n" + "x" * 10_000)
    return 1.0, {{"a{CLEAR}": 2.0}}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(AGENT)
    return tmp_path / "code.py"


@pytest.mark.parametrize("isolation", ["auto", "process"])
async def test_output_of_agents_and_programs_is_escaped_for_the_terminal(
    code: Path, isolation: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with host_episode(settings(f"agent:{code}:run", isolation=isolation, step_timeout_s=60.0)) as (
        episodes,
        task,
    ):
        capfd.readouterr()
        said = ""
        await acted(episodes, task, "a")
        answer = await acted(episodes, task, "a", "b")
        assert "ValueError: it is \\x1b[2J\\x07 broken" in answer.error
    while any(line not in said for line in ("begin\\x1b[2J", "part \\x1b[2J\\x07end", "child\\x1b[2J\\x07")):
        said += "".join(capfd.readouterr())
        await asyncio.sleep(0.01)
    assert "\x1b" not in said
    assert "\x07" not in said


def test_output_errors_and_names_of_reward_functions_are_escaped(code: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = code.with_name("rows.jsonl")
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2", "answer": "3"}\n')
    source = SourceSettings(task=TaskConfig(source=f"jsonl:{rows}"), seed=1)
    scorer = Scorer(ScoringSettings(source=source, reward=RewardConfig(function=f"{code}:score", timeout_s=60.0)))
    record = source.build().task(0).record
    named, raised = scorer.score([("good", record), ("raise", record)])
    scorer.close()
    assert named.error.startswith("a part of the reward is named 'a\\x1b[2J\\x07', 6 characters; a name must have ")
    assert raised.error.startswith("ValueError: bad \\x1b[2J\\x07 xxx")
    assert len(raised.error) < 600
    said = "".join(capfd.readouterr())
    assert said.count("scoring\\x1b[2J\\x07") == 2
    assert "\x1b" not in said


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[2J", "x" * 100_000, "\u202e"])
def test_a_reward_part_name_must_be_short_and_printable(name: str) -> None:
    with pytest.raises(InvalidReward) as refused:
        parse_reward((1.0, {name: 2.0}))
    assert len(str(refused.value)) < 500
    assert printable(str(refused.value)) == str(refused.value)
    assert "\n" not in str(refused.value)
    assert parse_reward((1.0, {"\u00fcber\u4f60" * (MAX_NAME_CHARS // 6): 2.0}))[0] == 1.0


def test_a_reward_has_a_limited_number_of_parts() -> None:
    with pytest.raises(InvalidReward, match=f"at most {MAX_PARTS} are kept"):
        parse_reward((1.0, {str(i): 0.0 for i in range(MAX_PARTS + 1)}))


def test_long_lines_are_truncated_and_carriage_returns_keep_the_last_text(capfd: pytest.CaptureFixture[str]) -> None:
    output = RelayedOutput()
    progress = b"".join(b"\r%3d %%" % i for i in range(101) for _ in range(50))
    with open(output.fileno(), "wb", closefd=False) as stream:
        stream.write(b"x" * 100_000 + b"\n10 %\r20 %\r\n\xff\n" + progress + b"\n")
        stream.write("\u00fc".encode() * 5000 + b"\nno line feed")
    output.close()
    output.wait()
    lines = capfd.readouterr().err.splitlines()
    cut = MAX_LINE_CHARS * "x", MAX_LINE_CHARS * "\u00fc"
    assert lines == [cut[0] + "...", "20 %", "\ufffd", "100 %", cut[1] + "...", "no line feed"]


def test_progress_of_an_episode_keeps_the_last_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a long line was kept, and the text that replaces it was dropped."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with ChildPrograms().as_owner():
        for percent in range(101):
            sys.stdout.write(f"{percent} % " + "x" * 100 + "\r")
        sys.stdout.write("done\n")
    assert stream.getvalue() == "done\n"


@pytest.mark.parametrize(
    "write",
    [
        lambda: sys.stdout.write("a\x1b\n"),
        lambda: sys.stdout.writelines(["a", "\x1b\n"]),
        lambda: sys.stdout.buffer.write(b"a\x1b\n"),
        lambda: sys.stdout.buffer.writelines([b"a", b"\x1b\n"]),
    ],
    ids=["write", "writelines", "buffer.write", "buffer.writelines"],
)
def test_output_of_an_episode_is_escaped_however_it_is_written(
    write: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding="utf-8", write_through=True))
    with ChildPrograms().as_owner():
        write()
    assert stream.getvalue() == b"a\\x1b\n"
    sys.stdout.buffer.write(b"\x1b")
    assert stream.getvalue().endswith(b"\x1b"), "of no episode"


def test_unfinished_lines_of_episodes_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    one, other = ChildPrograms(), ChildPrograms()
    for owner, text in ((one, "from one "), (other, "from other\n"), (one, "episode\nhalf a line")):
        with owner.as_owner():
            sys.stdout.write(text)
    for owner in (one, other, one):
        owner.close()
    assert stream.getvalue() == "from other\nfrom one episode\nhalf a line\n"


def test_a_maximum_length_counts_the_characters_that_are_printed() -> None:
    assert printable("\x1b" * 50, 100) == "\\x1b" * 25 + "..."
    assert printable("\x1b" * 25, 100) == "\\x1b" * 25


def test_output_is_relayed_again_after_standard_error_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay thread ended at the first line that could not be written, and later writers got a broken pipe."""
    output = RelayedOutput()
    closed, shown = io.StringIO(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    os.write(output.fileno(), b"lost\n")
    output.wait()
    monkeypatch.setattr(sys, "stderr", shown)
    os.write(output.fileno(), b"shown\n")
    output.close()
    output.wait()
    assert shown.getvalue() == "shown\n"


def test_episode_output_is_escaped_after_sys_stdout_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams were looked up once per process."""
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        with ChildPrograms().as_owner():
            print("begin\x1b[2J")
        assert stream.getvalue() == "begin\\x1b[2J\n"
