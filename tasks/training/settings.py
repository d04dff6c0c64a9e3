"""The [training] table of a job file, which the trainer receives as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.knobs import knob
from tasks.names import AGGREGATION_NAMES, SCHEDULE_NAMES
from tasks.registry import choice, composed
from tasks.training.advantage import ADVANTAGES
from tasks.training.loss import LOSSES


@dataclass(frozen=True, slots=True, kw_only=True)
@composed
class LossConfig:
    """The objective; docs/losses.md and tasks/training/loss.py have the formulas."""

    name: str = choice(LOSSES, "decoupled_ppo", "the loss")
    options: dict[str, Any] = knob({}, "knobs of a loss from a file", shown=False)
    aggregation: str = knob("token_mean", "how token losses become one number", choices=AGGREGATION_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Optimization."""

    learning_rate: float = knob(1e-5, "peak learning rate of AdamW", above=0, high=1)
    schedule: str = knob("constant", "learning rate over the run", choices=SCHEDULE_NAMES)
    warmup_steps: int = knob(0, "training steps of linear warm-up", low=0)
    minibatches: int = knob(1, "optimizer updates a training step", low=1)
    microbatch_tokens: int = knob(8192, "padded tokens one forward and backward pass may hold", low=1)
    grad_clip: float = knob(1.0, "largest gradient norm", above=0)
    weight_decay: float = knob(0.0, "AdamW weight decay", low=0)
    beta1: float = knob(0.9, "AdamW", low=0, high=1)
    beta2: float = knob(0.95, "AdamW", low=0, high=1)
    advantage: str = choice(ADVANTAGES, "grpo", "advantage estimate")
    loss: LossConfig = LossConfig()
    checkpoint_every: int = knob(0, "steps between checkpoints; 0 for the last step only", low=0)
    resume_every: int = knob(
        1, "steps between resume points (weights, optimizer, random state; the latest are kept); 0 for none", low=0
    )
