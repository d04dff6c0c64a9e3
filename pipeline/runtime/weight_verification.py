"""Verifies the instances' weights: the probe, the drift limit, and the result of each pull.

`Actors` owns it, in the driver's process. After each pull an instance compares its weights with the published
fingerprint, and its logprobs of the probe, a few held-out prompts, with the trainer's. The mean difference of these
logprobs, the drift, may be at most `drift_limit`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.processes.instance_handle import InstanceHandle
from staleflow.pipeline.recovery.resumption import Resumption
from staleflow.stores.errors import ActorLost, ConfigError, WeightsRefused
from staleflow.stores.weights.weight_report import WeightCheck
from staleflow.tasks.actors.parameter_server import PublishedWeights, mean_absolute_difference
from staleflow.tasks.actors.trainer import PublishedStep

logger = logging.getLogger(__name__)

PROBE_PROMPTS, PROBE_TOKENS = 8, 64
"""Number of held-out prompts in the probe, and its maximum length in tokens: one small prefill after each pull."""
DRIFT_FACTOR = 4.0
"""Allowed drift, as a multiple of the engine-trainer difference measured at version 0."""
MAX_INITIAL_DRIFT = 0.5
"""Mean difference, in nats, that engine and trainer may have at version 0: rounding in 8 bits explains less."""
ROUNDING_DRIFT = {"float32": 1e-3, "bfloat16": 2e-2}
"""Minimum drift limit by dtype, in nats, unless the job sets one: the mean difference that rounding explains."""


class WeightVerification:
    """State of one run's weight verification.

    Args:
        config: The job.
        context_length: Maximum tokens of the model's context, which the probe has to fit in.
    """

    def __init__(self, config: RunConfig, context_length: int) -> None:
        self._config = config
        self._context_length = context_length
        self.probe: tuple[int, ...] = ()
        """Token ids; empty until `set_probe`, and without held-out prompts."""
        self.base_logprobs: tuple[float, ...] = ()
        """Logprobs of the probe by the base model; empty without supervised fine-tuning, since version 0 has them."""
        self.drift_limit = config.rollout.logprob_drift_limit or ROUNDING_DRIFT[config.model.dtype]
        """Largest allowed mean difference of an instance's and the trainer's logprobs of the probe, in nats."""
        self.alarms: list[str] = []
        """Instances that were taken out of service for their weights or logprobs."""
        self.unverified_notes: list[str] = []
        """At most one line: which part of the instances' weights is not verified."""
        self.on_refused: Callable[[], None] = lambda: None
        """Called when an instance refuses weights and is taken out of service."""
        self._checks: list[WeightCheck] = []

    def set_probe(self, prompts: Iterable[Sequence[int]]) -> None:
        """Build the probe from the token ids of held-out prompts. A single token is repeated, since logprobs begin with
        the second one."""
        tokens = [token for prompt in prompts for token in prompt]
        if len(tokens) == 1:
            tokens *= PROBE_TOKENS
        self.probe = tuple(tokens[: min(PROBE_TOKENS, self._context_length - 1)])

    async def measure_engine_logprobs(
        self,
        instances: Iterable[InstanceHandle],
        get_logprobs: Callable[[InstanceHandle], Awaitable[tuple[float, ...]]],
        resumption: Resumption | None,
    ) -> list[tuple[float, ...]]:
        """Logprobs of the probe by each instance that has loaded the base model, for `set_drift_limit`; empty if the
        drift limit is set or stored."""
        is_base = resumption is None or not resumption.version
        if self._config.rollout.logprob_drift_limit or not is_base or not self.probe:
            return []
        logprobs: list[tuple[float, ...]] = []
        for instance in instances:
            if instance.has_taken_over_engine:
                continue
            try:
                logprobs.append(await get_logprobs(instance))
            except ActorLost as error:  # its first pull replaces it
                logger.warning("%s", error)
        return logprobs

    def set_drift_limit(
        self, engine_logprobs: Sequence[tuple[float, ...]], published: PublishedStep, resumption: Resumption | None
    ) -> None:
        """Set the drift limit from the differences of engine and trainer logprobs on the base model.

        A run that resumes from a trained version keeps its stored limit. Raises ConfigError above MAX_INITIAL_DRIFT,
        where rounding cannot be distinguished from wrong weights.

        Args:
            engine_logprobs: As returned by `measure_engine_logprobs`.
            published: The first published version.
            resumption: None for a new run.
        """
        if self._config.rollout.logprob_drift_limit:
            return
        if resumption is not None and not engine_logprobs:
            self.drift_limit = resumption.drift_limit or MAX_INITIAL_DRIFT
            return
        trainer_logprobs = self.base_logprobs or published.probe_logprobs
        difference = max(
            (mean_absolute_difference(logprobs, trainer_logprobs) for logprobs in engine_logprobs), default=0.0
        )
        if not difference <= MAX_INITIAL_DRIFT:
            raise ConfigError(
                f"rollout.engine computes another model than the trainer: at version 0 logprobs differ by "
                f"{difference:.3g} nats on average, {MAX_INITIAL_DRIFT} at most are allowed; use another engine or "
                "dtype, or set rollout.logprob_drift_limit"
            )
        self.drift_limit = max(self.drift_limit, DRIFT_FACTOR * difference)

    def expected_weights(self, published: PublishedStep) -> PublishedWeights:
        """Weights and logprobs that an instance must have after pulling a published version."""
        return PublishedWeights(
            version=published.version,
            fingerprint=published.fingerprint,
            probe_tokens=self.probe,
            probe_logprobs=published.probe_logprobs,
            drift_limit=self.drift_limit,
        )

    def record_check(self, instance: InstanceHandle, check: WeightCheck) -> None:
        """Record the result of a pull. Raises WeightsRefused if the instance must not serve these weights."""
        self._checks.append(check)
        if check.refused:
            alarm = f"{instance.id} is out of service at version {check.version}: {check.refused}"
            self.alarms.append(alarm)
            logger.error(alarm)
            self.on_refused()
            raise WeightsRefused(alarm, instance.id)
        if check.outcome == "not verified" and not self.unverified_notes:
            line = (
                f"weights are not verified: {check.weights.line}; only the logprobs of {max(0, len(self.probe) - 1)} "
                "tokens are compared with the trainer's"
            )
            self.unverified_notes.append(line)
            logger.warning("%s: %s", check.instance, line)

    def take_checks(self) -> tuple[WeightCheck, ...]:
        """Return and clear the results of the pulls since the last call."""
        checks, self._checks = tuple(self._checks), []
        return checks
