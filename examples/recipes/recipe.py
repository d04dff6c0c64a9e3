"""Recipes: what a job should reach, where that figure comes from, and whether a run reached it.

A recipe that was not run here has only figures of others, which it names as such; its bands are theirs.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import staleflow

FOLDER = Path(__file__).parent
HASH_BYTES = 2**20
"""Bytes of a data file that are hashed at once."""
SHORT_METRICS = ("reward", "held-out sampled", "held-out greedy")
"""Metrics of every run; those of other evaluation sets are `SET sampled` and `SET greedy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The limits of one figure of a run."""

    metric: str
    """`reward` of training batches, or the reward on an evaluation set, `held-out sampled` or `held-out greedy`."""
    low: float
    high: float
    basis: str
    """Where the limits come from."""
    first: int = -1
    """Of the metric's values, the first and the last that count, as Python's indices: -1 is the newest."""
    last: int = -1
    of: str = "mean"
    """What is made of them: `mean` or `highest`."""

    def __post_init__(self) -> None:
        if self.of not in ("mean", "highest") or self.low > self.high:
            raise ValueError(f"band of {self.metric}: of = {self.of!r}, {self.low} to {self.high}")

    def figure(self, curves: Mapping[str, Sequence[float]]) -> float | None:
        """The figure that has to lie in the band; None if the run has too few values."""
        values = curves.get(self.metric, ())
        first, last = (at % len(values) if -len(values) <= at < len(values) else None for at in (self.first, self.last))
        if first is None or last is None or first > last:
            return None
        counted = values[first : last + 1]
        return max(counted) if self.of == "highest" else sum(counted) / len(counted)

    @property
    def where(self) -> str:
        """The metric and the values that count, in words."""
        if self.first == self.last:
            places = {0: "before training" if self.metric != "reward" else "of the first step", -1: "at the end"}
            return f"{self.metric} {places.get(self.first, f'number {self.first}')}"
        if self.last == -1 and self.first < 0:
            return f"{self.metric}, {self.of} of the last {-self.first}"
        if (self.first, self.last) == (0, -1):
            return f"{self.metric}, {self.of} of all"
        return f"{self.metric}, {self.of} of numbers {self.first} to {self.last}"

    @property
    def limits(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Data that a recipe trains or evaluates on."""

    name: str
    """The file, relative to the current folder, or a data set of the hub."""
    sha256: str = ""
    """Of the file; empty: not pinned, since the data was not available here."""
    url: str = ""
    """Where the file can be downloaded; empty for a data set of the hub, which is downloaded with the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of a recipe on our machine: held-out rewards before and after, with the standard error after."""

    metric: str = "held-out sampled"
    seed: int
    before: float
    after: float
    stderr: float
    seconds: int
    load: str
    """Processes at work on the machine, with those of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A job, and what it should reach."""

    name: str
    title: str
    job: str
    """The job file, relative to the repository."""
    model: str
    hardware: str
    minutes: float
    """About how long a run takes on that hardware; 0: unknown."""
    make: str = ""
    """Target of the Makefile that makes the model; empty if the hub has it."""
    after: str = ""
    """Recipe whose run has to be there before."""
    generated: str = ""
    """What makes the data, if no file has it."""
    data: tuple[Data, ...] = ()
    published: str = ""
    """A figure of others for this job, or one that is close to it."""
    source: str = ""
    """Where they published it."""
    bands: tuple[Band, ...] = ()
    measured: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        if self.bands and not (self.measured or self.source):
            raise ValueError("bands of a recipe that was not run need the source of the published figure")
        if not self.data and not self.generated:
            raise ValueError("neither data nor generated says what it trains on")

    def verdict(self, curves: Mapping[str, Sequence[float]]) -> tuple[bool, str]:
        """Whether a run with these values of its metrics is within all bands, and a line that says so. Without a band
        nothing was checked, so it is not."""
        met, missed = list[str](), list[str]()
        for band in self.bands:
            figure = band.figure(curves)
            shown = "too few values" if figure is None else f"{figure:.3f}"
            inside = figure is not None and band.low <= figure <= band.high
            (met if inside else missed).append(f"{band.where} {shown}, band {band.limits}")
        if not self.bands:
            return False, f"{self.name}: not checked: the recipe has no band"
        source = "" if self.measured else f" (band of {self.source}; not run by us)"
        return not missed, f"{self.name}: {'missed' if missed else 'met'}: {'; '.join(missed or met)}{source}"


def names() -> list[str]:
    """All recipes."""
    return sorted(path.parent.name for path in FOLDER.glob("*/recipe.toml"))


def load(name: str) -> Recipe:
    """The recipe of a folder. Raises ConfigError if its file has a mistake."""
    path = FOLDER / name / "recipe.toml"
    try:
        tree = tomllib.loads(path.read_text())
        parts: dict[str, Any] = {
            "data": tuple(Data(**entry) for entry in tree.pop("data", [])),
            "bands": tuple(Band(**entry) for entry in tree.pop("band", [])),
            "measured": tuple(Measurement(**entry) for entry in tree.pop("measured", [])),
        }
        return Recipe(name=name, **parts, **tree)
    except (TypeError, ValueError) as error:
        raise staleflow.ConfigError(f"{path}: {error}") from error


def curves(run: staleflow.Run) -> dict[str, list[float]]:
    """The values of a stored run's metrics, in the order of steps and versions."""
    values: dict[str, list[float]] = {name: [] for name in SHORT_METRICS}
    values["reward"] = [record.metrics["reward"] for record in run.steps() if "reward" in record.metrics]
    for evaluation in sorted(run.evaluations(), key=lambda e: e.version):
        for way, mean in (("sampled", evaluation.sampled), ("greedy", evaluation.greedy)):
            if mean is not None:
                values.setdefault(f"{evaluation.name} {way}", []).append(mean)
    return values


def check_data(recipe: Recipe) -> Iterator[str]:
    """Warnings about data that is not pinned. Raises ConfigError if a file is missing or is another one."""
    for data in recipe.data:
        path = Path(data.name)
        if data.url and not path.exists():
            raise staleflow.ConfigError(f"{path}: no such file; download {data.url} to it")
        if not data.sha256:
            yield f"{data.name}: hash not pinned: data was not available; it may not be what the figure was measured on"
        elif (digest := sha256(path)) != data.sha256:
            raise staleflow.ConfigError(f"{path}: sha256 {digest}, not {data.sha256}; download {data.url} again")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def table(recipes: Sequence[Recipe]) -> str:
    """The table of recipes, Markdown."""
    rows = ["| recipe | model, hardware | figure | run here |", "|---|---|---|---|"]
    for recipe in recipes:
        minutes = f", {recipe.minutes:g} minutes" if recipe.minutes else ""
        link = f"[{recipe.name}](../examples/recipes/{recipe.name}/recipe.toml)"
        rows.append(
            f"| {link}: {recipe.title} | {recipe.model}; {recipe.hardware}{minutes} | {_figure(recipe)} "
            f"| {_runs(recipe.measured)} |"
        )
    return "\n".join(rows)


def _figure(recipe: Recipe) -> str:
    bands = "; ".join(f"{band.where} {band.limits}" for band in recipe.bands)
    published = f"{recipe.published} ([source]({recipe.source}))" if recipe.source else ""
    return "; ".join(filter(None, (published, bands and f"band: {bands}"))) or "none"


def _runs(measured: Sequence[Any]) -> str:
    if not measured:
        return "not run"
    before, after, stderr = ([getattr(m, name) for m in measured] for name in ("before", "after", "stderr"))
    runs = f", {len(measured)} runs" if len(measured) > 1 else ""
    seconds = _range([m.seconds for m in measured], "d")
    return f"{_range(before)} to {_range(after)} ({max(stderr):.3f}), {seconds} s{runs}"


def _range(values: Sequence[float], form: str = ".3f") -> str:
    """Least and most of measured values, as `0.081-0.177`, or the value if all are equal."""
    return "-".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))
