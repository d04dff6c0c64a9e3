"""Names that a job file may use, apart from the code they refer to, so that checking a job loads neither torch nor
vllm."""

AGGREGATION_NAMES = ("token_mean", "sequence_mean", "constant_length")
SCHEDULE_NAMES = ("constant", "cosine", "linear")
WORKLOAD_NAMES = ("lognormal", "bimodal", "power_law", "agentic", "recorded")
LATENCY_NAMES = ("lognormal", "normal", "constant")
REWARD_TOKEN = 2
"""First token of an emulated response whose reward is 0; REWARD_TOKEN + 1 if it is 1."""
