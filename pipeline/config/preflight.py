"""Checks everything a job names before any process is started: folders, devices, model, data, template and reward.

What can be seen in a file's first bytes is not left to the actors, who would find it after half a minute. torch is not
loaded, unless a tokenizer without tokenizer.json needs it. A failure is a ConfigError of one line.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib.util
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.pipeline.config import actor_settings, local_gpus, model_files, size_plan, user_files
from staleflow.pipeline.config.knob_tree import value_at
from staleflow.pipeline.config.model_facts import check_lengths, check_teacher_fits
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError, raised_as
from staleflow.tasks.rendering.file_tokenizer import FileTokenizer, chat_template, check_same_tokens
from staleflow.tasks.settings.knobs import names_user_code, shorten
from staleflow.tasks.settings.source_kinds import is_installed, kind_of

if TYPE_CHECKING:
    from staleflow.tasks.episodes.episode_host import EpisodeHostSettings
    from staleflow.tasks.rendering.task_source import Task
    from staleflow.tasks.sources.prompts import TokenizedPrompts

MAX_NAME_BYTES = 200
"""Most bytes of a run's name: folders named after it get a suffix, and a file's name has at most 255."""
CHECKED_PATH_KEYS = (
    "runs_dir", "cluster.shared_memory", *user_files.OTHER_PATH_KEYS, *user_files.MODEL_KEYS,
)  # fmt: skip
"""Keys that may name a file or folder, besides those of user code."""
MAX_DRAWN_PROMPTS = 100_000
"""Most prompts that are looked at."""
MAX_DRAWING_S = 2.0
"""Seconds after which no more prompts are looked at."""
INSTALL_COMMANDS = {"vllm": "pip install 'staleflow[vllm]'"}
"""Optional packages of engines, with how to install them."""


def check_job(config: RunConfig, *, runs_here: bool = True) -> list[str]:
    """Check everything a job names. Returns one line for each thing that could not be checked or may be a mistake.

    runs_here: whether it runs on this machine. If not, folders and data that are not here may be on the cluster. Raises
    ConfigError.
    """
    check_names(config)
    if runs_here:
        _check_runs_dir(Path(config.runs_dir))
    if runs_here and config.cluster.kind == "local":
        _check_machine(config)
    if runs_here and config.store:
        from staleflow.stores.trajectories.repository import check_bucket

        stored_config, _ = user_files.with_copied_code(user_files.with_absolute_paths(config))
        header = actor_settings.run_header(stored_config)
        check_bucket(header.url, None if (config.run_dir / "store").exists() else header.job)
    _check_step_timeout(config)
    if config.emulated:
        _check_workload(config, runs_here=runs_here)
    if not config.has_texts:
        user_files.check_user_code(config)
        return []
    notes: list[str] = []
    for key, kind, path in user_files.data_files(config):
        if runs_here and (not path.exists() or (kind == "jsonl" and path.is_dir())):
            why = "a folder, not a file" if path.exists() else "no such file"
            raise ConfigError(f"{key} = {f'{kind}:{path}'!r}: cannot be read: {why}")
    for key in user_files.TLS_KEYS if runs_here else ():
        if (file := value_at(config, key)) and not Path(file).is_file():
            raise ConfigError(f"{key} = {file!r}: no such file")
    folder = _check_model(config, notes, runs_here=runs_here)
    _check_reference(config, folder, notes, runs_here=runs_here)
    user_files.check_user_code(config)
    if not runs_here and _needs_cluster_machine(config, notes):
        return notes
    for name, job in config.jobs_by_source.items():
        try:
            _try_source(job, folder, notes, groups_per_step=0 if name else job.batch.groups_per_step)
        except ConfigError as error:
            message = user_files.with_row_names(str(error))
            raise ConfigError(f"task {name!r}: {message}" if name else message) from error
    return notes


def _try_source(config: RunConfig, folder: Path | None, notes: list[str], groups_per_step: int) -> None:
    """Draw the first prompts of a job's one source, and try its reward or environment. Raises ConfigError.
    groups_per_step: groups that a step draws from it; 0 if unknown."""
    from staleflow.tasks.sources.examples import Examples

    task, prompts = _draw_first_prompt(config, folder, notes, groups_per_step)
    examples = actor_settings.example_settings(config, config.num_held_out_prompts)
    if examples is not None and prompts is not None:
        Examples(examples, prompts).rows(0)
    environments = actor_settings.episode_settings(config) if config.has_environment else None
    if environments is None or environments.scoring is not None:
        _try_reward(config, task)
    if environments is not None:
        _try_environment(environments, prompts)


def check_names(config: RunConfig) -> None:
    """Raise ConfigError for texts that cannot name folders, or that name a cluster which is not used."""
    if not config.name.isprintable() or len(config.name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            f"name = {shorten(config.name)} must be a plain folder name: printable, and at most {MAX_NAME_BYTES} bytes"
        )
    for key in (*CHECKED_PATH_KEYS, *user_files.code_keys_of(config)):
        if "\0" in (path := value_at(config, key)):
            raise ConfigError(f"{key} = {shorten(path)} must be a path; it contains a zero byte")
        if (user_files.split_code_reference(path)[1] or path).startswith("~"):
            raise ConfigError(f"{key} = {path!r}: ~ is not replaced here, write the whole path")
    cluster = config.cluster
    for kind, key in (("address", "address"), ("file", "scheduler_file")):
        if cluster.kind == "local" and (value := getattr(cluster, key)):
            raise ConfigError(
                f'cluster.{key} = {value!r} has no effect with cluster.kind = "local"; set cluster.kind = "{kind}" to '
                "join that cluster, or remove it"
            )


def _check_step_timeout(config: RunConfig) -> None:
    """Check that a job with an environment does not count as stuck while it waits for a step of an environment."""
    time_scale = config.rollout.engine.time_scale
    step_timeout_s, stuck_s = config.environment.step_timeout_s / time_scale, config.deadlines.stuck_s
    if step_timeout_s >= stuck_s and config.has_environment:
        note = f" (at rollout.engine.time_scale = {time_scale:g})" if time_scale != 1 else ""
        raise ConfigError(
            f"environment.step_timeout_s = {config.environment.step_timeout_s:g}{note} must be less than "
            f"deadlines.stuck_s = {stuck_s:g}, after which a run that only waits for a step would be ended; raise "
            "deadlines.stuck_s"
        )


def _check_workload(config: RunConfig, *, runs_here: bool) -> None:
    """Check the workload of a run without a model, which simulations need less of."""
    kind, run = config.workload.kind, Path(config.workload.run)
    if kind == "agentic" and not config.has_environment:
        raise ConfigError(
            'workload.kind = "agentic": without environments only `staleflow simulate` has tool calls; set '
            'task.multi_turn = "yes", or choose another'
        )
    if kind == "recorded" and runs_here and not (run / "store").exists():
        raise ConfigError(f"workload.run = {str(run)!r}: no stored run there; name the folder of one")


def _check_runs_dir(runs_dir: Path) -> None:
    """Check that run folders can be created, without creating any."""
    ancestor = next(path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.exists())
    if not ancestor.is_dir():
        raise ConfigError(f"runs_dir = {str(runs_dir)!r}: {ancestor} is a file; set runs_dir to another folder")
    if why := _why_unwritable(ancestor):
        raise ConfigError(
            f"runs_dir = {str(runs_dir)!r}: {ancestor} cannot be written: {why}; set runs_dir to another folder"
        )


def _check_machine(config: RunConfig) -> None:
    """Check this machine's shared memory, engine and device."""
    memory = Path(config.cluster.shared_memory)
    subject = f"cluster.shared_memory = {str(memory)!r}"
    if not memory.is_dir():
        why = "not a folder" if memory.exists() else "no such folder"
        raise ConfigError(f"{subject}: {why}; set cluster.shared_memory to an in-memory one, such as /dev/shm")
    if why := _why_unwritable(memory):
        raise ConfigError(f"{subject}: cannot be written: {why}; set cluster.shared_memory to another")
    engines = {"rollout.engine": config.rollout.engine} | (
        {"teacher.engine": config.teacher.engine} if config.teachers else {}
    )
    for key, engine in engines.items():
        if (package := engine.package) and importlib.util.find_spec(package) is None:
            raise ConfigError(f'{key}.name = "{engine.name}": {package} is not installed; {INSTALL_COMMANDS[package]}')
    if config.model.device == "cuda" and not config.emulated and (why := _why_no_cuda()):
        raise ConfigError(f'model.device = "cuda": {why}; set it to "auto" or "cpu"')
    size_plan.place_locally(config, local_gpus.read_devices())


def _why_unwritable(folder: Path) -> str:
    """Why nothing can be created in a folder; empty if it can. Leaves nothing there."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return "it accepts no files" if error.errno == errno.ENOENT else error.strerror or str(error)


def _why_no_cuda() -> str:
    """Why torch would find no CUDA device on this machine; empty if it may find one. Does not load torch."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin or "").with_name("version.py") if spec is not None else None
    if version is not None and version.is_file():
        text = version.read_text("utf-8")
        if re.search(r"^hip\b.*= *'", text, re.MULTILINE):
            return ""  # ROCm, whose driver is another
        if re.search(r"^cuda\b.*= *None", text, re.MULTILINE):
            return "the torch that is installed is built without CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no device"
    return ""


def _check_model(config: RunConfig, notes: list[str], *, runs_here: bool) -> Path | None:
    """Check the model's files, and that the job's lengths fit its context. Returns their folder, if it is on this
    machine."""
    subject = f"model.path = {config.model.path!r}"
    folder = _find_model("model.path", config.model.path, notes, runs_here=runs_here)
    if folder is None:
        return None
    if config.rollout.engine.name == "transformers":
        model_files.check_attention(folder, subject)
    check_lengths(config, model_files.read_architecture(folder, subject))
    if any(task.chat for task in config.task.sources_by_name.values()) and chat_template(folder) == "":
        raise ConfigError(
            f"task.chat = true: the tokenizer in {folder} has no chat template; add chat_template.jinja there, or set "
            "task.chat = false and write the turns into task.template"
        )
    return folder


def _check_reference(config: RunConfig, model: Path | None, notes: list[str], *, runs_here: bool) -> None:
    """Check the reference model's files, that it has the tokens of the policy's, in the folder `model`, and that a
    teacher can compute the longest trajectory."""
    key, path = "training.kl.reference", config.training.kl.reference
    folder = _find_model(key, path, notes, runs_here=runs_here) if path else model
    if folder is None or model is None:
        return
    subject = f"{key} = {path!r}" if path else f"model.path = {config.model.path!r}"
    if path:
        policy, reference = (FileTokenizer(f).get_vocab() for f in (model, folder))
        check_same_tokens(subject, policy, reference)
    if config.teachers:
        check_teacher_fits(config, *(model_files.read_architecture(f, subject) for f in (model, folder)))
        if config.teacher.engine.name == "transformers":
            model_files.check_attention(folder, subject)


def _find_model(key: str, path: str, notes: list[str], *, runs_here: bool) -> Path | None:
    """Return a model's folder, if it is on this machine, and check that its files are whole. Raises ConfigError."""
    try:
        folder = model_files.find_model_folder(path, key)
    except ConfigError as error:
        if runs_here:
            raise
        notes.append(f"not checked here: {error}")
        return None
    if folder is None:
        notes.append(f"not checked: {key} = {path!r} has yet to be fetched from the hub")
        return None
    model_files.check_model_files(folder, f"{key} = {path!r}")
    return folder


def _needs_cluster_machine(config: RunConfig, notes: list[str]) -> bool:
    """Whether the job's data or reward can only be found where the job will run."""
    for key, kind, path in user_files.data_files(config):
        if not path.exists():
            notes.append(f"not checked here: {key} = {f'{kind}:{path}'!r} is not on this machine")
            return True
    for key in user_files.code_keys_of(config):
        if key == "task.source" and config.task.sources:
            continue  # they replace it
        reference = value_at(config, key)
        source, (_, module, _) = kind_of(reference), user_files.split_code_reference(reference)
        packages = () if source is None else source.packages
        if names_user_code(reference) and not module.endswith(".py") and (source is None or source.name_is_code):
            packages = (*packages, module.partition(".")[0])
        if not all(map(is_installed, packages)):
            notes.append(f"not checked here: {key} = {reference!r} cannot be imported on this machine")
            return True
    return False


def _draw_first_prompt(
    config: RunConfig, folder: Path | None, notes: list[str], groups_per_step: int
) -> tuple[Task, TokenizedPrompts | None]:
    """Draw the run's first prompt. With the model's folder, encode it, and any of the run's that may be too long, and
    return the prompts too. notes: receives a line for a prompt that the model cannot read, and for each number of
    prompts that is larger than the data set."""
    from staleflow.tasks.rendering.chat_tokenizer import ChatTokenizer
    from staleflow.tasks.sources.prompts import TokenizedPrompts

    if folder is None:
        return actor_settings.source_settings(config).build().task(0), None
    context = model_files.read_context_length(folder, f"model.path = {config.model.path!r}")
    max_prompt_tokens = actor_settings.max_prompt_tokens(config, context)
    settings = actor_settings.prompt_settings(
        config, context, num_held_out=config.num_held_out_prompts, max_prompt_tokens=max_prompt_tokens
    )
    tokenizer = FileTokenizer(folder)
    prompts = TokenizedPrompts(settings, ChatTokenizer(tokenizer))
    first = prompts.task(0)
    step_prompts = set()
    for number, task in itertools.chain([(0, first)], _draw_prompts(config, prompts)):
        if task is first or prompts.may_be_too_long(task):
            with raised_as(ConfigError, _describe_prompt_location(config, task, number), ConfigError):
                ids = prompts.encode(task)
            if task is first and (num_unknown := ids.count(tokenizer.unknown_id)):
                notes.append(
                    f"{_describe_prompt_location(config, task, number)}: {num_unknown} of its {len(ids)} tokens are "
                    "unknown to the model's tokenizer, which reads "
                    f"{shorten(tokenizer.decode(ids, skip_special_tokens=False))}"
                )
        if 0 <= number < groups_per_step:
            step_prompts.add(task.identity)
    if prompts.num_held_out is not None and prompts.num_held_out < config.task.eval_prompts:
        notes.append(
            f"task.eval_prompts = {config.task.eval_prompts}: only {prompts.num_held_out} rows are held out; each is "
            "evaluated once"
        )
    if len(step_prompts) < groups_per_step <= number + 1:
        notes.append(
            f"batch.groups_per_step = {groups_per_step}: {config.task.source} has only {len(step_prompts)} distinct "
            f"training prompts; a step draws each about {groups_per_step / len(step_prompts):.1f} times"
        )
    return first, prompts


def _try_environment(settings: EpisodeHostSettings, prompts: TokenizedPrompts | None) -> None:
    """Begin an episode as a host would, and see that what it will say can follow a turn of the model. Raises
    ConfigError."""
    from staleflow.tasks.episodes.episode_host import EpisodeHost

    async def check() -> None:
        episodes = EpisodeHost(settings)
        try:
            await episodes.check()
        finally:
            await episodes.close()

    if prompts is not None:
        prompts.bridge.check(settings.roles)
    # In a thread: the caller may have an event loop.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, check()).result()


def _draw_prompts(config: RunConfig, prompts: TokenizedPrompts) -> Iterator[tuple[int, Task]]:
    """The prompts that the run will use, numbered, as far as they can be drawn in a moment."""
    started_s = time.monotonic()
    prompts.task(0)
    draw_s = time.monotonic() - started_s  # an environment may take its time to reset
    deadline = time.monotonic() + MAX_DRAWING_S
    held_out = prompts.held_out(
        min(config.task.eval_prompts, MAX_DRAWN_PROMPTS // 100, 1 + int(MAX_DRAWING_S / max(draw_s, 1e-6)))
    )
    yield from ((-1 - i, task) for i, task in enumerate(held_out))
    for i in itertools.takewhile(
        lambda _: time.monotonic() < deadline,
        range(min(MAX_DRAWN_PROMPTS, config.steps * config.groups_started_per_step)),
    ):
        yield i, prompts.task(i)


def _describe_prompt_location(config: RunConfig, task: Task, number: int) -> str:
    """Where a prompt is in its data: the line of a file, or its number. Numbers of held-out prompts are negative."""
    source = config.task.eval_source if number < 0 and config.task.eval_source else config.task.source
    kind, path = user_files.split_data_source(source)
    if kind == "jsonl" and path is not None:
        with path.open(encoding="utf-8-sig") as lines:
            for line_number, line in enumerate(lines, 1):
                row = json.loads(line) if line.strip() else None
                if isinstance(row, dict) and all(task.record.get(key) == value for key, value in row.items()):
                    return f"{path}, line {line_number}"
    prompt_name = f"prompt {number}" if number >= 0 else f"held-out prompt {-1 - number}"
    return f"{source}, {prompt_name}"


def _try_reward(config: RunConfig, task: Task) -> None:
    """Score two answers to a prompt: its record's own, if it has one, and an empty one. Raises ConfigError if the
    reward fails on both, or takes too long; not if the job accepts any number of failures."""
    from staleflow.tasks.sources.reward_process import Scorer

    scorer = Scorer(actor_settings.scoring_settings(config))
    try:
        scorer.check()
        answers = [str(task.record[key]) for key in ("answer",) if key in task.record]
        errors: list[str] = []
        for answer in dict.fromkeys((*answers, "")):
            error = scorer.score([(answer, task.record)])[0].error
            if not error:
                return
            errors.append(error)
            if "took longer" in error:
                break
    finally:
        scorer.close()
    if config.reward.max_error_share >= 1:
        return
    remedy = (
        "make it faster, or raise reward.timeout_s"
        if "took longer" in errors[-1]
        else "fix it, or set reward.max_error_share = 1 to run all the same"
    )
    if errors[0].startswith(f"{ConfigError.__name__}: "):  # our own, which has a remedy
        raise ConfigError(f"{config.reward.setting}: {errors[0].partition(': ')[2]}")
    raise ConfigError(f"{config.reward.setting}: fails on the first prompt: {errors[0]}; {remedy}")
