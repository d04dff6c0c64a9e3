"""Actors of a run without model, processes or disk, in virtual time; InProcessWorkers uses them in place of the real
classes.

Trajectory server, rollout instance and reward worker are the real classes over a fake engine, reward and store; trainer
and parameter server are fakes. tests/runtime/test_in_process.py compares their methods with the real ones, so that they
cannot drift apart. Sampled tokens are a function of trajectory and position, so tokens lost, repeated or
swapped on the way to the store are detected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import inspect
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from staleflow.stores.errors import ProtocolViolation, StoreError, StoreUnavailable
from staleflow.stores.trajectories.records import CommitRecord, RunHeader
from staleflow.stores.trajectory import EndedTrajectory, FinishReason, InstanceId, PolicyVersion, Segment, TrajectoryId
from staleflow.stores.weights.resume_points import ResumePoints
from staleflow.stores.weights.weight_report import WeightReport
from staleflow.tasks.actors.actor_calls import call_actor
from staleflow.tasks.actors.environment_host import EnvironmentHost
from staleflow.tasks.actors.parameter_server import MAX_WAIT_S, FetchProgress, ParameterServer, WeightSource
from staleflow.tasks.actors.reward_worker import RewardWorker
from staleflow.tasks.actors.rollout_instance import RolloutInstance
from staleflow.tasks.actors.server_settings import ServerSettings
from staleflow.tasks.actors.teacher import Teacher
from staleflow.tasks.actors.trainer import PublishedStep, Trainer
from staleflow.tasks.actors.trainer_rank import CALL_TIMEOUT_S, FollowerRank
from staleflow.tasks.actors.trajectory_server import TrajectoryServer
from staleflow.tasks.emulation.workload import RandomWorkload, WorkloadConfig
from staleflow.tasks.engines.base import (
    EngineLoad,
    FailedRequest,
    LoadResult,
    PromptResponses,
    Request,
    SampledTokens,
    TokenScores,
)
from staleflow.tasks.engines.emulated_engine import emulated_ids, emulated_logprobs, emulated_scores
from staleflow.tasks.sources.reward_process import ScoredResponse
from staleflow.tasks.training.microbatches import BatchMessage, Row
from staleflow.tasks.training.rank import Rank, rank_name
from tests.support.memory_store import MemoryStore

PROMPTS = RandomWorkload(WorkloadConfig(prompt_tokens=6), members_per_group=2, max_tokens=100, seed=0)
"""Prompts of six tokens; no other part of it is used."""


def _row_bytes(row: Row) -> bytes:
    """All that a row holds, for a digest."""
    arrays = (row.prompt, row.response, row.behaviour, row.sampled, row.lags)
    numbers = (row.advantage, row.staleness, row.trained, row.group, row.branches)
    return b"".join(np.asarray(array).tobytes() for array in arrays) + repr(numbers).encode()


@dataclass(kw_only=True)
class World:
    """State shared by the actors of a run: durations, stored data, weights on each host."""

    tokens_per_s: float = 20.0
    """For one trajectory; an engine samples all at the same time."""
    slower: Callable[[str], float] = lambda instance: 1.0
    """Slowdown factor of each instance."""
    length: Callable[[int], int] = lambda trajectory: 8 + 5 * (trajectory % 4)
    """Number of tokens of a trajectory's response."""
    reward: Callable[[str], float] = lambda text: float(len(text) % 2)
    reward_error: Callable[[str], str] = lambda text: ""
    """The error with which scoring a response fails; empty if it succeeds."""
    train_s: float = 1.0
    publish_s: float = 0.1
    switch_s: float = 0.0
    """Seconds that engine and trainer each need to leave a shared device."""
    point_s: float = 0.0
    """Seconds to write a resume point in the trainer's thread."""
    save_s: float = 0.0
    """Seconds until the trainer starts to save a checkpoint."""
    commit_s: float = 0.0
    """Seconds of a commit in the server's thread."""
    outage: tuple[float, float] = (0.0, 0.0)
    """Start and end of the outage of the store's bucket, on the clock of the loop."""
    reward_s: float = 0.02
    teacher_s: float = 0.05
    """Seconds that a teacher computes on a response."""
    prune_s: float = 0.0
    """Seconds until a host starts to remove old versions."""
    stores: dict[str, MemoryStore] = field(default_factory=dict)
    weights: dict[str, set[int]] = field(default_factory=dict)
    """Published versions on each host."""
    num_bytes: int = 0
    """Size of a version."""
    loads_wrong: Callable[[str, int], bool] = lambda instance, version: False
    """Whether an instance gets other weights than those of the version it reads."""
    computes_wrong: Callable[[str, int], bool] = lambda instance, version: False
    """Whether the logprobs of an instance are off by a nat under a version."""
    not_compared: str = ""
    """Why engines cannot compare their weights; empty if they can."""
    refuses: str = ""
    """The error of engines that cannot load the weights; empty if they can."""
    trained: list[tuple[int, str]] = field(default_factory=list)
    """(step, digest of its rows) of each trained step, in order."""
    tuned: list[list[int]] = field(default_factory=list)
    """For each trainer in order, the fine-tuning steps before its first publication."""
    chance: str = ""
    """Suffix of the weights of a step that is trained again; empty: kernels are deterministic."""
    drift: float = 0.0
    """Error of the engines' probe logprobs in nats."""
    not_finite: Callable[[int], bool] = lambda trajectory: False
    """Whether engines report NaN as the logprob of the newest token of a trajectory."""
    turns: bool = False
    """Whether trainer and engines share a device."""
    awake: set[str] = field(default_factory=set)
    """Engines awake on the device."""
    computing: bool = False
    """Whether the trainer is computing."""
    figures: Callable[[int], dict[str, float]] = lambda step: {}
    """Metrics that a training step reports besides its times."""

    def check_bucket(self, request: str) -> None:
        """Raise StoreUnavailable during an outage."""
        begin_s, end_s = self.outage
        if begin_s <= asyncio.get_running_loop().time() < end_s:
            raise StoreUnavailable(f"{request}: the provided token has expired")

    def wake(self, instance: str) -> None:
        """Mark an engine as awake on its device."""
        assert not (self.turns and self.computing), f"{instance} wakes while the trainer computes"
        self.awake.add(instance)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Mark the trainer as computing on its device."""
        assert not (self.turns and self.awake), f"the trainer computes while {self.awake} are awake"
        self.computing = True
        try:
            yield
        finally:
            self.computing = False

    def path(self, version: int) -> str:
        return f"/memory/v{version}"

    def fingerprint(self, version: int) -> str:
        return f"weights-{version}"

    @property
    def actors(self) -> dict[type[Any], Callable[..., Any]]:
        """Return a factory for each class, given the host and the constructor arguments."""
        return {
            TrajectoryServer: lambda host, *args: server_class(self)(*args),
            RolloutInstance: lambda host, settings, *args: VirtualRolloutInstance(VirtualSettings(self), *args),
            RewardWorker: lambda host, *args: VirtualRewardWorker(self, *args),
            Teacher: lambda host, *args: VirtualTeacher(self, *args),
            EnvironmentHost: lambda host, *args: EnvironmentHost(*args),
            Trainer: lambda host, *args: PlayedTrainer(self, host, *args),
            FollowerRank: lambda host, *args: PlayedFollowerRank(self, host, *args),
            ParameterServer: lambda host, *args: PlayedParameterServer(self, host, *args),
        }


def response(trajectory: int, count: int) -> list[int]:
    """Return the first tokens of a trajectory's response."""
    return [int(t) for t in emulated_ids(trajectory, 0, count)]


# -- the trajectory server: the real one, its store in memory ----------------------------------------------------


def server_class(world: World) -> type[TrajectoryServer]:
    """Return a trajectory server class with a store of the world."""

    class SlowStore(MemoryStore):
        async def commit(self, record: CommitRecord, ended: Sequence[EndedTrajectory]) -> str:  # type: ignore[override]
            """The commit takes effect at the end of its duration, as in a thread."""
            await asyncio.sleep(world.commit_s)
            world.check_bucket("the commit")
            return super().commit(record, ended)

    slow = SlowStore if world.commit_s or any(world.outage) else MemoryStore

    class Stores:
        @staticmethod
        def create(path: Path, header: RunHeader) -> MemoryStore:
            if str(path) in world.stores:
                raise StoreError(f"{path}: is there already")
            return world.stores.setdefault(str(path), slow(header))

        @staticmethod
        def open(path: Path) -> MemoryStore:
            world.check_bucket("opening")
            return world.stores[str(path)]

    class InMemoryServer(TrajectoryServer):
        store_class: ClassVar[Any] = Stores

        def __init__(self, settings: ServerSettings, elapsed_s: float) -> None:
            prompts = dataclasses.replace(settings.prompts, workload=PROMPTS)
            super().__init__(dataclasses.replace(settings, prompts=prompts), elapsed_s)

    return InMemoryServer


# -- the rollout instance: the real one, over an engine in virtual time ------------------------------------------


@dataclass
class VirtualSettings:
    world: World

    def build(self, instance: InstanceId, threads: int) -> VirtualEngine:
        return VirtualEngine(self.world, instance)


@dataclass
class _Request:
    request: Request
    since: float
    """Time of submission."""
    marks: list[tuple[PolicyVersion, int]]
    """(version, number of response tokens when sampling under it started), oldest first."""


class VirtualEngine:
    """An engine that samples every request at one rate. `events` is a coroutine: in virtual time an executor waits for
    it as a thread would block."""

    def __init__(self, world: World, instance: InstanceId) -> None:
        self._world = world
        self._instance = instance
        self.version = PolicyVersion(0)
        self._tokens_per_s = world.tokens_per_s / world.slower(instance)
        self._stood_still_s: float | None = None
        self._requests: dict[TrajectoryId, _Request] = {}
        self._ended: list[SampledTokens | FailedRequest] = []
        self._changed = asyncio.Event()
        self._begin = self._now()
        self._sampled = 0
        """Tokens of requests that have finished or were stopped."""
        self._kept: dict[TrajectoryId, tuple[int, ...]] = {}
        """Contexts cached for trajectories that may return."""
        self._prefilled = self._cached = 0
        self.closed = False
        world.wake(instance)

    def stand_still(self) -> None:
        """Sample nothing from now on but reply to calls."""
        self._stood_still_s = self._now()

    def _now(self) -> float:
        """The time of the engine, which stops while decoding is stalled."""
        return asyncio.get_running_loop().time() if self._stood_still_s is None else self._stood_still_s

    def submit(self, requests: Sequence[Request]) -> None:
        assert self._instance in self._world.awake
        self._advance()
        for request in requests:
            held = self._requests.get(request.trajectory)
            if held is None or held.request.route_number < request.route_number:
                kept = self._kept.pop(request.trajectory, ())
                result = len(kept) if request.tokens[: len(kept)] == kept else 0
                self._cached += result
                self._prefilled += len(request.tokens) - result
                self._requests[request.trajectory] = _Request(
                    request=request, since=self._now(), marks=[(self.version, request.num_response_tokens)]
                )
        self._changed.set()

    def interrupt(self, trajectories: Sequence[TrajectoryId]) -> list[SampledTokens]:
        self._advance()
        stopped = [(self._requests[t], self._tokens(self._requests[t])) for t in trajectories if t in self._requests]
        for held, tokens in stopped:
            del self._requests[held.request.trajectory]
            self._sampled += tokens - held.request.num_response_tokens
        return [self._result(held, tokens, FinishReason.UNFINISHED) for held, tokens in stopped]

    def peek(self) -> list[SampledTokens]:
        self._advance()
        return [self._result(r, self._tokens(r), FinishReason.UNFINISHED) for r in self._requests.values()]

    def abort(self, trajectories: Sequence[TrajectoryId]) -> None:
        self.interrupt(trajectories)
        for trajectory in trajectories:
            self._kept.pop(trajectory, None)
        self._ended = [e for e in self._ended if e.trajectory not in trajectories]

    def load(self, version: PolicyVersion, weights: Path) -> LoadResult:
        self._advance()
        if self._world.refuses:
            raise StoreError(self._world.refuses)
        assert str(weights) == self._world.path(version)
        self._world.wake(self._instance)
        self.version = version
        self._kept.clear()
        for held in self._requests.values():
            held.marks.append((version, self._tokens(held)))
        wrong = self._world.loads_wrong(self._instance, version)
        return LoadResult(
            fingerprint=self._world.fingerprint(version),
            weights=WeightReport(not_verified={self._world.not_compared: 2})
            if self._world.not_compared
            else WeightReport(verified=2 - wrong, contradicted=int(wrong), names=("norm.weight",) * wrong),
        )

    async def sleep(self) -> None:
        self._advance()
        assert not self._requests, f"{self._instance} is put to sleep while it samples"
        self._kept.clear()
        await asyncio.sleep(self._world.switch_s)
        self._world.awake.discard(self._instance)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[TokenScores]:
        assert self._instance in self._world.awake
        off = self._world.drift + self._world.computes_wrong(self._instance, self.version)
        scores = [emulated_scores(tokens) for tokens in sequences]
        return [dataclasses.replace(item, logprobs=tuple(x + off for x in item.logprobs)) for item in scores]

    async def events(self, timeout_s: float) -> list[SampledTokens | FailedRequest]:
        time = asyncio.get_running_loop().time
        deadline = time() + timeout_s
        while True:
            self._advance()
            left_s = deadline - time()
            if self._ended or left_s <= 1e-9:
                ended, self._ended = self._ended, []
                return ended
            self._changed.clear()
            ends = [self._end_s(held) for held in self._requests.values() if self._stood_still_s is None]
            first_s = min(ends, default=deadline) - time()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left_s, max(0.0, first_s) + 1e-6))
            except TimeoutError:
                continue

    def drafting_trajectories(self) -> tuple[TrajectoryId, ...]:
        return ()

    def add_draft_responses(self, responses: Sequence[PromptResponses]) -> None:
        """Do nothing."""

    def load_statistics(self) -> EngineLoad:
        self._advance()
        progress = tuple((t, self._tokens(held)) for t, held in self._requests.items())
        return EngineLoad(
            version=self.version,
            running=len(progress),
            kv_tokens=sum(len(held.request.tokens) for held in self._requests.values()),
            busy_s=self._now() - self._begin,
            tokens_sampled=self._sampled + sum(n - self._requests[t].request.num_response_tokens for t, n in progress),
            progress=progress,
            kept_tokens=sum(map(len, self._kept.values())),
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
        )

    def reset(self, instance: InstanceId) -> None:
        vars(self).update(vars(VirtualEngine(self._world, instance)))

    def close(self) -> None:
        self.closed = True
        self._world.awake.discard(self._instance)

    def _length(self, request: _Request) -> int:
        prior = request.request.num_response_tokens
        return max(
            prior + 1, min(self._world.length(request.request.trajectory), prior + request.request.max_new_tokens)
        )

    def _end_s(self, request: _Request) -> float:
        return request.since + (self._length(request) - request.request.num_response_tokens) / self._tokens_per_s

    def _tokens(self, request: _Request) -> int:
        sampled = int((self._now() - request.since) * self._tokens_per_s + 1e-9)
        return min(self._length(request), request.request.num_response_tokens + sampled)

    def _advance(self) -> None:
        for trajectory, held in list(self._requests.items()):
            if self._end_s(held) <= self._now() + 1e-9:
                del self._requests[trajectory]
                self._sampled += self._length(held) - held.request.num_response_tokens
                ended = self._result(held, self._length(held), FinishReason.STOP)
                self._ended.append(ended)
                if held.request.keep_kv:
                    sampled = (int(token) for segment in ended.segments for token in segment.tokens)
                    self._kept[trajectory] = (*held.request.tokens, *sampled)

    def _result(self, request: _Request, tokens: int, finish: FinishReason) -> SampledTokens:
        key, segments = request.request.trajectory, []
        ends = [*(begin for _, begin in request.marks[1:]), tokens]
        for (version, begin), end in zip(request.marks, ends, strict=True):
            if end > begin:
                ids = emulated_ids(key, begin, end - begin)
                logprobs = emulated_logprobs(ids)
                if self._world.not_finite(key):
                    logprobs[-1] = np.nan
                segments.append(Segment(version=version, instance=self._instance, tokens=ids, logprobs=logprobs))
        return SampledTokens(
            trajectory=key,
            route_number=request.request.route_number,
            start=request.request.num_response_tokens,
            segments=tuple(segments),
            finish=finish,
        )


NUM_ARGUMENTS = len(inspect.signature(RolloutInstance.__init__).parameters) - 3
"""Parameters of a rollout instance without `self`; `run` and `resumed` come last."""


class VirtualRolloutInstance(RolloutInstance):
    """The real rollout instance, except that its engine ends with it: here all actors share a process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args[:NUM_ARGUMENTS])

    @property
    def engine(self) -> VirtualEngine:
        engine: Any = self._engine
        assert isinstance(engine, VirtualEngine)
        return engine

    def process_died(self) -> None:
        self.engine.close()


# -- the reward worker: the real one, its function played --------------------------------------------------------


class VirtualRewardWorker(RewardWorker):
    """The real reward worker except for its scoring process."""

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world

    async def check(self) -> None:
        """Do nothing, since there is nothing to load."""

    async def score_texts(self, items: list[tuple[str, Any]]) -> list[ScoredResponse]:
        await asyncio.sleep(self._world.reward_s * len(items))
        texts_errors = [(text, self._world.reward_error(text)) for text, _ in items]
        return [ScoredResponse(reward=0.0 if e else self._world.reward(text), error=e) for text, e in texts_errors]


# -- the teacher: the real one, its engine played --------------------------------------------------------------


def teacher_logprobs(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """[T] the logprobs of a played teacher, which depend on the token only."""
    return (-1.0 - np.asarray(tokens, np.float32) % 7 / 8).astype(np.float32)


class VirtualTeacher(Teacher):
    """The real teacher except for its engine."""

    def __init__(
        self, world: World, settings: Any, name: str, threads: int, temperature: float, call_s: float, policy: str = ""
    ) -> None:
        self._world, self._call_s = world, call_s

    async def _response_logprobs(self, rows: list[Row]) -> list[npt.NDArray[np.float32]]:
        await asyncio.sleep(self._world.teacher_s * len(rows))
        return [np.where(row.sampled, teacher_logprobs(row.response.tolist()), np.float32(0)) for row in rows]

    async def close(self) -> None:
        """Do nothing."""


# -- the trainer and the parameter server, played ----------------------------------------------------------------


class PlayedTrainer:
    """A trainer that fetches batches as the real one does, trains for a scripted time and publishes a number."""

    def __init__(
        self, world: World, host: str, settings: Any, folder: str, threads: int, call_s: float, resume_folder: str,
        steps_per_resume_point: int, keep_every: int = 0, ranks: int = 1,
    ) -> None:  # fmt: skip
        self._world, self._host, self._call_s = world, host, call_s
        self._probe: tuple[int, ...] = ()
        self._tuned: list[int] = []
        self._version = PolicyVersion(0)
        self._resume_points = ResumePoints(Path(resume_folder), keep_every)
        self._steps_per_resume_point = steps_per_resume_point
        self._thread = ThreadPoolExecutor(1)
        self._saving: asyncio.Future[Any] | None = None
        self.saved: list[str] = []
        """Folders of the saved checkpoints."""
        self._ranks = ranks
        self._others: tuple[Any, ...] = ()

    async def form_group(self, host: str, *peers: Any) -> None:
        assert len(peers) == self._ranks - 1
        self._others = peers
        for number, other in enumerate(peers, start=1):
            rank = Rank(number=number, count=self._ranks, host=host, port=1)
            await call_actor(other, "join", rank, timeout_s=CALL_TIMEOUT_S, actor_name=rank_name(number))

    async def _follow(self, method: str) -> None:
        """Wait as the other ranks do; the group is lost with any of them."""
        assert len(self._others) == self._ranks - 1, "the rank group is not formed yet"
        requests = [
            call_actor(other, "call_policy", method, timeout_s=CALL_TIMEOUT_S, actor_name=rank_name(number))
            for number, other in enumerate(self._others, start=1)
        ]
        await asyncio.gather(*requests)

    async def logprobs(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(emulated_logprobs(np.asarray(tokens[1:], np.int32)).tolist())

    async def fine_tune(self, step: int) -> dict[str, float]:
        if step in self._tuned:
            return {}
        await self._follow("fine_tune")
        self._tuned.append(step)
        return {"loss": 1.0}

    async def publish_initial(
        self, probe_tokens: tuple[int, ...], version: PolicyVersion, recorded_fingerprint: str
    ) -> PublishedStep:
        self._world.tuned.append(self._tuned)
        self._probe, self._version = probe_tokens, version
        with self._world.training():
            await self._follow("published")
        result = self._publish({})
        return dataclasses.replace(result, matches_record=recorded_fingerprint in ("", result.fingerprint))

    async def train(
        self,
        server: Any,
        step: int,
        trajectories: tuple[TrajectoryId, ...],
        versions: tuple[PolicyVersion, ...],
        recorded_fingerprint: str = "",
    ) -> PublishedStep:
        if step != self._version:
            raise ProtocolViolation(f"step {step} is to be trained, the weights are of version {self._version}")
        rows: list[Row] = []
        num_remaining = 1
        while num_remaining:
            message: BatchMessage = await call_actor(
                server,
                "take_batch",
                step,
                trajectories,
                versions,
                len(rows),
                timeout_s=self._call_s,
                actor_name="server",
            )
            rows += message.rows()
            num_remaining = message.num_remaining
        digest = hashlib.blake2b(b"".join(map(_row_bytes, rows))).hexdigest()
        if self._saving is not None:
            await self._saving
        with self._world.training():
            await self._follow("step")
            await asyncio.sleep(self._world.train_s)
            self._version = PolicyVersion(step + 1)
            self._world.trained.append((step, digest))
            await asyncio.sleep(self._world.publish_s + self._world.switch_s * self._world.turns)
        times = {"fetch_s": 0.0, "train_s": self._world.train_s, "publish_s": self._world.publish_s}
        result = self._publish({**times, **self._world.figures(step)})
        is_point_due = self._steps_per_resume_point and self._version % self._steps_per_resume_point == 0
        if is_point_due and recorded_fingerprint in ("", result.fingerprint):
            loop = asyncio.get_running_loop()
            self._saving = loop.run_in_executor(self._thread, self._write_point, self._version)
        return result

    async def _write_point(self, version: PolicyVersion) -> None:
        """Write a complete resume point after a scripted time."""
        await asyncio.sleep(self._world.point_s)
        with self._resume_points.writing(version) as part:
            zipfile.ZipFile(part, "w").close()

    def _chance(self) -> str:
        again = sum(step == self._version - 1 for step, _ in self._world.trained) > 1
        return self._world.chance if again else ""

    async def version(self) -> PolicyVersion:
        return self._version

    async def save_checkpoint(self, folder: str, version: PolicyVersion | None = None) -> bool:
        await asyncio.sleep(self._world.save_s)
        if version is not None and version not in self._world.weights[self._host]:
            return False
        self.saved.append(folder)
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "version").write_text(str(self._version if version is None else version))
        return True

    async def close(self) -> None:
        """Do nothing."""

    def _publish(self, metrics: dict[str, float]) -> PublishedStep:
        self._world.weights.setdefault(self._host, set()).add(self._version)
        return PublishedStep(
            version=self._version,
            metrics=metrics,
            fingerprint=self._world.fingerprint(self._version) + self._chance(),
            path=self._world.path(self._version),
            num_bytes=self._world.num_bytes,
            probe_logprobs=tuple(emulated_logprobs(np.asarray(self._probe[1:], np.int32)).tolist()),
        )


class PlayedFollowerRank:
    """A rank of the scripted trainer that does nothing and can be lost."""

    def __init__(self, world: World, host: str, settings: Any, threads: int) -> None:
        self._rank: Rank | None = None

    async def join(self, rank: Rank) -> None:
        self._rank = rank

    async def call_policy(self, method: str, *args: Any) -> None:
        assert self._rank is not None

    async def ping(self) -> None:
        """Reply."""

    async def close(self) -> None:
        """Do nothing."""


class PlayedParameterServer:
    """A parameter server that knows which hosts have weights; requesting a removed or unpublished version is an
    error."""

    def __init__(self, world: World, host: str, folder: str, call_s: float, piece_bytes: int = 1) -> None:
        self._here = world.weights.setdefault(host, set())
        self._world, self._call_s = world, call_s

    async def ensure_version(
        self, version: PolicyVersion, num_bytes: int, sources: tuple[WeightSource, ...]
    ) -> FetchProgress:
        if version not in self._here:
            name, actor = sources[0]
            await call_actor(actor, "read_piece", version, 0, 1, timeout_s=self._call_s, actor_name=name)
            self._here.add(version)
        return FetchProgress(path=self._world.path(version), num_bytes=num_bytes)

    async def read_piece(self, version: PolicyVersion, offset: int, size: int) -> bytes | None:
        deadline = asyncio.get_running_loop().time() + MAX_WAIT_S
        while version not in self._here:  # it may be on its way
            if asyncio.get_running_loop().time() > deadline:
                raise ProtocolViolation(f"version {version} is asked for and is not there: {sorted(self._here)}")
            await asyncio.sleep(0.05)
        return b""

    async def bytes_read(self) -> int:
        return 0

    async def prune(self, used_versions: tuple[PolicyVersion, ...], newest_version: PolicyVersion) -> None:
        await asyncio.sleep(self._world.prune_s)
        later = {version for version in self._here if version >= newest_version}
        self._here.intersection_update({*used_versions, *later, max(self._here, default=0)})

    async def close(self) -> None:
        """Do nothing."""
