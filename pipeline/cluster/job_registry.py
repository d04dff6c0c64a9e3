"""The job registry on a Dask scheduler: its jobs, and which worker belongs to which job.

pipeline/cluster/job_queue.py decides which job gets workers; this module passes it the events of the cluster and
executes its decisions. The driver of a submitted job is a Dask task. Until the job is admitted, the task is restricted
to a worker that does not exist, so a waiting job runs nothing. Then it starts on one of the job's workers. If its
client disconnects, the job's workers are restarted, and the job waits again. Workers that run only an engine are kept,
so that the engine need not be loaded again.

All calls run one after another on the scheduler's event loop, so nothing needs a lock. The registry is in the
scheduler's memory; data that must survive the scheduler is in the run folder.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distributed import SchedulerPlugin

from staleflow.pipeline.cluster import worker_restarts
from staleflow.pipeline.cluster.driver_watch import DriverWatch
from staleflow.pipeline.cluster.gang import ROLLOUT, Needs, WorkerGpus
from staleflow.pipeline.cluster.job_queue import JobQueue, find_driver_worker
from staleflow.pipeline.cluster.submitted_job import ENDED, Job, PlainDict
from staleflow.pipeline.cluster.worker_pool import REPORT_LIMIT_S
from staleflow.pipeline.config.local_gpus import read_devices
from staleflow.pipeline.placement.devices import Device

logger = logging.getLogger(__name__)

TASK_KEY_PREFIX = "staleflow-job-"
"""Prefix of the keys of the tasks that drive jobs."""
RPC_NAME = "staleflow"
"""Name of the scheduler's remote procedure that calls the registry."""
MAX_JOBS = 200
"""Number of jobs above which the oldest ended ones are dropped."""
NO_WORKER = "tcp://0.0.0.0:1"
"""The address to which the driver of a waiting job is restricted; no worker has it."""
FIRE_AND_FORGET = "fire-and-forget"
"""Name of the client for which Dask keeps tasks that no real client waits for."""
DRIVER_GONE = "the process of its driver is gone"
SUBMITTER_GONE = "the process that submitted it was gone before its task had arrived"
ADMISSION_CHECK_S = 1.0
"""Seconds between two checks whether waiting jobs can start, in addition to the check after each event."""


class JobRegistry(SchedulerPlugin):  # type: ignore[misc]  # untyped
    """Jobs and claims of one scheduler; pipeline/cluster/plugin.py registers it there."""

    name = "staleflow"
    idempotent = True

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.job_queue = JobQueue()
        self._tasks: set[asyncio.Future[None]] = set()
        """Background tasks: restarts and GPU reports of workers."""
        self._timer: asyncio.TimerHandle | None = None
        self._driver_watch: asyncio.Task[None] | None = None
        self._announced_waits: set[str] = set()
        """Waiting jobs whose log has the reason of their wait."""

    async def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.handlers[RPC_NAME] = self.answer_request
        for address in scheduler.workers:
            self.add_worker(scheduler, address)
        watch = DriverWatch(scheduler, self.jobs, self._restart_silent_driver)
        self._driver_watch = asyncio.ensure_future(watch.run())

    async def close(self) -> None:
        if self._driver_watch is not None:
            self._driver_watch.cancel()

    def answer_request(self, verb: str, **arguments: Any) -> tuple[Any]:
        """Answer a client's request. The tuple makes every answer differ from None, which Dask answers for a scheduler
        without a registry."""
        return (self.dispatch(verb, **arguments),)

    def dispatch(self, verb: str, **arguments: Any) -> Any:
        """Call the method for a client's request. Raises ValueError for an unknown verb, which only a client of another
        version sends."""
        verbs: dict[str, Callable[..., Any]] = {
            "submit": self.submit, "check_arrival": self.check_arrival, "enqueue": self.enqueue, "begin": self.begin,
            "check_admission": self.check_admission, "release_workers": self.release_workers,
            "report": self.report, "stop": self.request_stop, "jobs": self.all_jobs, "lines": self.lines,
            "report_gpus": self.report_gpus, "gpu_shortage": self.gpu_shortage,
            "retire": self.request_retirement, "return_worker": self.return_worker,
            "claim": self.job_queue.claim_worker, "claim_gpu_worker": self.job_queue.claim_gpu_worker,
            "workers_of": self.job_queue.workers_of, "unavailable": self.job_queue.unavailable_workers,
            "cuda_visible_devices": self.job_queue.cuda_visible_devices,
            "placement_text": self.job_queue.placement_text,
        }  # fmt: skip
        if verb not in verbs:
            raise ValueError(f"staleflow on the scheduler has no call {verb!r}; install the same version everywhere")
        return verbs[verb](**arguments)

    # -- workers -------------------------------------------------------------------------------------------------

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.job_queue.add_worker(worker, scheduler.workers[worker].resources, time.monotonic())
        self._spawn(self._request_gpu_report(worker))
        self._admit_jobs()

    async def _request_gpu_report(self, address: str) -> None:
        """Make a worker report its GPUs. A Dask worker plugin could do this too, but would end workers that cannot
        import this package."""
        deadline = time.monotonic() + REPORT_LIMIT_S
        while address in self._scheduler.workers and time.monotonic() < deadline:
            try:
                async with asyncio.timeout(REPORT_LIMIT_S):
                    reply = await self._scheduler.rpc(address).run(function=pickle.dumps(report_gpus))
                if reply["status"] == "OK":
                    return
            except (ImportError, AttributeError) as error:  # the worker has no staleflow, or another version
                logger.info("%s did not report its GPUs: %s", address, error)
                break
            except Exception as error:  # noqa: BLE001  the worker has just started, and may reply soon
                logger.info("%s did not report its GPUs yet: %s", address, error)
            await asyncio.sleep(ADMISSION_CHECK_S)
        self.report_gpus(address, [])

    def report_gpus(self, address: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Store the GPUs that a worker reports, as arguments of `Device`."""
        if (worker := self._scheduler.workers.get(address)) is not None:
            gpus = WorkerGpus(host=worker.host, devices=tuple(Device(**device) for device in devices))
            self.job_queue.set_gpus(address, gpus)
            self._admit_jobs()

    def gpu_shortage(self, needs: Mapping[str, Any]) -> tuple[str, list[int]] | None:
        """Check whether all workers together have enough GPUs for a job. Returns the shortage as text, empty if there
        is none, and the memory of each GPU in bytes; None if some workers have not reported yet. needs: arguments of
        `Needs`."""
        if self.job_queue.awaits_gpu_reports(time.monotonic()):
            return None
        sizes = [device.memory_bytes for device in self.job_queue.devices()]
        return self.job_queue.gpu_shortage(Needs(**needs)), sizes

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.job_queue.remove_worker(worker, time.monotonic())
        for job in self.jobs.values():
            if (
                job.driver_worker == worker and not job.client_id and job.state not in ENDED
            ):  # its driver had not begun, so its workers run nothing
                self._requeue(job)
        self._admit_jobs()

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Handle the disconnection of a driver. Unless its job has ended, the workers that it had not released are
        restarted."""
        for job in [job for job in self.jobs.values() if job.client_id == client and client]:
            job.client_id = ""
            if job.id not in self.job_queue.entries:
                self._queue_if_arrived(job)
                if job.state not in ENDED and job.id not in self.job_queue.entries:
                    self._end(job, "failed", DRIVER_GONE if job.needs is None else SUBMITTER_GONE)
                continue
            gang = self.job_queue.workers_of(job.id)
            workers_left = self.job_queue.requeue_after_driver_loss(job.id, time.monotonic())
            engine_workers: list[str] = []
            if job.state in ENDED:
                self.job_queue.remove_job(job.id)
            elif self._task(job) is None:
                self._end(job, "failed", DRIVER_GONE)
            else:
                self._requeue(job)
                engine_workers = [address for address in workers_left if gang[address] == (ROLLOUT,)]
            self._spawn(
                worker_restarts.restart_workers(
                    self._scheduler, [address for address in workers_left if address not in engine_workers]
                )
            )
            self._spawn(self._reserve_engine_workers(engine_workers))
        self._admit_jobs()

    def _restart_silent_driver(self, job: Job, silent_s: float) -> None:
        """Restart the worker of a driver that has not reported for silent_s; Dask restarts the driver elsewhere."""
        job.log(f"its driver on {job.driver_worker} has not reported for {silent_s:g} s and is restarted")
        self._spawn(worker_restarts.restart_workers(self._scheduler, [job.driver_worker]))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reserve_engine_workers(self, addresses: Sequence[str]) -> None:
        """Reserve the workers that reply and have an engine; restart the others."""
        engine_flags = await asyncio.gather(
            *(worker_restarts.has_orphan_engine(self._scheduler, address) for address in addresses)
        )
        without_engine = []
        for address, has_engine in zip(addresses, engine_flags, strict=True):
            if has_engine:
                self.job_queue.reserve_or_restart(address, time.monotonic())
            else:
                without_engine.append(address)
        self._admit_jobs()
        await worker_restarts.restart_workers(self._scheduler, without_engine)

    # -- waiting and starting ------------------------------------------------------------------------------------

    def submit(
        self,
        id: str,
        name: str,
        run_dir: str,
        steps: int,
        submitter: str = "",
        needs: Mapping[str, Any] | None = None,
        wait_limit_s: float = 0.0,
    ) -> PlainDict:
        """Add a job. Idempotent; replaces an ended job with the same id.

        Args:
            submitter: Dask's id of the submitting client. If it disconnects before the job has a task or is in the
                queue, the job ends.
            needs: Arguments of `Needs`, for a job that a task will drive; it waits for workers once that task has
                arrived.
            wait_limit_s: Maximum seconds to wait; 0: no limit.

        Returns:
            Another job that has this run folder and has not ended, if there is one; then nothing is added.
        """
        for other in self.jobs.values():
            if other.id != id and other.run_dir == run_dir and other.state not in ENDED:
                return other.to_plain()
        if id not in self.jobs or self.jobs[id].state in ENDED:
            self.jobs.pop(id, None)
            self.jobs[id] = Job(
                id, name, run_dir, steps, time.time(), why="no worker has taken its driver yet", client_id=submitter,
                needs=Needs(**needs) if needs is not None else None, wait_limit_s=wait_limit_s,
            )  # fmt: skip
            ended_ids = [other.id for other in self.jobs.values() if other.state in ENDED]
            for old_id in ended_ids[: max(0, len(self.jobs) - MAX_JOBS)]:
                del self.jobs[old_id]
        return {}

    def check_arrival(self, id: str) -> PlainDict:
        """Return a submitted job, and whether its task has arrived, with which it enters the queue."""
        job = self.jobs[id]
        self._queue_if_arrived(job)
        return job.to_plain() | {"arrived": job.state in ENDED or id in self.job_queue.entries}

    def _queue_if_arrived(self, job: Job) -> None:
        """Add a submitted job to the queue if its task has arrived. Idempotent. The submitting process may end after
        that, because Dask keeps the task."""
        if job.needs is None or job.state in ENDED or job.id in self.job_queue.entries or self._task(job) is None:
            return
        self._scheduler.client_desires_keys(keys=[TASK_KEY_PREFIX + job.id], client=FIRE_AND_FORGET)
        job.client_id = ""
        self.job_queue.add_job(job.id, job.run_dir, job.needs, job.wait_limit_s, time.monotonic())
        self._admit_jobs()

    def enqueue(self, id: str, needs: Mapping[str, Any], wait_limit_s: float, driver_client: str) -> None:
        """Add a run whose driver is no task of this cluster to the end of the queue. Idempotent.

        Args:
            needs: Arguments of `Needs`.
            wait_limit_s: Maximum seconds to wait; 0: no limit.
            driver_client: Dask's id of the client that drives the run.
        """
        job = self.jobs[id]
        job.client_id = driver_client
        self.job_queue.add_job(id, job.run_dir, Needs(**needs), wait_limit_s, time.monotonic())
        self._admit_jobs()

    def begin(self, id: str, address: str, driver_client: str) -> bool:
        """Whether a job's driver may run on this worker. If not, rescheduling it moves it to the right one or makes it
        wait. driver_client: Dask's id of its client."""
        job = self.jobs[id]
        if job.driver_worker == address:
            job.client_id = driver_client
            return True
        self._restrict_driver(job)
        return False

    def check_admission(self, id: str) -> PlainDict:
        """Return the state of a job, and whether it has all its workers. driver_worker: address of the worker that
        runs the driver; if the job has lost it, the driver must be rescheduled."""
        job = self.jobs[id]
        self._admit_jobs()
        is_complete = id in self.job_queue.entries and self.job_queue.replace_lost_workers(
            id, time.monotonic(), job.driver_worker
        )
        if job.driver_worker and self.job_queue.is_waiting(id):  # it has waited too long for a replacement
            self._requeue(job)
        if not is_complete and id in self.job_queue.entries:
            job.state, job.why, job.reported_at = "waiting", self.job_queue.entries[id].reason, time.time()
        return job.to_plain() | {"admitted": is_complete, "driver_worker": job.driver_worker}

    def release_workers(self, id: str) -> None:
        """Release the workers of an ended job, which must have no actors left on them. Ignores unknown jobs: the
        scheduler may have been restarted since."""
        if id in self.job_queue.entries:
            nannies = [address for address, worker in self._scheduler.workers.items() if worker.nanny]
            self.job_queue.restart_gpu_workers(id, nannies)
        self.job_queue.remove_job(id)
        if id in self.jobs:
            self.jobs[id].driver_worker = ""
        self._admit_jobs()

    def _admit_jobs(self) -> None:
        """Admit the jobs that can start, and log why the others wait."""
        admitted_gangs, expired_ids = self.job_queue.admit_jobs(time.monotonic())
        for id, gang in admitted_gangs.items():
            job = self.jobs[id]
            job.driver_worker, job.why, job.reported_at = find_driver_worker(gang), "its driver starts", time.time()
            self._announced_waits.discard(id)
            job.log(f"has its {len(gang)} workers")
            self._restrict_driver(job)
        for entry in [entry for entry in self.job_queue.entries.values() if not entry.num_workers]:
            job = self.jobs[entry.id]
            if entry.id not in self._announced_waits:
                self._announced_waits.add(entry.id)
                job.log(f"waits: {entry.reason}")
            job.state, job.why, job.reported_at = "waiting", entry.reason, time.time()
            if entry.id in expired_ids:
                self._end(
                    job, "failed", f"waited {entry.wait_limit_s:g} s for workers (deadlines.wait_s): {entry.reason}"
                )
        if addresses := self.job_queue.take_pending_restarts():
            self._spawn(worker_restarts.restart_workers(self._scheduler, addresses))
        waiting_ids = [entry.id for entry in self.job_queue.entries.values() if not entry.num_workers]
        self._reset_no_worker_timeout(waiting_ids)
        if self._timer is None and waiting_ids:
            self._timer = asyncio.get_running_loop().call_later(ADMISSION_CHECK_S, self._on_timer)

    def _reset_no_worker_timeout(self, ids: Iterable[str]) -> None:
        """Restart Dask's timeout of these jobs' tasks: if distributed.scheduler.no-workers-timeout is set, Dask fails
        tasks that have waited longer for a worker."""
        for id in ids:
            unrunnable, task = self._scheduler.unrunnable, self._scheduler.tasks.get(TASK_KEY_PREFIX + id)
            if task in unrunnable:  # reinsert the task: the dict must stay ordered by time
                del unrunnable[task]
                unrunnable[task] = time.monotonic()

    def _on_timer(self) -> None:
        self._timer = None
        self._admit_jobs()

    def _requeue(self, job: Job) -> None:
        """Make a job wait again without workers. If its driver is a task, it starts when the job is admitted."""
        job.driver_worker, job.state, job.client_id = "", "waiting", ""
        if self.job_queue.entries[job.id].num_workers:
            self.job_queue.requeue(job.id, time.monotonic())
        self._restrict_driver(job)

    def _end(self, job: Job, state: str, why: str) -> None:
        """End a job whose driver does not run."""
        job.state, job.why, job.driver_worker, job.reported_at = state, why, "", time.time()
        self._announced_waits.discard(job.id)
        job.log(f"{state}: {why}")
        self.job_queue.remove_job(job.id)
        if self._task(job) is not None:
            self._scheduler.client_releases_keys(
                keys=[TASK_KEY_PREFIX + job.id], client=FIRE_AND_FORGET, stimulus_id="staleflow-ended"
            )

    def _task(self, job: Job) -> Any:
        """Return the Dask task of a job's driver; None if there is none."""
        return self._scheduler.tasks.get(TASK_KEY_PREFIX + job.id)

    def _restrict_driver(self, job: Job) -> None:
        """Restrict a job's driver to its worker, or to none, and make Dask start it there if it waits."""
        task = self._task(job)
        if task is not None:
            task.worker_restrictions = {job.driver_worker or NO_WORKER}
            if job.driver_worker and task.state == "no-worker":
                self._scheduler.transitions({task.key: "processing"}, stimulus_id="staleflow-admitted")

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Handle Dask's transition of a driver's task. On arrival its job waits for workers. If the task fails in Dask,
        because its workers died too often or it could not be loaded, the job has failed."""
        if finish not in ("no-worker", "erred") or not isinstance(key, str):
            return
        job = self.jobs.get(key.removeprefix(TASK_KEY_PREFIX)) if key.startswith(TASK_KEY_PREFIX) else None
        if job is None or job.state in ENDED:
            return
        loop = asyncio.get_running_loop()
        if finish == "no-worker":
            loop.call_soon(self._queue_if_arrived, job)  # not within this transition
            return
        task = self._scheduler.tasks.get(key)
        job.state, job.why = "failed", str(getattr(task, "exception_text", "")) or "its task failed"
        job.reported_at = time.time()
        if not job.client_id:
            self.job_queue.remove_job(job.id)
            loop.call_soon(self._admit_jobs)

    # -- jobs ----------------------------------------------------------------------------------------------------

    def report(
        self,
        id: str,
        state: str,
        why: str,
        status: Mapping[str, Any],
        steps: Sequence[Mapping[str, float]],
        lines: Sequence[str],
        retired: Sequence[str] = (),
    ) -> PlainDict:
        """Store a driver's new steps and log lines.

        Args:
            retired: Workers that the last reply which the driver has got told it to retire. They are not listed again.

        Returns:
            `stop`: why the job must stop; empty if it need not. `retire`: workers that it must retire. `release`:
            workers that it does not need and should release so that another job can start.
        """
        job = self.jobs.get(id)
        if job is None:  # the job was dropped, or the scheduler was restarted
            return {"stop": "", "retire": [], "release": []}
        for step in steps:
            while job.history and next(reversed(job.history)) >= step["step"]:  # undone by a resume
                job.history.popitem()
            job.history[int(step["step"])] = dict(step)
        if steps and (task := self._scheduler.tasks.get(TASK_KEY_PREFIX + id)) is not None:
            task.suspicious = 0  # resets Dask's count of worker deaths after progress
        job.state, job.why, job.reported_at = state, why, time.time()
        if status:
            job.status = dict(status)
        job.lines.extend(lines)
        job.num_lines += len(lines)
        job.retirements = [worker for worker in job.retirements if worker not in retired]
        surplus_workers = self.job_queue.surplus_to_return.get(id, [])
        return {"stop": job.stop, "retire": list(job.retirements), "release": surplus_workers}

    def request_stop(self, id: str, why: str) -> str:
        """Request that a job stops after its current step. A waiting job ends at once. Returns the job's state."""
        job = self.jobs[id]
        state, job.stop = job.state, job.stop or why
        # A job that is not queued is a run on its own local cluster.
        is_queued = self.job_queue.is_waiting(id) or self._task(job) is not None or job.needs is not None
        has_driver = job.client_id and (job.needs is None or id in self.job_queue.entries)
        if is_queued and not has_driver and not job.driver_worker and state not in ENDED:
            self._end(job, "stopped", why)
            self._admit_jobs()
        return state

    def request_retirement(self, id: str, worker: str) -> str:
        """Request that a running job retires one of its workers. Returns the job's state; in other states nothing is
        requested."""
        job = self.jobs[id]
        if job.state == "running":
            job.retirements.append(worker)
        return job.state

    def return_worker(self, id: str, address: str) -> bool:
        """Release a worker that a running job does not need. Returns False if the job needs it."""
        is_returned = self.job_queue.return_worker(id, address)
        self._admit_jobs()
        return is_returned

    def all_jobs(self) -> list[PlainDict]:
        """Return all jobs as plain values, in order of submission."""
        return [job.to_plain() for job in self.jobs.values()]

    def lines(self, id: str, after: int) -> tuple[int, list[str]]:
        """Return the number of the next log line, and the kept lines from number `after` on."""
        job = self.jobs[id]
        num_new = max(0, min(job.num_lines - after, len(job.lines)))
        return job.num_lines, list(job.lines)[len(job.lines) - num_new :]


async def report_gpus(dask_worker: Any) -> None:
    """Report the GPUs of the worker that runs this function to the registry."""
    devices = [asdict(device) for device in read_devices()]
    await getattr(dask_worker.scheduler, RPC_NAME)(verb="report_gpus", address=dask_worker.address, devices=devices)


async def ask(client: Any, verb: str, **arguments: Any) -> Any:
    """Call the registry on the scheduler that a Dask client is connected to. Raises OSError if there is none, as on one
    that was just started again."""
    answer = await getattr(client.scheduler, RPC_NAME)(verb=verb, **arguments)
    if answer is None:
        raise OSError("the scheduler has no job registry; it was started again")
    return answer[0]
