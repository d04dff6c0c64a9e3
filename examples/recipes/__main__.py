"""python -m examples.recipes NAME: run a recipe's job, check whether the run is in its band, and draw it.

Exit code 0 if it is, 1 if it is not or the recipe has no band, 2 if the recipe cannot be run.
Without a name: a table of all recipes.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

import staleflow
from examples.recipes import picture
from examples.recipes import recipe as recipes
from examples.recipes.recipe import Recipe

PICTURE = "recipe.png"
"""The picture of a run, in its folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.recipes", description=__doc__)
    parser.add_argument("name", nargs="?", help="the recipe")
    parser.add_argument("--seed", type=int, help="seed of the run; by default that of the job file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the job")
    parser.add_argument("--check", type=Path, metavar="RUN", help="check a stored run instead of running the job")
    parser.add_argument("--make", action="store_true", help="print the make target of the model, and do no more")
    args = parser.parse_args(arguments)
    try:
        if args.name is None:
            print(recipes.table([recipes.load(name) for name in recipes.names()]))
            return 0
        recipe = find_recipe(args.name)
        if args.make:
            print(recipe.make)
            return 0
        result = staleflow.open_run(args.check or run(recipe, args.seed, args.set))
        code = report(recipe, result)
        if args.check is None:
            picture.draw(result.path / PICTURE, [(recipe, result)])
            print(f"{recipe.name}: picture: {result.path / PICTURE}")
        return code
    except staleflow.ConfigError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 2


def find_recipe(name: str) -> Recipe:
    """The recipe of this name. Raises ConfigError if there is none."""
    names = recipes.names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise staleflow.ConfigError(f"{name!r}: no such recipe; {hint}")
    return recipes.load(name)


def run(recipe: Recipe, seed: int | None, overrides: Sequence[str]) -> Path:
    """Run the recipe's job; returns the folder of the run. Raises ConfigError."""
    if not recipe.measured:
        print(f"{recipe.name}: not run by us; its settings may have to be changed for your machine", flush=True)
    for warning in recipes.check_data(recipe):
        print(f"{recipe.name}: {warning}", flush=True)
    job = staleflow.load_job(recipe.job, [*overrides, *([] if seed is None else [f"seed={seed}"])])
    if recipe.after:
        before = staleflow.load_job(recipes.load(recipe.after).job)
        require_run(recipe, Path(job.runs_dir, f"recipe-{recipe.after}-{before.seed}"))
    result = staleflow.run(job, overrides={"name": f"recipe-{recipe.name}-{job.seed}"}, progress=True)
    return result.run_dir


def require_run(recipe: Recipe, folder: Path) -> None:
    """Raise ConfigError unless the run that the recipe builds upon is there."""
    if not folder.exists():
        raise staleflow.ConfigError(f"{folder}: no such run; {recipe.name} needs it: `make recipe NAME={recipe.after}`")


def report(recipe: Recipe, run: staleflow.Run) -> int:
    """Print whether a run is complete, in the recipe's band, and clean by its audit; returns the exit code."""
    steps, planned = len(run.steps()), run.job.steps
    if steps < planned:
        print(f"{recipe.name}: missed: {steps} of {planned} steps are done; `staleflow resume {run.source}` goes on")
        return 1
    met, line = recipe.verdict(recipes.curves(run))
    print(line)
    audit = run.audit()
    if not audit.is_clean:
        print(f"{recipe.name}: the audit of {run.source} has findings: `staleflow store audit {run.source}`")
    return 0 if met and audit.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
