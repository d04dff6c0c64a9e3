"""Try each family of causal language models with every part of the system, and write docs/models.md.

    python -m benchmarks.model_matrix [FAMILY ...] [--out FOLDER] [--quick]      (or: make models)

Each tiny model (benchmarks/models/model_families.py) goes through the columns below, each in this order, in a process
of its own. A column says `yes`, or why not. --quick: five families, without the whole runs.

models.json has the results, and models.md is written from it after each family: an interrupted call is repeated, and
goes on with the families that it lacks. Families that are named are tried again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models.model_families import CONTEXT, FAMILIES, VOCABULARY, WINDOW, make_family_model

COLUMNS = {
    "engine": "requests of different lengths join and leave; logprobs equal one full forward pass to 1e-5 nats",
    "train": "two steps on rows of different lengths; `padded`: packed rows would have other logprobs",
    "recompute": "two steps with activations computed again give the same weights to 1e-6",
    "bfloat16": "two steps under autocast",
    "LoRA": "two steps of an adapter of rank 4 on the default layers",
    "resume": "a step after a resume point gives the same weights, bit for bit",
    "reload": "the engine loads the trained weights; its logprobs equal the trainer's to 1e-5 nats",
    "checkpoint": "`from_pretrained` reads it and gives the trainer's logprobs; tensors have the original's names",
    "run": "`staleflow run`, 3 steps, with a clean audit; `train-offline` repeats them bit for bit",
}
"""What is tried, by column."""
QUICK = ("llama", "qwen3_moe", "gemma3_text", "qwen3_5_text", "gpt_oss")
PADDED = "padded: "
"""Begins the outcome of a family that trains, with padded rows; the reason follows."""
CLOSE = 1e-5
"""Most nats between two computations of a logprob in float32."""
TRIAL_S = 600.0
"""Seconds that one family may take."""
Reason = str


def trainer_of(model: Path, *, dtype: str = "float32", **changes: Any) -> Any:
    """A policy trainer of a model."""
    from staleflow.tasks.training.policy import TrainerSettings
    from staleflow.tasks.training.trainer_settings import TrainingConfig

    training = TrainingConfig(learning_rate=1e-3, **changes)
    settings = TrainerSettings(
        model=str(model), dtype=dtype, device="cpu", training=training, num_steps=4, temperature=1.0,
        max_response_tokens=CONTEXT, seed=0,
    )  # fmt: skip
    return settings.build(1)


def make_rows() -> list[Any]:
    """Three groups of four responses, of 5 to 60 tokens, some longer than any window."""
    from staleflow.tasks.training.microbatches import Row

    rng = np.random.default_rng(0)
    rows = []
    for length in (4, 9, 3 * WINDOW):
        prompt = rng.integers(2, VOCABULARY, length).astype(np.int32)
        for _ in range(4):
            size = int(rng.integers(5, 60))
            rows.append(
                Row(
                    prompt=prompt,
                    response=rng.integers(2, VOCABULARY, size).astype(np.int32),
                    behaviour=np.full(size, -3.4, np.float32),
                    sampled=np.ones(size, bool),
                    advantage=float(rng.normal()),
                    staleness=1,
                )
            )
    return rows


def weights_of(trainer: Any) -> dict[str, Any]:
    """A copy of the weights that a trainer publishes."""
    import torch

    from staleflow.stores.weights.weight_hash import Weights, sorted_tensors

    def copies(weights: Weights) -> dict[str, Any]:
        return {name: torch.as_tensor(tensor).clone() for name, tensor in sorted_tensors(weights)}

    weights: dict[str, Any] = trainer.apply_to_weights(copies)
    return weights


def two_steps(trainer: Any) -> Reason:
    """Train two steps; the reason why their figures are of no use, if so."""
    for step in range(2):
        metrics = trainer.step(step, make_rows())
        if not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all() or not metrics["grad_norm"]:
            return f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
    return ""


def full_logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    """Logprobs of tokens[1:] by one forward pass, without a cache."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].double()
    table = logits.log_softmax(-1)
    return [float(table[i, token]) for i, token in enumerate(tokens[1:])]


class Trial:
    """One family's model and what several columns use of it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.model = folder / "model"
        make_family_model(family, self.model)
        self._engine: Any = None
        self._trainer: Any = None

    @property
    def trainer(self) -> Any:
        """A trainer after two steps."""
        if self._trainer is None:
            self._trainer = trainer_of(self.model)
            if why := two_steps(self._trainer):
                raise ValueError(why)
        return self._trainer

    @property
    def engine(self) -> Any:
        """The embedded engine on the model."""
        from staleflow.stores.trajectory import InstanceId
        from staleflow.tasks.engines.engine_builder import build_engine
        from staleflow.tasks.engines.engine_settings import TransformersSettings

        if self._engine is None:
            settings = TransformersSettings(
                model=str(self.model), dtype="float32", device="cpu", temperature=1.0, max_running=4, kv_tokens=2048,
                page_tokens=32, max_batch_tokens=512, eos=(1,), seed=0,
            )  # fmt: skip
            self._engine = build_engine(settings, InstanceId("rollout-0"), 1)
        return self._engine

    def close(self) -> None:
        """End the engine's thread."""
        if self._engine is not None:
            self._engine.close()

    def loaded(self, path: Path) -> Any:
        """A model as users load it."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def try_engine(self) -> Reason:
        from staleflow.stores.trajectory import TrajectoryId
        from staleflow.tasks.engines.base import Request, SampledTokens

        model, rng = self.loaded(self.model), np.random.default_rng(1)
        requests = {}
        for number, length in enumerate((3, 40, 11, 25, 5, 33)):
            prompt = tuple(map(int, rng.integers(2, VOCABULARY, length)))
            requests[number] = Request(
                trajectory=TrajectoryId(number), route_number=1, tokens=prompt, max_new_tokens=48
            )
        self.engine.submit(list(requests.values()))
        worst, ended, until = 0.0, 0, time.monotonic() + TRIAL_S / 4
        while ended < len(requests) and time.monotonic() < until:
            for event in self.engine.events(0.5):
                if not isinstance(event, SampledTokens):
                    return f"a request failed: {event}"
                ended += 1
                prompt = requests[event.trajectory].tokens
                tokens = [int(t) for s in event.segments for t in s.tokens]
                logprobs = [float(x) for s in event.segments for x in s.logprobs]
                expected = full_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 :]
                worst = max(worst, float(np.abs(np.subtract(logprobs, expected)).max()))
        if ended < len(requests):
            return "requests did not end"
        return "" if worst < CLOSE else f"logprobs differ by {worst:.1e} nats"

    def try_train(self) -> Reason:
        why = self.trainer.logprob_model.padding_reason
        return f"{PADDED}{why}" if why else ""

    def try_recompute(self) -> Reason:
        again = trainer_of(self.model, recompute_activations=True)
        if why := two_steps(again):
            return why
        expected, values = weights_of(self.trainer), weights_of(again)
        worst = max(float((values[name] - expected[name]).abs().max()) for name in expected)
        return "" if worst < 1e-6 else f"weights differ by {worst:.1e}"

    def try_bfloat16(self) -> Reason:
        return two_steps(trainer_of(self.model, dtype="bfloat16"))

    def try_lora(self) -> Reason:
        from staleflow.tasks.engines.adapters import LoraConfig

        return two_steps(trainer_of(self.model, lora=LoraConfig(rank=4)))

    def try_resume(self) -> Reason:
        import torch

        point, before = self.folder / "point", weights_of(self.trainer)
        self.trainer.begin_save(point)
        self.trainer.end_save()
        resumed = trainer_of(self.model)
        resumed.load_state(point)
        for trainer in (resumed, self.trainer):
            trainer.step(2, make_rows())
        first, second = weights_of(resumed), weights_of(self.trainer)
        if all(torch.equal(first[name], before[name]) for name in before):
            return "a step changed nothing"
        return "" if all(torch.equal(first[name], second[name]) for name in first) else "weights differ"

    def try_reload(self) -> Reason:
        from staleflow.stores.trajectory import PolicyVersion
        from staleflow.stores.weights.weight_folder import WeightFolder

        folder = WeightFolder(self.folder / "weights")
        self.trainer.apply_to_weights(lambda weights: folder.publish(PolicyVersion(1), weights))
        loaded = self.engine.load(PolicyVersion(1), folder.path(PolicyVersion(1)))
        if loaded.weights.outcome != "verified":
            return str(loaded.weights.line)
        tokens = [int(t) for t in np.random.default_rng(2).integers(2, VOCABULARY, 4 * WINDOW)]
        worst = float(np.abs(np.subtract(self.engine.score([tokens])[0].logprobs, self.trainer.logprobs(tokens))).max())
        return "" if worst < CLOSE else f"logprobs differ by {worst:.1e} nats"

    def try_checkpoint(self) -> Reason:
        from safetensors import safe_open

        from staleflow.stores.trajectory import PolicyVersion
        from staleflow.stores.weights.weight_folder import WeightFolder

        folder = WeightFolder(self.folder / "saved")
        self.trainer.apply_to_weights(lambda weights: folder.publish(PolicyVersion(1), weights))
        out = self.folder / "checkpoint"
        self.trainer.save(out, folder.path(PolicyVersion(1)))
        shapes = []
        for path in (self.model, out):
            with safe_open(path / "model.safetensors", "np") as file:
                shapes.append({name: file.get_slice(name).get_shape() for name in sorted(file.keys())})
        if shapes[0] != shapes[1]:
            names = sorted(shapes[0].keys() ^ shapes[1].keys())
            return f"{len(names)} tensors have other names, the first is {names[0]}" if names else "shapes differ"
        tokens = [int(t) for t in np.random.default_rng(2).integers(2, VOCABULARY, 4 * WINDOW)]
        worst = float(np.abs(np.subtract(full_logprobs(self.loaded(out), tokens), self.trainer.logprobs(tokens))).max())
        return "" if worst < CLOSE else f"logprobs differ by {worst:.1e} nats"

    def try_run(self) -> Reason:
        import staleflow

        job = {
            "name": "run", "runs_dir": str(self.folder / "runs"), "steps": 3,
            "model": {"path": str(self.model)},
            "task": {"source": "reasoning_gym:chain_sum", "eval_prompts": 0,
                     "options": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
            "batch": {"groups_per_step": 4, "group_size": 4},
            "rollout": {"instances": 1, "max_new_tokens": 24},
            "training": {"learning_rate": 1e-3},
            "cluster": {"dashboard": False},
        }  # fmt: skip
        result = staleflow.run(job, progress=False)
        report = result.run.audit()
        if not report.is_clean:
            return f"audit: {report.findings[0] if report.findings else 'not clean'}"
        worst = max(step.metrics["kl_behaviour"] for step in result.run.steps() if step.metrics["staleness_max"] == 0)
        if worst > CLOSE:
            return f"mismatch of {worst:.1e} nats"
        offline = result.run.train_offline(self.folder / "offline")
        return "" if offline.same_steps == 3 else f"train-offline repeats {offline.same_steps} of 3 steps"


def trials(trial: Trial, *, quick: bool) -> dict[str, Callable[[], Reason]]:
    """The function that tries each column."""
    tries: dict[str, Callable[[], Reason]] = {
        "engine": trial.try_engine, "train": trial.try_train, "recompute": trial.try_recompute,
        "bfloat16": trial.try_bfloat16, "LoRA": trial.try_lora, "resume": trial.try_resume,
        "reload": trial.try_reload, "checkpoint": trial.try_checkpoint, "run": trial.try_run,
    }  # fmt: skip
    if quick:
        del tries["run"]
    return tries


def try_family(family: str, *, quick: bool) -> dict[str, str]:
    """Try a family in this process: `yes` or the reason why not, by column."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(family, Path(folder))
        outcomes = {}
        for column, attempt in trials(trial, quick=quick).items():
            try:
                why = attempt()
            except Exception as error:  # noqa: BLE001  any failure is a result
                lines = str(error).strip().splitlines()
                why = f"{type(error).__name__}: {lines[0] if lines else ''}"
            outcomes[column] = why.replace(folder, "FOLDER") or "yes"
        trial.close()
        return outcomes


def in_process(family: str, *, quick: bool) -> dict[str, str]:
    """Try a family in a process of its own, which a crash or a hang ends alone."""
    command = [sys.executable, "-m", "benchmarks.model_matrix", "--alone", family, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return {"engine": f"did not end within {TRIAL_S:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"engine": f"the process ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    outcomes: dict[str, str] = json.loads(lines[-1])
    return outcomes


def present_versions() -> dict[str, str]:
    """What results depend on besides this repository."""
    return {
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
        "processor": platform.machine(),
    }


def read_results(path: Path) -> dict[str, dict[str, str]]:
    """Results by family that an earlier call has written, of the versions that are installed now; none without a
    file."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    results: dict[str, dict[str, str]] = stored["families"] if stored["versions"] == present_versions() else {}
    return results


def write_results(folder: Path, results: dict[str, dict[str, str]]) -> None:
    """Write models.json and models.md, in the order of FAMILIES."""
    stored = {
        "versions": present_versions(),
        "families": {family: results[family] for family in FAMILIES if family in results},
    }
    (folder / "models.json").write_text(json.dumps(stored, indent=1) + "\n")
    (folder / "models.md").write_text(page(stored))


def page(stored: dict[str, Any]) -> str:
    """docs/models.md: the families for which all works, and for each other one what does not, with the reason."""
    *packages, processor = stored["versions"].items()
    lines = [
        "# Models",
        "",
        "What works for each family of causal language models, tried on tiny random models by `make models` "
        f"({', '.join(' '.join(package) for package in packages)}; {processor[1]} processor; float32 unless a check "
        "says otherwise). A family is a `model_type` of transformers. Not tried: other families, GPUs, more than one "
        "rank, real weights; with vLLM [six families](engines.md#vllm).",
        "",
        *(f"- **{column}**: {meaning}" for column, meaning in COLUMNS.items()),
        "",
    ]
    works = [family for family, outcomes in stored["families"].items() if not differences(outcomes)]
    lines += [f"All of this works for {', '.join(f'`{family}`' for family in works) or 'no family'}.", ""]
    families: dict[str, list[str]] = {}
    for family, outcomes in stored["families"].items():
        if gaps := differences(outcomes):
            families.setdefault("; ".join(gaps), []).append(f"`{family}`")
    lines += ["| family | all but |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {gaps} |" for gaps, names in families.items()]
    return "\n".join(lines) + "\n"


def differences(outcomes: dict[str, str]) -> list[str]:
    """What does not work for a family, works with padding only, or was not tried, each with its reason."""
    columns: dict[str, list[str]] = {}  # by reason, which several columns may share
    for column in COLUMNS:
        outcome = outcomes.get(column, "yes")
        if outcome.startswith(PADDED):
            reason = outcome.removeprefix(PADDED).partition(", by ")[0]  # by how much, which differs by family
            columns.setdefault(reason, []).append(f"{column} padded")
        elif outcome != "yes":
            columns.setdefault(reason_of(outcome), []).append(f"no {column}")
    gaps = [f"{', '.join(names)}: {reason}" for reason, names in columns.items()]
    untried = [column for column in COLUMNS if column not in outcomes]
    return [*gaps, *([f"{', '.join(untried)} not tried"] if untried else [])]


def reason_of(outcome: str) -> str:
    """The reason that an error gives, without its class and what it advises.

    >>> reason_of("ConfigError: lora.targets = []: it has no layer; train all weights")
    'lora.targets = []: it has no layer'
    """
    return re.sub(r"^\w+Error: ", "", outcome).partition("; ")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of models.json and models.md")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(try_family(arguments.alone, quick=arguments.quick)))
        return
    results = read_results(arguments.out / "models.json")
    families = arguments.families or [name for name in (QUICK if arguments.quick else FAMILIES) if name not in results]
    if unknown := set(families) - FAMILIES.keys():
        parser.error(f"no family {min(unknown)!r}; there are {', '.join(FAMILIES)}")
    for number, family in enumerate(families, 1):
        started = time.monotonic()
        results[family] = in_process(family, quick=arguments.quick)
        gaps = {column: why for column, why in results[family].items() if why != "yes"}
        print(f"{number}/{len(families)} {family}: {time.monotonic() - started:.0f} s; {gaps or 'all'}", flush=True)
        write_results(arguments.out, results)


if __name__ == "__main__":
    main()
