"""Rules that the coordinator applies: what starts, where it is sampled, when instances pull, what is dropped. Pure."""
