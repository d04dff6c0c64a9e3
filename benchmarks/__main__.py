"""All benchmarks, each in its quick form: whether it works, in minutes. One alone, at its full size, gives numbers.

    python -m benchmarks [NAME ...]

Those of real runs need the demo's base model; `make bench` makes it.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "runs/base/running-sums"
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ledger": ((),),
    "coordinator": ((),),
    "transfer": ((),),
    "shares": ((),),
    "simulated": (("--out", "{folder}"),),
    "agentic": (("--out", "{folder}"),),
    "prefix": (("--engine", "transformers"),),
    "pulls": (("--out", "{folder}"),),
    "ablation": (("--out", "{folder}"),),
    "reality": (("emulated",), ("overhead",), ("short",), ("transformers",)),
    "forecasts": (("--folder", "{folder}/forecasts"),),
    "rescore": ((),),
    "run_page": ((),),
    "long_store": ((),),
    "model_matrix": (("--out", "{folder}"),),
    "training": ((), ("--prompts",), ("--memory",)),
    "objectives": ((),),
    "learning": (("--set", "runs_dir={folder}"),),
    "time_to_quality": (("--set", "runs_dir={folder}", "--out", "{folder}"),),
    "on_pull": (("--set", "runs_dir={folder}", "--out", "{folder}"),),
    "gpu": (("--out", "{folder}"),),
    "causes": (("--folder", "{folder}", "--out", "{folder}"),),
    "soak": ((),),
    "sources": ((),),
    "endpoint": (("load",), ("identity",)),
    "speculation": ((MODEL,),),
    "engines": (("throughput", MODEL), ("updates", MODEL), ("logprobs", MODEL)),
}
"""Arguments of each benchmark in this folder besides --quick, once for each of its parts."""
NEEDS = {"engines": "vllm", "speculation": "vllm", "objectives": "trl"}
"""Packages that are not everywhere."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}; all by default")
    names = parser.parse_args().names or list(COMMANDS)
    if unknown := set(names) - set(COMMANDS):
        parser.error(f"no benchmark {min(unknown)!r}; there are {', '.join(COMMANDS)}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
                print(f"== {name}: left out, {NEEDS[name]} is not installed", flush=True)
                continue
            for arguments in COMMANDS[name]:
                words = [name, *(word.format(folder=folder) for word in arguments)]
                print(f"== {' '.join(words)}", flush=True)
                begin = time.monotonic()
                command = [sys.executable, "-m", f"benchmarks.{name}", *words[1:], "--quick"]
                code = subprocess.run(command, check=False, cwd=ROOT).returncode
                print(f"== {time.monotonic() - begin:.0f} s" + (f", failed with {code}" if code else ""), flush=True)
                failed += [" ".join(words)] * (code != 0)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
