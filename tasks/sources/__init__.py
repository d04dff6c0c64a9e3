"""Sources of prompts, their rows, evaluation sets and rewards."""
