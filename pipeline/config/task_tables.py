"""The [task] table of a job, or its [[task]] tables: one task source, or several by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from staleflow.pipeline.strategies.samplers import SAMPLERS, Sampler
from staleflow.stores.errors import ConfigError
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import choice
from staleflow.tasks.settings.reward_functions import reward_names
from staleflow.tasks.settings.task_config import TaskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTaskConfig(TaskConfig):
    """A task source, and the order in which its tasks are drawn."""

    sampler: Sampler = choice(SAMPLERS, "in_order", "which task of the source is drawn next")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTaskConfig(SampledTaskConfig):
    """One of several task sources."""

    ratio: float = knob(
        1.0, "groups of this source that are trained on, relative to those of the other sources", above=0, high=1e6
    )
    reward: str = knob(
        "",
        "what scores its responses, as reward.function; empty: the job's [reward]",
        choices=("", *reward_names()),
        user_code=True,
    )
    max_new_tokens: int = knob(0, "most tokens in a response; 0: rollout.max_new_tokens, and never more", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTableConfig(SampledTaskConfig):
    """One task source and the form of its prompts, or several sources."""

    LIST_KEY: ClassVar[str] = "sources"
    """Key that a list of tables with `name` is converted to."""

    sources: dict[str, MixedTaskConfig] = knob(
        {}, "several sources by name, in place of all other keys of this table; [[task]] tables with `name` are these"
    )

    @property
    def keys_besides_sources(self) -> list[str]:
        """Keys of this table that are set although `sources` replaces them."""
        default = TaskTableConfig()
        names = (f.name for f in dataclasses.fields(self) if f.name not in ("sources", "multi_turn"))
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    @property
    def sources_by_name(self) -> dict[str, SampledTaskConfig]:
        """The task sources by name; a single one under the empty name."""
        return {**self.sources} if self.sources else {"": self}


def with_named_tasks(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Move the [[task]] tables of a job's unchecked tree to task.sources. Raises ConfigError."""
    tables = tree.get("task")
    if not isinstance(tables, list):
        return dict(tree)
    sources: dict[str, Any] = {}
    for number, table in enumerate(tables, 1):
        name = table.get("name") if isinstance(table, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(f'{source}: [[task]] number {number} needs a name, such as name = "sums"')
        if name in sources:
            raise ConfigError(f"{source}: two [[task]] tables have name = {name!r}; rename one")
        sources[name] = {key: value for key, value in table.items() if key != "name"}
    return {**tree, "task": {TaskTableConfig.LIST_KEY: sources}}
