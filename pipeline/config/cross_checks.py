"""Checks of a job file that involve more than one key. Each error says what to change."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from staleflow.pipeline.config.evaluation_settings import HELD_OUT
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError, raised_as
from staleflow.stores.s3_url import URL_REMEDY, split_url
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.settings.knobs import shorten
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.training.loss import Dpo, Sft, UserLoss

MAX_TRAJECTORIES, MAX_STEPS = 1_000_000, 1_000_000_000
"""Larger numbers of trajectories per step, or of steps, are taken for typing errors. All trajectories of a step are in
memory at once."""
MAX_SHOWN_CHARS = 200
"""Maximum characters of a corrected template in a message."""


def check_key_combinations(config: RunConfig, source: str) -> None:
    """Raise ConfigError for the first check that fails. source: name of the job file, for messages."""
    with raised_as(ConfigError, source, ConfigError):
        for line in _broken_rules(config):
            raise ConfigError(line)
        config.rollout.engine.check()
        config.teacher.engine.check("teacher.engine")


def _broken_rules(config: RunConfig) -> Iterator[str]:
    """Yield one line for each rule that a job breaks: what is wrong, and the remedy."""
    if not config.model.path and config.has_texts:
        yield "model.path is missing; name a folder or a hub model"
    yield from _check_sources(config)
    yield from _check_texts(config)
    if not config.name or "/" in config.name or config.name.startswith("."):
        yield f"name = {config.name!r} must be a plain folder name"
    advantage, filtering = config.training.advantage, config.batch.filtering
    if advantage.compares_members and config.batch.group_size < 2:
        yield f"batch.group_size = 1 leaves {advantage.name} nothing to compare; it must be >= 2"
    if filtering.compares_members and config.batch.group_size < 2:
        yield (
            f'batch.filtering = "{filtering.name}" would drop every group of batch.group_size = 1, whose '
            'rewards are all equal; use "keep_all"'
        )
    keep_every, resume_every = config.training.keep_every, config.training.resume_every
    if keep_every and (not resume_every or keep_every % resume_every):
        yield f"training.keep_every = {keep_every} is no multiple of training.resume_every = {resume_every}; set one"
    yield from _check_sizes(config)
    yield from _check_objective(config)
    for kind, key in (("address", "address"), ("file", "scheduler_file")):
        if config.cluster.kind == kind and not getattr(config.cluster, key):
            yield f"cluster.kind = {kind!r} needs cluster.{key}"
    if config.store:
        try:
            split_url(config.store_url)
        except ConfigError:
            yield f"store = {config.store!r} is not a valid store; {URL_REMEDY}"
    if bool(config.endpoint.tls_cert) != bool(config.endpoint.tls_key):
        yield "endpoint.tls_cert and endpoint.tls_key belong together; set both, or neither"
    yield from _check_evaluation(config)
    yield from _check_engine(config)
    yield from _check_teacher(config)
    yield from _check_emulation(config)


def _check_objective(config: RunConfig) -> Iterator[str]:
    """Check that the settings of the training objective are complete, and that none of them is unused."""
    kl = config.training.kl
    if kl.reference and not kl.coefficient and not isinstance(config.training.loss, Dpo):
        yield (
            f"training.kl.reference = {kl.reference!r} is not used while training.kl.coefficient = 0; set it "
            "above 0, such as 0.001"
        )
    if kl.coefficient and kl.place == "advantage" and kl.estimator != "k1":
        yield (
            f'training.kl.place = "advantage" with estimator = "{kl.estimator}" would only push sampled tokens down; '
            'set estimator = "k1"'
        )
    sft = config.training.sft
    if sft.source and not sft.uses_examples:
        yield (
            f"training.sft.source = {sft.source!r} is not used while training.sft.steps and training.sft.weight are 0; "
            "set one above 0"
        )
    if sft.weight and sft.examples_per_step < config.training.minibatches:
        yield (
            f"training.sft.examples_per_step = {sft.examples_per_step} is less than training.minibatches = "
            f"{config.training.minibatches}, over which the examples of a step are divided; raise it"
        )
    if sft.uses_examples and config.has_environment and not config.environment.tools and not sft.source:
        yield "training.sft.source is missing: task.source is an environment; name rows with answers"
    if sft.steps and not kl.reference and (kl.coefficient or isinstance(config.training.loss, Dpo)):
        yield (
            "training.kl.reference is missing: with training.sft the run begins with another model than model.path; "
            "name the one to stay near"
        )
    loss = config.training.loss
    if isinstance(loss, Dpo) and (kl.coefficient or config.training.entropy_bonus):
        yield 'training.loss = "dpo" has its own beta; set training.kl.coefficient and training.entropy_bonus to 0'
    if isinstance(loss, Dpo) and config.batch.group_size < 2:
        yield 'training.loss = "dpo" compares responses to one prompt; batch.group_size must be >= 2'
    trains_without_advantage = kl.coefficient or sft.weight or isinstance(loss, Sft | UserLoss)
    if config.training.advantage.name == "none" and not trains_without_advantage:
        yield (
            'training.advantage = "none" leaves nothing to train on; set training.kl.coefficient above 0 and a teacher '
            "as training.kl.reference, or choose another advantage"
        )


def _check_sizes(config: RunConfig) -> Iterator[str]:
    """Check that the sizes of a step are consistent and plausible."""
    if config.training.minibatches > config.batch.groups_per_step * config.batch.group_size:
        yield (
            f"training.minibatches = {config.training.minibatches} is more than the "
            f"{config.trajectories_per_step} trajectories of a step"
        )
    if config.training.overlong_tokens > config.rollout.max_new_tokens:
        yield (
            f"training.overlong_tokens = {config.training.overlong_tokens} is more than "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}, of which they are the last"
        )
    num_started = config.groups_started_per_step * config.members_started_per_group
    if num_started > MAX_TRAJECTORIES:
        yield (
            f"batch.groups_per_step and batch.group_size make {num_started} "
            f"trajectories a step; it must be at most {MAX_TRAJECTORIES}"
        )
    if config.steps > MAX_STEPS:
        yield f"steps = {config.steps} is out of range; it must be at most {MAX_STEPS}"
    rollout = config.rollout
    if rollout.min_instances > rollout.instances:
        yield (f"rollout.min_instances = {rollout.min_instances} is more than rollout.instances = {rollout.instances}")
    if 0 < rollout.max_instances < rollout.instances:
        yield (
            f"rollout.max_instances = {rollout.max_instances} is less than rollout.instances = "
            f"{rollout.instances}, with which the run begins"
        )


def _check_sources(config: RunConfig) -> Iterator[str]:
    """Check the keys of a job with several task sources."""
    sources = config.task.sources
    if not sources:
        return
    for key in config.task.keys_besides_sources[:1]:
        yield f"task.{key} is set beside several sources; set task.sources.NAME.{key} of each instead"
    for name, task in sources.items():
        key = f"task.sources.{name}"
        if task.max_new_tokens > config.rollout.max_new_tokens:
            yield (
                f"{key}.max_new_tokens = {task.max_new_tokens} is more than rollout.max_new_tokens = "
                f"{config.rollout.max_new_tokens}, which the engines have room for; lower it"
            )
        if name in (HELD_OUT, *config.evaluation.sets):
            yield f"{key}: an evaluation set has this name; rename one"
    if config.training.sft.uses_examples:
        yield "training.sft is not supported with several task sources; remove it, or use one [task]"
    for name, evaluation_set in config.evaluation.sets.items():
        if not evaluation_set.source:
            yield f"evaluation.sets.{name} needs a source: of several task sources it cannot take the job's own"


def _check_texts(config: RunConfig) -> Iterator[str]:
    """Check that templates can be filled, and that patterns find an answer."""
    for name, task in config.task.sources_by_name.items():
        yield from _check_template(task, f"task.sources.{name}" if name else "task")
    if "{observation}" not in config.environment.template:
        yield (f"environment.template must contain {{observation}}, it is {shorten(config.environment.template)}")
    if config.environment.tools and config.environment.tool_timeout_s >= config.environment.step_timeout_s:
        yield (
            f"environment.tool_timeout_s = {config.environment.tool_timeout_s:g} must be less than "
            f"environment.step_timeout_s = {config.environment.step_timeout_s:g}, which ends the episode"
        )


def _check_template(task: TaskConfig, key: str) -> Iterator[str]:
    """Check one source's template and pattern. key: its table."""
    template, pattern = task.template, task.answer_pattern
    if "{prompt}" not in template:
        yield f"{key}.template must contain {{prompt}}, it is {shorten(template)}"
    escaped = "{prompt}".join(part.replace("{", "{{").replace("}", "}}") for part in template.split("{prompt}"))
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError:
        names = ["{"]
    if set(names) != {"prompt"}:
        yield (
            f"{key}.template: only {{prompt}} is replaced; write any other brace twice: "
            f"{escaped if len(escaped) <= MAX_SHOWN_CHARS else shorten(escaped)}"
        )
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        yield f"{key}.answer_pattern = {shorten(pattern)} does not compile: {error}"
        return
    if pattern and not num_groups:
        yield f"{key}.answer_pattern = {shorten(pattern)} has no group; put the answer's part in ( )"


def _check_evaluation(config: RunConfig) -> Iterator[str]:
    """Check the evaluation sets."""
    max_new_tokens, sets = config.rollout.max_new_tokens, config.evaluation_sets
    if HELD_OUT in config.evaluation.sets:
        yield f"evaluation.sets.{HELD_OUT} is the name of the set of task.eval_prompts; rename it"
    has_games = config.has_environment and not config.environment.tools and not config.task.sources
    for name, evaluation_set in config.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if not evaluation_set.responses_per_prompt:
            yield f"{key}: samples = 0 and greedy = false leave nothing to score; set one of them"
        if evaluation_set.max_new_tokens > max_new_tokens:
            yield (
                f"{key}.max_new_tokens = {evaluation_set.max_new_tokens} is more than rollout.max_new_tokens = "
                f"{max_new_tokens}, which the engines have room for; lower it"
            )
        if has_games and evaluation_set.reward != "task":
            yield (
                f"{key}.reward = {evaluation_set.reward!r}: environments reward their episodes themselves; remove it, "
                "and return the reward from the environment"
            )
        if has_games and evaluation_set.source:
            yield (
                f"{key}.source = {evaluation_set.source!r}: environments of a run are those of task.source and "
                "task.eval_source; leave it empty"
            )
    best = config.evaluation.best_checkpoint_set
    if best and best not in sets:
        set_names = ", ".join(sets) or "none; set task.eval_prompts or add evaluation.sets.NAME"
        yield (f"evaluation.best_checkpoint_set = {best!r} is no set that is evaluated; known: {set_names}")


def _check_engine(config: RunConfig) -> Iterator[str]:
    """Check what the job's engine supports."""
    engine = config.rollout.engine
    speculation = engine.speculation
    if speculation.num_speculative_tokens and config.training.lora.rank:
        yield (
            f"rollout.engine.speculation.num_speculative_tokens = {speculation.num_speculative_tokens}: "
            "drafts are not verified under adapters (training.lora.rank) yet; use 0"
        )
    yield from _check_adapters(config)
    if engine.kv_tokens < config.rollout.max_new_tokens:
        yield (
            f"rollout.engine.kv_tokens = {engine.kv_tokens} cannot hold one response of "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}; set it to at least "
            f"{2 * config.rollout.max_new_tokens}, for a prompt too"
        )


def _check_teacher(config: RunConfig) -> Iterator[str]:
    """Check that teachers are used, and that their engine can compute what the loss compares."""
    engine, temperature = config.teacher.engine, config.rollout.temperature
    if not config.teacher.instances or config.emulated:
        return
    if not config.needs_reference:
        yield (
            f"teacher.instances = {config.teacher.instances}: nothing is compared with a reference model; set "
            "training.kl.coefficient above 0, or teacher.instances to 0"
        )
    if engine.emulated:
        yield f'teacher.engine.name = "{engine.name}" has no model; use "transformers" or "vllm"'
    if temperature != 1.0 and not engine.scores_at_any_temperature:
        yield (
            f"rollout.temperature = {temperature:g}: the {engine.name} engine computes a teacher's logprobs at "
            'temperature 1 only; set it to 1, or teacher.engine.name to "transformers"'
        )
    if engine.speculation.num_speculative_tokens:
        yield "teacher.engine.speculation: a teacher samples nothing; leave num_speculative_tokens at 0"


def _check_adapters(config: RunConfig) -> Iterator[str]:
    """Check that adapters are trained if and only if the engines serve adapters."""
    rank, on_pull = config.training.lora.rank, config.rollout.on_pull
    if rank and on_pull != "adapter":
        yield (
            f"training.lora.rank = {rank} makes versions adapters, served side by side; set rollout.on_pull = "
            f'"adapter" in place of "{on_pull}"'
        )
    if on_pull == "adapter" and not rank:
        yield (
            'rollout.on_pull = "adapter" needs versions that are adapters; set training.lora.rank, such as '
            'to 32, or use "keep"'
        )
    lora = config.training.lora
    if not rank and (lora.targets or lora.alpha != LoraConfig().alpha):
        yield ("training.lora.rank = 0 trains no adapter; set it above 0, or remove [training.lora]")


def _check_emulation(config: RunConfig) -> Iterator[str]:
    """Check the keys of simulated and emulated runs."""
    cost = config.rollout.cost
    if cost.k4 + max(cost.k2, cost.b + cost.k3) <= 0:
        yield "rollout.cost: a decode step of one trajectory takes no time; set k2 or k4 above 0"
    if config.workload.kind == "recorded" and not config.workload.run:
        yield 'workload.kind = "recorded" needs workload.run, the folder of a stored run'
    yield from _check_turns(config)


def _check_turns(config: RunConfig) -> Iterator[str]:
    """Check what cannot be combined with the layout "turns"."""
    if not config.shares_gpus:
        return
    layout_text, training = 'cluster.layout = "turns"', config.training
    if config.cluster.kind != "local":
        yield (
            f'{layout_text} needs cluster.kind = "local": the queue of a cluster gives each GPU to one role; use '
            '"separate"'
        )
    if config.num_served_versions:
        yield f'{layout_text}: rollout.on_pull = "adapter" keeps the model\'s own weights on the GPUs; use "separate"'
    if training.ranks > 1 and not training.offload:
        yield f"{layout_text}: training.ranks = {training.ranks} needs training.offload = true"
