"""The [task], [reward] and [evaluation.sets] tables of a job file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from staleflow.tasks.settings.dataset_columns import Columns
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.reward_functions import reward_names
from staleflow.tasks.settings.source_kinds import all_syntax


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Source of prompts, and how they are presented to the model."""

    source: str = knob(
        "reasoning_gym:chain_sum",
        f"{all_syntax()}, or your own class or coroutine, path/to/file.py:NAME",
    )
    options: dict[str, Any] = knob(
        {}, "arguments of the source, such as min_terms of a reasoning-gym dataset, or split of one of `datasets`"
    )
    multi_turn: str = knob(
        "auto",
        "whether a trajectory may have several turns, with an environment step after each; auto: if task.source is an "
        "environment. In an emulated run yes means that the workload's tools run outside of the instances",
        choices=("auto", "yes", "no"),
    )
    columns: Columns = Columns()
    template: str = knob("{prompt}", "text around each prompt, or around its last message; must contain {prompt}")
    chat: bool = knob(
        False, "render prompts by the tokenizer's chat template: a text as a user's message, or a list of messages"
    )
    system: str = knob("", "system message of prompts that have none of their own; needs chat")
    answer_pattern: str = knob(
        "", "regular expression whose first group is the answer in a response; empty: the whole response"
    )
    skip_long: bool = knob(
        False,
        "replace training prompts too long for the model's context or the KV cache by others, and leave out such "
        "prompts of evaluations; otherwise the run stops",
    )
    eval_prompts: int = knob(200, "held-out prompts of the evaluations before and after training; 0: none", low=0)
    eval_source: str = knob(
        "", "where these prompts come from, named as in task.source; empty: held out of task.source, the last tenth"
    )
    eval_options: dict[str, Any] = knob({}, "arguments of eval_source, such as split")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One reward function of a weighted sum."""

    function: str = knob("task", "as reward.function", choices=reward_names(), user_code=True)
    weight: float = knob(1.0, "factor of its result in the reward; may be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    function: str = knob(
        "task",
        "task (the verifier of task.source), math_verify, path/to/file.py:name, or module:name",
        choices=reward_names(),
        user_code=True,
    )
    parts: dict[str, RewardPart] = knob(
        {}, "in place of function: functions by name, each with a weight; the reward is their weighted sum"
    )
    workers: int = knob(1, "reward worker processes", low=1, high=1024)
    timeout_s: float = knob(
        10.0, "seconds allowed to score one response; after that its process is killed and an error recorded", above=0
    )
    max_error_share: float = knob(
        0.5, "maximum share of a batch whose scoring fails; above it the run stops", low=0, high=1
    )

    @property
    def setting(self) -> str:
        """The reward functions by their names in the job file."""
        return f"reward.parts = {', '.join(self.parts)}" if self.parts else f"reward.function = {self.function!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSetConfig:
    """A set of prompts on which the model is evaluated."""

    source: str = knob("", "where its prompts come from, named as in task.source; empty: as task.eval_prompts")
    options: dict[str, Any] = knob({}, "arguments of its source, such as split")
    reward: str = knob(
        "task",
        "what scores it: task (the verifier of its source), math_verify, path/to/file.py:name, or module:name",
        choices=reward_names(),
        user_code=True,
    )
    prompts: int = knob(100, "prompts, the first of its source; duplicates are left out", low=1)
    samples: int = knob(1, "responses sampled per prompt", low=0, high=1000)
    greedy: bool = knob(True, "whether one more response per prompt is sampled greedily")
    temperature: float = knob(0.0, "sampling temperature of the samples; 0: rollout.temperature", low=0, high=10)
    max_new_tokens: int = knob(0, "maximum tokens of a response, at most rollout.max_new_tokens; 0: that value", low=0)

    @property
    def responses_per_prompt(self) -> int:
        """Number of responses per prompt: `samples`, and one more if greedy."""
        return self.samples + self.greedy
