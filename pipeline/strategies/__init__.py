"""Rules the coordinator consults: who may start, where it is sampled, when instances pull, what is dropped. Pure."""
