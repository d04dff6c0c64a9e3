"""The endpoint: whether what agents are told is what the store holds, and what it adds to a turn's seconds.

    python -m benchmarks.endpoint identity MODEL   a run whose agent writes down what it is told, against the store
    python -m benchmarks.endpoint load             sessions side by side, in another process, and a policy that waits

`identity` needs a model's folder, such as `make demo-agent` makes. Ids and logprobs are compared bit for bit. A turn
would have differed had messages been rendered again, if its text is made of other tokens than those that were sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pipeline.config import loading
from pipeline.jobs.execution import execute
from stores.audit import audit
from stores.trajectory import Segment, Trajectory
from stores.versioned import VersionedStore
from tasks.endpoint.server import EndpointServer
from tasks.endpoint.settings import EndpointSettings
from tasks.endpoint.turns import SampledTurn
from tasks.texts import tokenizer_texts

DEMO = "examples/agent_openai.toml"
POLICY_S = 0.05
"""Seconds that the policy takes for a turn."""
HELLO = [{"role": "user", "content": "Guess my digit."}]

AGENT = """
import json, os
import httpx

CLIENTS = {}


async def play(base_url, key, task):
    if base_url not in CLIENTS:
        CLIENTS[base_url] = httpx.AsyncClient(timeout=120)
    client = CLIENTS[base_url]
    digit = task.rng.randrange(10)
    messages = [{"role": "user", "content": "Guess my digit."}]
    with open(f"{task.options['folder']}/{os.getpid()}.jsonl", "a") as log:
        for turn in range(4):
            answer = await client.post(
                base_url + "/chat/completions", headers={"Authorization": "Bearer " + key},
                json={"model": "policy", "messages": messages, "return_token_ids": True, "logprobs": True},
            )
            answer.raise_for_status()
            log.write(answer.text + "\\n")
            log.flush()
            said = answer.json()["choices"][0]["message"]["content"]
            guess = said.strip()
            if guess not in tuple("0123456789") or int(guess) == digit:
                return float(guess == str(digit))
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "higher" if int(guess) < digit else "lower"},
            ]
    return 0.0
"""

Told = tuple[tuple[int, ...], tuple[int, ...], bytes]
"""Ids before a turn, its own, and the bytes of its logprobs."""


def stored_turns(t: Trajectory) -> Iterator[Told]:
    """The turns of a stored trajectory."""
    before = t.prompt_tokens.tolist()
    turn: list[Segment] = []
    for span in (*t.spans, None):
        if isinstance(span, Segment):
            turn.append(span)
            continue
        if turn:
            tokens = [int(i) for part in turn for i in part.tokens]
            yield tuple(before), tuple(tokens), np.concatenate([part.logprobs for part in turn]).tobytes()
            before, turn = [*before, *tokens], []
        if span is not None:
            before = [*before, *span.tokens.tolist()]


def identity(model: str, quick: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "agent.py").write_text(AGENT)
        (folder / "told").mkdir()
        config = loading.load(DEMO, (
            f"model.path={model}", f"runs_dir={folder}", f"task.source=agent:{folder}/agent.py:play",
            f"task.options.folder={folder}/told", "task.eval_prompts=0", "cluster.dashboard=false",
            f"steps={2 if quick else 6}", f"batch.groups_per_step={4 if quick else 12}", "name=identity",
        ))  # fmt: skip
        asyncio.run(execute(config, lambda *_: None, print))
        store = VersionedStore.open(config.run_dir / "store")
        held = {turn for row in store.ended() for turn in stored_turns(row.trajectory)}
        answers = [json.loads(line) for file in (folder / "told").iterdir() for line in file.read_text().splitlines()]
        told = [_told(answer) for answer in answers]
        texts = tokenizer_texts(model)
        skewed = sum(
            texts.ids(answer["choices"][0]["message"]["content"]) != turn[1]
            for answer, turn in zip(answers, told, strict=True)
        )
        print(f"turns told: {len(told)}; with the very ids and logprobs in the store: {sum(t in held for t in told)}")
        print(f"stored and never told: {len(held - set(told))} of {len(held)}")
        print(f"turns that would have differed had messages been rendered again: {skewed}")
        print(f"findings of the audit: {len(audit(store).findings)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _told(answer: dict[str, Any]) -> Told:
    choice = answer["choices"][0]
    logprobs = np.asarray([one["logprob"] for one in choice["logprobs"]["content"]], np.float32)
    return tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]), logprobs.tobytes()


def load(sessions: int, turns: int) -> None:
    asyncio.run(_serve(sessions, turns))


async def _serve(sessions: int, turns: int) -> None:
    server = EndpointServer(EndpointSettings())
    await server.start()
    found = [server.sessions.open() for _ in range(sessions)]

    async def tell(session: Any) -> None:
        ids: tuple[int, ...] = tuple(range(200))
        for _ in range(turns):
            await session.asked
            await asyncio.sleep(POLICY_S)
            turn = SampledTurn(before=ids, tokens=(5,) * 100, logprobs=(-0.5,) * 100, text="some words " * 20)
            ids = (*ids, *turn.tokens, 6)
            session.answer(turn)

    telling = asyncio.gather(*(tell(session) for session in found))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    clients = context.Process(target=_clients, args=(server.base_url, [s.key for s in found], turns, results))
    cpu, begin = time.process_time(), time.monotonic()
    clients.start()
    await telling
    seconds, cpu_s = await asyncio.to_thread(results.get)
    took_s, own_s = time.monotonic() - begin, time.process_time() - cpu
    await asyncio.to_thread(clients.join)
    await server.stop()
    added = np.sort(np.asarray(seconds) - POLICY_S) * 1e3
    p50, p99 = np.percentile(added, [50, 99])
    print(f"{sessions} sessions, {turns} turns each: {len(seconds)} answers of {sessions * turns}")
    print(f"added to a turn, with the client: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    own_ms, client_ms = own_s / len(seconds) * 1e3, cpu_s / len(seconds) * 1e3
    print(
        f"{len(seconds) / took_s:.0f} requests/s; CPU a request: endpoint {own_ms:.2f} ms, clients {client_ms:.2f} ms"
    )


def _clients(base_url: str, keys: list[str], turns: int, results: Any) -> None:
    async def one(client: httpx.AsyncClient, key: str) -> list[float]:
        messages: list[dict[str, str]] = list(HELLO)
        found = []
        for _ in range(turns):
            begin = time.monotonic()
            answer = await client.post(
                f"{base_url}/chat/completions",
                headers={"Authorization": f"Bearer {key}"},
                json={"model": "m", "messages": messages, "logprobs": True, "return_token_ids": True},
            )
            found.append(time.monotonic() - begin)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        return found

    async def all_of_them() -> list[float]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return [s for found in await asyncio.gather(*(one(client, key) for key in keys)) for s in found]

    cpu = time.process_time()
    seconds = asyncio.run(all_of_them())
    results.put((seconds, time.process_time() - cpu))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("identity", "load"))
    parser.add_argument("model", nargs="?", default="runs/base/careless-player", help="of identity")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.what == "identity":
        identity(args.model, args.quick)
    else:
        load(16 if args.quick else args.sessions, 2 if args.quick else args.turns)


if __name__ == "__main__":
    main()
