"""Writes a user's first job (`staleflow init`): a commented job file, with a default data set, reward and model.

The defaults are made-up sums, a reward file, and a tiny model that is pretrained on the spot; each is left out if the
user names their own. No file is overwritten, and if the job cannot be completed, no file is left behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import actor_settings, loading, user_files
from staleflow.pipeline.config.knob_tree import toml_value
from staleflow.pipeline.config.model_facts import inspect_model
from staleflow.pipeline.config.model_files import find_model_folder
from staleflow.stores.errors import ConfigError
from staleflow.tasks.rendering.chat_tokenizer import load_chat_tokenizer
from staleflow.tasks.rendering.file_tokenizer import FileTokenizer
from staleflow.tasks.settings import user_code
from staleflow.tasks.settings.dataset_columns import Columns
from staleflow.tasks.settings.knobs import names_user_code
from staleflow.tasks.settings.reward_functions import REWARDS, reward_name_error
from staleflow.tasks.settings.source_kinds import SourceType, is_environment, kind_of, open_source
from staleflow.tasks.sources.dataset_rows import SAVED_FOLDER_FILES, RowSource, format_columns

JOB_FILE, REWARD_FILE, SUMS_FILE, MODEL_FOLDER = "job.toml", "reward.py", "sums.jsonl", "model"
"""Names of the files and of the model's folder that may be written."""
NUM_SUMS, TERM_RANGE = 2000, (3, 5)
"""Number of made-up sums, and the fewest and the most terms of a sum."""
PRETRAINING_STEPS, WORKED_ONLY_STEPS, WORKED_SHARE = 400, 250, 0.2
"""Pretraining of the tiny model. In the first WORKED_ONLY_STEPS of its steps, all examples compute their sum term by
term. After these, WORKED_SHARE of the examples do; the others guess a digit, and are right one time in ten."""
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "input", "query", "text")
"""Usual names of a column of prompts, in order of preference."""
ANSWER_COLUMNS = (
    "answer",
    "solution",
    "label",
    "target",
    "output",
    "ground_truth",
    "final_answer",
    "response",
    "completion",
)
"""Usual names of a column of answers."""
GOLD_MARK = "####"
"""The mark before the final result in answers of GSM8K and similar data sets."""
NUMBER_PATTERN = r"-?\d+(?:[.,]\d+)*"
EXACT_REWARD = "exact"
"""The name of the reward "task" for rows on the command line."""
NUM_SAMPLE_ROWS = 50
"""Number of rows that are read to see whether answers are numbers."""
LEARNING_RATES, MIN_LEARNING_RATE = ((50e6, 3e-4), (1.5e9, 1e-5)), 1e-6
"""Initial learning rates by the size of the model's files (most bytes, rate), and the rate of larger models."""
MAX_RESPONSE_TOKENS = 512
"""Longest response of a model that the user brings, unless its context is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitInputs:
    """The user's data set, model and reward; defaults replace empty ones. options: options of the data set."""

    data: str = ""
    model: str = ""
    reward: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_column: str = ""
    answer_column: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstJob:
    """The files that were written, and the first prompt.

    files: a description of each file, by its name. first_prompt: the text as the model receives it. num_tokens: its
    length. num_unknown: how many of its tokens are the tokenizer's unknown token, which the text leaves out.
    """

    files: Mapping[str, str]
    first_prompt: str
    num_tokens: int
    num_unknown: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What a job file must say about a data set or another task source."""

    source: str
    """The value of task.source."""
    columns: Columns | None = None
    """Columns of the prompts and answers; None if the source has no columns."""
    has_number_answers: bool = False
    """Whether answers are numbers."""
    has_gold_mark: bool = False
    """Whether answers follow the GOLD_MARK."""
    has_message_prompts: bool = False
    """Whether prompts are lists of chat messages."""
    has_environment: bool = False
    """Whether the source is an environment of several turns."""


def write_first_job(folder: Path, inputs: InitInputs, report: Callable[[str], None]) -> FirstJob:
    """Create a folder and write a job into it. Raises ConfigError. report: receives progress lines of pretraining."""
    if inputs.data and not inputs.model:
        raise ConfigError(
            "the tiny model knows nothing but sums; bring a model for your data: --model FOLDER_OR_NAME, such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    if inputs.options and not inputs.data:
        raise ConfigError(f"--option {next(iter(inputs.options))}: the made-up sums have no options; add --data")
    if inputs.model:
        find_model_folder(inputs.model, "--model")  # first: transformers would ask the hub for each file, several times
    data = _inspect_data(folder, inputs)
    writes_reward = not inputs.reward and data.columns is not None
    files = {JOB_FILE: "the job; its comments say what each line is for"}
    files |= {REWARD_FILE: _describe_reward(data)} if writes_reward else {}
    files |= {} if inputs.data else {SUMS_FILE: f"{NUM_SUMS} sums with their answers; the last tenth is held out"}
    files |= {} if inputs.model else {MODEL_FOLDER: "a tiny Llama, pretrained to guess mostly, and to work out a few"}
    for name in files:
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} exists and is not overwritten; name another folder: staleflow init NAME"
            )
    text = _job_text(folder, inputs, data)
    loading.from_tree(tomllib.loads(text), JOB_FILE)
    with _removed_after_an_error(folder, files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".init-", dir=folder) as tmp_name:
                tmp_folder = Path(tmp_name)
                (tmp_folder / JOB_FILE).write_text(text, "utf-8")
                if writes_reward:
                    (tmp_folder / REWARD_FILE).write_text(_reward_text(data), "utf-8")
                if not inputs.data:
                    (tmp_folder / SUMS_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in _sum_rows()), "utf-8")
                if not inputs.model:
                    _pretrain(tmp_folder / MODEL_FOLDER, report)
                for name in files:
                    (tmp_folder / name).rename(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}; name another folder") from error
        with contextlib.chdir(folder):
            return _load_written_job(files)


def _load_written_job(files: Mapping[str, str]) -> FirstJob:
    """Load the job that was written into the current folder, and encode its first prompt. Raises ConfigError."""
    config = loading.load(JOB_FILE)
    prompts = actor_settings.prompt_settings(
        config, num_held_out=config.num_held_out_prompts, max_prompt_tokens=None
    ).build()
    tokens = prompts.encode(prompts.task(0))
    num_unknown = 0
    if Path(config.model.path).is_dir():
        num_unknown = tokens.count(FileTokenizer(Path(config.model.path)).unknown_id)
    return FirstJob(files=files, first_prompt=prompts.text(tokens), num_tokens=len(tokens), num_unknown=num_unknown)


@contextlib.contextmanager
def _removed_after_an_error(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """After an error, remove the files of these names from `folder`."""
    try:
        yield
    except BaseException:
        for path in (folder / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


# -- sums, and a model that knows them -------------------------------------------------------------------------------


def _draw_sum(rng: random.Random) -> str:
    """A sum of single digits, all of whose partial sums are single digits, too: `7 - 1 + 3`."""
    total, terms = rng.randint(1, 9), []
    first_number = total
    for _ in range(rng.randint(*TERM_RANGE) - 1):
        next_total = rng.choice([other for other in range(10) if other != total])
        terms.append(f"{'+' if next_total > total else '-'} {abs(next_total - total)}")
        total = next_total
    return " ".join([str(first_number), *terms])


def _sum_rows() -> Iterator[dict[str, str]]:
    """Rows of distinct sums."""
    rng = random.Random(0)
    expressions: dict[str, None] = {}
    while len(expressions) < NUM_SUMS:
        expressions[_draw_sum(rng)] = None
    for expression in expressions:
        total = sum(int(term) for term in re.findall(r"-?\d", expression.replace("- ", "-")))
        yield {"prompt": f"{expression} =", "answer": str(total)}


def _pretrain(out: Path, report: Callable[[str], None]) -> None:
    """Write a model that mostly guesses. It can learn to compute sums term by term, which it does right."""
    from staleflow.tasks.training.tiny_model import EXAMPLES_PER_STEP, PretrainingSettings, pretrain, worked_example

    def examples(rng: random.Random) -> Iterator[tuple[str, str]]:
        for number in itertools.count():
            expression = _draw_sum(rng)
            shows_work = number < EXAMPLES_PER_STEP * WORKED_ONLY_STEPS or rng.random() < WORKED_SHARE
            yield f"{expression} =", worked_example(expression, rng, 0.0) if shows_work else f"so{rng.randint(0, 9)}."

    def on_start(parameters: int) -> None:
        report(f"pretraining a model of {parameters:,} parameters, {PRETRAINING_STEPS} steps")

    def on_step(step: int, loss: float) -> None:
        if step % 100 == 0:
            report(f"  step {step}: loss {loss:.2f}")

    settings = PretrainingSettings(
        steps=PRETRAINING_STEPS,
        hidden_size=64,
        num_layers=2,
        learning_rate=5e-3,
        warmup_steps=30,
        initializer_range=0.1,
    )
    pretrain(out, examples(random.Random(1)), settings, on_start, on_step)


# -- what the user brings --------------------------------------------------------------------------------------------


def _inspect_data(folder: Path, inputs: InitInputs) -> DataFacts:
    """Open the user's data set, and find its columns and the form of its answers; without data, those of the sums.
    Raises ConfigError."""
    source = _source_name(inputs.data) if inputs.data else ""
    kind, _, name = source.partition(":")
    source_kind = kind_of(source)
    if source_kind is None or source_kind.type is not SourceType.ROWS:
        for option, column in (("--prompt-column", inputs.prompt_column), ("--answer-column", inputs.answer_column)):
            if column:
                raise ConfigError(f"{option} {column}: only for --data with rows in columns")
        if not source:
            return DataFacts(source=f"jsonl:{SUMS_FILE}", columns=Columns())
        has_environment = is_environment(source, f"--data {inputs.data}")
        if has_environment and inputs.reward not in ("", EXACT_REWARD, "task"):
            raise ConfigError(f"--reward {inputs.reward}: {source} rewards its episodes itself; leave --reward out")
        prefix, file, name = user_files.split_code_reference(source)
        return DataFacts(
            source=f"{prefix}{_job_path(folder, file)}:{name}" if file.endswith(".py") else source,
            has_environment=has_environment,
        )
    rows = open_source(source_kind.type, source, inputs.options, f"--data {inputs.data}")
    names = tuple(rows.names)
    prompt = inputs.prompt_column or next((column for column in PROMPT_COLUMNS if column in names), "")
    answer = inputs.answer_column or next((column for column in ANSWER_COLUMNS if column in names), "")
    for option, column in (("--prompt-column", prompt), ("--answer-column", answer)):
        if column and column.partition(".")[0] not in names and column not in names:
            raise ConfigError(f"{option} {column}: --data {inputs.data} has only {format_columns(column, names)}")
    if not prompt:
        raise ConfigError(f"--data {inputs.data}: which column is the prompt? --prompt-column {' or '.join(names)}")
    columns = Columns(prompt=prompt, answer=answer if answer != prompt else "")
    if not columns.answer and inputs.reward in (EXACT_REWARD, *REWARDS):
        other_names = " or ".join(name for name in names if name != prompt) or "NAME"
        raise ConfigError(
            f"--data {inputs.data}: --reward {inputs.reward} compares with an answer; which column is it? "
            f"--answer-column {other_names}"
        )
    tasks = RowSource(rows, columns, f"--data {inputs.data}")
    records = [tasks.task(i).record for i in range(min(NUM_SAMPLE_ROWS, len(rows)))]
    answers = [str(record["answer"]) for record in records] if columns.answer else []
    has_gold_mark = bool(answers) and all(GOLD_MARK in answer for answer in answers)
    return DataFacts(
        source=f"{kind}:{_job_path(folder, name)}",
        columns=columns,
        has_number_answers=bool(answers)
        and all(re.fullmatch(NUMBER_PATTERN, answer.rpartition(GOLD_MARK)[2].strip()) for answer in answers),
        has_gold_mark=has_gold_mark,
        has_message_prompts=not isinstance(tasks.task(0).prompt, str),
    )


def _source_name(data: str) -> str:
    """The data set of `--data`, a file, folder or name, in the form `kind:name` of job files. Raises ConfigError."""
    if kind_of(data) is not None or names_user_code(data):
        return data
    path = Path(os.path.expanduser(data))
    endings = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
    if path.suffix in endings:
        return f"{endings[path.suffix]}:{path}"
    if path.is_file():
        raise ConfigError(f"--data {data}: unknown kind of file; bring one of {', '.join(endings)}")
    if path.suffix and "/" not in data and not path.is_dir():  # the hub's names without an owner have no dot
        raise ConfigError(f"--data {data}: no such file")
    if path.is_dir() and not any((path / name).is_file() for name in SAVED_FOLDER_FILES) and [*path.glob("*.parquet")]:
        return f"parquet:{path}"
    return f"datasets:{path if path.is_dir() else data}"


def _job_path(folder: Path, name: str) -> str:
    """A path as it is written into the job file: relative to the job's folder if it is in there, or was named relative
    to the current folder; names that are no paths stay."""
    path = Path(os.path.expanduser(name))
    if not path.exists():
        return name
    if path.is_absolute() and not path.resolve().is_relative_to(folder.resolve()):
        return str(path)
    return os.path.relpath(path.resolve(), folder.resolve())


def _reward_function(folder: Path, inputs: InitInputs, data: DataFacts) -> str:
    """The reward function as the job file names it. Raises ConfigError."""
    if not inputs.reward:
        return f"{REWARD_FILE}:reward" if data.columns is not None else "task"
    if inputs.reward == EXACT_REWARD:
        return "task"
    if problem := reward_name_error(inputs.reward):
        raise ConfigError(f"--reward {problem}")
    if not names_user_code(inputs.reward):
        return inputs.reward
    user_code.load(inputs.reward, "--reward")
    file, _, name = inputs.reward.rpartition(":")
    return f"{_job_path(folder, file)}:{name}"


# -- what is written -------------------------------------------------------------------------------------------------


def _describe_reward(data: DataFacts) -> str:
    if data.columns is not None and not data.columns.answer:
        return "how a response is scored: short ones are best, for want of an answer column (--answer-column); edit it"
    return "how a response is scored: 1 for the right answer, else 0; edit it as you like"


def _reward_text(data: DataFacts) -> str:
    """The text of reward.py."""
    assert data.columns is not None
    answer_code = 'str(record["answer"])' + (f'.rpartition("{GOLD_MARK}")[2]' if data.has_gold_mark else "")
    body = f"    expected = {answer_code}\n    return float(answer.strip() == expected.strip())\n"
    if data.has_number_answers:
        body = (
            f'    expected = {answer_code}.replace(",", "")\n'
            '    return float(answer.replace(",", "").strip() == expected.strip())\n'
        )
    if not data.columns.answer:
        body = "    return 1 / (1 + len(answer))\n"
    return f'''"""How responses are scored. job.toml names this file and its function under [reward]."""


def reward(answer, record):
    """The score of one response: a number, or (number, its parts by name).

    answer: what task.answer_pattern finds in the response; without a pattern, the whole response
    record: the prompt's row in the data set
    """
{body}'''


def _job_text(folder: Path, inputs: InitInputs, data: DataFacts) -> str:
    """The text of the job file. Raises ConfigError."""
    tokenizer = load_chat_tokenizer(inputs.model) if inputs.model else None
    has_chat_template = tokenizer is not None and tokenizer.has_chat_template
    if data.has_message_prompts and not has_chat_template:
        raise ConfigError(f"--data {inputs.data}: prompts are messages, and {inputs.model} has no chat template")
    max_new_tokens = 48
    if inputs.model:
        minimal_job = {"model": {"path": inputs.model}, "rollout": {"max_new_tokens": 1}}
        facts = inspect_model(loading.from_tree(minimal_job, "--model"))
        max_new_tokens = min(MAX_RESPONSE_TOKENS, facts.context_length // 2)
    pattern, template = "", "{prompt}"
    if not inputs.model:
        pattern = r"so(-?\d+)\."
    elif not inputs.data or data.has_number_answers:
        pattern = f"({NUMBER_PATTERN})"
    elif data.columns is not None and data.columns.answer:
        pattern, template = r"Answer:\s*(.+)", "{prompt}\n\nEnd with a line that says: Answer: ..."
    values: dict[str, Any] = {
        "steps": 100 if inputs.model else 50,
        "model": _job_path(folder, inputs.model) if inputs.model else MODEL_FOLDER,
        "source": data.source,
        "template": template,
        "chat": has_chat_template,
        "eval_prompts": 100 if inputs.model else 200,
        "function": _reward_function(folder, inputs, data),
        "groups": 8 if inputs.model else 16,
        "max_new_tokens": max_new_tokens,
        "engine": "vllm" if inputs.model and importlib.util.find_spec("vllm") else "transformers",
        "max_running": 32 if inputs.model else 64,
        "kv_tokens": max(16_384, 4 * max_new_tokens) if inputs.model else 4096,
        "learning_rate": _learning_rate(inputs.model),
    }
    toml_values = {key: toml_value(value) for key, value in values.items()}
    toml_values["answer_pattern"] = f"'{pattern}'"  # a literal, in which a backslash is one
    data_lines = ""
    if inputs.options:
        data_lines += f"options = {toml_value(dict(inputs.options))}\n"
    if data.columns is not None:
        columns = {"prompt": data.columns.prompt, "answer": data.columns.answer}
        data_lines += f"columns = {toml_value(columns)}  # of a row: the prompt, a text or messages; the answer\n"
    function = toml_values.pop("function")
    reward_lines, turn, turns = REWARD_TEMPLATE.format(function=function), "", ""
    if data.has_environment:
        reward_lines = f"function = {function}  # the environment gives the reward"
        turn_tokens = max(1, max_new_tokens // 8)
        turn = f"turn_tokens = {turn_tokens}  # most tokens of a turn; max_new_tokens is for the whole episode\n"
        turns = ENVIRONMENT_TEMPLATE
    return JOB_TEMPLATE.format(data_lines=data_lines, reward_lines=reward_lines, turn=turn, turns=turns, **toml_values)


def _learning_rate(model: str) -> float:
    """The initial learning rate for the size of a model's files; the least for a model that is not on this machine."""
    if not model:
        return LEARNING_RATES[0][1]
    num_bytes = sum(path.stat().st_size for path in Path(os.path.expanduser(model)).glob("*.safetensors"))
    return next((rate for max_bytes, rate in LEARNING_RATES if 0 < num_bytes <= max_bytes), MIN_LEARNING_RATE)


JOB_TEMPLATE = """\
# A job of staleflow. Run it in this folder: staleflow run job.toml
# `staleflow config explain job.toml` lists all values, with their meaning and limits.
name = "first"  # the run is stored in runs/first; another run needs another name: --set name=second
steps = {steps}  # training steps
seed = 1

[model]
path = {model}  # folder of a Hugging Face causal LM with its tokenizer, or a hub name

[task]
source = {source}  # jsonl:FILE, parquet:FILE, datasets:NAME, reasoning_gym:NAME or mine.py:Class
{data_lines}template = {template}  # text around each prompt
chat = {chat}  # whether the tokenizer's chat template renders prompts; then `system = "..."` is possible, too
answer_pattern = {answer_pattern}  # its last match in a response is the answer; empty: the whole response
eval_prompts = {eval_prompts}  # prompts that are kept apart, and answered before and after training
# eval_source = "jsonl:test.jsonl"  # where they come from, in place of the last tenth of the rows

[reward]
{reward_lines}
{turns}
[batch]
groups_per_step = {groups}  # prompts in a training step ...
group_size = 8  # ... and responses to each, which are compared with each other

[staleness]
eta = 1  # most versions that a response may be older than the step that trains on it; 0: none, and both take turns

[rollout]
instances = 1  # processes that sample
max_new_tokens = {max_new_tokens}  # most tokens of a response; longer ones are cut off
{turn}
[rollout.engine]
name = {engine}  # vllm is faster on GPUs: pip install 'staleflow[vllm]'
max_running = {max_running}  # responses sampled at once
kv_tokens = {kv_tokens}  # tokens of prompts and responses that are kept in memory for it

[training]
learning_rate = {learning_rate}  # what small models learn at is too high for large ones
"""
REWARD_TEMPLATE = """\
function = {function}  # task (equal to the row's answer), math_verify or mine.py:function
# Or, in place of function, a weighted sum of several (several lines of this kind):
# parts.right = {{ function = "math_verify" }}
# parts.mine = {{ function = "mine.py:function", weight = 0.1 }}"""
ENVIRONMENT_TEMPLATE = """
[environment]
max_turns = 16  # most turns of an episode; the last one ends it
step_timeout_s = 30.0  # seconds for a step or a reset; after that it has failed
"""
