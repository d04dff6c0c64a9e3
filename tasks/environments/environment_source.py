"""Environments of several turns as task sources: the prompt of a task is the first observation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from staleflow.stores.errors import ConfigError
from staleflow.tasks.environments.environment_config import EnvironmentConfig
from staleflow.tasks.environments.episode import EpisodeFailed, EpisodeStart, record_of
from staleflow.tasks.environments.fork_server import ForkServerSettings
from staleflow.tasks.environments.forked_episodes import Resetter
from staleflow.tasks.rendering.task_source import Prompt, Record, Task, TaskSource, require_text
from staleflow.tasks.settings.dataset_columns import DataUse
from staleflow.tasks.settings.endpoint_settings import EndpointSettings
from staleflow.tasks.settings.seeds import task_seed
from staleflow.tasks.settings.source_kinds import kind_of

RESET_ATTEMPTS = 3
"""Resets tried for a prompt of a run."""
RESET_PAUSE_S = 0.5
"""Seconds between two of them."""


class EnvironmentSource:
    """Tasks of an environment. Task i is reset with a seed derived from the job's seed and i. Held-out tasks never have
    the seeds of training tasks, although first observations may be equal."""

    num_held_out = None
    held_out_notice = ""

    def __init__(
        self,
        source: str,
        options: Mapping[str, Any],
        seed: int,
        key: str,
        config: EnvironmentConfig,
        endpoint: EndpointSettings,
        use: DataUse = DataUse.BOTH,
    ) -> None:
        """Load the environment. key: its key in the job file, for messages. endpoint: the endpoint of agents. use:
        which rows are used, if its tasks are rows."""
        self._where = f"{key} = {source!r}"
        self._seed = seed
        settings = ForkServerSettings(
            source=source,
            options=dict(options),
            key=key,
            memory_mib=config.memory_mib,
            endpoint=endpoint.local,
            use=use,
        )
        kind = kind_of(source)
        self._has_rows = kind is not None and kind.takes_rows
        self._resetter = Resetter(settings, config.step_timeout_s)
        self._make_task(0, attempts=1)

    def task(self, index: int, *, held_out: bool = False) -> Task:
        return self._make_task(index, held_out=held_out, attempts=RESET_ATTEMPTS)

    def _make_task(self, index: int, *, attempts: int, held_out: bool = False) -> Task:
        start = EpisodeStart(index=index, held_out=held_out, seed=task_seed(self._seed, index, held_out=held_out))
        try:
            prompt = require_text(self._first_observation(start, attempts))
        except ConfigError:
            raise
        except (EpisodeFailed, ValueError) as error:
            task_label = f"{'held-out ' if held_out else ''}task {index}"
            reason = error if isinstance(error, EpisodeFailed) else f"its prompt {error}"
            raise ConfigError(f"{self._where}: {task_label}: {reason}") from error
        return Task(prompt=prompt, record=record_of(start, prompt), seed=None if self._has_rows else start.seed)

    def _first_observation(self, start: EpisodeStart, attempts: int) -> Prompt:
        """Reset the environment until it succeeds: a service that it uses may fail once. Raises EpisodeFailed."""
        for _ in range(attempts - 1):
            with contextlib.suppress(EpisodeFailed):
                return self._resetter.first_observation(start)
            time.sleep(RESET_PAUSE_S)
        return self._resetter.first_observation(start)

    def excluding_held_out(self, num_held_out: int, evaluation: TaskSource | None = None) -> EnvironmentSource:
        return self

    def score(self, answer: str, record: Record) -> float:
        raise ValueError("an environment returns its own rewards; there is no answer to score")
