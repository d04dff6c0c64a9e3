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
from typing import Any

from distributed import Client

import staleflow

source = os.environ.get("RUN", "runs/demo")  # a run's folder, or the URL of its store in a bucket
results = Path(f"{source}-offline-example")
shutil.rmtree(results, ignore_errors=True)
results.mkdir()

# %% [markdown]
# ## What is stored, and is it consistent? (`store show`, `store audit`)

# %%
run = staleflow.open_run(source)
print(run)
print(f"{run.bound}; audit clean: {run.audit().is_clean}")
print(run.metrics()[["reward", "staleness_mean", "response_mean"]].tail())

# %% [markdown]
# The batch of any step, bit for bit as the trainer received it (`store show --at-step K`).

# %%
last = run.steps()[-1].step
batch = run.batch(last)
assert batch.is_intact
print(f"step {last} consumed {len(batch.trajectories)} trajectories, fingerprint {batch.fingerprint}")

# %% [markdown]
# ## Trajectories worth reading (`store show --worst 2`)

# %%
for id in run.sorted_ids("worst", 2, step=last):
    trajectory = run.trajectory(id)
    print(f"trajectory {id}, reward {trajectory.reward:.2f}: {trajectory.prompt!r} -> {trajectory.response!r}")

# %% [markdown]
# ## As a table
#
# One row per trajectory, texts and tokens included.

# %%
frame = run.to_pandas("staleness <= 1 and reward > 0")
print(frame[["trajectory", "step", "reward", "prompt", "response"]].tail())

# %% [markdown]
# A store may be larger than memory: then Dask's workers read it block by block. Without a client Dask computes in this
# process; with `Client("tcp://head:8786")` it computes on a cluster.

# %%
blocks = run.to_dask()
trained = blocks[blocks.fate == "consumed"]
print(trained.groupby("staleness")[["reward", "response_tokens"]].mean().compute())

# %% [markdown]
# ## As arrays
#
# Tokens are one after another along a dimension of their own; `mask` is 1 for tokens in the loss.

# %%
data = run.to_xarray()
surprise = -data.logprobs.where(data.mask == 1).mean().compute()
print(f"mean surprise of a trained token when it was sampled: {float(surprise):.3f} nats")

# %% [markdown]
# ## Another reward, on a branch (`store rescore`, `store diff`)
#
# Nothing stored is overwritten. The branch records the reward that made it; a function of this file is saved with the
# run. It gets the text of the response and the record of its prompt.

# %%
client = Client(processes=False, dashboard_address=None)  # in this process; for a cluster, give its address


def exact(answer: str, record: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Reward and its parts by name. answer: what `task.answer_pattern` matched, or the whole response."""
    right = float(answer.strip() == str(record["answer"]).strip())
    return right, {"right": right, "letters": float(len(answer))}


branch = f"strict-{len(run.commits())}-{os.getpid()}"
made = run.rescore(reward=exact, branch=branch, client=client)
print(f"mean reward {made.mean_before:.3f} -> {made.mean_after:.3f}")
changed = run.diff("main", branch)
print(
    f"{changed.changed} of {changed.trajectories} rewards differ, {len(changed.order_changed)} groups rank differently"
)

# %% [markdown]
# ## How far has the policy moved? (`store recompute-logprobs`)
#
# Logprobs of the last checkpoint for responses that older versions sampled.

# %%
checkpoint = max((run.path / "checkpoints").iterdir())
for row in run.recompute_logprobs(checkpoint, where=f"step >= {last - 1}", client=client).by_staleness:
    print(f"staleness {row.staleness}: KL {row.kl:.2g} nats, effective sample size {row.ess_tokens:.0%} of the tokens")

# %% [markdown]
# ## Sharing the data (`store export`)

# %%
written = run.export("hf", results / "dataset", where="reward > 0", client=client)
print(f"{written.rows} trajectories for datasets.load_dataset({written.path!r})")

# %% [markdown]
# ## Training without sampling (`train-offline`)
#
# On all data, with nothing changed, this reproduces the run's own weights bit for bit. Here it trains with the other
# reward, and only on trajectories of staleness 0 and 1.

# %%
end = run.branch(branch).train_offline(results / "policy", where="staleness <= 1", client=client)
print(f"{end.checkpoint}: {end.steps} steps on {end.rows} trajectories")
for evaluation in (end.before, end.after):
    if evaluation is not None:
        print(evaluation.line)
client.close()

# %% [markdown]
# ## What if? (`staleflow simulate --from RUN --sweep staleness.eta=0,1,2`)
#
# From the command line: the stored lengths and measured latencies under another bound, in virtual time.
