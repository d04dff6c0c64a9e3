"""Work on stored runs: audit, export, recompute rewards and logprobs, train offline, serve."""
