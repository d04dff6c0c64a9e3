"""The tests that must detect mutations of each module."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

LEDGER = ("tests/stores/test_staleness.py", "tests/strategies", "tests/coordination/test_coordinator.py")
DECISIONS = tuple(
    f"tests/coordination/test_{name}.py"
    for name in (
        "coordinator", "notifications", "episodes", "random_events", "phases", "evaluation_hosts", "resume_plan",
        "forecast", "episode_forecast", "bounded_memory",
    )
)  # fmt: skip
SERVERS = tuple(
    f"tests/tasks/test_{name}.py"
    for name in (
        "acknowledgements", "parameter_server", "rollout_instance", "replaced_hosts", "environment_host", "actor_calls",
        "trainer_rank", "actor_close",
    )
)  # fmt: skip
RUNTIME = tuple(
    f"tests/runtime/test_{name}.py"
    for name in (
        "actors", "transfers", "driver", "start_failures", "actor_failures", "instance_link", "role_recovery",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Modules that are scored together. paths: folders or modules. tests: tests that must detect mutations, fastest
    first; own: tests by module name, which run before them."""

    name: str
    paths: tuple[str, ...]
    tests: tuple[str, ...]
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def modules(self) -> list[str]:
        """Return its modules by path in the repository."""
        listed = subprocess.run(["git", "ls-files", *self.paths], check=True, capture_output=True, text=True)
        return [path for path in listed.stdout.split() if path.endswith(".py") and not path.endswith("__init__.py")]

    def tests_of(self, path: str) -> tuple[str, ...]:
        """Return the tests of a module in the order in which they run."""
        own = self.own.get(path.rpartition("/")[2].removesuffix(".py"), ())
        return (*own, *(test for test in self.tests if test not in own))


PACKAGES = (
    Package(
        name="protocol",
        paths=("stores/staleness",),
        tests=LEDGER,
        own={"ledger": (*LEDGER, "tests/coordination/test_state.py")},
    ),
    Package(
        name="in flight",
        paths=("stores/in_flight",),
        tests=(
            "tests/stores/test_in_flight.py", "tests/stores/test_in_flight_turns.py", "tests/stores/test_spool.py",
            "tests/tasks/test_acknowledgements.py", "tests/tasks/test_rollout_instance.py",
        ),
    ),
    Package(
        name="audit",
        paths=("stores/auditing",),
        tests=("tests/stores/test_audit_findings.py", "tests/stores/test_audit.py"),
        own={
            "audit": ("tests/stores/test_bucket.py",),
            "chain": ("tests/stores/test_chain.py",),
            "drop_bias": ("tests/stores/test_drop_bias.py",),
            "row_checks": ("tests/stores/test_spans.py",),
            "snapshot_audit": ("tests/stores/test_snapshot_audit.py",),
        },
    ),
    Package(
        name="coordination",
        paths=("pipeline/coordination",),
        tests=DECISIONS,
        own={
            "coordinator": (*DECISIONS, "tests/coordination/test_route_limit.py"),
            "journal": ("tests/coordination/test_journal.py", "tests/runtime/test_run_journal.py"),
            "state": (
                "tests/coordination/test_coordinator.py", "tests/coordination/test_state.py",
                "tests/runtime/test_device_turns.py::test_trainer_and_instances_use_the_gpus_in_turns",
            ),
            "fleet": ("tests/coordination/test_coordinator.py", "tests/coordination/test_state.py"),
            "mixture": ("tests/coordination/test_mixture.py",),
        },
    ),
    Package(
        name="strategies",
        paths=("pipeline/strategies", "pipeline/simulator/baselines.py"),
        tests=(
            "tests/strategies", "tests/coordination/test_coordinator.py", "tests/config/test_config.py",
            "tests/config/test_user_code.py", "tests/simulator/test_simulator.py",
        ),
    ),
    Package(
        name="losses",
        paths=("tasks/training/loss.py", "tasks/training/advantage.py", "tasks/training/objective.py"),
        tests=(
            "tests/tasks/test_losses.py", "tests/tasks/test_objective.py", "tests/tasks/test_numerics.py",
            "tests/tasks/test_overlong.py", "tests/config/test_user_code.py",
        ),
    ),
    Package(
        name="actors",
        paths=(
            "tasks/actors", "pipeline/runtime/actor_client.py", "pipeline/runtime/actors.py",
            "pipeline/runtime/weight_publisher.py", "pipeline/runtime/weight_verification.py",
        ),
        tests=SERVERS,
        own={
            "store_thread": ("tests/tasks/test_async_spool.py", "tests/tasks/test_store_thread.py"),
            **dict.fromkeys(
                ("actor_client", "actors", "weight_publisher"),
                (*RUNTIME, "tests/runtime/test_membership.py", "tests/runtime/test_device_turns.py"),
            ),
            "reward_worker": ("tests/runtime/test_evaluation_results.py",),
            "teacher": ("tests/tasks/test_teacher.py", "tests/runtime/test_teachers.py"),
            "trainer": ("tests/tasks/test_trainer.py",),
            "step_batches": ("tests/tasks/test_step_batches.py",),
            "draft_corpus": ("tests/tasks/test_draft_corpus.py",),
            "rollout_instance": ("tests/tasks/test_draft_corpus.py", "tests/tasks/test_engine_handover.py"),
            "observation_encoder": ("tests/tasks/test_observation_encoder.py",),
        },
    ),
)  # fmt: skip
