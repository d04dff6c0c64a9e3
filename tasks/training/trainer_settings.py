"""The [training] table of a job file, which the trainer receives unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from staleflow.tasks.engines.adapters import LoraConfig
from staleflow.tasks.settings.choice_names import AGGREGATION_NAMES, SCHEDULE_NAMES
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.settings.registry import choice
from staleflow.tasks.training.advantage import ADVANTAGES, Advantage
from staleflow.tasks.training.loss import LOSSES, Loss, Sft
from staleflow.tasks.training.rank import COLLECTIVE_TIMEOUT_S

if TYPE_CHECKING:
    from staleflow.tasks.training.microbatches import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class KlConfig:
    """A penalty on the distance to a reference model or a teacher. The trainer holds it in addition to its own model,
    unless [teacher] has instances."""

    coefficient: float = knob(0.0, "weight of the penalty; 0: none, and no reference model", low=0)
    estimator: str = knob("k3", "estimate of the distance, token by token", choices=("k1", "k2", "k3"))
    place: str = knob(
        "loss",
        "where it counts: loss adds it to each token's, reward subtracts it from the advantage of what led to it, "
        "advantage from that of its token alone, as on-policy distillation does",
        choices=("loss", "reward", "advantage"),
    )
    reference: str = knob("", "folder of the reference model, such as a checkpoint or a teacher; empty: model.path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning on examples: before the first training step, in each training step, or both."""

    steps: int = knob(
        0, "optimizer updates on examples before the first training step; 0: none, version 0 is model.path", low=0
    )
    weight: float = knob(
        0.0, "weight of the examples' cross-entropy, which is added to the loss of each training step; 0: none", low=0
    )
    examples_per_step: int = knob(
        32, "examples of each such update or step, taken in their order, from the first one again at the end", low=1
    )
    source: str = knob("", "where they come from, named as in task.source; empty: prompts and answers of task.source")
    options: dict[str, Any] = knob({}, "arguments of source, such as split")
    learning_rate: float = knob(
        2e-5, "learning rate of `steps`, constant; AdamW's moments start anew after them", above=0, high=1
    )

    @property
    def uses_examples(self) -> bool:
        return self.steps > 0 or self.weight > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Optimization."""

    learning_rate: float = knob(1e-5, "peak learning rate of AdamW", above=0, high=1)
    schedule: str = knob("constant", "learning-rate schedule over the run", choices=SCHEDULE_NAMES)
    schedule_steps: int = knob(
        0, "training steps of a cosine or linear schedule, schedule_floor after it; 0: those of the run", low=0
    )
    schedule_floor: float = knob(0.1, "share of the peak rate that a cosine or linear schedule ends at", low=0, high=1)
    warmup_steps: int = knob(0, "training steps of linear warm-up", low=0)
    ranks: int = knob(
        1,
        "processes that train the model together, each with its share of the rows and of the parameters; each needs a "
        "worker of its own",
        low=1,
        high=1024,
    )
    epochs: int = knob(1, "passes over the batch of a training step", low=1)
    minibatches: int = knob(1, "optimizer updates per pass over the batch", low=1)
    microbatch_tokens: int = knob(
        8192,
        "most tokens in one forward and backward pass, with padding if rows are padded; one row always fits",
        low=1,
    )
    recompute_activations: bool = knob(
        False,
        "keep of each layer only what comes into it, and compute the rest again for the gradient: less memory for the "
        "tokens of a pass, up to a third more time",
    )
    compile: bool = knob(
        False,
        "compile each layer of the trained model with torch.compile: the first step takes up to a minute longer, the "
        "others on a GPU in bfloat16 about two thirds of the time",
    )
    offload: bool = knob(
        False,
        "keep weights, gradients and the optimizer's state in the processor's memory, and on the GPU a layer at a "
        "time: for a model of which these do not fit there, at the price of moving each layer for every pass",
    )
    grad_clip: float = knob(1.0, "gradient norm above which gradients are clipped", above=0)
    weight_decay: float = knob(0.0, "AdamW weight decay", low=0)
    beta1: float = knob(0.9, "AdamW beta1", low=0, below=1)
    beta2: float = knob(0.95, "AdamW beta2", low=0, below=1)
    advantage: Advantage = choice(ADVANTAGES, "grpo", "advantage estimator")
    overlong_tokens: int = knob(
        0,
        "last tokens before rollout.max_new_tokens over which a response loses reward, more with each; 0: none",
        low=0,
    )
    overlong_penalty: float = knob(1.0, "reward that a response of rollout.max_new_tokens loses", low=0)
    loss: Loss = choice(LOSSES, "decoupled_ppo", "policy loss; docs/losses.md has the formulas")
    aggregation: str = knob("token_mean", "how token losses are reduced to one number", choices=AGGREGATION_NAMES)
    entropy_bonus: float = knob(
        0.0, "weight of the entropy of each token's distribution, subtracted from the loss; 0: none", low=0
    )
    kl: KlConfig = KlConfig()
    sft: SftConfig = SftConfig()
    lora: LoraConfig = LoraConfig()
    measured_rows: int = knob(
        8,
        "trajectories without a gradient that are computed each step, at least two, for its figures only; 0: none",
        low=0,
    )
    checkpoint_every: int = knob(0, "training steps between checkpoints; 0: only after the last step", low=0)
    resume_every: int = knob(
        1, "training steps between resume points (weights, optimizer, random state); latest are kept; 0: none", low=0
    )
    keep_every: int = knob(
        0, "training steps between resume points that are kept for good, a multiple of resume_every; 0: none", low=0
    )


def fine_tuning_config(training: TrainingConfig) -> TrainingConfig:
    """The training settings of supervised fine-tuning: one update per step, with the cross-entropy averaged over the
    step's tokens. Settings of memory, AdamW and adapters are those of RL."""
    return replace(
        training,
        loss=Sft(),
        aggregation="token_mean",
        kl=KlConfig(),
        sft=SftConfig(),
        entropy_bonus=0.0,
        epochs=1,
        minibatches=1,
        measured_rows=0,
        learning_rate=training.sft.learning_rate,
        schedule="constant",
        warmup_steps=0,
    )


class ExampleRows(Protocol):
    """The examples of supervised fine-tuning."""

    def rows(self, step: int) -> Sequence[Row]:
        """The rows of a step; the same in each call."""
        ...


class ExampleRowSettings(Protocol):
    """Settings from which the leading rank builds the examples. Picklable."""

    def build(self) -> ExampleRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTrainerSettings:
    """Settings of the trainer of a model; see ModelConfig.

    Args:
        training: The [training] table of the job.
        num_steps: Length of a decaying schedule, unless the table sets one.
        max_response_tokens: Maximum tokens of a response, the divisor of constant_length aggregation.
        collective_timeout_s: Maximum seconds that a rank waits for the others in one operation.
        examples: Settings of the examples of training.sft; None without it.
        shares_device: Whether instances use the device between two uses by the trainer.
        has_stored_reference: Whether rows have logprobs under the reference model, which a teacher computed, so that
            the trainer does not hold that model.
    """

    model: str
    dtype: str
    device: str
    training: TrainingConfig
    num_steps: int
    temperature: float
    max_response_tokens: int
    seed: int
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    examples: ExampleRowSettings | None = None
    shares_device: bool = False
    has_stored_reference: bool = False
