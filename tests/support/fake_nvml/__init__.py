"""A simulated NVIDIA management library."""
