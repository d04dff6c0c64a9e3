"""Files and folders are replaced atomically: after failures, kills, and with two concurrent writers."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from staleflow.stores.errors import StoreError, strerror
from staleflow.stores.files import flush_and_rename, replace_text, replacing, replacing_folder
from staleflow.stores.trajectory import PolicyVersion
from staleflow.stores.weights.weight_folder import Piece, WeightFolder

REMEDY = "free space"


def replace_file(path: Path, write: Callable[[Path], object], remedy: str, **options: Any) -> None:
    """Replace a file with what `write` writes to a temporary path."""
    with replacing(path, remedy, **options) as tmp_path:
        write(tmp_path)


def replace_folder(path: Path, write: Callable[[Path], object], remedy: str, **options: Any) -> None:
    """Replace a folder with what `write` writes into a temporary one."""
    with replacing_folder(path, remedy, **options) as tmp_path:
        write(tmp_path)


def failing_writer(error: Exception) -> Callable[[Path], None]:
    """Return a writer that fails halfway."""

    def write(part: Path) -> None:
        (part / "half" if part.is_dir() else part).write_text("half")
        raise error

    return write


def test_replace_text_writes_atomically_and_creates_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    replace_text(path, "one", REMEDY)
    replace_text(path, "zwölf", REMEDY)
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert os.listdir(path.parent) == ["a.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("replace", [replace_file, replace_folder])
def test_a_failed_replacement_leaves_the_previous_content(tmp_path: Path, replace: Callable[..., None]) -> None:
    path = tmp_path / "a"
    if replace is replace_file:
        path.write_text("before")
    else:
        (path / "before").mkdir(parents=True)
    full = OSError(28, "No space left on device", "/somewhere/.a.part")
    with pytest.raises(StoreError) as error:
        replace(path, failing_writer(full), REMEDY)
    assert str(error.value) == f"{path}: cannot be written: No space left on device; free space"
    torch = RuntimeError("enforce fail at inline_container\nframe #0")
    with pytest.raises(StoreError, match="cannot be written: enforce fail at inline_container; free space"):
        replace(path, failing_writer(torch), REMEDY, error_types=(RuntimeError,))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    with pytest.raises(KeyboardInterrupt):
        replace(path, lambda part: signal.raise_signal(signal.SIGINT), REMEDY)
    signal.signal(signal.SIGINT, before)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        replace(path, failing_writer(RuntimeError("a fault of ours")), REMEDY)
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_text() == "before" if path.is_file() else os.listdir(path) == ["before"]


def test_unwritable_paths_give_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a", Path("/proc/none/a"), tmp_path, tmp_path / ("long" * 100)):
        with pytest.raises(StoreError, match=r"cannot be written: .*; free space") as error:
            replace_text(path, "text", REMEDY)
        assert "\n" not in str(error.value)
    replace_text(tmp_path / ("é" * 120), "text", REMEDY)  # 240 bytes: its part's name is shorter


def test_symlinks_and_devices_are_preserved(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_text(tmp_path / "link", "one", REMEDY)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "one"
    (tmp_path / "null").symlink_to(os.devnull)
    replace_text(tmp_path / "null", "one", REMEDY)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def write_named(text: str, folder: Path) -> None:
    """Write a file whose name is its text."""
    (folder / text).write_text(text)


def test_replace_folder_replaces_the_whole_folder(tmp_path: Path) -> None:
    for text in ("one", "two"):
        replace_folder(tmp_path / "a", partial(write_named, text), REMEDY)
        assert os.listdir(tmp_path / "a") == [text]
    assert os.listdir(tmp_path) == ["a"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "other").touch()
    with pytest.raises(OSError, match="not empty"):
        flush_and_rename(tmp_path / "b", tmp_path / "a")


def test_a_replacement_of_a_folder_that_is_interrupted_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, to: Path) -> None:
        raise KeyboardInterrupt

    replace_folder(tmp_path / "a", partial(write_named, "one"), REMEDY)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(tmp_path / "a", partial(write_named, "two"), REMEDY)
    assert os.listdir(tmp_path / "a") == ["one"]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("exists", [False, True])
def test_two_writers_of_a_folder_do_not_conflict(tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one replaces the folder while the first one is about to rename its own."""
    replace, writers = Path.replace, ["two"]
    if exists:
        replace_folder(tmp_path / "a", partial(write_named, "before"), REMEDY)

    def replaced(self: Path, to: Path) -> Path:
        if writers:
            replace_folder(tmp_path / "a", partial(write_named, writers.pop()), REMEDY)
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", replaced)
    replace_folder(tmp_path / "a", partial(write_named, "one"), REMEDY)
    assert os.listdir(tmp_path / "a") == ["two"]
    assert os.listdir(tmp_path) == ["a"]


def test_the_text_of_an_error_without_a_number_is_its_message() -> None:
    texts = [strerror(error) for error in (OSError("truncated"), StoreError("gone"), OSError(28, "No space", "/a"))]
    assert texts == ["truncated", "gone", "No space"]


def test_all_data_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder inside is synced, then renamed, then the parent folder is synced."""
    messages: list[tuple[str, Path]] = []
    sync, replace = os.fsync, Path.replace

    def synced(held: int) -> None:
        messages.append(("sync", Path(os.readlink(f"/proc/self/fd/{held}"))))
        sync(held)

    def replaced(self: Path, to: Path) -> Path:
        messages.append(("name", to))
        return replace(self, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    replace_text(tmp_path / "a", "text", REMEDY)
    assert [(what, p == tmp_path) for what, p in messages] == [("sync", False), ("name", False), ("sync", True)]
    messages.clear()

    def write(part: Path) -> None:
        (part / "in").mkdir()
        (part / "in" / "file").touch()

    replace_folder(tmp_path / "b", write, REMEDY)
    assert [what for what, _ in messages] == ["sync", "sync", "sync", "name", "sync"]
    messages.clear()
    replace_file(tmp_path / "c", Path.touch, REMEDY, flush=False)
    assert [what for what, _ in messages] == ["name"]


def test_two_concurrent_writers_do_not_interfere(tmp_path: Path) -> None:
    """Both are halfway at the same time; the result is complete."""
    both = threading.Barrier(2, timeout=120)

    def write(part: Path, text: str) -> None:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            both.wait()
            file.write(text)

    threads = [
        threading.Thread(target=replace_file, args=(tmp_path / "a", lambda part, t=text: write(part, t), REMEDY))
        for text in ("left", "right")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_text() in ("leftleft", "rightright")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("replace", [replace_file, replace_folder])
def test_a_temporary_file_about_to_be_removed_by_another_writer_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Callable[..., None]
) -> None:
    """The other writer locks it between creation and lock, and removes it while it is written."""
    lock = fcntl.flock
    swept: list[tuple[Path, int]] = []

    def locked_second(held: int, how: int) -> None:
        if not swept:
            (part,) = tmp_path.iterdir()
            swept.append((part, os.open(part, os.O_RDONLY)))
            lock(swept[0][1], how)
        lock(held, how)

    def write(part: Path) -> None:
        (part / "whole" if part.is_dir() else part).write_text("whole")
        left, held = swept[0]
        if left.exists():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        os.close(held)

    monkeypatch.setattr(fcntl, "flock", locked_second)
    replace(tmp_path / "a", write, REMEDY)
    assert os.listdir(tmp_path) == ["a"]


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from tests.stores.test_files import replace_file, replace_folder

def write(part):
    (part / "half" if part.is_dir() else part).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

{"file": replace_file, "folder": replace_folder}[sys.argv[1]](Path(sys.argv[2]), write, "")
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_temporary_files_of_a_killed_writer_are_removed_by_the_next(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", KILLED, kind, str(path)], check=False, timeout=60)
        assert result.returncode == -signal.SIGKILL
        (left,) = os.listdir(tmp_path)  # not two of them
        assert left.startswith(".a.")
    (tmp_path / ".a.part").mkdir()  # with the name of another program
    if kind == "file":
        replace_text(path, "whole", REMEDY)
    else:
        replace_folder(path, lambda part: (part / "whole").touch(), REMEDY)
    assert sorted(os.listdir(tmp_path)) == [".a.part", "a"]


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from typing import Any
from tests.stores.test_files import replace_folder

at, renames = int(sys.argv[1]), []

def killing(rename):
    def renamed(self, to):
        renames.append(to)
        if len(renames) > at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, to)
    return renamed

Path.rename, Path.replace = killing(Path.rename), killing(Path.replace)
replace_folder(Path(sys.argv[2]), lambda part: (part / "new").touch(), "")
"""


@pytest.mark.parametrize(("at", "content"), [(0, "before"), (1, "before"), (2, "new")])
def test_a_folder_whose_writer_was_killed_between_two_renames_is_restored(
    tmp_path: Path, at: int, content: str
) -> None:
    """The next writer fails, which shows the restored content."""
    path = tmp_path / "a"
    path.mkdir()
    (path / "before").touch()
    result = subprocess.run([sys.executable, "-c", KILLED_AT, str(at), str(path)], check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert path.exists() == (at != 1)
    with pytest.raises(StoreError):
        replace_folder(path, failing_writer(OSError(28, "No space left on device")), REMEDY)
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(path) == [content]


def test_old_folders_of_active_writers_and_longer_names_are_kept(tmp_path: Path) -> None:
    long = "n" * 50
    for old in (f".a.{'0' * 16}.old", f".{long}.{'1' * 16}.old"):
        (tmp_path / old).mkdir()

    def write(part: Path) -> None:
        part.rename(tmp_path / f".a.{'0' * 16}.part")
        replace_text(tmp_path / "a", "the second writer", REMEDY)
        (tmp_path / f".a.{'0' * 16}.part").rename(part)

    replace_folder(tmp_path / "b", write, REMEDY)
    replace_text(tmp_path / long, "whole", REMEDY)
    assert {f".{long}.{'1' * 16}.old", f".a.{'0' * 16}.old", "a", "b", long} == {*os.listdir(tmp_path)}


def test_weights_that_stop_arriving_give_a_one_line_error_and_leave_no_file(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "weights")

    def arrive() -> None:
        with folder.receive(folder.path(PolicyVersion(3)), 8, 4) as incoming:
            incoming.write(Piece(0, 4), b"some")
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"safetensors: cannot be written: No space left on device; free memory"):
        arrive()
    assert os.listdir(folder.folder) == [".owner"]


OWN_WAYS = {
    "stores/files.py": "the one way",
    "pipeline/stored_runs/suite_process.py": "into a temporary folder; it imports nothing of this project",
    "pipeline/cluster/tls_cluster.py": "logs of processes",
    "pipeline/api/run_data.py": "in a temporary folder of its own",
    "pipeline/config/first_job.py": "into a folder whose files are published at the end",
    "pipeline/coordination/journal.py": "appends, and renames a whole file",
    "pipeline/jobs/tracking.py": "discards what a package prints",
    "pipeline/stored_runs/exporting.py": "inside the folder that is published at the end",
    "pipeline/stored_runs/reward_rescoring.py": "code for a worker's import, in a temporary folder of its own",
    "pipeline/runtime/evaluation_driver.py": "renames a whole folder",
    "pipeline/recovery/resumption.py": "renames a whole file",
    "pipeline/recovery/run_journal.py": "fills a part it is given",
    "stores/in_flight/spool.py": "begins a part, and appends to it",
    "tasks/engines/vllm_adapters.py": "in a temporary folder of its own",
    "tasks/training/emulated_trainer.py": "fills a part it is given",
    "tasks/training/lora.py": "fills a folder that its caller publishes",
}
"""Modules that write or rename files themselves, with the reason."""


def test_only_listed_modules_write_files_directly() -> None:
    writes = re.compile(r"\.write_text\(|\.write_bytes\(|\.rename\(|os\.replace\(|open\([^)]*[\"'][wx]b?[\"']")
    root = Path(__file__).parents[2]
    results = set()
    for room in ("cli", "pipeline", "tasks", "stores"):
        for module in (root / room).rglob("*.py"):
            lines = module.read_text().splitlines()
            if any(writes.search(line) and "tmp_path.write_text" not in line for line in lines):
                results.add(str(module.relative_to(root)))
    assert results - {"stores/weights/weight_folder.py"} <= OWN_WAYS.keys()
