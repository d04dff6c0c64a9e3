"""Whole runs over in-process actors in virtual time, with checks of all invariants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.pipeline.config import loading
from staleflow.pipeline.config.actor_settings import make_workload
from staleflow.pipeline.config.factories import make_coordinator
from staleflow.pipeline.config.model_facts import ModelFacts
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination import journal
from staleflow.pipeline.coordination.snapshot import Snapshot
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.pipeline.runtime.actors import Actors
from staleflow.pipeline.runtime.driver import Driver
from staleflow.pipeline.runtime.evaluation_results import Evaluation
from staleflow.pipeline.runtime.run_report import RunListener, RunReport
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.trajectory import EnvSpan, Fate, PolicyVersion, Segment, Trajectory
from staleflow.tasks.engines.emulated_engine import emulated_ids
from tests.support import virtual_time
from tests.support.in_process import Fault, InProcessWorkers
from tests.support.memory_store import MemoryStore
from tests.support.scripted import World, response

JOB = """
name = "job"
runs_dir = "{runs}"
steps = 3
seed = 1

[batch]
groups_per_step = 2
group_size = 2

[rollout]
instances = 2
max_new_tokens = 100
cost_tolerance = 1e9

[rollout.engine]
name = "emulated"
max_running = 4
kv_tokens = 2000

[deadlines]
start_s = 50
call_s = 3
sample_s = 20
train_s = 40
commit_s = 60
stuck_s = 30

[environment]
step_timeout_s = 25
"""
"""A job of three steps of four trajectories on two instances. All timeouts differ."""


@dataclass
class Run(RunListener):
    """A finished run with its results and the reports of its driver."""

    config: RunConfig
    world: World
    workers: InProcessWorkers
    driver: Any = None
    actors: Any = None
    error: Exception | None = None
    stopped_at_once: bool = False
    phases: list[tuple[float, str]] = field(default_factory=list)
    """Activities outside of training with their start on the clock of the loop."""
    steps: list[int] = field(default_factory=list)
    """Steps that were reported as stored."""
    wall_s: list[float] = field(default_factory=list)
    """Seconds of the run in its report when each of these steps was."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """Evaluations that were reported."""
    ended_s: float = 0.0
    """On the clock of the loop, before anything was closed."""
    instance_lines: list[str] = field(default_factory=list)
    """The line about instances at each status."""
    loss_counts: list[int] = field(default_factory=list)
    """Number of losses known at each status."""

    def on_activity(self, name: str) -> None:
        self.phases.append((asyncio.get_running_loop().time(), name))

    def on_status(self, snapshot: Snapshot, report: RunReport) -> None:
        self.loss_counts.append(len(report.lost_actors))
        self.instance_lines.append(report.instances_line)

    def on_step_stored(self, step: Mapping[str, float], bottleneck: str) -> None:
        self.steps.append(int(step["step"]))
        self.wall_s.append(self.outcomes.seconds_by_activity["wall_s"])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    @property
    def outcomes(self) -> RunReport:
        outcomes: RunReport = self.driver.report
        return outcomes

    @property
    def store(self) -> MemoryStore:
        return self.world.stores[str(self.config.run_dir / "store")]

    @property
    def records(self) -> list[CommitRecord]:
        return self.store.commits()

    @property
    def entries(self) -> list[journal.JournalEntry]:
        """The journal, read from its file."""
        return list(journal.JournalReader(self.config.run_dir / "events.jsonl"))

    def events(self, name: str) -> list[tuple[float, Any]]:
        """Return all (time, event) of one kind."""
        return [(e.now, e.event) for e in self.entries if type(e.event).__name__ == name]

    def commands(self, *names: str) -> list[Any]:
        """Return the commands of these kinds in order."""
        return [c for e in self.entries for c in e.commands if type(c).__name__ in names]

    def raised(self) -> Exception:
        """Return the error that ended the run; fails if there is none."""
        assert self.error is not None, "the run ended well"
        return self.error

    # -- promises ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the run ended without error, did all its steps and that all invariants hold."""
        if self.error is not None:
            raise self.error
        assert not self.outcomes.stop_reason
        assert [r.kind for r in self.records if r.kind != "refusal"] == ["step"] * self.config.steps + ["end"]
        self.check_kept()
        fates = Counter(row.fate for row in self.store.trajectories())
        assert fates[Fate.CONSUMED] == self.config.steps * self.config.trajectories_per_step
        assert len(self.outcomes.steps) == self.config.steps
        assert self.outcomes.snapshot is not None

    def check_kept(self) -> None:
        """Check what was stored however the run ended: conservation, the bound, the order of tokens, and a journal that
        replays to the same commands."""
        self._check_ledger()
        self._check_rows()
        self._check_journal()

    def _check_ledger(self) -> None:
        rows = list(self.store.trajectories())
        seen = 0
        for record in self.records:
            seen += record.num_rows
            ledger = record.ledger
            ended = sum(ledger.num_ended.values())
            assert ended == seen, f"step {record.step}: {ended} ended, {seen} stored"
            assert ledger.num_started == ended + ledger.num_live, f"step {record.step}: conservation"
        fates = Counter(f"{row.fate.value}:{row.reason.value}" for row in rows)
        if self.records:
            assert dict(fates) == {k: n for k, n in self.records[-1].ledger.num_ended.items() if n}
        steps = [r for r in self.records if r.kind == "step"]
        assert [r.step for r in steps] == list(range(len(steps)))
        for record in steps:
            assert (record.ledger.version, record.ledger.next_step) == (record.step, record.step + 1)
            assert record.weight_fingerprint == self.world.fingerprint(record.step + 1)
            for check in record.weight_checks:
                assert check.fingerprint == self.world.fingerprint(check.version)

    def _check_rows(self) -> None:
        for row in self.store.trajectories():
            t = row.trajectory
            at = 0
            for span in t.spans:
                end = at + len(span.tokens)
                begin = len(t.prompt_tokens) + at
                if isinstance(span, Segment):
                    assert span.tokens.tolist() == response(t.id, end)[at:]
                else:
                    assert span.tokens.tolist() == emulated_ids(0, begin, end - at).tolist(), "env tokens"
                at = end
            versions = t.versions[t.sampled]
            assert self.config.has_environment or list(versions) == sorted(versions)
            if row.fate is Fate.CONSUMED:
                self._check_whole(t)
                assert 0 <= row.step - t.v_traj <= self.config.staleness.eta
                assert all(t.v_traj <= v <= row.step for v in versions)

    def _check_whole(self, t: Trajectory) -> None:
        """Check that each response has all its tokens or all its turns."""
        if not self.config.has_environment:
            whole = min(self.world.length(t.id), self.config.rollout.max_new_tokens)
            assert t.num_tokens == whole, f"trajectory {t.id} is cut off, or more than whole"
            return
        turns = make_workload(self.config).turns(*divmod(t.id, self.config.members_started_per_group))
        values = [len(span.tokens) for span in t.spans if isinstance(span, EnvSpan)]
        assert len(t.turns) == len(turns), f"trajectory {t.id} has {len(t.turns)} of {len(turns)} turns"
        assert values == [turn.tool_tokens for turn in turns[:-1]]
        assert isinstance(t.spans[-1], Segment), "an episode ends with the model's turn"

    def _check_journal(self) -> None:
        entries = self.entries
        assert all(a.now <= b.now for a, b in itertools.pairwise(entries)), "time went backwards"
        coordinator = make_coordinator(self.config, validate_every_event=True)
        assert journal.replay(coordinator, iter(entries)).difference == ""


Script = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True)
class Stage:
    """The placed actors of a run, without a driver."""

    config: RunConfig
    world: World
    workers: InProcessWorkers
    actors: Any

    def publish(self, version: PolicyVersion) -> None:
        """Publish a version as a training step does."""
        trainer = self.workers.actor("trainer")
        trainer._version = version
        self.actors.record_published(trainer._publish({}))


FACTS = ModelFacts(context_length=1000, eos=(1,), nonce="0")


class Body:
    """Creates runs in separate folders below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def config(self, *overrides: str) -> RunConfig:
        """Return a job in a new folder."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(JOB.format(runs=folder))
        config = loading.load(folder / "job.toml", overrides)
        config.run_dir.mkdir()
        return config

    def run(
        self,
        *overrides: str,
        faults: Sequence[Fault] = (),
        world: World | None = None,
        hosts: Sequence[str] = ("one",),
        meanwhile: Script | None = None,
        resumption: Resumption | None = None,
        config: RunConfig | None = None,
    ) -> Run:
        """Run a driver to its end. meanwhile: a coroutine that runs beside it. config: that of an earlier run to
        resume."""
        config = config or self.config(*overrides)
        world = world or World()
        world.turns = config.shares_gpus
        run = Run(config=config, world=world, workers=InProcessWorkers(world.actors, faults, hosts))
        virtual_time.run(self._drive(run, meanwhile, resumption))
        return run

    def checked_run(self, *overrides: str, **arguments: Any) -> Run:
        """Like `run`; fails unless the run did all its steps and all invariants hold."""
        run = self.run(*overrides, **arguments)
        run.check()
        return run

    @contextlib.asynccontextmanager
    async def placed(
        self,
        *overrides: str,
        faults: Sequence[Fault] = (),
        world: World | None = None,
        hosts: Sequence[str] = ("one",),
        resumption: Resumption | None = None,
    ) -> AsyncIterator[Stage]:
        """Place the actors of a run; they are closed at the end."""
        config, world = self.config(*overrides), world or World()
        workers = InProcessWorkers(world.actors, faults, hosts)
        stage = Stage(config, world, workers, Actors(config, workers, config.run_dir, FACTS))
        try:
            await stage.actors.place_all(resumption)
            yield stage
        finally:
            await stage.actors.close()
            await workers.end()

    async def _drive(self, run: Run, meanwhile: Script | None, resumption: Resumption | None) -> None:
        loop = asyncio.get_running_loop()

        run.actors = Actors(run.config, run.workers, run.config.run_dir, FACTS)
        run.driver = Driver(run.config, run.actors, run.config.run_dir, run, resumption)
        beside = asyncio.ensure_future(meanwhile(run)) if meanwhile is not None else None
        try:
            await run.driver.run()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            run.stopped_at_once = True
        except Exception as error:  # noqa: BLE001  the test looks at it
            run.error = error
        finally:
            run.ended_s = loop.time()
            if beside is not None:
                await asyncio.wait_for(beside, 0) if beside.done() else beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)
            await run.driver.close()
            await run.workers.end()
