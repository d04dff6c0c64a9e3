"""Settings of a job's actors, built from its job file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from staleflow.pipeline.config import knob_tree
from staleflow.pipeline.config.evaluation_settings import HELD_OUT
from staleflow.pipeline.config.factories import draft_settings, instance_cost_model, make_episodes
from staleflow.pipeline.config.model_files import find_local_model, read_context_length, read_vocabulary_size
from staleflow.pipeline.config.schema import RunConfig
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories.records import RunHeader
from staleflow.stores.trajectory import EndedTrajectory, EnvSpan, Fate
from staleflow.tasks.emulation.workload import RandomWorkload, RecordedWorkload, Turn, Workload
from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.engines.engine_settings import ENGINES, EngineSettings
from staleflow.tasks.settings.seeds import engine_seed
from staleflow.tasks.settings.source_kinds import is_agent, is_environment
from staleflow.tasks.settings.task_config import TaskConfig
from staleflow.tasks.training.advantage import OverlongPenalty

if TYPE_CHECKING:
    from staleflow.stores.trajectories.versioned import VersionedStore
    from staleflow.tasks.actors.server_settings import ServerSettings
    from staleflow.tasks.episodes.emulated_host import EmulatedHostSettings
    from staleflow.tasks.episodes.episode_host import EpisodeHostSettings
    from staleflow.tasks.sources.evaluation_sets import EvaluationSet
    from staleflow.tasks.sources.examples import ExampleSettings
    from staleflow.tasks.sources.prompts import PromptSettings
    from staleflow.tasks.sources.reward_process import ScoringSettings
    from staleflow.tasks.sources.task_sources import NamedSourceSettings, SourceSettings
    from staleflow.tasks.training.policy import PolicySettings, TrainerSettings


def run_header(config: RunConfig) -> RunHeader:
    """The header of this job's store, without max_prompt_tokens, which depends on the model."""
    return RunHeader(
        run=config.name,
        eta=config.staleness.eta,
        groups_per_step=config.batch.groups_per_step,
        group_size=config.batch.group_size,
        members_started_per_group=config.members_started_per_group,
        num_held_out=config.num_held_out_prompts,
        url=config.store_url,
        job=knob_tree.to_toml(config) if config.store else "",
        sources=tuple(config.task.sources),
    )


def source_settings(config: RunConfig, task: TaskConfig | None = None) -> SourceSettings:
    """Settings of the source of prompts and evaluation prompts. task: the task source; by default the job's, or its
    first if there are several."""
    from staleflow.tasks.settings.endpoint_settings import EndpointSettings
    from staleflow.tasks.sources.task_sources import SourceSettings

    task = task or next(iter(config.task.sources_by_name.values()))
    if not config.has_texts:
        return SourceSettings(task=TaskConfig(source="emulated"), seed=config.seed)
    has_agent = is_agent(task.source) or is_agent(task.eval_source)
    return SourceSettings(
        task=TaskConfig(**{f.name: getattr(task, f.name) for f in dataclasses.fields(TaskConfig)}),
        seed=config.seed,
        tokenizer=config.model.path,
        environment_config=config.environment,
        endpoint=EndpointSettings(
            config=config.endpoint,
            model=config.name,
            temperature=config.rollout.temperature,
            vocabulary=read_vocabulary_size(config.model.path) if has_agent else 0,
        ),
    )


def environment_settings(
    config: RunConfig, *, is_replacement: bool = False
) -> EpisodeHostSettings | EmulatedHostSettings:
    """Settings of environment hosts; emulated ones if the job has no texts. May import user code. Raises ConfigError.
    is_replacement: whether the host replaces a lost one."""
    if not config.has_texts:
        from staleflow.tasks.episodes.emulated_host import EmulatedHostSettings

        return EmulatedHostSettings(
            episodes=make_episodes(config, make_workload(config)),
            environment_config=config.environment,
            time_scale=config.rollout.engine.time_scale,
        )
    predecessor_settings = {"source.endpoint.unknown_key_grace_s": config.deadlines.call_s} if is_replacement else {}
    return knob_tree.with_values(episode_settings(config), predecessor_settings)


def episode_settings(config: RunConfig) -> EpisodeHostSettings:
    """Settings of environment hosts for a job with texts. Raises ConfigError unless the job has either an environment
    or tools."""
    from staleflow.tasks.episodes.episode_host import EpisodeHostSettings

    if config.task.sources:
        return EpisodeHostSettings(
            source=source_settings(config),
            scoring=scoring_settings(config),
            environment_sources={
                name: source_settings(config, task) for name, task in _environment_sources(config).items()
            },
        )
    is_episodic = is_environment(config.task.source, "task.source")
    if config.task.eval_source and is_environment(config.task.eval_source, "task.eval_source") != is_episodic:
        raise ConfigError(
            f"task.eval_source = {config.task.eval_source!r}: either both it and task.source = {config.task.source!r} "
            "are environments of many turns, or neither is"
        )
    if config.environment.tools:
        if is_episodic:
            raise ConfigError(
                f"environment.tools: task.source = {config.task.source!r} is an environment of many turns, which "
                "brings its own tools; remove environment.tools"
            )
        return EpisodeHostSettings(source=source_settings(config), scoring=scoring_settings(config))
    if not is_episodic:
        raise ConfigError(
            f"task.multi_turn = 'yes': task.source = {config.task.source!r} is no environment of many turns, and "
            "environment.tools names no tool; remove it"
        )
    if config.reward.parts or config.reward.function != "task":
        raise ConfigError(
            f"{config.reward.setting}: task.source = {config.task.source!r} rewards its episodes itself; set "
            'reward.function = "task", and return the reward from the environment'
        )
    return EpisodeHostSettings(source=source_settings(config))


def unrepeatable_sources(config: RunConfig) -> frozenset[int]:
    """Numbers of the task sources whose episodes cannot be replayed on another host. May import user code. Raises
    ConfigError."""
    from staleflow.tasks.environments.environment_loader import traits_of

    if not (config.has_texts and config.has_environment):
        return frozenset()
    sources = {_source_key(name): task.source for name, task in config.task.sources_by_name.items()}
    return frozenset(
        number
        for number, (key, source) in enumerate(sources.items())
        if is_environment(source, key) and not traits_of(source, key).repeatable
    )


def _source_key(name: str) -> str:
    """The job file's key of a task source. name: empty if the job has one without a name."""
    return f"task.sources.{name}.source" if name else "task.source"


def scoring_settings(config: RunConfig) -> ScoringSettings:
    """Settings from which a reward worker or environment host builds the job's reward."""
    from staleflow.tasks.sources.reward_process import ScoringSettings

    environments = _environment_sources(config)
    return ScoringSettings(
        source=source_settings(config),
        reward=config.reward,
        eval_sets=tuple(
            evaluation_set for evaluation_set in evaluation_sets(config) if not evaluation_set.uses_run_reward
        ),
        # Environments reward their episodes themselves.
        sources=tuple(source for source in _named_sources(config) if source.name not in environments),
    )


def _environment_sources(config: RunConfig) -> dict[str, TaskConfig]:
    """The named task sources that are environments of many turns. Raises ConfigError."""
    return {
        name: task
        for name, task in config.task.sources.items()
        if config.has_texts and is_environment(task.source, _source_key(name))
    }


def evaluation_sets(config: RunConfig) -> tuple[EvaluationSet, ...]:
    """The sets of prompts on which this job evaluates the model."""
    from staleflow.tasks.sources.evaluation_sets import EvaluationSet

    source_numbers = {name or HELD_OUT: number for number, name in enumerate(config.task.sources_by_name)}
    limits = {name: source.max_new_tokens for name, source in config.task.sources.items()}
    tasks = list(config.task.sources_by_name.values())
    return tuple(
        EvaluationSet(
            name=name,
            config=dataclasses.replace(
                settings,
                source=settings.source if name not in source_numbers and config.has_texts else "",
                max_new_tokens=settings.max_new_tokens or limits.get(name) or config.rollout.max_new_tokens,
            ),
            columns=tasks[0].columns,
            seed=config.seed,
            uses_run_reward=name in source_numbers,
            task_source_number=source_numbers.get(name, 0),
            answer_pattern=tasks[source_numbers.get(name, 0)].answer_pattern,
        )
        for name, settings in config.evaluation_sets.items()
    )


def prompt_settings(
    config: RunConfig, context_length: int = 2**31, *, num_held_out: int, max_prompt_tokens: int | None
) -> PromptSettings:
    """Settings of the run's prompts.

    Args:
        context_length: Tokens the model can attend to. The default means no limit, for prompts read from a store.
        num_held_out, max_prompt_tokens: As in the store's RunHeader.
    """
    from staleflow.tasks.sources.prompts import PromptSettings

    return PromptSettings(
        tokenizer=config.model.path,
        source=_with_tools(config, source_settings(config)),
        max_new_tokens=config.rollout.max_new_tokens,
        context_length=context_length,
        kv_tokens=config.rollout.engine.kv_tokens,
        num_held_out=num_held_out,
        max_prompt_tokens=max_prompt_tokens,
        eval_sets=evaluation_sets(config),
        workload=None if config.has_texts else make_workload(config),
        has_random_responses=config.emulated and config.has_texts,
        sources=_named_sources(config) if config.has_texts else (),
    )


def _named_sources(config: RunConfig) -> tuple[NamedSourceSettings, ...]:
    """The task sources of a job that has several."""
    from staleflow.tasks.sources.task_sources import NamedSourceSettings

    return tuple(
        NamedSourceSettings(
            name=name,
            settings=_with_tools(config, source_settings(config, task)),
            num_held_out=task.eval_prompts,
            max_new_tokens=task.max_new_tokens or config.rollout.max_new_tokens,
            reward=task.reward,
        )
        for name, task in config.task.sources.items()
    )


def _with_tools(config: RunConfig, source: SourceSettings) -> SourceSettings:
    """The source with {tools} in its system message replaced by a description of the tools."""
    system = source.task.system
    if "{tools}" not in system or not config.environment.tools:
        return source
    from staleflow.tasks.episodes.tools import describe_tools

    return knob_tree.with_values(source, {"task.system": system.replace("{tools}", describe_tools(config.environment))})


def max_prompt_tokens(config: RunConfig, context_length: int) -> int | None:
    """Length in tokens above which this job replaces a prompt; None if it replaces none. context_length: the model's,
    in tokens."""
    if not config.has_texts or not any(task.skip_long for task in config.task.sources_by_name.values()):
        return None
    return min(context_length, config.rollout.engine.kv_tokens) - config.rollout.max_new_tokens


def _read_context_length(config: RunConfig) -> int:
    """Tokens the model can attend to; no limit if the model is not on this machine. Raises ConfigError."""
    folder = find_local_model(config.model.path)
    return 2**31 if folder is None else read_context_length(folder, f"model.path = {config.model.path!r}")


def server_settings(config: RunConfig, store: Path, context_length: int, *, resumed: bool = False) -> ServerSettings:
    """Settings of the trajectory server. context_length: the model's, in tokens. resumed: whether to continue an
    existing store."""
    from staleflow.tasks.actors.server_settings import ServerSettings

    prompt_limit = max_prompt_tokens(config, context_length)
    return ServerSettings(
        prompts=prompt_settings(
            config, context_length, num_held_out=config.num_held_out_prompts, max_prompt_tokens=prompt_limit
        ),
        reward_settings=", ".join(
            [
                config.reward.setting,
                *(f"task.sources.{n}.reward = {s.reward!r}" for n, s in config.task.sources.items() if s.reward),
            ]
        ),
        group_size=config.batch.group_size,
        members_started_per_group=config.members_started_per_group,
        advantage=config.training.advantage,
        overlong=overlong_penalty(config),
        max_error_share=config.reward.max_error_share,
        store=str(store),
        header=dataclasses.replace(run_header(config), max_prompt_tokens=prompt_limit),
        commit_s=config.deadlines.commit_s,
        resumed=resumed,
        writes_resume_points=config.training.resume_every > 0,
        max_turn_tokens=config.rollout.turn_tokens or config.rollout.max_new_tokens,
        keeps_kv=config.has_environment,
        serves_drafts=drafts_from_responses(config),
        has_teacher=bool(config.teachers),
    )


def drafts_from_responses(config: RunConfig) -> bool:
    """Whether engines draft from other responses to the same prompts."""
    speculation = config.rollout.engine.speculation
    return speculation.num_speculative_tokens > 0 and speculation.source == "responses" and not config.emulated


def overlong_penalty(config: RunConfig) -> OverlongPenalty:
    """The job's penalty on responses whose length is near the limit."""
    training = config.training
    return OverlongPenalty(
        ramp_tokens=training.overlong_tokens,
        penalty=training.overlong_penalty,
        max_length=config.rollout.max_new_tokens,
    )


def example_settings(config: RunConfig, num_held_out: int) -> ExampleSettings | None:
    """Settings of the examples of supervised fine-tuning; None without it. Raises ConfigError. num_held_out: as in the
    store's RunHeader."""
    from staleflow.tasks.sources.examples import ExampleSettings

    sft = config.training.sft
    if not sft.uses_examples:
        return None
    prompts = prompt_settings(
        config, num_held_out=num_held_out, max_prompt_tokens=max_prompt_tokens(config, _read_context_length(config))
    )
    if not sft.source:
        return ExampleSettings(prompts=prompts, examples_per_step=sft.examples_per_step)
    # Prompts are only encoded: the run's own source may be an environment, which the trainer does not open.
    emulated_task = dataclasses.replace(config.task, source="emulated", eval_source="")
    return ExampleSettings(
        prompts=knob_tree.with_values(prompts, {"source.task": emulated_task, "eval_sets": ()}),
        examples_per_step=sft.examples_per_step,
        source=sft.source,
        options=sft.options,
        seed=config.seed,
        columns=config.task.columns,
        eval_sets=prompts.eval_sets,
        held_out_source=None if config.has_environment else prompts.source,
    )


def policy_settings(config: RunConfig) -> PolicySettings:
    """Settings from which the trainer builds its policy."""
    if config.emulated:
        from staleflow.tasks.training.emulated_trainer import EmulatedTrainerSettings

        return EmulatedTrainerSettings(
            train_s=config.simulation.train_s,
            s_per_token=config.simulation.train_s_per_token,
            time_scale=config.rollout.engine.time_scale,
            switch_s=config.simulation.switch_s if config.shares_gpus else 0.0,
            training=config.training,
        )
    return trainer_settings(config)


def trainer_settings(config: RunConfig) -> TrainerSettings:
    """Settings of the trainer of a job that is not emulated."""
    from staleflow.tasks.training.policy import TrainerSettings

    return TrainerSettings(
        model=config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        training=config.training,
        num_steps=config.steps,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_new_tokens,
        seed=config.seed,
        examples=example_settings(config, config.num_held_out_prompts),
        shares_device=config.shares_gpus,
        has_stored_reference=bool(config.teachers),
    )


def teacher_engine_settings(config: RunConfig, eos: tuple[int, ...]) -> EngineSettings:
    """Settings of the teachers' engines. eos: token ids that end a response."""
    engine = config.teacher.engine
    parameters = {
        "model": config.training.kl.reference or config.model.path,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "temperature": config.rollout.temperature,
        "eos": eos,
        "seed": config.seed,
        "keep_cache": False,
        "lora": LoraConfig(),
        "num_served_versions": 0,
        "shares_device": False,
    }
    # vLLM's request for the logprobs of a sequence needs room for one more token.
    return ENGINES.make(dataclasses.replace(engine, kv_tokens=engine.kv_tokens + engine.page_tokens), parameters)


def engine_settings(
    config: RunConfig, index: int, eos: tuple[int, ...], *, attempt: int = 0, num_earlier_starts: int = 0
) -> EngineSettings:
    """Settings of one instance's engine. index, attempt and num_earlier_starts give each engine a distinct seed.

    Args:
        index: Number of the instance.
        eos: Token ids that end a response.
        attempt: How often the instance was replaced.
        num_earlier_starts: Number of previous starts of the run.
    """
    engine = config.rollout.engine
    parameters = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "temperature": config.rollout.temperature,
        "eos": eos,
        "seed": engine_seed(config.seed, index, attempt, num_earlier_starts),
        "keep_cache": config.rollout.on_pull == "keep",
        "lora": config.training.lora,
        "num_served_versions": config.num_served_versions,
        "shares_device": config.shares_gpus,
        "cost": instance_cost_model(config, index),
        "drafting": draft_settings(config),
        "members_per_group": config.members_started_per_group,
        "pull_s": config.simulation.pull_s,
        "switch_s": config.simulation.switch_s,
    }
    if engine.needs("workload"):
        parameters["workload"] = make_workload(config)
    return ENGINES.make(engine, parameters)


def make_workload(config: RunConfig) -> Workload:
    """The workload that determines the responses of simulated and emulated instances: random, or recorded in a
    store."""
    if config.workload.kind == "recorded":
        return _recorded_workload(Path(config.workload.run))
    return RandomWorkload(
        config.workload,
        members_per_group=config.members_started_per_group,
        max_tokens=config.rollout.max_new_tokens,
        seed=config.seed,
    )


def _recorded_workload(run_dir: Path) -> RecordedWorkload:
    """Prompts, lengths, turns and rewards of the groups that a stored run trained on or filtered, ordered by group id.
    Filtered groups are included, because they cost sampling too."""
    from staleflow.stores.trajectories.versioned import VersionedStore

    store = VersionedStore.open(run_dir / "store")
    table = store.displayed_columns()
    # Only rows that were trained on have a staleness of 0 or more.
    trained_or_filtered = np.flatnonzero((table["staleness"] >= 0) | (table["fate"] == Fate.FILTERED.value))
    groups: dict[int, list[int]] = {}
    for row in trained_or_filtered[np.argsort(table["trajectory"][trained_or_filtered], kind="stable")]:
        groups.setdefault(int(table["group"][row]), []).append(int(row))
    rows = np.asarray([groups[g] for g in sorted(groups) if len(groups[g]) == store.header.group_size], np.int64)
    if not len(rows):
        raise ConfigError(f"workload.run = {str(run_dir)!r}: no trajectory of it was trained on; name a finished run")
    return RecordedWorkload(
        table["prompt_tokens"][rows[:, 0]].astype(np.int64),
        table["response_tokens"][rows].astype(np.int64),
        table["reward"][rows].astype(np.float64),
        _recorded_turns(store, rows, table["given_tokens"][rows] > 0),
    )


def _recorded_turns(
    store: VersionedStore, rows: npt.NDArray[np.int64], is_multi_turn: npt.NDArray[np.bool_]
) -> dict[tuple[int, int], tuple[Turn, ...]]:
    """Turns of the multi-turn rows, by (index of the group in `rows`, member); rows that cannot be read are omitted."""
    group_member_of_row = {int(rows[g, m]): (int(g), int(m)) for g, m in np.argwhere(is_multi_turn)}
    positions = sorted(group_member_of_row)  # near rows are read together
    turns_by_member = {}
    for position, ended in zip(positions, store.trajectories_at(positions), strict=True):
        turns: list[Turn] = []
        for span in ended.trajectory.spans if isinstance(ended, EndedTrajectory) else ():
            turn = turns[-1] if turns else Turn(0)
            if isinstance(span, EnvSpan):
                turns[-1:] = [
                    turn._replace(tool_s=turn.tool_s + span.seconds, tool_tokens=turn.tool_tokens + len(span.tokens))
                ]
            elif turn.tool_tokens:
                turns.append(Turn(len(span.tokens)))
            else:
                turns[-1:] = [turn._replace(tokens=turn.tokens + len(span.tokens))]
        if turns:
            turns_by_member[group_member_of_row[position]] = (*turns[:-1], Turn(turns[-1].tokens))
    return turns_by_member
