"""Rules the coordinator consults: what may start, where it is sampled, when instances pull, what is dropped. Pure."""
