"""How policy weights travel from the trainer's host to the rollout instances."""
