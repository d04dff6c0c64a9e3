"""Run folders: one process at a time, writes only under the lock, and copies that use their own files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.config import actor_settings, knob_tree, loading, user_files
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.config.user_files import collect_code
from staleflow.pipeline.jobs import job_driver
from staleflow.pipeline.jobs.execution import execute
from staleflow.pipeline.jobs.job_driver import Submission
from staleflow.pipeline.recovery import resumption, run_folder
from staleflow.pipeline.recovery.run_folder import (
    FolderInUse,
    create_and_lock,
    load_job,
    lock_folder,
    prepare_run_dir,
    require_no_run,
)
from staleflow.pipeline.runtime.run_report import RunListener
from staleflow.stores.errors import ConfigError, StoreError
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.commands import command, error_line
from tests.jobs.test_resume import contents

JOB = """
name = "job"
runs_dir = "{runs}"
steps = 3

[batch]
groups_per_step = 6
group_size = 4

[rollout]
max_new_tokens = 400

[rollout.engine]
name = "emulated"
kv_tokens = 20000

[workload]
median = 60
prompt_tokens = 20

[simulation]
train_s = 0.2
pull_s = 0.02

[cluster]
dashboard = false
"""


@pytest.fixture
def light_job(tmp_path: Path) -> Path:
    """A job file that needs no model."""
    path = tmp_path / "light.toml"
    path.write_text(JOB.format(runs=tmp_path / "runs"))
    return path


def started_run(light: Path, *overrides: str) -> RunConfig:
    """Return a run with a store and without steps."""
    config = loading.load(light, overrides)
    prepare_run_dir(config)
    VersionedStore.create(config.run_dir / "store", actor_settings.run_header(config))
    return config


@pytest.mark.parametrize("line", ["runs_dir = 5", "name = 5", "name = ['a']", "runs_dir = {}", "staleness = 3"])
def test_a_job_value_of_a_wrong_type_gives_a_one_line_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.toml").write_text(f"{line}\n")
    (tmp_path / "events.jsonl").touch()
    start = f"staleflow: {tmp_path / 'config.toml'}: {line.split(maxsplit=1)[0]} must be "
    assert error_line("replay", tmp_path).startswith(start)


# -- one process at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True], ids=["while its actors start", "while it trains"])
def test_a_second_run_of_a_name_is_rejected_before_it_writes(light_job: Path, stored: bool) -> None:
    folder = started_run(light_job).run_dir
    if not stored:
        shutil.rmtree(folder / "store")
    with lock_folder(folder):
        before = contents(folder)
        second = loading.load(light_job, ("staleness.eta=4",))
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on .* another name=... for a new run$"):
            asyncio.run(execute(second, RunListener()))
        assert contents(folder) == before


def test_one_of_many_concurrent_creators_gets_the_folder(light_job: Path) -> None:
    everyone, tried = threading.Barrier(8), threading.Barrier(8)
    won: list[int] = []
    refused: list[ConfigError] = []

    def run(seed: int) -> None:
        config = loading.load(light_job, (f"seed={seed}",))
        everyone.wait()
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(create_and_lock(config.run_dir))
                prepare_run_dir(config)
                won.append(seed)
            except ConfigError as error:
                refused.append(error)
            tried.wait()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (seed,) = won
    assert [type(error) for error in refused] == [FolderInUse] * 7
    assert load_job(light_job.parent / "runs" / "job").seed == seed


def test_a_lock_file_removed_during_locking_still_excludes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[Any] = []

    def late(file: Any, how: int) -> None:
        if not removed:
            removed.append(file)
            (tmp_path / run_folder.LOCK_FILE).unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        lock_folder(tmp_path),
        pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}"),
        lock_folder(tmp_path),
    ):
        pytest.fail("both hold it")


def test_a_folder_that_cannot_be_locked_gives_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockless(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with (
        pytest.raises(ConfigError, match=r"^/proc/none: cannot be written: .*set runs_dir to another"),
        create_and_lock(Path("/proc/none")),
    ):
        pytest.fail("nobody can write there")
    (tmp_path / "taken" / run_folder.LOCK_FILE).mkdir(parents=True)
    with (
        pytest.raises(StoreError, match=r"cannot be written: .*a run's folder is locked"),
        lock_folder(tmp_path / "taken"),
    ):
        pytest.fail("there is no file to lock")
    monkeypatch.setattr(fcntl, "flock", lockless)
    with (
        pytest.raises(StoreError, match="No locks available; use a file system that supports locks"),
        lock_folder(tmp_path),
    ):
        pytest.fail("nothing is locked")


# -- what is left of a run that was killed early -----------------------------------------------------------------------


def test_a_folder_without_results_is_reused_and_others_are_rejected(light_job: Path) -> None:
    config = loading.load(light_job)
    folder = prepare_run_dir(config)
    (folder / "events.jsonl").touch()
    prepare_run_dir(loading.load(light_job, ("seed=5",)))
    assert load_job(folder).seed == 5
    for name in ("store", "checkpoints", "resume"):
        (folder / name).mkdir()
        with pytest.raises(ConfigError, match="already has a run; set another name="):
            require_no_run(folder)
        (folder / name).rmdir()
    (folder / "events.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already has a run"):
        require_no_run(folder)


def test_changes_by_a_resume_are_written_even_without_stored_steps(light_job: Path) -> None:
    folder = prepare_run_dir(loading.load(light_job))
    resumption.prepare(resumption.load(folder, ("steps=9",)))
    assert load_job(folder).steps == 9


# -- a job that is not the store's -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job_overrides", "new_override", "message"),
    [
        ((), "staleness.eta=4", "staleness.eta = 4 in config.toml, 1 in the store"),
        ((), "batch.groups_per_step=5", "batch.groups_per_step = 5 in config.toml, 6 in the store"),
        ((), "batch.group_size=2", "batch.group_size = 2 in config.toml, 4 in the store"),
        ((), "batch.extra_members=1", r"batch.group_size \+ batch.extra_members = 5 in config.toml, 4 in the store"),
    ],
)
def test_a_resume_rejects_a_job_that_contradicts_its_store(
    light_job: Path, job_overrides: tuple[str, ...], new_override: str, message: str
) -> None:
    config = started_run(light_job, *job_overrides)
    assert resumption.find_resume_version(config) == 0
    run_folder.write_job(loading.load(light_job, (*job_overrides, new_override)))
    before = contents(config.run_dir)
    for go_on in (resumption.find_resume_version, resumption.prepare):
        with pytest.raises(ConfigError, match=message):
            go_on(resumption.load(config.run_dir))
    assert contents(config.run_dir) == before


# -- what is named is what is worked on --------------------------------------------------------------------------------


@pytest.fixture
def moved_run(light_job: Path, tmp_path: Path) -> Path:
    """A copy of the folder of a submitted job whose config names the code in the original folder, which has changed."""
    folder = tmp_path / "runs" / "job"
    config = started_run(
        light_job, f"reward.function={folder}/code/reward_mine.py:score",
        f"task.source={folder}/code/task_mine.py:Prompts",
        f"tracking.tracker={tmp_path}/runs/job-2/mine.py:Tracker", f"model.path={folder}/checkpoints/step-000003",
        f"training.kl.reference={folder}/checkpoints/step-000001", "training.kl.coefficient=0.1",
    )  # fmt: skip
    run_folder.write_job_id(config.run_dir, "job-1", {"reward_mine.py": "one = 1\n", "task_mine.py": "two = 2\n"})
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(config.run_dir, copy)
    for file in (config.run_dir / "code").iterdir():
        file.write_text("raise RuntimeError('the original was read')\n")
    return copy


@pytest.mark.parametrize("spelled", ["plain", "link", "from within"])
def test_a_copied_run_uses_its_folder(moved_run: Path, spelled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = moved_run
    if spelled == "link":
        named = moved_run.parent / "latest"
        named.symlink_to(moved_run)
    if spelled == "from within":
        monkeypatch.chdir(moved_run)
        named = Path()
    config = user_files.with_absolute_paths(resumption.load(named, ("steps=7",)))
    assert config.run_dir == moved_run
    assert (config.steps, config.name) == (7, "copy")
    assert config.reward.function == f"{moved_run}/code/reward_mine.py:score"
    assert config.task.source == f"{moved_run}/code/task_mine.py:Prompts"
    assert config.model.path == f"{moved_run}/checkpoints/step-000003"
    assert config.training.kl.reference == f"{moved_run}/checkpoints/step-000001"
    assert config.tracking.tracker == f"{moved_run.parent.parent}/runs/job-2/mine.py:Tracker"
    resumption.prepare(config)
    assert (load_job(moved_run).run_dir, load_job(moved_run).steps) == (moved_run, 7)
    assert load_job(moved_run.parent.parent / "runs" / "job").steps == 3


def test_paths_outside_the_run_folder_stay_unchanged(moved_run: Path) -> None:
    original = moved_run.parent.parent / "runs" / "job"
    config = load_job(moved_run, (f"model.path={original}/checkpoints/step-000002",))
    assert config.model.path == f"{original}/checkpoints/step-000002"


def test_the_code_of_a_moved_run_is_read_from_its_folder(moved_run: Path) -> None:
    tracked = load_job(moved_run, ('tracking.tracker=""',))
    config, code = collect_code(tracked)
    assert code == {"reward_mine.py": "one = 1\n", "task_mine.py": "two = 2\n"}
    submission = Submission(id="copy-2", job_toml=configuration_text(config), code=code, resume=True)
    assert (
        job_driver.configure_for_cluster(submission, "tcp://host:1").reward.function
        == f"{moved_run}/code/reward_mine.py:score"
    )


def configuration_text(config: RunConfig) -> str:

    return knob_tree.to_toml(config)


def test_a_folder_with_an_invalid_run_name_is_rejected(moved_run: Path) -> None:
    hidden = moved_run.rename(moved_run.parent / ".copy")
    assert "no steps are stored" in command("store", "audit", hidden).stdout, "it can be read"
    with pytest.raises(ConfigError, match="must not begin with a dot; rename it"):
        resumption.load(hidden)


# -- submitted jobs ----------------------------------------------------------------------------------------------------


def submission(id: str, *, resume: bool = False) -> Submission:
    return Submission(id=id, job_toml="", code={"reward_mine.py": f"# {id}\n"}, resume=resume)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_job_of_a_name_is_rejected_before_it_writes(light_job: Path, resume: bool) -> None:
    config = loading.load(light_job)

    async def both() -> None:
        async with job_driver.lock_for_job(config, submission("job-a")):
            before = contents(config.run_dir)
            with pytest.raises(FolderInUse):
                async with job_driver.lock_for_job(config, submission("job-b", resume=resume)):
                    pytest.fail("both hold it")
            assert contents(config.run_dir) == before

    asyncio.run(both())
    assert (config.run_dir / "code" / "reward_mine.py").read_text() == "# job-a\n"
    VersionedStore.create(config.run_dir / "store", actor_settings.run_header(config))
    before = contents(config.run_dir)

    async def third() -> None:
        async with job_driver.lock_for_job(config, submission("job-c")):
            pytest.fail("there is a run already")

    with pytest.raises(ConfigError, match="already has a run"):
        asyncio.run(third())
    del before[run_folder.LOCK_FILE]
    assert {name: text for name, text in contents(config.run_dir).items() if name != run_folder.LOCK_FILE} == before


def test_a_restarted_driver_waits_for_the_lock_of_the_previous_one(light_job: Path) -> None:
    config = loading.load(light_job)
    order: list[str] = []

    async def driver(name: str, seconds: float) -> None:
        async with job_driver.lock_for_job(config, submission("job-a")):
            order.append(f"{name} in")
            await asyncio.sleep(seconds)
            order.append(f"{name} out")

    async def both() -> None:
        await asyncio.gather(driver("first", 0.7), driver("second", 0.0))

    asyncio.run(both())
    assert order == ["first in", "first out", "second in", "second out"]
    hurried = loading.load(light_job, ("deadlines.start_s=0.1",))

    async def too_long() -> None:
        async with job_driver.lock_for_job(hurried, submission("job-a")):
            pytest.fail("it is held")

    with lock_folder(config.run_dir), pytest.raises(FolderInUse):
        asyncio.run(too_long())


def test_store_ls_names_a_run_without_a_store(light_job: Path) -> None:
    folder = prepare_run_dir(loading.load(light_job))
    (row,) = json.loads(command("store", "ls", folder.parent, "--json").stdout)
    assert (row["run"], row["state"]) == (str(folder), "no store")
