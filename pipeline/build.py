"""From a job file to the objects that run it: the coordinator, and the settings each actor starts with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator, Policy
from pipeline.cost import CostModel
from pipeline.strategies.admission import make_admission
from pipeline.strategies.filtering import make_filtering
from pipeline.strategies.routing import make_routing
from pipeline.strategies.synchronization import make_synchronization
from stores.base import RunHeader
from stores.staleness import StalenessLedger

if TYPE_CHECKING:
    from tasks.engines.transformers import TransformersSettings
    from tasks.scoring import ScoringSettings
    from tasks.server import ServerSettings
    from tasks.training import TrainerSettings


def make_coordinator(config: RunConfig, *, validate_each: bool = False) -> Coordinator:
    """The coordinator this job asks for. Both bodies, and a replay, build it here."""
    cost = config.rollout.cost
    ledger = StalenessLedger(
        eta=config.staleness.eta,
        groups_per_step=config.batch.groups_per_step,
        group_size=config.batch.group_size,
        groups_started=config.groups_started,
        members_started=config.members_started,
        num_steps=config.steps,
    )
    policy = Policy(
        admission=make_admission(config.staleness.admission),
        routing=make_routing(
            config.rollout.routing,
            CostModel(k1=cost.k1, k2=cost.k2, k3=cost.k3, k4=cost.k4, b=cost.b),
            config.rollout.mu,
        ),
        synchronization=make_synchronization(config.rollout.synchronization, config.rollout.load_threshold),
        filtering=make_filtering(config.batch.filtering),
        max_attempts=config.rollout.max_attempts,
    )
    return Coordinator(ledger, policy, validate_each=validate_each)


def run_header(config: RunConfig) -> RunHeader:
    return RunHeader(
        run=config.name,
        eta=config.staleness.eta,
        groups_per_step=config.batch.groups_per_step,
        group_size=config.batch.group_size,
        members_started=config.members_started,
    )


def scoring_settings(config: RunConfig) -> ScoringSettings:
    from tasks.scoring import ScoringSettings

    return ScoringSettings(
        source=config.task.source,
        options=dict(config.task.options),
        seed=config.seed,
        function=config.reward.function,
        answer_pattern=config.task.answer_pattern,
        timeout_s=config.reward.timeout_s,
    )


def server_settings(config: RunConfig, store: Path, context: int) -> ServerSettings:
    """context: tokens the model can attend to."""
    from tasks.server import ServerSettings

    return ServerSettings(
        tokenizer=config.model.path,
        scoring=scoring_settings(config),
        template=config.task.template,
        chat=config.task.chat,
        group_size=config.batch.group_size,
        members_started=config.members_started,
        advantage=config.training.advantage,
        max_error_share=config.reward.max_error_share,
        max_new_tokens=config.rollout.max_new_tokens,
        context=context,
        kv_tokens=config.rollout.engine.kv_tokens,
        store=str(store),
        header=run_header(config),
    )


def trainer_settings(config: RunConfig) -> TrainerSettings:
    from tasks.loss import LossSettings
    from tasks.training import TrainerSettings

    t = config.training
    return TrainerSettings(
        model=config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        learning_rate=t.learning_rate,
        schedule=t.schedule,
        warmup_steps=t.warmup_steps,
        num_steps=config.steps,
        minibatches=t.minibatches,
        microbatch_tokens=t.microbatch_tokens,
        grad_clip=t.grad_clip,
        weight_decay=t.weight_decay,
        betas=(t.beta1, t.beta2),
        aggregation=t.loss.aggregation,
        loss=LossSettings(
            name=t.loss.name, clip_low=t.loss.clip_low, clip_high=t.loss.clip_high, weight_cap=t.loss.weight_cap
        ),
        temperature=config.rollout.temperature,
        max_length=config.rollout.max_new_tokens,
        seed=config.seed,
    )


def engine_settings(config: RunConfig, index: int, eos: tuple[int, ...]) -> TransformersSettings:
    """index: of the instance, so that each samples with a seed of its own. eos: ids that end a response."""
    from tasks.engines.transformers import TransformersSettings

    engine = config.rollout.engine
    return TransformersSettings(
        model=config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        temperature=config.rollout.temperature,
        max_running=engine.max_running,
        kv_tokens=engine.kv_tokens,
        page_tokens=engine.page_tokens,
        max_batch_tokens=engine.max_batch_tokens,
        eos=eos,
        seed=config.seed * 1000 + index,
    )
