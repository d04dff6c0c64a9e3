"""Malformed input to every command: job files, data, models, rewards, stores, journals, addresses, disks, names,
terminals.

`CASES` is a table of setup, command line, exit code and words of the output. Each output is one line without a
traceback within 10 s. tests/cli/test_malformed.py runs the cases that need no separate process. To run all of them,
each in a process and timed:

    python -m tests.cli.malformed [WORD ...]        only the cases whose names contain one of the words
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cli.malformed_inputs import (
    ROW,
    ROWS,
    Case,
    Prepare,
    flip_bits,
    furnish,
    make_empty_folder,
    make_run_without_steps,
    make_small_vocabulary,
    remove,
    replace_run_folder,
    replace_text,
    rewrite,
    truncate,
    write_reward,
    write_text,
)
from tests.conftest import JOB as RUN
from tests.support.tiny_models import make_tiny_model

RUN_SETTINGS = ("--set", "task.eval_prompts=0", "--set", "batch.extra_members=1")
"""Settings of the stored run besides those of its job, as in the fixture `stored`."""
WITHIN_S = 10.0
"""Time limit of a case in seconds."""
MINE = "--set reward.function=mine.py:f"
"""Option that selects the reward of mine.py."""
LONG = "x" * 300
CHAT = "--set task.chat=true"
CONFIG = "runs/finished/config.toml"
EVENTS = "runs/finished/events.jsonl"


def _job(name: str, content: str | bytes, *says: str, command: str = "config explain bad.toml") -> Case:
    return Case(name=f"job file: {name}", command=command, prepare=(write_text("bad.toml", content),), says=says)


def _set(name: str, override: str, *says: str, command: str = "run") -> Case:
    words = f"{command} job.toml --set {shlex.quote(override)}"
    return Case(name=f"job: {name}", command=words, says=says)


JOB_FILES = (
    Case(name="job file: none", command="run none.toml", says=("none.toml: no such job file", "staleflow init")),
    _job("no TOML", "steps = = 1", "bad.toml: not valid TOML", "line 1"),
    Case(name="job file: none, submitted", command="submit none.toml --scheduler tcp://127.0.0.1:9",
         says=("none.toml: no such job file",)),
    Case(name="job file: none, simulated", command="simulate none.toml", says=("none.toml: no such job file",)),
    Case(name="job file: none, profiled", command="profile none.toml", says=("none.toml: no such run",)),
)  # fmt: skip

VALUES = (
    _set("an unknown table", "rolout.instances=2", "unknown key rolout", "did you mean rollout?"),
    _set("an override of no table", "steps.x=1", "steps is a value, not a table"),
    _set("a name of two lines", 'name="a\\nb"', "name = 'a\\nb'", "plain folder name"),
    _set("a name of 300 characters", f"name={LONG}", "plain folder name", "at most"),
    _set("a name with a NUL", 'name="a\\u0000b"', "plain folder name"),
    _set("no name", "name=", "name = '' must be a plain folder name"),
    _set("a runs_dir with a NUL", 'runs_dir="a\\u0000b"', "runs_dir"),
    _set("a model with a NUL", 'model.path="a\\u0000b"', "model.path", "zero byte"),
    _set("data with a NUL", 'task.source="jsonl:a\\u0000b"', "task.source", "zero byte"),
    _set("an override that is no UTF-8", "task.template={prompt}\udcff", "override task.template", "not UTF-8 text"),
    _set("an empty model", "model.path= ", "model.path", "no such folder"),
    _set("a runs_dir that is a file", "runs_dir=data.jsonl", "data.jsonl", "set runs_dir to another folder"),
    _set(
        "a runs_dir that is read-only",
        "runs_dir=/proc/none",
        "/proc/none",
        "accepts no files",
        "set runs_dir to another folder",
    ),
    _set("an address without kind", "cluster.address=tcp://127.0.0.1:9", 'cluster.kind = "address"'),
    _set("a scheduler file without kind", "cluster.scheduler_file=x.json", 'cluster.kind = "file"'),
    _set("no memory folder", "cluster.shared_memory=/nowhere/at/all", "cluster.shared_memory", "no such folder"),
    _set("a memory folder that is a file", "cluster.shared_memory=data.jsonl", "cluster.shared_memory", "folder"),
    _set("a memory folder that is read-only", "cluster.shared_memory=/proc", "cluster.shared_memory", "written"),
    _set("an engine that is not installed", "rollout.engine.name=vllm", "vllm", "not installed", "staleflow[vllm]"),
    _set("a device that is not there", "model.device=cuda", "model.device", "cuda", '"cpu"'),
    _set("a response as long as the context", "rollout.max_new_tokens=128", "leaves no room for a prompt"),
    Case(
        name="job: a response as long as the context, emulated",
        says=("leaves no room for a prompt",),
        command="run job.toml --set rollout.engine.name=emulated --set workload.prompts=task "
        "--set rollout.max_new_tokens=128",
    ),
    _set("a tracker of no file", "tracking.tracker=none.py:T", "tracking.tracker = ", "no such file"),
)

DATA = (
    _set("data: none", "task.source=jsonl:none.jsonl", "none.jsonl", "no such file"),
    _set("data: a folder", "task.source=jsonl:model", "task.source = ", "folder"),
    Case(name="data: a bad row", command="run job.toml", says=("line 21: not JSON", "double quotes: column 2 ("),
         prepare=(rewrite("data.jsonl", lambda t: t + "{'prompt': 1}\n"),)),
    Case(name="data: a row without prompt", command="run job.toml",
         says=("data.jsonl, line 21", "'prompt'"),
         prepare=(rewrite("data.jsonl", lambda t: t + '{"question": "1", "answer": "2"}\n'),)),
    Case(name="data: a row that is no object", command="run job.toml", says=("data.jsonl, line 21", "object"),
         prepare=(rewrite("data.jsonl", lambda t: t + "[1]\n"),)),
    Case(name="data: no rows", command="run job.toml", says=("data.jsonl", "0 rows; add some"),
         prepare=(write_text("data.jsonl", "\n\n"),)),
    Case(name="data: held-out prompts only", command="run job.toml", says=("data.jsonl", "held-out"),
         prepare=(write_text("data.jsonl", ROW * 2),)),
    Case(name="data: not text", command="run job.toml", says=("data.jsonl", "cannot be read"),
         prepare=(write_text("data.jsonl", b"\xff\xfe{}\n"),)),
    Case(name="data: a prompt that is too long", command="run job.toml --set steps=50",
         says=("data.jsonl, line 7", "tokens", "max_new_tokens = 16", "task.skip_long"),
         prepare=(rewrite("data.jsonl", lambda t: t.replace("6 + 2", "1 + " * 200 + "2")),)),
    Case(name="data: a prompt that is too long for the cache", says=("rollout.engine.kv_tokens of 64 less",),
         command=f"run job.toml --set rollout.engine.kv_tokens=64 --set 'task.template={'1 ' * 60}{{prompt}}'"),
    Case(name="data: a first prompt without tokens", command="run job.toml", says=("line 1", "prompt is empty"),
         prepare=(write_text("data.jsonl", ROW.replace("1 + 2 =", "") + ROWS),)),
    _set("data: no parquet file", "task.source=parquet:none.parquet", "task.source = ", "no such file"),
    _set("data: no evaluation set", "task.eval_source=jsonl:none.jsonl", "task.eval_source = ", "no such file"),
    _set("data: no examples", "training.sft={steps=1, source='jsonl:none.jsonl'}", "sft.source", "no such file"),
    Case(name="data: examples without answers", says=("training.sft.source", "line 1: answer has no text to learn"),
         command="run job.toml --set training.sft.steps=1 --set training.sft.source=jsonl:examples.jsonl",
         prepare=(write_text("examples.jsonl", '{"prompt": "1", "answer": 2}\n'),)),
    _set("data: an unknown column", "task.columns.prompt=question", "'question'", "task.columns.prompt", "answer"),
    _set("data: a system message without chat", "task.system=be brief", "task.system", "task.chat = true"),
    _set("data: an unknown source", "task.source=json:data.jsonl", "task.source"),
    _set("data: an unknown dataset", "task.source=reasoning_gym:chain_summ", "chain_summ"),
    Case(name="data: wrong options", says=("task.options", "min_termz"),
         command="run job.toml --set task.source=reasoning_gym:chain_sum --set task.options.min_termz=3"),
    _set("data: a class of no file", "task.source=none.py:Data", "none.py", "no such file"),
    Case(name="data: a class that fails", command="run job.toml --set task.source=mine.py:Data",
         says=("task.source", "KeyError"),
         prepare=(write_text("mine.py", "class Data:\n    def __init__(self, options, seed): options['x']\n"),)),
)  # fmt: skip

MODELS = (
    _set("model: no folder", "model.path=runs/base/none", "model.path = 'runs/base/none'", "no such folder"),
    _set("model: no folder, like a hub name", "model.path=runs/none", "model.path = 'runs/none'", "no such folder"),
    _set("model: no hub name either", "model.path=nobody/nothing", "model.path = 'nobody/nothing'", "hub"),
    _set(
        "reference model: no folder",
        "training.kl={coefficient=0.1, reference='runs/base/none'}",
        "training.kl.reference = 'runs/base/none'",
        "no such folder",
    ),
    Case(name="reference model: another tokenizer", says=("training.kl.reference", "the first is 17", "tokenizer"),
         command="run job.toml --set training.kl.coefficient=0.1 --set training.kl.reference=other",
         prepare=(lambda f: shutil.copytree(f / "model", f / "other"),
                  replace_text("other/tokenizer.json", '";": 17', '";": 99'))),
    _set("model: the home folder's sign", "model.path=~/none", "~ is not replaced here, write the whole path"),
    _set("model: a file", "model.path=data.jsonl", "model.path = 'data.jsonl'", "folder"),
    _set("model: a folder of something else", "model.path=runs", "model.path", "config.json"),
    Case(name="model: no tokenizer", command="run job.toml", says=("model.path", "tokenizer"),
         prepare=(remove("model/tokenizer.json"), remove("model/tokenizer_config.json"))),
    Case(name="model: a broken tokenizer", command="run job.toml", says=("model.path", "tokenizer"),
         prepare=(truncate("model/tokenizer.json", 0.5),)),
    Case(name="model: no weights", command="run job.toml", says=("model.path", "weights"),
         prepare=(remove("model/model.safetensors"),)),
    Case(name="model: truncated weights", command="run job.toml", says=("model.safetensors", "truncated"),
         prepare=(truncate("model/model.safetensors", 0.5),)),
    Case(name="model: empty weights", command="run job.toml", says=("model.safetensors",),
         prepare=(truncate("model/model.safetensors", 0),)),
    Case(name="model: broken configuration", command="run job.toml", says=("model.path", "config.json"),
         prepare=(truncate("model/config.json", 0.5),)),
    Case(name="model: an unknown architecture", command="run job.toml", says=("model.path", "nonesuch"),
         prepare=(replace_text("model/config.json", '"llama"', '"nonesuch"'),)),
    Case(name="model: no chat template", command=f"run job.toml {CHAT}", says=("task.chat", "no chat template")),
    Case(name="model: a chat template that fails", command=f"run job.toml {CHAT}", says=("task.chat", "no tools"),
         prepare=(write_text("model/chat_template.jinja", "{{ raise_exception('no tools') }}"),)),
)  # fmt: skip

REWARDS = (
    _set("reward: no file", "reward.function=none.py:f", "reward.function = ", "no such file"),
    Case(name="reward: a part of no file", says=("none.py", "no such file"),
         command="run job.toml --set reward.parts.a.function=none.py:f"),
    _set("reward: an unknown word", "reward.function=exact", "reward.function must be one of task,", "not 'exact'"),
    _set("reward: misspelt", "reward.function=mathh_verify", "did you mean 'math_verify'?"),
    Case(name="reward: no function", command="run job.toml --set reward.function=mine.py:ff",
         says=("mine.py has no function ff", "did you mean f?"), prepare=(write_reward("return 1.0"),)),
    Case(name="reward: three arguments", command=f"run job.toml {MINE}", says=("must take (answer, record)", "'more'"),
         prepare=(write_text("mine.py", "def f(answer, record, more): return 1.0\n"),)),
    Case(name="reward: bad syntax", command=f"run job.toml {MINE}", says=("reward.function", "line 1"),
         prepare=(write_text("mine.py", "def f(answer, record) return 1.0\n"),)),
    Case(name="reward: an import that fails", command=f"run job.toml {MINE}", says=("reward.function", "nonesuch"),
         prepare=(write_text("mine.py", "import nonesuch\n"),)),
    Case(name="reward: a module that exits", command=f"run job.toml {MINE}", says=("reward.function", "SystemExit"),
         prepare=(write_text("mine.py", "import sys\nsys.exit(3)\n"),)),
    Case(name="reward: a bug", command=f"run job.toml {MINE}",
         prepare=(write_reward("return record['solution'] == answer"),),
         says=("reward.function", "KeyError: 'solution'", "reward.max_error_share")),
    *(Case(name=f"reward: no answers, {function}", says=("set task.columns.answer, or reward.function to your own",),
           command=f"run job.toml --set 'task.columns.answer=\"\"' --set reward.function={function}",
           prepare=(rewrite("data.jsonl", lambda t: t.replace("answer", "sol")),))
      for function in ("task", "math_verify")),
    Case(name="reward: a text", command=f"run job.toml {MINE}", prepare=(write_reward("return 'good'"),),
         says=("reward.function", "good")),
    Case(name="reward: not a number", command=f"run job.toml {MINE}", prepare=(write_reward("return float('nan')"),),
         says=("reward.function", "nan")),
    Case(name="reward: it hangs", command=f"run job.toml {MINE} --set reward.timeout_s=1", alone=True,
         prepare=(write_reward("time.sleep(1000)"),), says=("reward.function", "longer than 1 s", "reward.timeout_s")),
    Case(name="reward: it kills its process", command=f"run job.toml {MINE}", prepare=(write_reward("os._exit(1)"),),
         says=("reward.function", "died")),
    Case(name="reward: it exits", command=f"run job.toml {MINE}", prepare=(write_reward("sys.exit('enough')"),),
         says=("reward.function", "enough")),
    Case(name="reward: no file, explained", command="config explain job.toml --set reward.function=none.py:f",
         says=("reward.function = ", "no such file")),
    Case(name="reward: no file, submitted", says=("reward.function", "no such file"),
         command="submit job.toml --scheduler tcp://127.0.0.1:9 --set reward.function=none.py:f"),
    Case(name="reward: no file, scored again", command="store rescore runs/finished --branch b --reward none.py:f",
         says=("none.py", "no such file")),
)  # fmt: skip

NO_RUN = (
    *(
        Case(name=f"no run: {words}", command=words.format("runs/none"), says=("runs/none", "no such run"))
        for words in (
            "resume {}", "replay {}", "simulate --from {}", "train-offline {}", "store show {}", "store audit {}",
            "store diff {} main b", "store rescore {} --reward task --branch b", "store export {} --to jsonl",
            "store recompute-logprobs {} --model model",
        )
    ),
    *(
        Case(name=f"an empty folder: {words}", command=words.format("runs/empty"), says=("runs/empty", "no such run"),
             prepare=(make_empty_folder("runs/empty"),))
        for words in ("resume {}", "replay {}", "store audit {}", "store show {}", "profile {}", "simulate --from {}")
    ),
    Case(name="no run: a file", command="store audit data.jsonl", says=("data.jsonl", "no such run")),
    Case(name="no folder of runs", command="store ls none", says=("none: no such folder",)),
    Case(name="a file of runs", command="store ls data.jsonl", says=("data.jsonl", "folder")),
)  # fmt: skip

STORES = (
    Case(name="store: none", command="store audit runs/finished", says=("runs/finished", "no store"),
         prepare=(remove("runs/finished/store"),)),
    Case(name="store: no steps", command="store audit runs/early", says=("NOT VERIFIED", "no steps are stored"), code=1,
         prepare=(make_run_without_steps,)),
    Case(name="store: no steps, exported", command="store export runs/early --to jsonl", says=("stored yet",),
         prepare=(make_run_without_steps,)),
    Case(name="store: no steps, compared", command="store diff runs/early main other", says=("no branch 'other'",),
         prepare=(make_run_without_steps,)),
    Case(name="branch: compared with itself", command="store diff runs/finished main main", says=("with itself",)),
    Case(name="run: a summary cut off, profiled", command="profile runs/finished", says=("summary.json", "damaged"),
         code=1, prepare=(write_text("runs/finished/summary.json", '{"cost_model": {'),)),
    Case(name="run: a summary cut off, simulated", command="simulate --from runs/finished", code=1,
         says=("summary.json", "damaged"), prepare=(write_text("runs/finished/summary.json", '{"cost_model": {'),)),
    Case(name="store: no steps, trained on", command="train-offline runs/early", says=("no", "trained on"),
         prepare=(make_run_without_steps,)),
    Case(name="store: no steps, simulated", command="simulate --from runs/early", says=("runs/early",),
         prepare=(make_run_without_steps,), lines=2),
    Case(name="store: no repository", command="store audit runs/finished", says=("cannot be opened",), code=1,
         prepare=(lambda f: shutil.rmtree(f / "runs/finished/store"), make_empty_folder("runs/finished/store"))),
    Case(name="store: a broken manifest", command="store audit runs/finished", says=("runs/finished/store",), code=1,
         prepare=(flip_bits("runs/finished/store/manifests/*"),), lines=60),
    Case(name="store: a broken snapshot", command="store audit runs/finished --full", says=("cannot be",),
         code=1, prepare=(flip_bits("runs/finished/store/snapshots/*"),), lines=60),
    Case(name="store: a broken chunk", command="store audit runs/finished", says=("damaged", "BROKEN", "not checked"),
         code=1, prepare=(flip_bits("runs/finished/store/chunks/*"),), lines=60),
    Case(name="store: an unknown step", command="store show runs/finished --at-step 99",
         says=("no commit of step 99", "steps 0 to 2")),
    Case(name="store: an unknown trajectory", command="store show runs/finished --trajectory 99999",
         says=("no stored trajectory 99999",)),
    Case(name="store: an unknown branch", command="store show runs/finished --branch none --best 1",
         says=("no branch 'none'", "main")),
    Case(name="store: a condition with an unknown name", says=("rewards", "reward"),
         command="store show runs/finished --best 1 --where 'rewards > 0'"),
    Case(name="store: a condition that is no expression", says=("reward >",),
         command="store show runs/finished --best 1 --where 'reward >'"),
    Case(name="store: a condition that calls", says=("__import__",),
         command="store show runs/finished --best 1 --where '__import__(\"os\")'"),
    Case(name="store: two orders", command="store show runs/finished --worst 1 --best 1", says=("give only one of",)),
    Case(name="store: a condition beside an id", says=("--where has no effect with --trajectory",),
         command="store show runs/finished --trajectory 0 --where 'nonsense =='"),
    Case(name="branch: a bad name", command="store rescore runs/finished --reward task --branch 'a b/c'",
         says=("'a b/c'", "branch")),
    Case(name="branch: no name", command="store rescore runs/finished --reward task --branch ''", says=("branch",)),
    Case(name="branch: main", command="store rescore runs/finished --reward task --branch main", says=("main",)),
    Case(name="branch: 300 characters", command=f"store rescore runs/finished --reward task --branch {LONG}",
         says=("branch", "at most")),
    Case(name="branch: a bad name, of logprobs",
         command="store recompute-logprobs runs/finished --model model --branch 'x/y'", says=("'x/y'", "branch")),
    Case(name="branch: unknown, compared", command="store diff runs/finished main none", says=("no branch 'none'",)),
    Case(name="export: an unknown format", command="store export runs/finished --to csv", says=("'csv'", "parquet")),
    Case(name="export: nowhere", command="store export runs/finished --to jsonl --out /proc/none/x.jsonl",
         says=("/proc/none", "--out")),
    Case(name="export: an unknown branch", command="store export runs/finished --to jsonl --branch none",
         says=("no branch 'none'",)),
    Case(name="export: a condition with an unknown name", says=("rewards", "reward"),
         command="store export runs/finished --to jsonl --where 'rewards > 0'"),
    Case(name="logprobs: no model",
         command="store recompute-logprobs runs/finished --model runs/finished/checkpoints/x",
         says=("runs/finished/checkpoints/x", "step-000002"),
         prepare=(make_empty_folder("runs/finished/checkpoints/step-000002"),)),
    Case(name="logprobs: another vocabulary", command="store recompute-logprobs runs/finished --model small",
         says=("small", "vocabulary"),
         prepare=(make_small_vocabulary,)),
    Case(name="logprobs: weights of another configuration",
         command="store recompute-logprobs runs/finished --model small",
         says=("small", "model.safetensors", "vocab_size = 3"),
         prepare=(make_small_vocabulary, lambda f: shutil.copy(f / "model/model.safetensors", f / "small"))),
    Case(name="logprobs: of an emulated run", command="store recompute-logprobs runs/emulated --model model",
         says=("emulated",)),
    Case(name="offline: a key that is fixed", command="train-offline runs/finished --set steps=3",
         says=("steps", "cannot be changed offline")),
    Case(name="offline: nothing selected", command="train-offline runs/finished --where 'reward > 5'",
         says=("reward > 5", "no trajectory that was trained on matches")),
    Case(name="offline: an existing folder", command="train-offline runs/finished --out model",
         says=("already exists",)),
    Case(name="offline: nowhere", command="train-offline runs/finished --out /proc/none/x",
         says=("/proc/none", "--out")),
)  # fmt: skip

JOURNALS = (
    Case(name="journal: none", command="replay runs/finished", says=("no recorded events",), prepare=(remove(EVENTS),)),
    Case(name="journal: truncated", command="replay runs/finished", says=("INCOMPLETE",), code=1, lines=2,
         prepare=(truncate(EVENTS, 0.5),)),
    Case(name="journal: garbled", command="replay runs/finished", says=("events.jsonl, line 5",),
         prepare=(rewrite(EVENTS, lambda t: "\n".join([*t.splitlines()[:4], "{]", *t.splitlines()[5:]])),)),
    Case(name="journal: of bytes", command="replay runs/finished", says=("events.jsonl, line 1, is incomplete",),
         code=1, lines=2,
         prepare=(write_text(EVENTS, b"\xff\xfe\x00\x01" * 100),)),
    Case(name="journal: another event", command="replay runs/finished", says=("events.jsonl, line 1",),
         prepare=(rewrite(EVENTS, lambda t: t.replace('"type":', '"type_":').replace('"type" :', '"type_" :')),)),
    Case(name="journal: an unknown trajectory", command="replay runs/finished --trajectory 99999",
         says=("no trajectory 99999",)),
    Case(name="journal: no number", command="replay runs/finished --trajectory x", says=("'x'", "--trajectory")),
)  # fmt: skip

RESUMES = (
    Case(name="resume: finished", command="resume runs/finished", says=("all 3 steps are trained", "set steps=N")),
    Case(name="resume: no job file", command="resume runs/finished", says=("runs/finished", "no such run"),
         prepare=(remove(CONFIG),)),
    Case(name="resume: a broken job file", command="resume runs/finished", says=("config.toml: not valid TOML",),
         prepare=(replace_text(CONFIG, "\neta = 1", "\neta = = 1"),)),
    Case(name="resume: a key that is fixed", command="resume runs/finished --set staleness.eta=3",
         says=("staleness.eta=3: cannot be changed", "steps")),
    Case(name="resume: another bound", command="resume runs/finished --set steps=9", says=("staleness.eta = 3",),
         prepare=(replace_text(CONFIG, "\neta = 1", "\neta = 3"),)),
    Case(name="resume: the model is gone", command="resume runs/finished --set steps=9", says=("no such folder",),
         prepare=(remove("model"),)),
    Case(name="resume: no resume point", command="resume runs/finished --set steps=9",
         says=("no complete resume point",), prepare=(remove("runs/finished/resume"),)),
    Case(name="resume: a run without resume points", command="resume runs/finished --set steps=9",
         says=("3 steps are stored but there is no complete resume point; training.resume_every was 0",),
         prepare=(remove("runs/finished/resume"), replace_text(CONFIG, "\nresume_every = 1", "\nresume_every = 0"))),
    Case(name="run: a name that is taken", command="run job.toml --set name=finished",
         says=("runs/finished: already has a run", "set another name=", "`staleflow resume ")),
    Case(name="submit: a name of digits", says=("'question'", "task.columns.prompt"),
         command="submit job.toml --scheduler tcp://127.0.0.1:9 --name 2024 --set task.columns.prompt=question"),
    Case(name="submit: a name that is taken", says=("runs/finished: already has a run",),
         command="submit job.toml --scheduler tcp://127.0.0.1:9 --set name=finished"),
)  # fmt: skip

VIRTUAL = (
    Case(name="simulate: nothing", command="simulate", says=("job file or --from RUN",)),
    Case(name="simulate: both", command="simulate job.toml --from runs/finished", says=("job file or --from RUN",)),
    Case(name="simulate: a sweep of nothing", command="simulate job.toml --sweep staleness.eta", says=("--sweep",)),
    *(
        Case(name=f"simulate: a time without end, {key}", command=f"simulate job.toml --set {key}=1e300",
             says=(key, "out of range"))
        for key in ("simulation.train_s", "rollout.cost.k4", "simulation.straggler_factor", "workload.tool_s")
    ),
    Case(name="simulate: a sweep of no key", command="simulate job.toml --sweep =1", says=("--sweep =1", "key=value")),
    Case(name="simulate: a key swept twice", says=("--sweep staleness.eta=2", "--sweep staleness.eta=0,1", "once"),
         command="simulate job.toml --sweep staleness.eta=0,1 --sweep staleness.eta=2"),
    Case(name="simulate: a key swept and set", says=("--sweep staleness.eta=0,1", "--set staleness.eta=2", "once"),
         command="simulate job.toml --sweep staleness.eta=0,1 --set staleness.eta=2"),
    Case(name="simulate: a sweep out of range", command="simulate job.toml --sweep staleness.eta=0,-1",
         says=("out of range",)),
    Case(name="simulate: no recorded run", says=("runs/none",),
         command="simulate job.toml --set workload.kind=recorded --set workload.run=runs/none"),
    Case(name="plan: nothing is measured", command="plan job.toml", says=("--from RUN", "profile = FILE")),
    Case(name="plan: no such run", command="plan job.toml --from runs/none", says=("runs/none", "no finished run")),
    Case(name="plan: the run has begun", command="plan runs/finished/config.toml", says=("already has a run",)),
    _set("engine: pages as large as the cache", "rollout.engine.page_tokens=5000", "page_tokens = 5000", "or less",
         command="config explain"),
    Case(name="job: more groups than there is memory", says=("batch.groups_per_step", "at most 1000000"),
         command="simulate job.toml --set batch.groups_per_step=4611686018427387904"),
    Case(name="job: more steps than there is time", says=("steps", "at most 1000000000"),
         command="simulate job.toml --set steps=4611686018427387904"),
    *(
        Case(name=f"store at {url}", command=f"simulate job.toml --set store={url}", says=(url, "s3://BUCKET/PREFIX"))
        for url in ("s3:/bucket", "ftp://bucket/runs", "s3://", "s3://b/runs", "s3://Bucket/runs")
    ),
    Case(name="audit: no memory", command="store audit runs/none --memory 0", says=("--memory", "0")),
    Case(name="job: no time for a commit", says=("deadlines.commit_s",),
         command="simulate job.toml --set deadlines.commit_s=0"),
    Case(name="profile: nowhere", command="profile runs/finished --out /proc/none/x.json",
         says=("/proc/none", "--out")),
)  # fmt: skip

DRY = (
    Case(name="dry: a reward's bug", command=f"run --dry-run job.toml {MINE} --set reward.max_error_share=0.5",
         says=("reward.function", "KeyError"), prepare=(write_reward("return record['solution'] == answer"),)),
    Case(name="dry: no data", command="run --dry-run job.toml --set task.source=jsonl:none.jsonl",
         says=("none.jsonl", "no such file")),
    Case(name="dry: no model", command="run --dry-run job.toml --set model.path=runs/none", says=("no such folder",)),
    Case(name="dry: a prompt that is too long", command="run --dry-run job.toml", says=("data.jsonl, line 1",),
         prepare=(replace_text("data.jsonl", "0 + 2", "1 + " * 200),)),
)  # fmt: skip

COMMANDS = (
    Case(name="option: without a value", command="run job.toml --set", says=("--set",)),
    Case(name="option: JSON of a plan", command="doctor job.toml --json", says=("cannot be combined with --json",)),
    Case(name="argument: too many", command="run job.toml job.toml", says=("job.toml",)),
    Case(name="option: not a number", command="store show runs/finished --worst many", says=("--worst", "many")),
    Case(
        name="option: too many workers",
        command="store export runs/finished --to jsonl --workers 0",
        says=("--workers", "1"),
    ),
)

NOWHERE = "--scheduler tcp://127.0.0.1:9"
ADDRESSES = (
    *(
        Case(name=f"address: nothing there: {words}", command=f"{words} {NOWHERE}",
             says=("no scheduler at tcp://127.0.0.1:9: ",), alone=words not in ("jobs", "submit job.toml"))
        for words in ("jobs", "status x", "logs x", "cancel x", "retire x y", "submit job.toml")
    ),
    Case(name="address: none", command="jobs", says=("no cluster given", "--scheduler")),
    Case(name="address: one TLS file", command="jobs --scheduler tls://127.0.0.1:9 --tls-cert x",
         says=("with TLS all three",)),
    Case(name="address: TLS without files", command="jobs --scheduler tls://127.0.0.1:9", says=("--tls-ca-file",)),
    Case(name="address: TLS files that are not there", says=("none.pem",),
         command="jobs --scheduler tls://127.0.0.1:9 --tls-ca-file none.pem --tls-cert none.pem --tls-key none.pem"),
    Case(name="address: no scheduler file", command="jobs --scheduler-file none.json",
         says=("none.json", "No such file")),
    Case(name="address: a job's, nothing there", says=("no scheduler at tcp://127.0.0.1:9",),
         command="run job.toml --set cluster.kind=address --set cluster.address=tcp://127.0.0.1:9"),
    Case(name="address: of offline work", command=f"store export runs/finished --to jsonl {NOWHERE}",
         says=("127.0.0.1:9",), alone=True),
)  # fmt: skip

DISKS = (
    Case(name="disk: full output of JSON", command="store show runs/finished --json", redirect=">/dev/full",
         says=("No space left",), code=1, alone=True),
    Case(name="disk: full output of a table", command="simulate job.toml", redirect=">/dev/full",
         says=("No space left",), code=1, alone=True, lines=2),
    Case(name="disk: a closed pipe", command="config explain job.toml --no-check", redirect="| head -1", says=("name",),
         code=0, alone=True),
    Case(name="disk: closed output", command="store ls", redirect=">&-", says=(), code=0, alone=True),
    Case(name="disk: the current folder is gone", command="run job.toml", says=("job.toml",), alone=True,
         redirect="gone"),
)  # fmt: skip

SURROUNDINGS = (
    Case(name="terminal: ASCII only", command="config explain job.toml --no-check --set name=größe", says=("gr",),
         code=0, alone=True, environment={"PYTHONIOENCODING": "ascii"}, lines=400),
    Case(name="terminal: one column", command="simulate job.toml", says=("the",), code=0, alone=True, lines=400,
         environment={"COLUMNS": "1", "TERM": "dumb"}),
)  # fmt: skip

CASES = (
    *JOB_FILES, *VALUES, *DATA, *MODELS, *REWARDS, *NO_RUN, *STORES, *JOURNALS, *RESUMES, *VIRTUAL, *DRY, *COMMANDS,
    *ADDRESSES, *DISKS, *SURROUNDINGS,
)  # fmt: skip


# -- judging an answer -----------------------------------------------------------------------------------------------


def output_faults(case: Case, code: int, out: str, err: str, elapsed_s: float = 0.0) -> list[str]:
    """Return what is wrong with the output of a case; empty if nothing is."""
    answer = err if code == 2 else out + err
    lines = [line for line in answer.splitlines() if line.strip()]
    result = [] if code == case.code else [f"exit code {code}, not {case.code}"]
    result += [f"does not say {words!r}" for words in case.says if words not in answer]
    result += ["a traceback"] if "Traceback" in out + err else []
    result += [f"{len(lines)} lines"] if len(lines) > case.lines and not result else []
    result += [f"{max(map(len, lines))} characters"] if code == 2 and any(len(line) > 600 for line in lines) else []
    result += [f"{elapsed_s:.1f} s"] if elapsed_s > WITHIN_S else []
    return result


def furnish_folder(folder: Path) -> Path:
    """Create the folder that each case starts with a copy of; this trains a tiny model for three steps."""
    make_tiny_model(folder / "model")
    (folder / "job.toml").write_text(RUN.format(runs=folder / "runs", steps=3, model=folder / "model"))
    words = [sys.executable, "-m", "staleflow.cli.main", "run", str(folder / "job.toml"), *RUN_SETTINGS]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    furnish(folder / "furnished", folder / "model", folder / "runs/job")
    return folder / "furnished"


def prepare(steps: Sequence[Prepare], folder: Path, start: Path) -> None:
    """Copy the folder `start` and change the copy."""
    shutil.copytree(start, folder)
    replace_run_folder(folder, start)
    for step in steps:
        step(folder)


def run_alone(case: Case, folder: Path) -> tuple[int, str, str, float]:
    """Run a case in a separate process; returns exit code, standard output, standard error and seconds."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, **case.environment}
    own = case.environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(([str(folder / own)] if own else []) + [root])
    # -P: the installed command does not import from the current folder either.
    words = [sys.executable, "-P", "-m", "staleflow.cli.main", *shlex.split(case.command)]
    shell = shlex.join(words) + f" {case.redirect}"
    if case.redirect == "gone":
        shell = f"mkdir away; cd away; rmdir ../away; {shlex.join(words)}"
    begin = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", shell], cwd=folder, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=2 * WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return process.returncode, out, err, time.monotonic() - begin


def main(words: list[str]) -> int:
    """Run the cases whose names contain one of the words, or all. Returns the number of failures."""
    failed, longest = 0, 0.0
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="malformed-") as made:
        start = furnish_folder(Path(made))
        for number, case in enumerate(chosen, 1):
            folder = Path(made) / str(number)
            prepare(case.prepare, folder, start)
            code, out, err, elapsed_s = run_alone(case, folder)
            shutil.rmtree(folder)
            result = output_faults(case, code, out, err, elapsed_s)
            failed, longest = failed + bool(result), max(longest, elapsed_s)
            received = [line for line in (err if code else out + err).splitlines() if line.strip()]
            outcome = "FAIL" if result else "ok"
            print(f"{number:3} {outcome:4} {elapsed_s:5.1f} s  {code:3}  {case.name}", flush=True)
            print(f"        {received[-1][:220] if received else '(nothing)'}", flush=True)
            for fault in result:
                print(f"      ! {fault}", flush=True)
    print(f"{len(chosen)} cases, {failed} failed, longest {longest:.1f} s")
    return failed


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(1 if main(sys.argv[1:]) else 0)
