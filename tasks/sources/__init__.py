"""Sources of prompts, data set rows, evaluation sets and rewards."""
