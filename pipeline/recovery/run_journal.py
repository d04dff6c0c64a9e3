"""The journal of a run. Closed parts are compressed in a separate thread, never on the driver's event loop.

Parts that a killed run left uncompressed are compressed at the run's next start. A part that cannot be compressed stays
uncompressed, and is read in the same way.
"""

from __future__ import annotations

import gzip
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from staleflow.pipeline.coordination.journal import PART_BYTES, Journal
from staleflow.stores.errors import StoreError
from staleflow.stores.files import replacing

logger = logging.getLogger(__name__)

COPY_BYTES = 2**20
GZIP_LEVEL = 6
"""Compression level. It reduces events to a fifteenth of their size, and 64 MiB take one or two seconds."""


class RunJournal(Journal):
    """A journal whose closed parts are compressed. close(wait=True) waits for all of them."""

    def __init__(self, path: Path, part_bytes: int = PART_BYTES) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        for leftover in sorted(path.parent.glob("events*.jsonl.*")):
            if leftover.suffix[1:].isdigit():
                self._compress_later(leftover)
        super().__init__(path, self._compress_later, part_bytes)

    def _compress_later(self, part: Path) -> None:
        self._thread.submit(compress, part)

    def close(self, *, wait: bool = False) -> None:
        super().close()
        self._thread.shutdown(wait=wait)


def compress(part: Path) -> None:
    """Replace a closed part by a compressed one. Never raises: a part that cannot be compressed is left as it is."""
    try:
        with (
            replacing(part.with_name(f"{part.name}.gz"), "it stays uncompressed") as target,
            part.open("rb") as source,
            gzip.open(target, "wb", compresslevel=GZIP_LEVEL) as compressed_file,
        ):
            shutil.copyfileobj(source, compressed_file, COPY_BYTES)
        part.unlink()
    except (StoreError, OSError) as error:
        logger.warning("%s", error)
