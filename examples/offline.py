# %% [markdown]
# # A stored run, months later
#
# Every trajectory of a run is in its store: tokens, behaviour logprobs, the policy version of each token, rewards and
# its fate. This file shows what can be done with them. Run it cell by cell in an editor or notebook that supports
# `# %%`, or as a whole with `RUN=runs/demo python examples/offline.py`. Titles name the equivalent commands.

# %%
import os
import shutil
from pathlib import Path

from distributed import Client

from staleflow.pipeline.stored_runs import branch_diff, exporting, logprob_recompute, reward_rescoring, training, views
from staleflow.pipeline.stored_runs.pool import Pool
from staleflow.stores.auditing.audit import audit
from staleflow.stores.trajectories.records import batch_fingerprint
from staleflow.stores.trajectories.versioned import VersionedStore

run = Path(os.environ.get("RUN", "runs/demo"))
results = Path(f"{run}-offline-example")
shutil.rmtree(results, ignore_errors=True)
results.mkdir()

# %% [markdown]
# ## What is stored, and is it consistent? (`store show`, `store audit`)

# %%
store = VersionedStore.open(run / "store")
steps = [record for record in store.steps() if record.kind == "step"]
print(f"{run}: {len(steps)} steps, {store.header.bound}; audit clean: {audit(store).clean}")

# %% [markdown]
# The batch of any step, bit for bit as the trainer received it (`store show --at-step K`).

# %%
last = steps[-1]
then = VersionedStore.open(run / "store", at_step=last.step)
batch = list(then.ended(step=last.step))
assert batch_fingerprint((row.trajectory, row.advantage) for row in batch) == last.batch_fingerprint
print(f"step {last.step} consumed {len(batch)} trajectories, fingerprint {last.batch_fingerprint}")

# %% [markdown]
# ## As a table
#
# One row per trajectory, read block by block by the workers, so the store may be larger than memory. Without a client
# Dask computes in this process; with `Client("tcp://head:8786")` it computes on a cluster.

# %%
frame = store.to_dask()
trained = frame[frame.fate == "consumed"]
print(trained.groupby("staleness")[["reward", "response_tokens"]].mean().compute())

# %% [markdown]
# ## As arrays
#
# Tokens are one after another along a dimension of their own; `mask` is 1 for tokens in the loss.

# %%
data = store.to_xarray()
surprise = -data.logprobs.where(data.mask == 1).mean().compute()
print(f"mean surprise of a trained token when it was sampled: {float(surprise):.3f} nats")

# %% [markdown]
# ## Trajectories worth reading (`store show --worst 2`)

# %%
for seen in views.view(run, store, views.ranked(store, "worst", 2, f"step == {last.step}")):
    print(f"trajectory {seen.id}, reward {seen.facts['reward']:.2f}: {seen.prompt!r} -> {seen.response!r}")

# %% [markdown]
# ## Another reward, on a branch (`store reprocess`, `store diff`)
#
# Nothing stored is overwritten. The branch records the function that made it and the hash of its file.

# %%
client = Client(processes=False, dashboard_address=None)  # in this process; for a cluster, give its address
pool = Pool(client, shared=False)
branch = f"strict-{len(store.steps())}-{os.getpid()}"
made = reward_rescoring.reprocess(run, "examples/strict_reward.py:score", branch, pool)
print(f"mean reward {made.mean_before:.3f} -> {made.mean_after:.3f}")
changed = branch_diff.difference(run, "main", branch)
print(f"{changed.changed} of {changed.trajectories} rewards differ, {len(changed.flipped)} groups rank differently")

# %% [markdown]
# ## How far has the policy moved? (`store rescore-logprobs`)
#
# Logprobs of the last checkpoint for responses that older versions sampled.

# %%
checkpoint = max((run / "checkpoints").iterdir())
for at in logprob_recompute.rescore(run, str(checkpoint), pool, where=f"step >= {last.step - 1}").by_staleness:
    print(f"staleness {at.staleness}: KL {at.kl:.2g} nats, effective sample size {at.ess_tokens:.0%} of the tokens")

# %% [markdown]
# ## Sharing the data (`store export`)

# %%
written = exporting.export(run, "hf", results / "dataset", pool, where="reward > 0")
print(f"{written.rows} trajectories for datasets.load_dataset({written.path!r})")

# %% [markdown]
# ## Training without sampling (`train-offline`)
#
# On all data, with nothing changed, this reproduces the run's own weights bit for bit. Here it trains with the other
# reward, and only on trajectories of staleness 0 and 1.

# %%
end = training.train_offline(run, results / "policy", pool, branch=branch, where="staleness <= 1")
print(f"{end.checkpoint}: {end.steps} steps on {end.rows} trajectories")
for evaluation in (end.before, end.after):
    if evaluation is not None:
        print(evaluation.line)
client.close()

# %% [markdown]
# ## What if? (`staleflow simulate --from RUN --sweep staleness.eta=0,1,2`)
#
# From the command line: the stored lengths and measured latencies under another bound, in virtual time.
