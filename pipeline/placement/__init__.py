"""Which host and GPUs each process of a run gets. Pure."""
