"""A run whose agent uses stop strings: ends of turns, replies and stored tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.endpoint import AgentArgs, stored_turns
from staleflow.stores.in_flight.stop_criteria import find_stop
from staleflow.stores.trajectory import Fate
from staleflow.tasks.rendering.chat_tokenizer import load_chat_tokenizer
from tests.runtime.test_run import check, run

STOP = ("12", "+3", "9", "=so")
AGENT = """
import json, os
import httpx


async def play(base_url, key, task):
    messages = [{"role": "user", "content": f"1+{task.seed % 10}="}]
    async with httpx.AsyncClient(timeout=120) as client:
        with open(f"{task.options['folder']}/{os.getpid()}.jsonl", "a") as log:
            for turn in range(3):
                body = {"model": "policy", "messages": messages, "return_token_ids": True, "logprobs": True}
                if turn != 1:
                    body["stop"] = STOP
                head = {"Authorization": "Bearer " + key}
                answer = await client.post(base_url + "/chat/completions", headers=head, json=body)
                if answer.status_code != 200:
                    break
                log.write(json.dumps([turn, answer.json()]) + "\\n")
                log.flush()
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "so"}]
    return task.seed % 2
"""


def test_turns_end_at_the_stop_strings_of_their_requests(job: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"STOP = {list(STOP)}\n{AGENT}")
    (tmp_path / "told").mkdir()
    end = run(
        job, f"task.source=agent:{tmp_path}/agent.py:play", f"task.options={{folder='{tmp_path}/told'}}",
        "task.eval_prompts=0", "steps=2", "rollout.max_new_tokens=60", "rollout.turn_tokens=16",
    )  # fmt: skip
    texts = load_chat_tokenizer(str(tiny_model))
    received: set[AgentArgs] = set()
    stopped = cut = 0
    for file in (tmp_path / "told").iterdir():
        for line in file.read_text().splitlines():
            turn, answer = json.loads(line)
            (choice,) = answer["choices"]
            tokens = choice["token_ids"]
            logprobs = np.asarray([item["logprob"] for item in choice["logprobs"]["content"]], np.float32)
            received.add((tuple(answer["prompt_token_ids"]), tuple(tokens), logprobs.tobytes()))
            text = texts.text(tokens)
            result = find_stop(text, STOP) if turn != 1 else None
            assert choice["message"]["content"] == (text if result is None else text[: result[0]])
            assert turn == 1 or find_stop(texts.text(tokens[:-1]), STOP) is None, "nothing is sampled after it"
            assert choice["finish_reason"] == ("stop" if result or tokens[-1] == 1 else "length")
            stopped += result is not None
            cut += turn == 1 and find_stop(text, STOP) is not None
    assert stopped > 10, "or it shows nothing"
    assert cut > 0, "turns without stop strings go on"
    ended = [row for row in check(end.run_dir, 2).trajectories() if row.fate is Fate.CONSUMED]
    stored = {turn for row in ended for turn in stored_turns(row.trajectory)}
    assert stored
    assert stored <= received
