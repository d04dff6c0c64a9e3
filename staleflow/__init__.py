"""Asynchronous RL post-training of language models on Dask, with a hard bound on policy staleness.

    import staleflow

    run = staleflow.open_run("runs/demo")
    print(run.metrics().reward.tail(), run.audit().clean)

What this package lists in `__all__` is its public API; modules below it are private and may move. Names are imported
when they are first used, so that `import staleflow` loads neither torch nor zarr nor dask.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staleflow.pipeline.api.stored_run import Run as Run
    from staleflow.pipeline.api.stored_run import list_runs as list_runs
    from staleflow.pipeline.api.stored_run import open_run as open_run
    from staleflow.stores.errors import ConfigError as ConfigError
    from staleflow.stores.errors import StaleflowError as StaleflowError
    from staleflow.stores.errors import StoreError as StoreError

    __version__: str

_MODULES = {
    "Run": "staleflow.pipeline.api.stored_run",
    "list_runs": "staleflow.pipeline.api.stored_run",
    "open_run": "staleflow.pipeline.api.stored_run",
    "ConfigError": "staleflow.stores.errors",
    "StaleflowError": "staleflow.stores.errors",
    "StoreError": "staleflow.stores.errors",
}
"""The module of each public name; a test compares it with the imports above, which type checkers read."""

__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604  names are strings

if not TYPE_CHECKING:  # type checkers would take every unknown name for one

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used. Raises AttributeError, with the nearest name, for others."""
        if name == "__version__":
            value: Any = importlib.metadata.version("staleflow")
        elif name in _MODULES:
            value = getattr(importlib.import_module(_MODULES[name]), name)
        else:
            near = difflib.get_close_matches(name, _MODULES, n=1)
            raise AttributeError(
                f"module 'staleflow' has no attribute {name!r}{f'; did you mean {near[0]}?' if near else ''}"
            )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
