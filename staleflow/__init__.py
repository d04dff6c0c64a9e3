"""Asynchronous RL post-training of language models on Dask, with a hard bound on policy staleness."""
