"""Journals of commit 9e20fc41, whose events, commands and fields had other names, are converted entry by entry."""

import json
from pathlib import Path
from typing import get_args

import pytest

from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.commands import Command
from staleflow.pipeline.coordination.events import Event
from staleflow.pipeline.coordination.journal import CODEC, JournalEntry
from staleflow.pipeline.coordination.journal_conversion import FIELDS, TYPES, convert_entry
from staleflow.stores.errors import ConfigError

EARLIER = [
    '{"now":1.5,"event":{"type":"InstanceJoined","instance":"b","version":3,"kv_capacity":100,"max_running":4},'
    '"commands":[{"type":"Draw","num_groups":9,"cause":"InstanceJoined#1"},'
    '{"type":"Route","trajectory":54,"epoch":1,"instance":"b","version":3,"cause":"InstanceJoined#1"}]}',
    '{"now":1.5,"event":{"type":"EnvironmentAnswered","trajectory":7,"epoch":1,"tokens":9},'
    '"commands":[{"type":"Act","trajectory":7,"epoch":1,"cut":true,"cause":"EnvironmentAnswered#7"},'
    '{"type":"Dismiss","trajectory":8,"cause":"TrajectoryScored#9"},'
    '{"type":"Forget","trajectory":8,"instance":"a","cause":"TrajectoryScored#9"},'
    '{"type":"Retire","endings":[{"type":"Ending","trajectory":2,"group":0,"fate":"aborted","reason":"surplus_member",'
    '"step":1}],"versions":[0],"cause":"TrajectoryScored#9"},'
    '{"type":"Conclude","evaluation":0,"version":3,"cause":"TrajectoryScored#9","unanswered":[-8]}]}',
    '{"now":1.5,"event":{"type":"InstanceReported","instance":"b","progress":[[5,3]],"safe":[[5,2]],'
    '"steps":{"type":"StepsTaken","running":1,"kv_tokens":9,"seconds":0.5,"tokens":4}},'
    '"commands":[{"type":"Speculate","instance":"b","length":4,"cause":"InstanceReported#7"}]}',
]
"""One entry of each name that has changed."""


def test_each_earlier_name_is_converted_and_read() -> None:
    text = "\n".join(EARLIER)
    assert all(f'"{name}"' in text for name in (*TYPES, *FIELDS))
    for line in EARLIER:
        entry = CODEC.decode(convert_entry(json.loads(line)), JournalEntry)
        written = CODEC.encode(entry)
        assert convert_entry(written) == written, "what this version writes needs no conversion"
        assert all(name not in json.dumps(written) for name in ("EnvironmentAnswered", '"epoch"', '"cut"'))


def test_the_reader_names_the_conversion(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(EARLIER) + "\n")
    with pytest.raises(ConfigError, match=r"line 1: .*`staleflow store convert`"):
        list(journal.read(path))


def test_a_converted_name_is_one_that_this_version_has() -> None:
    assert {*TYPES.values()} - {"DecodeStats"} <= {kind.__name__ for kind in (*get_args(Event), *get_args(Command))}
