"""Settings of the trajectory server."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.stores.trajectories.records import RunHeader
from staleflow.tasks.sources.prompts import PromptSettings
from staleflow.tasks.training.advantage import Advantage, OverlongPenalty


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the trajectory server; see BatchConfig and RewardConfig. store: the store's folder.
    reward_settings: the reward functions as the job sets them, for messages. commit_s: seconds for which a commit is
    retried while the store's bucket fails. resumed: whether to continue an existing store."""

    prompts: PromptSettings
    reward_settings: str
    group_size: int
    members_started_per_group: int
    advantage: Advantage
    overlong: OverlongPenalty
    max_error_share: float
    store: str
    header: RunHeader
    commit_s: float
    resumed: bool = False
    writes_resume_points: bool = True
    """Whether the run can be resumed from a point that the trainer writes."""
    max_turn_tokens: int
    """Token limit of a turn."""
    keeps_kv: bool
    """Whether environment steps follow turns, so that engines keep their KV cache."""
    has_teacher: bool = False
    """Whether a step needs the logprobs of its responses from a teacher."""
    serves_drafts: bool = False
    """Whether engines draft from the responses that the server knows."""
