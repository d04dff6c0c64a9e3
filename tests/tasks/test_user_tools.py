"""User tools: schemas, calls, failures, and errors found before a run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.pipeline.config import actor_settings, loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.recovery import run_folder
from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.episode import EpisodeFailed
from staleflow.tasks.environments.forked_episodes import ForkedEpisode, ForkServer
from staleflow.tasks.environments.user_tools import MAX_RESULT_CHARS, load_tool
from staleflow.tasks.episodes.episode_host import EpisodeHost
from staleflow.tasks.episodes.step_results import EpisodeKey, HostedStepResult
from staleflow.tasks.episodes.tools import load_tools, parse_tool_calls

FILE = '''
import asyncio, os, signal, time
from typing import Any, Literal

calls = []

def lookup(word: str, among: list[str] | None = None, kind: Literal["noun", "verb"] = "noun") -> dict[str, Any]:
    """Looks a word up.

    In a list, if one is given."""
    calls.append(word)
    return {"word": word, "among": among, "kind": kind, "calls": len(calls)}

async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"

def hangs(what: str) -> None:
    """Never answers."""
    while True:
        time.sleep(1)

def breaks(how: str) -> Any:
    """Fails in many ways."""
    if how == "exit":
        os._exit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        raise SystemExit(4)
    if how == "greedy":
        return len(bytearray(10**12))
    if how == "odd":
        return {1, 2}
    if how == "nan":
        return float("nan")
    if how == "half":
        return "\\ud800"
    if how == "long":
        return "a" * 10**6
    if how == "none":
        return None
    if how == "later":
        return slow(0)
    raise KeyError(how)

def unhinted(word):
    """Has no hint."""
def undocumented(word: str): ...
def many(*words: str):
    """Takes any number."""
def typed(word: bytes):
    """Takes bytes."""
def literal(word: Literal[b"a"]):
    """Takes one value, which JSON does not have."""
def unhashable(word: Literal[["a"]]):
    """Takes one value, which has no hash."""
def unread(word: "Nothing"):
    """Has a hint that names nothing."""
def calculator(word: str):
    """Has the name of another."""
class Thing:
    """Is no function."""
'''


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": "144"}\n' * 3)
    (tmp_path / "mine.py").write_text(FILE)
    path = tmp_path / "job.toml"
    path.write_text(
        f'runs_dir = "{tmp_path}/runs"\nname = "own"\n[model]\npath = "x"\n'
        f'[task]\nsource = "jsonl:{tmp_path}/rows.jsonl"\n'
        'chat = true\nsystem = "Tools:\\n{tools}"\n'
        '[environment]\nmax_turns = 3\ntool_timeout_s = 2\ntools = ["calculator"'
        + "".join(f', "{tmp_path}/mine.py:{name}"' for name in ("lookup", "slow", "hangs", "breaks"))
        + "]\n"
    )
    return path


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(job: Path, *turns: str) -> list[list[str]]:
    """Return the messages after each turn, each of a separate episode."""
    episode_settings = actor_settings.episode_settings(loading.load(job, ()))

    async def work() -> list[HostedStepResult]:
        episodes = EpisodeHost(episode_settings)
        try:
            await episodes.check()
            record = episode_settings.source.build().task(0).record
            keys = [EpisodeKey(group=0, member=member) for member in range(len(turns))]
            requests = [
                episodes.step(key, record, [turn], truncated=False) for key, turn in zip(keys, turns, strict=True)
            ]
            return list(await asyncio.gather(*requests))
        finally:
            await episodes.close()

    answers = asyncio.run(work())
    assert not any(answer.error or answer.ended for answer in answers)
    return [[message.content for message in answer.messages] for answer in answers]


def test_load_tool_derives_the_schema_from_the_function_signature(job: Path) -> None:
    tool = load_tool(f"{job.parent}/mine.py:lookup")
    assert (tool.name, tool.description) == ("lookup", "Looks a word up.\n\nIn a list, if one is given.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "among": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "kind": {"enum": ["noun", "verb"]},
        },
        "required": ["word"],
        "additionalProperties": False,
    }
    settings = actor_settings.prompt_settings(loading.load(job, ()), num_held_out=0, max_prompt_tokens=None)
    received = [json.loads(line) for line in settings.source.task.system.splitlines()[1:]]
    assert [item["function"]["name"] for item in received] == ["calculator", "lookup", "slow", "hangs", "breaks"]
    assert received[1]["function"]["parameters"] == tool.parameters


def test_each_tool_call_runs_in_a_new_process(job: Path) -> None:
    first, second, third = results(
        job,
        call("lookup", word="a", among=["b"], kind="verb") + "<lookup>x y</lookup>",
        call("slow", seconds=0) + "<slow>0.1</slow>" + "<calculator>1 + 1</calculator>",
        call("lookup") + call("lookup", word=3) + call("lookup", word="a", kind="x") + call("lookup", word="a", b=1)
        + call("lookup", word="a", among=[1]) + "<slow>long</slow>" + '<tool_call>{"name": "lookup"}</tool_call>',
    )  # fmt: skip
    assert [json.loads(text.removeprefix("<result>").removesuffix("</result>")) for text in first] == [
        {"word": "a", "among": ["b"], "kind": "verb", "calls": 1},
        {"word": "x y", "among": None, "kind": "noun", "calls": 1},
    ]
    assert second == ["waited", "<result>waited</result>", "<result>2</result>"]
    assert third == [
        "error: lookup: argument word is missing",
        "error: lookup: argument word must be a text",
        'error: lookup: argument kind must be one of "noun", "verb"',
        "error: lookup: there is no argument b; there are word, among, kind",
        "error: lookup: argument among must be a list of a text or null",
        "<result>error: slow: argument seconds must be a number</result>",
        "error: lookup: argument word is missing",
    ]


@pytest.mark.parametrize(
    ("arguments", "text", "error"),
    [
        ("", "{}", ""),
        (', "arguments": null', "{}", ""),
        (', "arguments": {"zone": "CET"}', '{"zone": "CET"}', ""),
        (', "parameters": "{\\"zone\\": \\"CET\\"}"', '{"zone": "CET"}', ""),
        (', "arguments": "CET"', "", "now: arguments must be an object, of zone, form"),
        (', "arguments": [7]', "", "now: arguments must be an object, of zone, form"),
    ],
)
def test_json_calls_of_a_tool_without_required_arguments(tmp_path: Path, arguments: str, text: str, error: str) -> None:
    (tmp_path / "now.py").write_text('def now(zone: str = "", form: str = "") -> str:\n    "Returns the time."\n')
    tools = load_tools(EnvironmentConfig(tools=[f"{tmp_path}/now.py:now"]))
    (parsed,) = parse_tool_calls(f'<tool_call>{{"name": "now"{arguments}}}</tool_call>', tools)
    assert (parsed.argument, parsed.error) == (text, error)


def test_a_text_argument_may_be_json_itself_but_no_object_of_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "now.py").write_text('def now(zone: str = "") -> str:\n    "Returns the time."\n')
    tools = load_tools(EnvironmentConfig(tools=[f"{tmp_path}/now.py:now"]))
    calls = ('{"name": "now"}', '{"name": "now", "arguments": "[7]"}', '{"name": "now", "arguments": "{\\"a\\": 1}"}')
    parsed = parse_tool_calls("".join(f"<tool_call>{call}</tool_call>" for call in calls), tools)
    assert [json.loads(call.argument) for call in parsed[:2]] == [{}, {"zone": "[7]"}]
    assert parsed[2].error == "now: there is no argument a; there are zone"


def test_tool_failures_and_timeouts_are_reported_to_the_model(job: Path) -> None:
    ways = ("exit", "leave", "greedy", "odd", "nan", "half", "none", "later")
    failed, hung, long = results(
        job, "".join(call("breaks", how=how) for how in ways), call("hangs", what=""), "<breaks>long</breaks>"
    )
    received = [
        "error: its process ended with exit code 3",
        "error: SystemExit: 4",
        "error: MemoryError: (environment.memory_mib = 1024)",
        "error: its result cannot be written as JSON: TypeError: Object of type set is not JSON serializable",
        "error: its result cannot be written as JSON: ValueError: Out of range float",
        "\ufffd",
        "null",
        "waited",
    ]
    assert [text[: len(start)] for text, start in zip(failed, received, strict=True)] == received
    assert hung == ["error: stopped after 2 s"]
    assert MAX_RESULT_CHARS < len(long[0]) < MAX_RESULT_CHARS + 100


async def test_a_call_without_a_process_fails_the_episode(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = loading.load(job, ()).environment
    tools = load_tools(config)
    with pytest.raises(EpisodeFailed, match=r"^its process was killed by SIGKILL$"):
        await tools["breaks"].run('{"how": "killed"}', 100.0, config)

    def fork(server: ForkServer) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(ForkServer, "fork", fork)
    with pytest.raises(EpisodeFailed, match=r"^no process can be started for it: no more processes$"):
        await tools["breaks"].run('{"how": "odd"}', 100.0, config)

    async def begin(episode: ForkedEpisode) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ForkedEpisode, "begin", begin)
    with pytest.raises(EpisodeFailed, match=r"^a tool's process did not start within 0.01 s$"):
        await tools["breaks"].run('{"how": "odd"}', 100.0, replace(config, tool_timeout_s=0.01))


async def test_a_call_with_hardly_any_time_left_is_stopped_and_not_a_failure(job: Path) -> None:
    config = loading.load(job, ()).environment
    assert await load_tools(config)["hangs"].run('{"what": ""}', 1e-6, config) == "error: stopped after 1e-06 s"


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("mine.py:lokup", "has no function lokup; did you mean lookup?"),
        ("none.py:lookup", "cannot be loaded: "),
        ("mine.py:unhinted", "argument word needs a type hint, such as word: str"),
        ("mine.py:undocumented", "needs a docstring, which describes the tool to the model"),
        ("mine.py:many", "argument *words: str cannot be passed by name"),
        ("mine.py:typed", "argument word has type <class 'bytes'>; use str, int, float"),
        ("mine.py:literal", "argument word has type typing.Literal[b'a']; use str, int, float"),
        ("mine.py:unhashable", "argument word has type typing.Literal[['a']]; use str, int, float"),
        ("mine.py:unread", "its type hints cannot be read: NameError: name 'Nothing' is not defined"),
        ("mine.py:calculator", "another tool has the name calculator; rename the function"),
        ("mine.py:Thing", "a tool is a function, def or async def, not type"),
    ],
)
def test_an_invalid_tool_is_rejected_before_the_run(job: Path, tool: str, message: str) -> None:
    episode_settings = actor_settings.episode_settings(
        loading.load(job, (f'environment.tools=["calculator", "{job.parent}/{tool}"]',))
    )

    async def work() -> None:
        episodes = EpisodeHost(episode_settings)
        try:
            await episodes.check()
        finally:
            await episodes.close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(work())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_tool_files_are_packed_with_the_job(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = loading.load(job, ('environment.tools=["mine.py:slow", "calculator", "mine.py:lookup"]',))
    config = user_files.with_absolute_paths(here)
    assert config.environment.tools == [f"{tmp_path}/mine.py:slow", "calculator", f"{tmp_path}/mine.py:lookup"]
    sent, code = user_files.collect_code(config)
    assert code == {"environment_mine.py": FILE}
    assert sent.environment.tools[2] == "environment_mine.py:lookup"
    there: RunConfig = user_files.with_code_in(sent, here.run_dir / "code", code)
    assert there.environment.tools[0] == f"{here.run_dir}/code/environment_mine.py:slow"
    run_folder.prepare_run_dir(there, code)
    moved = here.run_dir.rename(tmp_path / "elsewhere")
    assert run_folder.load_job(moved).environment.tools == [
        f"{moved}/code/environment_mine.py:slow", "calculator", f"{moved}/code/environment_mine.py:lookup",
    ]  # fmt: skip
