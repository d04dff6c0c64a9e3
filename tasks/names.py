"""The names a job file may use, apart from what they name: checking a job loads neither torch nor vllm."""

ENGINE_NAMES = ("transformers", "vllm", "emulated")
SAMPLING_REFUSED = dict.fromkeys(
    (
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "bad_words",
        "min_tokens",
    ),
    "it would sample from another distribution than the model's own, and the trainer, which computes that one, would "
    "weigh tokens by a wrong ratio; rollout.temperature is applied by both",
)
"""Ways to sample that other systems offer, and why a job may not ask for them."""
ENGINE_OPTIONS_OURS = {
    "vllm": {
        **dict.fromkeys(
            ("model", "dtype", "seed", "tensor_parallel_size", "max_num_seqs", "block_size"), "has its own key"
        ),
        "num_gpu_blocks_override": "rollout.engine.kv_tokens says it",
        "max_num_batched_tokens": "rollout.engine.max_batch_tokens says it",
        **dict.fromkeys(
            (
                "logprobs_mode",
                "async_scheduling",
                "weight_transfer_config",
                "worker_extension_cls",
                "skip_tokenizer_init",
            ),
            "tokens could no longer be attributed to their version and logprob",
        ),
        **dict.fromkeys(
            ("logits_processors", "override_generation_config", "generation_config", "speculative_config"),
            "stored logprobs would not be those of the policy that sampled",
        ),
        **SAMPLING_REFUSED,
    }
}
"""Engine arguments that a job may not pass on, and why."""
AGGREGATION_NAMES = ("token_mean", "sequence_mean", "constant_length")
SCHEDULE_NAMES = ("constant", "cosine")
WORKLOAD_NAMES = ("lognormal", "bimodal", "power_law", "agentic", "recorded")
REWARD_TOKEN = 2
"""First token of an emulated response without reward; one more with it."""
