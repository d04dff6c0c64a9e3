"""Endpoint, instance and agent are killed while agents wait: the turns they received equal the stored ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.endpoint import AgentArgs, stored_turns
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.events import EnvironmentFailed, InstanceLost
from staleflow.pipeline.processes.dask_workers import DaskWorkers
from staleflow.pipeline.runtime.driver import Driver
from staleflow.stores.trajectory import Fate
from tests.runtime.test_run import check, process_of, run_and_interfere

STEPS = 4
PROGRAM = """
import json, os, sys, time, urllib.error, urllib.request

task = json.loads(os.environ["STALEFLOW_TASK"])
log = open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "w")


def note(**what):
    print(json.dumps(what), file=log, flush=True)


def ask(messages):
    body = {"model": "policy", "messages": messages, "logprobs": True, "return_token_ids": True}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    where = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(where, json.dumps(body).encode(), head), timeout=300) as answer:
        return json.load(answer)


def asked(messages):
    '''As clients do: what may be tried again is, after as long as the answer says.'''
    for _ in range(20):
        try:
            return ask(messages)
        except urllib.error.HTTPError as error:
            note(status=error.code, retry=error.headers.get("Retry-After"))
            if error.headers.get("Retry-After") is None:
                raise
            time.sleep(float(error.headers["Retry-After"]))
        except OSError as error:
            note(broken=str(error))
            time.sleep(0.1)
    sys.exit("nobody answers")


messages = [{"role": "user", "content": f"1+{task['seed'] % 10}"}]
for turn in range(3):
    note(asks=turn)
    answer = asked(messages)
    note(reply=answer)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "so"}]
note(ended=True)
print(0.5)
"""
EMULATED = """
[workload]
prompts = "task"
kind = "agentic"
median = 20
turns = 3

[simulation]
train_s = 0.2
pull_s = 0.02
"""

Notes = dict[int, list[dict[str, Any]]]


def agent_records(folder: Path) -> Notes:
    """Return the lines that agents wrote, by process, without incomplete lines."""
    return {
        int(file.stem): [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        for file in folder.iterdir()
    }


def received_turns(answers: list[dict[str, Any]]) -> tuple[AgentArgs, ...]:
    """Return the turns that an agent received."""
    results = []
    for answer in (note["reply"] for note in answers if "reply" in note):
        choice = answer["choices"][0]
        logprobs = np.asarray([item["logprob"] for item in choice["logprobs"]["content"]], np.float32)
        results.append((tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]), logprobs.tobytes()))
    return tuple(results)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["environment-0", "rollout-0", "agent"])
def test_turns_received_by_agents_equal_stored_turns_after_a_kill(job: Path, victim: str) -> None:
    heard = job.parent / "heard"
    heard.mkdir()
    program = job.parent / "program.py"
    program.write_text(PROGRAM)
    command = json.dumps([sys.executable, "-S", str(program), str(heard)])
    text = re.sub("options = .*", f"options = {{ command = {command} }}", job.read_text())
    job.write_text(text + EMULATED)
    waited: list[int] = []

    async def interfere(driver: Driver, cluster: DaskWorkers) -> None:
        while not waited:
            await asyncio.sleep(0.02)
            waited.extend(
                p for p, result in agent_records(heard).items() if result and result[-1].get("asks", 0) and alive(p)
            )
        if victim == "agent":
            os.kill(waited[0], signal.SIGKILL)
            return
        os.kill(await process_of(cluster, victim), signal.SIGKILL)
        while victim == "environment-0" and any(map(alive, waited)):  # agents end with their endpoint
            await asyncio.sleep(0.02)

    overrides = (
        "task.source=agent:command", "task.eval_prompts=0", f"steps={STEPS}", "rollout.engine.name=emulated",
        "rollout.instances=2", "rollout.max_new_tokens=60", "deadlines.call_s=6",
    )  # fmt: skip
    driver = asyncio.run(run_and_interfere(job, overrides, interfere))
    run_dir = job.parent / "runs" / "job"
    rows = list(check(run_dir, STEPS).trajectories())
    result = agent_records(heard)
    by_agents = {received_turns(written) for written in result.values()}
    consumed = [tuple(stored_turns(row.trajectory)) for row in rows if row.fate is Fate.CONSUMED]
    assert len(consumed) == STEPS * 16
    assert set(consumed) <= by_agents  # each episode as one agent received it, from the first turn to the last
    stored = {tuple(stored_turns(row.trajectory)) for row in rows}
    ended = [received_turns(written) for written in result.values() if "ended" in written[-1]]
    assert ended
    if victim != "environment-0":  # turns that were not passed on restart
        assert set(ended) <= stored
    refused = [note for written in result.values() for note in written if "status" in note]
    assert {note["status"] for note in refused} <= {400, 410, 503}  # at its limit, episode over, or to be tried again
    assert all(note["retry"] for note in refused if note["status"] == 503)

    events = [entry.event for entry in journal.JournalReader(run_dir / "events.jsonl")]
    failed = [event.error for event in events if isinstance(event, EnvironmentFailed)]
    if victim == "agent":
        assert failed == ["the agent's command ended with exit code -9"]
    elif victim == "rollout-0":
        assert failed == []
        assert [event.instance for event in events if isinstance(event, InstanceLost)] == ["rollout-0"]
    else:
        assert failed
        assert all("is not repeatable; start it again" in error for error in failed)
        assert "environment-0" in driver.report.actor_losses[0]
