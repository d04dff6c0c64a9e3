"""Location of a stored run: a folder, or a bucket with the URL of its store."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path

from staleflow.pipeline.recovery.run_folder import require_run
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.s3_url import is_url


def run_folder(source: str | Path) -> Path:
    """Find the folder of a run.

    Args:
        source: The run's folder, or the URL of its store.

    Returns:
        The run's folder. For a URL, a temporary folder that lasts as long as this process, with the job file that the
        store holds and a `store` file that names the URL.

    Raises:
        ConfigError: There is no run, or nothing can be read at the URL.
    """
    text = str(source)
    if not is_url(text):
        require_run(Path(source))
        return Path(source)
    from staleflow.stores.trajectories.storage import check_endpoint, write_url_file
    from staleflow.stores.trajectories.versioned import VersionedStore

    parent = tempfile.TemporaryDirectory(prefix="staleflow-", ignore_cleanup_errors=True)
    atexit.register(parent.cleanup)
    folder = Path(parent.name) / text.rstrip("/").rpartition("/")[2]
    folder.mkdir()
    write_url_file(folder / "store", text)
    try:
        check_endpoint()
        store = VersionedStore.pinned(folder / "store")
    except (StoreError, OSError) as error:
        why = str(error).rpartition(": ")[2]
        raise ConfigError(
            f"{text}: no store can be read there: {why}; check the URL, AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID"
        ) from error
    (folder / "config.toml").write_text(store.header.job, "utf-8")
    return folder
