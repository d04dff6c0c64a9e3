"""A journal in parts reads as one file, with closed, compressed, truncated or missing parts."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.events import Tick
from staleflow.pipeline.coordination.journal import Journal, JournalEntry, list_start_files
from staleflow.pipeline.recovery import resumption, run_journal
from staleflow.pipeline.recovery.run_journal import RunJournal, compress
from staleflow.pipeline.run_page.run_reader import JournalFollower
from staleflow.stores.errors import ConfigError, StoreError
from tests.commands import command
from tests.coordination.test_journal import WRITTEN, TinyBody, coordinator
from tests.jobs.test_replaying import run_folder

PART_BYTES = 20_000


def split_journal(path: Path, full_journal: Path, part_bytes: int = PART_BYTES) -> list[JournalEntry]:
    """Split the journal of one file into parts; returns the entries."""
    entries = list(journal.JournalReader(full_journal))
    book = RunJournal(path, part_bytes=part_bytes)
    for entry in entries:
        book.append(entry.now, entry.event, entry.commands)
    book.close(wait=True)
    return entries


@pytest.fixture
def full_journal(tmp_path: Path) -> Path:
    """An eventful journal in one file."""
    (tmp_path / "whole").mkdir()
    path = tmp_path / "whole" / "events.jsonl"
    TinyBody(coordinator(tmp_path), path, 3).run()
    return path


def test_a_journal_in_parts_reads_and_replays_as_one_file(tmp_path: Path, full_journal: Path) -> None:
    path = tmp_path / "events.jsonl"
    entries = split_journal(path, full_journal)
    result = journal.list_files(path)
    assert [p.name for p in result] == [*(f"events.jsonl.{n:04}.gz" for n in range(1, len(result))), "events.jsonl"]
    assert len(result) > 5
    read = journal.JournalReader(path)
    assert list(read) == entries
    assert read.incomplete_line_number == 0
    assert journal.replay(coordinator(tmp_path), journal.JournalReader(path)).difference == ""
    headings = b"".join(b'{"part":%d}\n' % n for n in range(2, len(result) + 1))
    assert sum(map(journal.uncompressed_bytes, result)) == full_journal.stat().st_size + len(headings)
    assert sum(p.stat().st_size for p in result[:-1]) < full_journal.stat().st_size / 4


def test_a_journal_of_one_part_has_the_bytes_of_one_file(tmp_path: Path, full_journal: Path) -> None:
    split_journal(tmp_path / "events.jsonl", full_journal, journal.PART_BYTES)
    assert (tmp_path / "events.jsonl").read_bytes() == full_journal.read_bytes()
    assert journal.list_files(tmp_path / "events.jsonl") == [tmp_path / "events.jsonl"]


def test_a_missing_or_corrupt_part_gives_a_one_line_error(tmp_path: Path, full_journal: Path) -> None:
    path = tmp_path / "events.jsonl"
    split_journal(path, full_journal)
    second = tmp_path / "events.jsonl.0002.gz"
    *closed, last = journal.list_files(path)

    def refusal() -> str:
        with pytest.raises(ConfigError) as error:
            list(journal.JournalReader(path))
        assert "\n" not in str(error.value)
        return str(error.value)

    data = second.read_bytes()
    second.unlink()
    assert refusal() == f"{tmp_path}/events.jsonl.0002: this part of the journal is missing; restore it"
    for torn in (data[: len(data) // 2], data[:-4], b"", data[:40] + bytes(40) + data[80:]):
        second.write_bytes(torn)
        assert refusal().startswith(f"{second}: damaged{' after line ' if torn else ': it is empty'}")
    second.write_bytes(data)
    assert list(journal.JournalReader(path))
    kept = closed[-1].read_bytes()
    closed[-1].unlink()
    assert refusal() == (
        f"{tmp_path}/events.jsonl.{len(closed):04}: this part of the journal is missing; "
        f"events.jsonl is {len(closed) + 1}"
    )
    closed[-1].write_bytes(kept)
    last.unlink()
    assert f"{last}: cannot be read" in refusal()


def test_parts_of_a_killed_writer_are_read_and_compressed_by_the_next(tmp_path: Path, full_journal: Path) -> None:
    path = tmp_path / "events.jsonl"
    entries = split_journal(path, full_journal)
    for part in list(journal.list_closed_parts(path).values())[1::2]:
        plain = part.with_suffix("")
        plain.write_bytes(gzip.decompress(part.read_bytes()))
        if part != list(journal.list_closed_parts(path).values())[3]:
            part.unlink()  # killed before, or after, the compressed one was complete
    path.write_bytes(path.read_bytes() + b'{"now":1.5,"ev')
    read = journal.JournalReader(path)
    assert list(read) == entries
    assert read.incomplete_line_number == len(path.read_bytes().splitlines())
    path.rename(tmp_path / "events.1.jsonl")
    RunJournal(tmp_path / "events.jsonl").close(wait=True)
    assert [p.suffix for p in journal.list_closed_parts(path).values()] == [".gz"] * (
        len(journal.list_closed_parts(path))
    )
    assert not [p for p in tmp_path.glob("events.jsonl.*") if p.suffix != ".gz"]


def test_a_part_that_cannot_be_compressed_is_kept_and_logged(
    tmp_path: Path, full_journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    (tmp_path / "events.jsonl.0002.gz").mkdir()
    (tmp_path / "events.jsonl.0002.gz" / "full").write_text("")
    book = Journal(path, compress, 5_000)
    book.append(1.0, next(iter(journal.JournalReader(full_journal))).event, ())
    book.close()
    (tmp_path / "events.jsonl.0007").write_text("x\n")
    (tmp_path / "events.jsonl.0007.gz").mkdir()
    compress(tmp_path / "events.jsonl.0007")
    assert (tmp_path / "events.jsonl.0007").read_text() == "x\n"
    assert "it stays uncompressed" in caplog.text


def test_a_part_that_is_exactly_full_is_closed(tmp_path: Path) -> None:
    whole, full = tmp_path / "whole.jsonl", tmp_path / "full.jsonl"
    for path in (whole, full):
        book = Journal(path, None, whole.stat().st_size if whole.exists() else 10**6)
        book.append(1.0, Tick(), ())
        book.close()
    assert (tmp_path / "full.jsonl.0001").read_bytes() == whole.read_bytes()


def test_a_journal_of_a_killed_process_has_every_written_entry(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from staleflow.pipeline.coordination.events import Tick
        from staleflow.pipeline.recovery.run_journal import RunJournal
        book = RunJournal(Path(sys.argv[1]), part_bytes=3_000)
        for i in range(10**9):
            book.append(float(i), Tick(), ())
            print(i, flush=True)
        """
    )
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        path = folder / "events.jsonl"
        with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(400 + 37 * attempt):
                last = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
        read = [entry.now for entry in journal.JournalReader(path)]
        assert read == list(range(len(read)))
        assert len(read) > last


def test_a_journal_whose_writer_was_killed_between_two_parts_is_read_and_continued(
    tmp_path: Path, full_journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"

    entries, rename = list(journal.JournalReader(full_journal)), Path.rename

    def rename_unless_next(file: Path, target: Path) -> Path:
        if target == path:
            raise OSError(errno.EIO, "killed")
        return rename(file, target)

    def append_all(book: journal.Journal) -> None:
        for entry in entries:
            book.append(entry.now, entry.event, entry.commands)

    killed = journal.Journal(path, part_bytes=PART_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_unless_next)
        with pytest.raises(StoreError, match="killed"):
            append_all(killed)
    killed.close()
    before = list(journal.JournalReader(path))
    assert before and not path.exists()
    continued = journal.Journal(path)
    continued.append(1e9, Tick(), ())
    continued.close()
    assert [entry.now for entry in journal.JournalReader(path)] == [*(entry.now for entry in before), 1e9]
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        list(journal.JournalReader(path))


def test_a_resumed_run_keeps_the_parts_of_each_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_folder(folder)
    events = folder / "events.jsonl"
    before = list(journal.JournalReader(events))
    (folder / "one").write_bytes(events.read_bytes())
    events.unlink()
    split_journal(events, folder / "one")
    count = len(journal.list_files(events))
    resumption._archive_start(folder)
    assert journal.list_files(events) == []
    assert len(journal.list_files(folder / "events.1.jsonl")) == count
    assert [events.name for _, events in list_start_files(folder)] == ["events.1.jsonl", "events.jsonl"]
    split_journal(events, folder / "one")
    result = command("replay", folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{2 * len(before)} events" in result.stdout

    # Interrupted during a rename, and killed while the current part was closed: the journal continues from there.
    for part in list(journal.list_closed_parts(events).values())[:2]:
        part.rename(folder / part.name.replace("events", "events.2", 1))
    events.rename(folder / f"events.jsonl.{count:04}")
    resumption._archive_start(folder)
    assert [events.name for _, events in list_start_files(folder)] == [
        "events.1.jsonl",
        "events.2.jsonl",
        "events.jsonl",
    ]
    assert list(journal.JournalReader(folder / "events.2.jsonl")) == before
    resumption._archive_start(folder)  # a start without any event
    assert [events.name for _, events in list_start_files(folder)] == [
        "events.1.jsonl",
        "events.2.jsonl",
        "events.jsonl",
    ]


def test_the_run_page_follows_parts_during_rotation_and_compression(
    tmp_path: Path, full_journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    entries = list(journal.JournalReader(full_journal))
    alone, follower = JournalFollower(3), JournalFollower(3)
    alone.follow([full_journal], max_bytes=10**9)
    lines: list[str] = []
    add = follower.index.add

    def add_and_record(line: bytes | str, name: str) -> None:
        lines.append(name)
        add(line, name)

    monkeypatch.setattr(follower.index, "add", add_and_record)
    book = Journal(path, None, 15_000)
    for i, entry in enumerate(entries):
        book.append(entry.now, entry.event, entry.commands)
        if i % 50 == 0:
            follower.follow([path], max_bytes=6_000)
            done = [p for p in journal.list_closed_parts(path).values() if p.suffix != ".gz"]
            if done and i % 200 == 0:
                run_journal.compress(done[0])
    book.close()
    shares = []
    while follower.index.read_share < 1:
        follower.follow([path], max_bytes=6_000)
        shares.append(follower.index.read_share)
    assert shares == sorted(shares)
    assert len(lines) == len(entries), "no line is read twice"
    assert (follower.index.num_entries, follower.index.last_s) == (alone.index.num_entries, alone.index.last_s)
    assert follower.index.starts == alone.index.starts
    views = [index.window(0, 1e9, 20) for index in (follower.index, alone.index)]
    assert {bool(view.pop("read_error")) for view in views} in ({False}, {True}), "the line of an instance lost unknown"
    assert views[0] == views[1]


def test_journals_of_earlier_versions_without_parts_are_readable(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in WRITTEN))
    assert len(list(journal.JournalReader(tmp_path / "events.jsonl"))) == len(WRITTEN)


def test_a_full_disk_ends_the_run_with_one_line_and_the_journal_closes(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    journal = RunJournal(tmp_path / "events.jsonl")
    with pytest.raises(StoreError, match=r"events\.jsonl: cannot be written: No space left on device; free"):
        journal.append(0.0, Tick(), ())
    journal.close(wait=True)
