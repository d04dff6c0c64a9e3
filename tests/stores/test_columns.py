"""The table of columns: a new column needs one entry, and older stores read its fill value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.columns import COLUMNS, FATES, FINISHES, REASONS
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import Fate
from tests.stores.store_conformance import HEADER, ended, record
from tests.stores.test_stores import edit

ROOT = Path(__file__).parents[2]
REASON_NAMES = [
    "none", "surplus_group", "surplus_member", "engine_failed", "group_failed", "no_signal", "run_ended", "too_stale",
    "environment_failed",
]  # fmt: skip
WITH_A_COLUMN = """
import sys
from pathlib import Path

import numpy as np

from staleflow.stores.trajectories import columns

one = columns.Column(
    name="first_token", dtype="int32", fill=-7, meaning="first token of the prompt",
    get_value=lambda row: row.trajectory.prompt_tokens[0],
)
columns.COLUMNS = (*columns.COLUMNS, one)

from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories import dataframes
from staleflow.stores.trajectories.selection import Selection
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.stores.store_conformance import ended, record

path = Path(sys.argv[1])
assert VersionedStore.open(path).displayed_columns()["first_token"].tolist() == [-7] * 3
store = VersionedStore.open(path)
rows = [ended(np.random.default_rng(9), i, 1) for i in (3, 4)]
store.commit(record(1), rows)
store = VersionedStore.open(path)
expected = [-7] * 3 + [int(row.trajectory.prompt_tokens[0]) for row in rows]
assert store.displayed_columns()["first_token"].tolist() == expected
assert VersionedStore.open(path, at_step=0).displayed_columns()["first_token"].tolist() == [-7] * 3
assert Selection("first_token == -7").mask(store.displayed_columns()).tolist() == [True] * 3 + [False] * 2
frame = dataframes.to_pandas(store.trajectories())
assert frame.first_token.dtype == "int32" and frame.first_token.tolist()[3:] == expected[3:]
assert "first_token" in store.to_xarray()
assert not [finding for finding in audit(store).findings if finding.check == "arrays"]
"""


def test_a_new_column_needs_one_table_entry_and_old_stores_read_its_fill_value(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [ended(rng, i, 0) for i in range(3)])
    result = subprocess.run(
        [sys.executable, "-c", WITH_A_COLUMN, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    # A version that does not know the column reads the store as before.
    reopened = VersionedStore.open(tmp_path / "s")
    assert [row.trajectory.id for row in reopened.trajectories()] == [0, 1, 2, 3, 4]
    assert "first_token" not in reopened.displayed_columns()
    assert not [finding for finding in audit(reopened).findings if finding.check == "arrays"]


def test_columns_are_separate_arrays_of_the_declared_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [ended(rng, i, 0, Fate.FILTERED if i == 2 else Fate.CONSUMED) for i in range(3)])
    root = store._read_root()
    for column in COLUMNS:
        array = root[column.array_name]
        assert (array.shape, array.dtype, array.fill_value) == ((3,), column.dtype, column.fill), column.name
    assert store.stored_columns()["fate"].tolist() == [0, 0, 1]
    assert store.displayed_columns()["fate"].tolist() == ["consumed", "consumed", "filtered"]
    assert set(store.displayed_columns(names=("reward", "fate"))) == {"reward", "fate"}


@pytest.mark.parametrize("name", ["reward", "v_min", "dataset_row"])
def test_a_missing_column_reads_as_its_fill_value(tmp_path: Path, name: str) -> None:
    (column,) = [c for c in COLUMNS if c.name == name]
    store = VersionedStore.create(tmp_path / "s", HEADER)
    store.commit(record(0), [ended(np.random.default_rng(0), i, 0) for i in range(3)])
    edit(tmp_path / "s", lambda root: root.__delitem__(column.array_name))
    store = VersionedStore.open(tmp_path / "s")
    assert store.displayed_columns()[name].tolist() == [column.fill] * 3
    assert len(list(store.trajectories())) == 3


def test_members_of_enumerations_keep_their_stored_numbers() -> None:
    """A store has their positions; a new member goes to the end of these lists."""
    assert [m.value for m in FINISHES] == ["stop", "length", "unfinished"]
    assert [m.value for m in FATES] == ["consumed", "filtered", "aborted"]
    assert [m.value for m in REASONS] == REASON_NAMES


def test_column_names_are_unique_and_documented() -> None:
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)
    lines = []
    for column in COLUMNS:
        kind = "word" if column.members else "" if column.dtype == "int64" else column.dtype
        properties = ", ".join(filter(None, (kind, column.unit)))
        lines.append(f"- `{column.name}`{properties and f' ({properties})'}: {column.meaning}")
    assert "\n".join(lines) in (ROOT / "docs" / "store.md").read_text()
