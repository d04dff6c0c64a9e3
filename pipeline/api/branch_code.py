"""The reward code of a derived branch, saved with the run."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from staleflow.pipeline.api.code_objects import write_code
from staleflow.stores.errors import ConfigError
from staleflow.stores.trajectories import derived_branches


@contextlib.contextmanager
def reward_file(run_dir: Path, branch: str, reward: str | Callable[..., Any]) -> Iterator[str]:
    """Context manager: yields the name of a reward for a new branch. A function is written to the run's code/ folder,
    and removed if the block fails, when there is no branch. Requires the folder's lock. Raises ConfigError,
    StoreError."""
    if isinstance(reward, str):
        yield reward
        return
    if not callable(reward):
        raise ConfigError(f"reward: a {type(reward).__name__}; expected a function, or a name as in a job file")
    derived_branches.check_branch_name(
        (run_dir / "store").resolve(), branch
    )  # the file of a branch that exists is kept
    path = write_code(reward, run_dir / "code", file_name(branch))
    try:
        yield path
    except BaseException:
        Path(path.rpartition(":")[0]).unlink(missing_ok=True)
        raise


def file_name(branch: str) -> str:
    """Name of the file for a branch's code: a Python identifier, different for each branch.

    >>> file_name("strict"), file_name("by length")
    ('branch_strict', 'branch_by_length_588131ba')
    """
    plain = re.sub(r"[^A-Za-z0-9]", "_", branch)
    return f"branch_{plain}" if plain == branch else f"branch_{plain}_{zlib.crc32(branch.encode()):08x}"
