"""Proposes how many GPUs of a run sample and how many train. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.tasks.emulation.cost_model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of a training step. sample_s: seconds in which one instance samples its batch. train_s: seconds in which one
    rank trains on it."""

    sample_s: float
    train_s: float

    @classmethod
    def of(
        cls, costs: CostModel, *, responses: int, tokens: float, prompt_tokens: int, max_running: int, kv_tokens: int,
        train_s: float,
    ) -> StepWork:  # fmt: skip
        """Estimate the work with a cost model. An instance runs as many responses at once as max_running and its KV
        cache allow, each half finished on average.

        Args:
            costs: Times of prefill and decode steps.
            responses: Responses of a batch.
            tokens: Mean length of a response.
            prompt_tokens: Mean length of a prompt.
            max_running: Most responses that an instance runs at once.
            kv_tokens: KV cache of an instance, in tokens.
            train_s: Seconds in which one rank trains on a batch.

        >>> costs = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, b=0.0)
        >>> StepWork.of(costs, responses=64, tokens=100, prompt_tokens=0, max_running=32, kv_tokens=9999,
        ...             train_s=1.0).sample_s
        2.0
        """
        context = prompt_tokens + tokens / 2
        running = max(1, min(responses, max_running, int(kv_tokens // (prompt_tokens + tokens))))
        steps = responses * tokens / running
        prefill_s = responses * prompt_tokens * costs.prefill
        return cls(sample_s=steps * costs.step_s(running, running * context) + prefill_s, train_s=train_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of GPUs. reason: why it was chosen, in one line."""

    instances: int
    ranks: int
    reason: str


def propose_split(work: StepWork, num_gpus: int, tensor_parallel: int = 1, min_ranks: int = 1) -> Split | None:
    """Choose the division with the shortest step. Sampling and training overlap, so the slower one decides; among equal
    divisions, the one with fewer ranks is chosen. None if there are too few GPUs.

    Args:
        work: Of a step.
        num_gpus: GPUs to divide.
        tensor_parallel: GPUs of an instance.
        min_ranks: Least number of ranks on which the trainer fits into memory.
    """
    best: tuple[float, int, int] | None = None  # (seconds of a step, ranks, instances)
    for ranks in range(min_ranks, num_gpus - tensor_parallel + 1):
        instances = (num_gpus - ranks) // tensor_parallel
        key = max(work.sample_s / instances, work.train_s / ranks), ranks, instances
        best = key if best is None else min(best, key)
    if best is None:
        return None
    step_s, ranks, instances = best
    reason = (
        f"an instance samples a step's batch in {work.sample_s:.3g} s (rollout.cost), a rank trains it in "
        f"{work.train_s:.3g} s (simulation.train_s): together {step_s:.3g} s a step"
    )
    return Split(instances=instances, ranks=ranks, reason=reason)
