"""The endpoint: whether the turns that agents receive are those that are stored, and what it adds to a turn's seconds.

    python -m benchmarks.endpoint identity [MODEL]   a run whose agent writes down its answers, against the store
    python -m benchmarks.endpoint load             sessions side by side, in another process, and a policy that waits
    python -m benchmarks.endpoint load MODEL --vllm PYTHON    and the same of vLLM's own server, in turn

`identity` needs a model's folder, such as `make careless-player-model` makes; without one it pretrains a small one,
with a BPE tokenizer, on lines of this repository's pages. Ids and logprobs are compared bit for bit. Of each turn but
an episode's first it counts, too, whether its context would have been other token ids, had the messages been rendered
again, and whether it is other than what was sampled and given before.

`load` has the same clients ask both servers for the same: chats of so many turns, with ids and logprobs. The policy
behind either is a wait of --policy-s and an answer of TOKENS tokens: behind vLLM's it takes the place of
AsyncLLM.generate, so what is measured is its server without its engine. What a turn takes beyond that wait, at the
client, was added. Sessions begin one after the other within the first wait, so that sessions / policy_s requests come
a second, if the server keeps up: a short wait asks for all it can do, a longer one shows what it adds when it is not
overrun. vLLM's server renders and tokenises the messages, which here the trajectory server does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from staleflow.pipeline.config import actor_settings, loading
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Segment, Trajectory
from staleflow.tasks.endpoint.server import EndpointServer
from staleflow.tasks.rendering.sampled_turn import SampledTurn
from staleflow.tasks.rendering.task_source import Message
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from staleflow.tasks.training.tiny_model import PretrainingSettings, pretrain

DEMO = "examples/agent_openai.toml"
TOKENS = 100
SAYS = "some words " * 20
START_S = 300.0
"""Seconds that vLLM's server may take to listen."""
VLLM = """
import asyncio, sys


def main():
    from vllm.entrypoints.launchers.api_server.entry import main as command
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    policy_s, count, says = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    logprobs = [{5: Logprob(logprob=-0.5, rank=1, decoded_token="a")}] * count

    async def generate(self, prompt, sampling_params, request_id, **more):
        await asyncio.sleep(policy_s)
        output = CompletionOutput(
            index=0, text=says, token_ids=[5] * count, cumulative_logprob=-0.5 * count, logprobs=logprobs,
            finish_reason="stop",
        )
        yield RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=list(prompt["prompt_token_ids"]),
            prompt_logprobs=None, outputs=[output], finished=True,
        )

    AsyncLLM.generate = generate
    sys.argv[1:] = sys.argv[4:]
    command()


if __name__ == "__main__":
    main()
"""
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
BPE_PRETRAINING = PretrainingSettings(steps=100, hidden_size=64, num_layers=2, learning_rate=3e-3, warmup_steps=20)
HELLO = [{"role": "user", "content": "Guess my digit."}]

AGENT = """
import json, os
import httpx

CLIENTS = {}


async def play(base_url, key, task):
    if base_url not in CLIENTS:
        CLIENTS[base_url] = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))
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
            log.write(json.dumps([messages, answer.json()]) + "\\n")
            log.flush()
            said = answer.json()["choices"][0]["message"]["content"]
            guess = said.strip()
            if guess == str(digit):
                return 1.0
            found = "higher" if guess in tuple("0123456789") and int(guess) < digit else "lower"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": found}]
    return 0.0
"""

AgentArgs = tuple[tuple[int, ...], tuple[int, ...], bytes]
"""Ids before a turn, its own, and the bytes of its logprobs."""


def stored_turns(t: Trajectory) -> Iterator[AgentArgs]:
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


def bpe_model(folder: Path, settings: PretrainingSettings) -> None:
    """A small model that answers with lines of this repository's pages, in tokens of a byte-level BPE. Many texts are
    made of other tokens when they are tokenised again than those that it samples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    lines = [line for page in sorted(Path("docs").glob("*.md")) for line in page.read_text().splitlines()]
    lines = [line[:60].strip() for line in lines if len(line) > 40 and line[0] not in "|#<`"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special, alphabet = ["<|pad|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[2])
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    rng = random.Random(0)

    def chats() -> Iterator[tuple[str, ...]]:
        while True:
            found = "Guess my digit.", *(rng.choice(("higher", "lower")) for _ in range(2))
            questions = (("\n" if n else "") + asked.format(one) for n, one in enumerate(found))
            yield tuple(text for question in questions for text in (question, rng.choice(lines)))

    pretrain(folder, chats(), settings, lambda _: None, lambda *_: None, tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def identity(model: str, quick: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        more: tuple[str, ...] = ()
        if not model:
            model = str(folder / "model")
            bpe_model(folder / "model", replace(BPE_PRETRAINING, steps=20 if quick else BPE_PRETRAINING.steps))
            more = ("task.chat=true", "rollout.max_new_tokens=160", "rollout.turn_tokens=24")
        (folder / "agent.py").write_text(AGENT)
        (folder / "answers").mkdir()
        config = loading.load(DEMO, (
            f"model.path={model}", f"runs_dir={folder}", f"task.source=agent:{folder}/agent.py:play",
            f"task.options.folder={folder}/answers", "task.eval_prompts=0", "cluster.dashboard=false",
            f"steps={2 if quick else 6}", f"batch.groups_per_step={4 if quick else 8}", "name=identity", *more,
        ))  # fmt: skip
        asyncio.run(execute(config, RunListener()))
        store = VersionedStore.open(config.run_dir / "store")
        stored = {turn for row in store.trajectories() for turn in stored_turns(row.trajectory)}
        answers = [
            json.loads(line) for file in (folder / "answers").iterdir() for line in file.read_text().splitlines()
        ]
        received = [_received_turn(answer) for _, answer in answers]
        prompts = actor_settings.prompt_settings(config, num_held_out=0, max_prompt_tokens=None).build()
        ends: dict[str, tuple[int, ...]] = {}
        later = again = other = 0
        for (messages, answer), (before, tokens, _) in zip(answers, received, strict=True):
            session = answer["id"].rpartition("-")[0]
            if (so_far := ends.get(session)) is not None:
                later += 1
                other += before[: len(so_far)] != so_far
                rendered = prompts.render([Message(m["role"], m["content"]) for m in messages])
                again += tuple(rendered) != before
            ends[session] = before + tokens
        num_equal = sum(turn in stored for turn in received)
        print(f"turns received: {len(received)}; with the very ids and logprobs in the store: {num_equal}")
        print(f"stored and never received: {len(stored - set(received))} of {len(stored)}")
        print(f"turns after an episode's first: {later}; of these contexts")
        print(f"  had differed, had messages been rendered again: {again}")
        print(f"  do differ from what was sampled and given before: {other}")
        print(f"findings of the audit: {len(audit(store).findings)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _received_turn(answer: dict[str, Any]) -> AgentArgs:
    choice = answer["choices"][0]
    logprobs = np.asarray([token["logprob"] for token in choice["logprobs"]["content"]], np.float32)
    return tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]), logprobs.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """Sessions side by side, turns of each, and seconds that the policy takes for a turn."""

    sessions: int
    turns: int
    policy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Turns through a server. added_ms: by turn, beyond what the policy takes, at the client. cpu_ms: of the server, a
    request; client_cpu_ms: of the clients. took_s: all of them."""

    added_ms: list[float]
    cpu_ms: float
    client_cpu_ms: float
    took_s: float


def load(of_each: InstanceLoad, rounds: int, model: str, vllm: str) -> None:
    """Measure the endpoint, and vLLM's server if an interpreter that has it is named, in turn."""
    found: dict[str, list[Measured]] = {"endpoint": []}
    with contextlib.ExitStack() as stack:
        if vllm:
            url, process = stack.enter_context(vllm_server(vllm, model, of_each.policy_s))
            found["vLLM's server"] = []
            _asked(url, ["any"] * 8, replace(of_each, sessions=8, turns=2))  # its first requests compile and load
        for _ in range(rounds):
            found["endpoint"].append(asyncio.run(_serve(of_each)))
            if vllm:
                keys = ["any"] * of_each.sessions
                found["vLLM's server"].append(_measured(url, keys, of_each, lambda: _cpu_s(process)))
    print(f"{of_each.sessions} sessions, {of_each.turns} turns of {of_each.policy_s} s each, {rounds} times")
    print("| server | answers | added, p50 | p99 | requests/s | CPU a request | clients' |")
    print("|---|---|---|---|---|---|---|")
    for name, of in found.items():
        p50, p99 = np.percentile([ms for one in of for ms in one.added_ms], [50, 99])
        count = sum(len(one.added_ms) for one in of)
        cpu_ms, client_ms = np.mean([one.cpu_ms for one in of]), np.mean([one.client_cpu_ms for one in of])
        a_second = count / sum(one.took_s for one in of)
        asked = of_each.sessions * of_each.turns * rounds
        print(
            f"| {name} | {count} of {asked} | {p50:.0f} ms | {p99:.0f} ms | {a_second:.0f} | {cpu_ms:.2f} ms "
            f"| {client_ms:.2f} ms |"
        )


@contextlib.contextmanager
def vllm_server(python: str, model: str, policy_s: float) -> Iterator[tuple[str, psutil.Process]]:
    """vLLM's server without its engine: its base URL, and its process."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        template = Path(folder, "template.jinja")
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        command = (
            python, "-c", VLLM, str(policy_s), str(TOKENS), SAYS, "--model", model, "--served-model-name", "m",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
            "--kv-cache-memory-bytes", str(2**28), "--chat-template", str(template), "--disable-log-stats",
            # Its engine is asked for nothing, so any small model will do: the conversations only have to fit.
            "--hf-overrides", '{"max_position_embeddings": 8192}', "--disable-uvicorn-access-log",
        )  # fmt: skip
        with open(Path(folder, "log"), "w+") as log:
            environment = {**os.environ, **VLLM_ENVIRONMENT}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                url = f"http://127.0.0.1:{port}"
                deadline = time.monotonic() + START_S
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if httpx.get(f"{url}/health").status_code == 200:
                            break
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise SystemExit(f"vLLM's server did not start: {log.read()[-3000:]}")
                    time.sleep(0.5)
                yield f"{url}/v1", psutil.Process(process.pid)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def _cpu_s(process: psutil.Process) -> float:
    """Seconds of a processor that a process has taken. Its children, an engine that is asked for nothing, are not in
    it."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _asked(base_url: str, keys: list[str], load: InstanceLoad) -> tuple[list[float], float, float]:
    """Seconds of each turn of such sessions, whose clients are a process of their own; its processor seconds; and
    seconds of all."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    clients = context.Process(target=_clients, args=(base_url, keys, load, results))
    clients.start()
    while True:
        with contextlib.suppress(queue.Empty):
            found: tuple[list[float], float, float] = results.get(timeout=1.0)
            clients.join()
            return found
        if not clients.is_alive() and results.empty():
            raise SystemExit("the clients failed; see what they wrote above")


def _measured(base_url: str, keys: list[str], load: InstanceLoad, cpu_s: Callable[[], float]) -> Measured:
    """Turns of such sessions through a server. cpu_s: its processor seconds so far."""
    before = cpu_s()
    seconds, client_cpu_s, took_s = _asked(base_url, keys, load)
    return Measured(
        added_ms=[(s - load.policy_s) * 1e3 for s in seconds],
        cpu_ms=(cpu_s() - before) / len(seconds) * 1e3,
        client_cpu_ms=client_cpu_s / len(seconds) * 1e3,
        took_s=took_s,
    )


async def _serve(load: InstanceLoad) -> Measured:
    server = EndpointServer(EndpointSettings())
    await server.start()
    found = [server.sessions.open() for _ in range(load.sessions)]

    async def tell(session: Any) -> None:
        ids: tuple[int, ...] = tuple(range(200))
        for _ in range(load.turns):
            await session.next_messages
            await asyncio.sleep(load.policy_s)
            turn = SampledTurn(prompt_tokens=ids, tokens=(5,) * TOKENS, logprobs=(-0.5,) * TOKENS, text=SAYS)
            ids = (*ids, *turn.tokens, 6)
            session.send_turn(turn)

    telling = asyncio.gather(*(tell(session) for session in found))
    keys = [session.key for session in found]
    measured = await asyncio.to_thread(_measured, server.base_url, keys, load, time.process_time)
    await telling
    await server.stop()
    return measured


def _clients(base_url: str, keys: list[str], load: InstanceLoad, results: Any) -> None:
    async def one(client: httpx.AsyncClient, n: int, key: str) -> list[float]:
        await asyncio.sleep(load.policy_s * n / load.sessions)
        messages: list[dict[str, str]] = list(HELLO)
        found = []
        for _ in range(load.turns):
            begin = time.monotonic()
            answer = await client.post(
                f"{base_url}/chat/completions",
                headers={"Authorization": f"Bearer {key}"},
                json={
                    "model": "m", "messages": messages, "logprobs": True, "return_token_ids": True,
                    "max_tokens": TOKENS,
                },
            )  # fmt: skip
            choice = answer.raise_for_status().json()["choices"][0]
            found.append(time.monotonic() - begin)
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == TOKENS
            said = {"role": "assistant", "content": choice["message"]["content"]}
            messages += [said, {"role": "user", "content": "go on"}]
        return found

    async def all_of_them() -> list[float]:
        async with contextlib.AsyncExitStack() as stack:
            # One client a session: the pool of one for all looks through every connection at each request.
            context = ssl.create_default_context()
            clients = [
                await stack.enter_async_context(httpx.AsyncClient(timeout=600, verify=context, trust_env=False))
                for _ in keys
            ]
            asking = (one(client, n, key) for n, (client, key) in enumerate(zip(clients, keys, strict=True)))
            return [s for found in await asyncio.gather(*asking) for s in found]

    cpu, begin = time.process_time(), time.monotonic()
    seconds = asyncio.run(all_of_them())
    results.put((seconds, time.process_time() - cpu, time.monotonic() - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("identity", "load"))
    parser.add_argument(
        "model", nargs="?", default="", help="folder; of identity, and of vLLM; by default made, and the demo's"
    )
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="interpreter with vLLM; without it: not measured")
    parser.add_argument("--rounds", type=int, default=3, help="of load")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--policy-s", type=float, default=0.05, help="seconds that the policy takes for a turn")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.what == "identity":
        identity(args.model, args.quick)
    else:
        if args.quick:
            args.sessions, args.turns, args.rounds = 16, 2, 1
        of_each = InstanceLoad(sessions=args.sessions, turns=args.turns, policy_s=args.policy_s)
        load(of_each, args.rounds, args.model or "runs/base/careless-player", args.vllm)


if __name__ == "__main__":
    main()
