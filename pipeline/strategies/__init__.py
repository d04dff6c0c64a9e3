"""Rules the coordinator consults: what starts, where it is sampled, when instances pull, what is dropped. Pure."""
