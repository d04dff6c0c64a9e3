"""The coordinator's body on a real cluster: carries its commands out as actor calls and feeds their outcomes back.

One asyncio loop. Commands to one rollout instance leave in order through one sender each (a Route after a Pull must
find the new weights); so do books to the trajectory server. An actor that is gone is an event, not an exception:
instances and reward workers are replaced, and only the loss of the trainer or the server ends the run. It decides
nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import build
from pipeline.cluster import ActorCluster, Placed
from pipeline.commands import Abort, Command, Draw, Interrupt, Pull, Retire, Route, Score, Train
from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.events import (
    Event,
    GroupsArrived,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    NewGroup,
    PullFinished,
    StopRequested,
    Tick,
    TrajectoryFailed,
    TrajectoryInterrupted,
    TrajectorySampled,
    TrajectoryScored,
    VersionPublished,
)
from pipeline.journal import Journal
from pipeline.model_files import ModelFacts
from pipeline.snapshot import Snapshot
from stores import errors
from stores.base import LedgerState, StepRecord
from stores.errors import ProtocolViolation, RunStuck
from stores.trajectory import InstanceId, PolicyVersion, TrajectoryId
from tasks.parameters import ParameterServer
from tasks.remote import call
from tasks.reward import RewardWorker
from tasks.rollout import Outcome, RolloutInstance, RouteItem
from tasks.server import TrajectoryServer
from tasks.training import StepResult, Trainer

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest an event poll waits at an instance; it returns at once when something ended."""
TICK_S = 0.5
"""How often time passes for the coordinator, and instances report progress."""
SCORE_BATCH = 32
"""Responses handed to a reward worker in one call: enough to hide the call, few enough to spread."""
REPLACEMENTS = 3
"""How often one instance or reward worker is replaced before the run stops: past that it is no accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean reward on held-out prompts at one policy version."""

    version: int
    num_prompts: int
    sampled: float
    """At the rollout temperature."""
    greedy: float


@dataclass(slots=True)
class Outcomes:
    """What a run leaves behind besides its store."""

    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds, by what was going on."""
    snapshot: Snapshot | None = None
    stopped: str = ""
    """Why the run ended early; empty if it did all its steps."""
    losses: list[str] = field(default_factory=list)
    """Actors that were lost and replaced."""


@dataclass(slots=True)
class _Instance:
    placed: Placed
    outbox: asyncio.Queue[Command]
    tasks: list[asyncio.Task[None]]
    version: PolicyVersion = PolicyVersion(0)
    fingerprint: str = ""
    # For the instance's idle share: seconds the coordinator had work on it, seconds its engine had; what the engine
    # did before the run, an evaluation, does not count.
    assigned_s: float = 0.0
    busy_s: float = 0.0
    busy_before_s: float | None = None
    tokens_sampled: int = 0


class Driver:
    """Drives one run. `progress` is called with a snapshot and the last step's metrics about twice a second."""

    def __init__(
        self,
        config: RunConfig,
        cluster: ActorCluster,
        run_dir: Path,
        facts: ModelFacts,
        progress: Callable[[Snapshot, Outcomes, str], None],
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._run_dir = run_dir
        self._facts = facts
        self._progress = progress
        self._coordinator: Coordinator = build.make_coordinator(config)
        self._journal = Journal(run_dir / "events.jsonl")
        self._inbox: asyncio.Queue[Event | StepResult | BaseException] = asyncio.Queue()
        self._books: asyncio.Queue[Retire | StepRecord] = asyncio.Queue()
        self._scores: asyncio.Queue[TrajectoryId] = asyncio.Queue()
        self._instances: dict[InstanceId, _Instance] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._replaced: dict[str, int] = {}
        self._published: dict[PolicyVersion, tuple[str, str]] = {}
        self._begin = time.monotonic()
        self._training_since = self._idle_since = 0.0
        self._last_event_s = 0.0
        self._ages: list[tuple[float, float]] = []
        self._stop_requested = ""
        self.outcomes = Outcomes()

    # -- the run -------------------------------------------------------------------------------------------------

    async def run(self) -> Outcomes:
        """Place the actors, evaluate, train, evaluate, store the end. Raises StaleflowError with one story."""
        call_s = self._config.deadlines.call_s
        self._say("starting actors")
        await self._place_actors()
        initial: StepResult = await call(self._trainer.actor, "publish_initial", within_s=call_s, who="trainer")
        self._published[initial.version] = (initial.path, initial.fingerprint)
        await self._evaluate(PolicyVersion(0))
        self._begin = self._idle_since = time.monotonic()
        self._spawn(self._keep_books(), "books")
        self._spawn(self._tick(), "clock")
        for i in range(self._config.reward.workers):
            self._spawn(self._score_on(f"reward-{i}"), f"reward-{i}")
        for instance in list(self._instances.values()):
            self._join(instance)
        await self._main_loop()
        await self._close_books()
        self.outcomes.snapshot = self._coordinator.snapshot()
        self._measure_phases()
        if not self.outcomes.stopped:
            version = self._coordinator.ledger.version
            await self._pull_all(version)
            await self._evaluate(version)
        await self._checkpoint(f"step-{self._coordinator.ledger.version:06d}")
        return self.outcomes

    def stop(self, why: str) -> None:
        """End the run at the next moment when no training step is in flight. Safe from a signal handler."""
        self._stop_requested = self._stop_requested or why

    async def close(self) -> None:
        """Stop all tasks, close all actors; never raises."""
        for task in self._background:
            task.cancel()
        for instance in self._instances.values():
            for task in instance.tasks:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        # The engines first: they may still use what the others hold.
        order = {"rollout": 0, "trainer": 1, "reward": 2}
        for placed in sorted(self._cluster.placed.values(), key=lambda p: order.get(p.role, 3)):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await call(placed.actor, "close", within_s=10.0, who=placed.name)
        self._journal.close()

    async def _main_loop(self) -> None:
        """Events in, commands out, until all steps are trained or a stop is asked for."""
        deadlines = self._config.deadlines
        last_progress = time.monotonic()
        while not self._coordinator.finished:
            try:
                item = await asyncio.wait_for(self._inbox.get(), 1.0)
            except TimeoutError:
                item = Tick()
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, StepResult):
                item = self._after_training(item)
            if not isinstance(item, (Tick, InstanceReported)):
                last_progress = time.monotonic()
            self._handle(item)
            if self._stop_requested and not self._coordinator.training:
                self.outcomes.stopped = self._stop_requested
                break
            limit = deadlines.train_s if self._coordinator.training else deadlines.stuck_s
            if time.monotonic() - last_progress > limit:
                raise RunStuck(f"no progress for {limit:g} s: {self._coordinator.waiting_for()}")
        # Redundancy may have left something in flight even after the last step.
        self._handle(StopRequested(why=self.outcomes.stopped or "all steps are trained"))
        step = self._coordinator.ledger.next_step
        self._books.put_nowait(StepRecord(kind="end", step=step, ledger=self._ledger_state()))

    def _handle(self, event: Event) -> None:
        now = self._now()
        for name, num_running in self._coordinator.loads().items():
            if num_running and name in self._instances:
                self._instances[name].assigned_s += now - self._last_event_s
        self._last_event_s = now
        commands = self._coordinator.handle(event, now)
        self._journal.append(now, event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Route() | Abort() | Interrupt() | Pull():
                instance = self._instances.get(command.instance)
                if instance is not None:  # else its loss is already on the way
                    instance.outbox.put_nowait(command)
            case Draw():
                self._spawn(self._draw(command), "draw")
            case Score():
                self._scores.put_nowait(command.trajectory)
            case Retire():
                self._books.put_nowait(command)
            case Train():
                self._training_since = time.monotonic()
                self._spawn(self._train(command), "train")

    # -- carrying out --------------------------------------------------------------------------------------------

    async def _draw(self, command: Draw) -> None:
        drawn = await call(
            self._server.actor,
            "draw",
            command.num_groups,
            within_s=self._config.deadlines.call_s,
            who="trajectory server",
        )
        groups = tuple(NewGroup(group=g.group, prompt_tokens=g.prompt_tokens) for g in drawn)
        self._inbox.put_nowait(GroupsArrived(groups=groups))

    async def _train(self, command: Train) -> None:
        wait_s = self._training_since - self._idle_since
        result: StepResult = await call(
            self._trainer.actor,
            "train",
            self._server.actor,
            command.step,
            command.trajectories,
            command.versions,
            within_s=self._config.deadlines.train_s,
            who="trainer",
        )
        elapsed_s = time.monotonic() - self._training_since
        result.metrics.update(
            **self._mean_ages(),
            wait_s=wait_s,
            overhead_s=elapsed_s - result.metrics["train_s"] - result.metrics["publish_s"],
            elapsed_s=time.monotonic() - self._begin,
        )
        self._inbox.put_nowait(result)

    def _after_training(self, result: StepResult) -> Event:
        """Book the step as the ledger stands now, then let its version be known."""
        self._published[result.version] = (result.path, result.fingerprint)
        self._idle_since = time.monotonic()
        record = StepRecord(
            kind="step",
            step=result.version - 1,
            ledger=self._ledger_state(),
            metrics=result.metrics,
            weight_fingerprint=result.fingerprint,
            loaded_fingerprints={i: (s.version, s.fingerprint) for i, s in self._instances.items() if s.fingerprint},
        )
        self._books.put_nowait(record)
        every = self._config.training.checkpoint_every
        if every and result.version % every == 0 and result.version < self._config.steps:
            self._spawn(self._checkpoint(f"step-{result.version:06d}"), "checkpoint")
        self._spawn(self._prune(), "prune")
        return VersionPublished(version=result.version)

    async def _keep_books(self) -> None:
        """Tell the server how trajectories ended and have it commit steps, in the order decided."""
        while True:
            item = await self._books.get()
            call_s = self._config.deadlines.call_s
            if isinstance(item, Retire):
                await call(
                    self._server.actor, "retire", item.endings, item.versions, within_s=call_s, who="trajectory server"
                )
            else:
                metrics = await call(self._server.actor, "commit", item, within_s=call_s, who="trajectory server")
                if item.kind == "step":
                    self.outcomes.steps.append({"step": float(item.step), **item.metrics, **metrics})
                    self._say("")
            self._books.task_done()

    async def _close_books(self) -> None:
        """Wait until everything is stored, or raise what kept it from being stored."""
        done = asyncio.ensure_future(self._books.join())
        while not done.done():
            await asyncio.wait({done}, timeout=0.1)
            while not self._inbox.empty():
                item = self._inbox.get_nowait()
                if isinstance(item, BaseException):
                    done.cancel()
                    raise item

    async def _send_to(self, instance: _Instance) -> None:
        """Carry out one instance's commands in order; consecutive routes, and aborts, travel together."""
        name, actor = instance.placed.name, instance.placed.actor
        call_s = self._config.deadlines.call_s
        pending: Command | None = None
        while True:
            command = pending or await instance.outbox.get()
            pending = None
            batch = [command]
            if isinstance(command, (Route, Abort)):
                while not instance.outbox.empty():
                    following = instance.outbox.get_nowait()
                    if type(following) is not type(command):
                        pending = following
                        break
                    batch.append(following)
            match command:
                case Route():
                    items = tuple(
                        RouteItem(trajectory=c.trajectory, epoch=c.epoch, version=c.version)
                        for c in batch
                        if isinstance(c, Route)
                    )
                    await call(actor, "route", self._server.actor, items, within_s=call_s, who=name)
                case Abort():
                    ids = tuple(c.trajectory for c in batch if isinstance(c, Abort))
                    await call(actor, "abort", ids, within_s=call_s, who=name)
                case Interrupt():
                    stopped = await call(
                        actor, "interrupt", self._server.actor, (command.trajectory,), within_s=call_s, who=name
                    )
                    for outcome in stopped:
                        self._inbox.put_nowait(
                            TrajectoryInterrupted(
                                trajectory=outcome.trajectory, epoch=outcome.epoch, tokens=outcome.tokens
                            )
                        )
                case Pull():
                    await self._pull(instance, command.version)
                    self._inbox.put_nowait(PullFinished(instance=command.instance, version=command.version))

    async def _pull(self, instance: _Instance, version: PolicyVersion) -> None:
        """Load a version on an instance, and check that what it holds is what was published."""
        call_s = self._config.deadlines.call_s
        parameters = self._cluster.placed[f"parameters-{instance.placed.host}"]
        source = self._cluster.placed[f"parameters-{self._trainer.host}"]
        path = await call(parameters.actor, "ensure", version, source.actor, within_s=call_s, who=parameters.name)
        loaded = await call(instance.placed.actor, "pull", version, path, within_s=call_s, who=instance.placed.name)
        expected = self._published[version][1]
        if loaded.fingerprint != expected:
            raise ProtocolViolation(
                f"{instance.placed.name} holds {loaded.fingerprint} after pulling version {version}, "
                f"{expected} was published"
            )
        instance.version, instance.fingerprint = version, loaded.fingerprint

    async def _listen_to(self, instance: _Instance) -> None:
        """Pass on what ends on an instance."""
        actor, call_s = instance.placed.actor, self._config.deadlines.call_s
        while True:
            outcomes: list[Outcome] = await call(
                actor, "next_events", self._server.actor, POLL_S, within_s=call_s + POLL_S, who=instance.placed.name
            )
            for o in outcomes:
                event: Event = TrajectorySampled(trajectory=o.trajectory, epoch=o.epoch, tokens=o.tokens)
                if o.error:
                    event = TrajectoryFailed(trajectory=o.trajectory, epoch=o.epoch, error=o.error)
                self._inbox.put_nowait(event)

    async def _watch(self, instance: _Instance) -> None:
        """Report an instance's progress, and sum up how long it had work and did none."""
        actor, call_s = instance.placed.actor, self._config.deadlines.call_s
        instance.busy_before_s = (await call(actor, "report", within_s=call_s, who=instance.placed.name)).busy_s
        while True:
            await asyncio.sleep(TICK_S)
            load = await call(actor, "report", within_s=call_s, who=instance.placed.name)
            instance.busy_s = load.busy_s - (instance.busy_before_s or 0.0)
            instance.tokens_sampled = load.tokens_sampled
            name = InstanceId(instance.placed.name)
            self._inbox.put_nowait(InstanceReported(instance=name, progress=load.progress))

    async def _score_on(self, name: str) -> None:
        """Feed one reward worker; replace it when it is lost, and score again what it held."""
        call_s = self._config.deadlines.call_s
        while True:
            batch = [await self._scores.get()]
            while len(batch) < SCORE_BATCH and not self._scores.empty():
                batch.append(self._scores.get_nowait())
            budget_s = call_s + len(batch) * self._config.reward.timeout_s
            try:
                worker = self._cluster.placed[name].actor
                scored = await call(worker, "score", self._server.actor, tuple(batch), within_s=budget_s, who=name)
            except errors.InstanceLost as lost:
                self._note_loss(name, lost)
                self._cluster.forget(name)
                await self._place_reward(name)
                for trajectory in batch:
                    self._scores.put_nowait(trajectory)
                continue
            for trajectory, reward, error in scored:
                if error:
                    logger.warning("trajectory %d: reward failed: %s", trajectory, error)
                self._inbox.put_nowait(TrajectoryScored(trajectory=trajectory, reward=reward, error=error))

    async def _tick(self) -> None:
        """Let time pass for the coordinator and for the display, and note how old the work is."""
        while True:
            await asyncio.sleep(TICK_S)
            self._inbox.put_nowait(Tick())
            snapshot = self._coordinator.snapshot()
            self._ages.append((snapshot.staleness_in_flight, snapshot.staleness_in_queue))
            self._progress(snapshot, self.outcomes, "")

    # -- actors --------------------------------------------------------------------------------------------------

    @property
    def _server(self) -> Placed:
        return self._cluster.placed["server"]

    @property
    def _trainer(self) -> Placed:
        return self._cluster.placed["trainer"]

    async def _place_actors(self) -> None:
        config, cluster = self._config, self._cluster
        settings = build.server_settings(config, self._run_dir / "store", self._facts.context)
        await asyncio.gather(
            cluster.place("server", "server", TrajectoryServer, settings, self._now()),
            cluster.place(
                "trainer",
                "trainer",
                Trainer,
                build.trainer_settings(config),
                self._folder,
                config.cluster.threads,
                config.deadlines.call_s,
            ),
            *(self._place_reward(f"reward-{i}") for i in range(config.reward.workers)),
            *(self._place_instance(i) for i in range(config.rollout.instances)),
        )
        server, trainer = self._server, self._trainer
        hosts = {trainer.host: trainer, **{i.placed.host: i.placed for i in self._instances.values()}}
        for host, neighbour in hosts.items():
            await self._place_parameters(host, server if server.host == host else neighbour)

    async def _place_reward(self, name: str) -> None:
        settings = build.scoring_settings(self._config)
        call_s = self._config.deadlines.call_s
        placed = await self._cluster.place(name, "reward", RewardWorker, settings, call_s)
        await call(placed.actor, "check", within_s=self._config.deadlines.start_s, who=name)

    async def _place_parameters(self, host: str, neighbour: Placed) -> None:
        """One parameter server a host, beside an actor that is there anyway: its calls are short and asynchronous."""
        name = f"parameters-{host}"
        self._cluster.generation += 1
        key = f"staleflow-{self._config.name}-{name}-{self._cluster.generation}"
        future = self._cluster.client.submit(
            ParameterServer,
            self._folder,
            self._config.deadlines.call_s,
            actor=True,
            workers=[neighbour.address],
            allow_other_workers=False,
            key=key,
            pure=False,
        )
        actor = await future
        self._cluster.slots.setdefault(neighbour.worker, []).append("parameters")
        self._cluster.placed[name] = replace(neighbour, name=name, role="parameters", actor=actor, future=future)

    async def _place_instance(self, index: int) -> None:
        """Place instance `index`, under a new name when it replaces one: late answers of the old one must not match."""
        config = self._config
        attempt = self._replaced.get(f"rollout-{index}", 0)
        name = f"rollout-{index}" + (f".{attempt}" if attempt else "")
        engine = build.engine_settings(config, index + 100 * attempt, self._facts.eos)
        placed = await self._cluster.place(
            name,
            "rollout",
            RolloutInstance,
            engine,
            InstanceId(name),
            config.cluster.threads,
            config.rollout.max_new_tokens,
            config.deadlines.call_s,
        )
        self._instances[InstanceId(name)] = _Instance(placed=placed, outbox=asyncio.Queue(), tasks=[])

    def _join(self, instance: _Instance) -> None:
        """Start working with an instance and tell the coordinator."""
        name = instance.placed.name
        for work in (self._send_to(instance), self._listen_to(instance), self._watch(instance)):
            task = asyncio.ensure_future(self._guard_instance(instance, work))
            instance.tasks.append(task)
        engine = self._config.rollout.engine
        self._inbox.put_nowait(
            InstanceJoined(
                instance=InstanceId(name),
                version=instance.version,
                kv_capacity=engine.kv_tokens,
                max_running=engine.max_running,
            )
        )

    async def _guard_instance(self, instance: _Instance, work: Coroutine[Any, Any, None]) -> None:
        """A lost instance is an event and is replaced; any other failure ends the run."""
        try:
            await work
        except errors.InstanceLost as lost:
            name = InstanceId(instance.placed.name)
            if self._instances.pop(name, None) is None:
                return  # another of its tasks saw it first
            for task in instance.tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._note_loss(str(name).partition(".")[0], lost)
            self._inbox.put_nowait(InstanceLost(instance=name, why=str(lost)))
            self._cluster.forget(str(name))
            self._spawn(self._replace_instance(int(str(name).split("-")[1].split(".")[0])), "replace")
        except Exception as error:  # noqa: BLE001  carried to the main loop, which raises it
            self._inbox.put_nowait(error)

    async def _replace_instance(self, index: int) -> None:
        await self._place_instance(index)
        attempt = self._replaced[f"rollout-{index}"]
        instance = self._instances[InstanceId(f"rollout-{index}.{attempt}")]
        version = max(self._published)
        if version > 0:
            await self._pull(instance, version)
        self._join(instance)

    def _note_loss(self, name: str, lost: errors.InstanceLost) -> None:
        self._replaced[name] = self._replaced.get(name, 0) + 1
        self.outcomes.losses.append(f"{self._now():.1f} s: {lost}")
        logger.warning("%s; replacing it", lost)
        if self._replaced[name] > REPLACEMENTS:
            raise errors.InstanceLost(f"{name} was lost {self._replaced[name]} times: {lost}") from lost

    # -- around the run ------------------------------------------------------------------------------------------

    async def _pull_all(self, version: PolicyVersion) -> None:
        for instance in list(self._instances.values()):
            if instance.version != version:
                await self._pull(instance, version)

    async def _evaluate(self, version: PolicyVersion) -> None:
        """Mean reward on the held-out prompts, sampled and greedy, spread over the instances. Nothing else runs."""
        count = self._config.task.eval_prompts
        if not count:
            return
        self._say(f"evaluating version {version}")
        for instance in self._instances.values():
            for task in instance.tasks:
                task.cancel()  # they would take the evaluation's answers for the run's
        limit = self._config.deadlines.train_s
        prompts = await call(self._server.actor, "held_out", count, within_s=limit, who="trajectory server")
        instances = list(self._instances.values())
        scores = {}
        for greedy in (False, True):
            shares = [prompts[i :: len(instances)] for i in range(len(instances))]
            answers = await asyncio.gather(
                *(
                    call(
                        i.placed.actor,
                        "evaluate",
                        [p.tokens for p in s],
                        greedy,
                        limit,
                        within_s=limit,
                        who=i.placed.name,
                    )
                    for i, s in zip(instances, shares, strict=True)
                )
            )
            tokens = [a.tokens for share in answers for a in share]
            texts = await call(self._server.actor, "decode", tokens, within_s=limit, who="trajectory server")
            records = [p.record for share in shares for p in share]
            reward = self._cluster.placed["reward-0"].actor
            items = list(zip(texts, records, strict=True))
            scored = await call(reward, "score_texts", items, within_s=limit, who="reward-0")
            scores[greedy] = sum(s.reward for s in scored) / count
        self.outcomes.evaluations.append(
            Evaluation(version=version, num_prompts=count, sampled=scores[False], greedy=scores[True])
        )

    async def _checkpoint(self, name: str) -> None:
        folder = self._run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        await call(
            self._trainer.actor,
            "save_checkpoint",
            str(folder / name),
            within_s=self._config.deadlines.train_s,
            who="trainer",
        )

    async def _prune(self) -> None:
        """Remove the versions no instance uses or is about to load."""
        used = {i.version for i in self._instances.values()} | {
            view.version for view in self._coordinator.snapshot().instances
        }
        for name, placed in list(self._cluster.placed.items()):
            if placed.role == "parameters":
                await call(placed.actor, "prune", tuple(used), within_s=self._config.deadlines.call_s, who=name)

    def _ledger_state(self) -> LedgerState:
        ledger = self._coordinator.ledger
        return LedgerState(
            num_started=ledger.num_started,
            num_ended={f"{fate.value}:{reason.value}": n for (fate, reason), n in ledger.num_ended.items()},
            live=(),
            next_step=ledger.next_step,
            version=ledger.version,
        )

    def _measure_phases(self) -> None:
        """Seconds by what was going on, and the system's own share of them."""
        wall_s = time.monotonic() - self._begin
        steps = self.outcomes.steps
        idle = [max(0.0, i.assigned_s - i.busy_s) for i in self._instances.values()]
        count = max(1, len(self._instances))
        self.outcomes.phases = {
            "wall_s": wall_s,
            "train_s": sum(s["train_s"] for s in steps),
            "publish_s": sum(s["publish_s"] for s in steps),
            "trainer_overhead_s": sum(s["overhead_s"] for s in steps),
            "trainer_waits_for_batch_s": sum(s["wait_s"] for s in steps),
            "commit_s": sum(s["commit_s"] for s in steps),
            "rollout_busy_s": sum(i.busy_s for i in self._instances.values()) / count,
            "rollout_assigned_s": sum(i.assigned_s for i in self._instances.values()) / count,
            "rollout_idle_with_work_s": sum(idle) / count,
            "tokens_sampled": float(sum(i.tokens_sampled for i in self._instances.values())),
        }

    def _mean_ages(self) -> dict[str, float]:
        """Staleness in flight and in queue, mean over the ticks since the last step ended."""
        ages, self._ages = self._ages or [(0.0, 0.0)], []
        return {
            "staleness_in_flight": sum(a for a, _ in ages) / len(ages),
            "staleness_in_queue": sum(b for _, b in ages) / len(ages),
        }

    @property
    def _folder(self) -> str:
        return str(Path(self._config.cluster.shared_memory) / f"staleflow-{self._config.name}-{self._facts.nonce}")

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _say(self, what: str) -> None:
        self._progress(self._coordinator.snapshot(), self.outcomes, what)

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run in the background; a failure reaches the main loop."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                logger.debug("%s failed", what, exc_info=True)
                self._inbox.put_nowait(error)

        task = asyncio.ensure_future(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
