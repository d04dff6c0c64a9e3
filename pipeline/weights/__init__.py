"""Transfer of policy weights from the trainer's host to the rollout instances."""
