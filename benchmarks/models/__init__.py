"""What the model matrix tries: tiny models of each family."""
