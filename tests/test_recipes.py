"""Recipes: valid job files, decisions by bands, and recipes that were not run here."""

from __future__ import annotations

import ast
import http.server
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import staleflow
from examples.recipes import __main__ as command
from examples.recipes import picture
from examples.recipes import recipe as recipes
from examples.recipes.recipe import Band, Data, Measurement, Recipe
from staleflow.tasks.settings import user_code
from tests.support.simulated_store import stored_simulation

NAMES = recipes.names()
LEVEL = Band(metric="held-out sampled", low=0.8, high=0.9, basis="")
SOURCE = {"published": ".85", "source": "https://example.org"}
FOLDER = Path("examples/recipes")


def make_recipe(**settings: Any) -> Recipe:
    fixed = {"name": "a", "title": "", "job": "", "model": "", "hardware": "", "minutes": 1, "generated": "by us"}
    return Recipe(**{**fixed, **settings})


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_and_its_job_file_are_valid(name: str) -> None:
    recipe = recipes.load(name)
    job = staleflow.load_job(recipe.job)
    assert recipe.title and recipe.model and recipe.hardware
    if recipe.make:
        assert f"\n{recipe.make}: " in Path("Makefile").read_text()
    if recipe.after:
        assert recipe.after in NAMES
    sets = {"held-out", *job.evaluation.sets, *job.task.sources}
    metrics = {"reward", *(f"{name} {way}" for name in sets for way in ("sampled", "greedy"))}
    assert {band.metric for band in recipe.bands} <= metrics
    for file, names in re.findall(r"(examples/[\w/]+\.py):(\w+)", Path(recipe.job).read_text()):
        defined = {node.name for node in ast.parse(Path(file).read_text()).body if hasattr(node, "name")}
        assert names in defined


@pytest.mark.parametrize("name", NAMES)
def test_each_measured_run_ended_within_the_band(name: str) -> None:
    recipe = recipes.load(name)
    for band in recipe.bands:
        runs = [run for run in recipe.measured if run.metric == band.metric]
        figures = [band.figure({band.metric: [run.before, run.after]}) for run in runs]
        assert all(figure and band.low <= figure <= band.high for figure in figures)


def test_the_page_has_the_table_of_all_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert capsys.readouterr().out.strip() in Path("docs/recipes.md").read_text(), "`python -m examples.recipes`"


def test_a_recipe_that_was_not_run_needs_the_source_of_its_band() -> None:
    with pytest.raises(ValueError, match="need the source"):
        make_recipe(bands=(LEVEL,))
    assert make_recipe(bands=(LEVEL,), **SOURCE).verdict({"held-out sampled": [0.85]}) == (
        True,
        "a: met: held-out sampled at the end 0.850, band 0.800 to 0.900 (band of https://example.org; not run by us)",
    )
    assert "| not run |" in recipes.table([make_recipe(bands=(LEVEL,), **SOURCE)])


def test_a_figure_outside_a_band_is_reported() -> None:
    start = Band(metric="held-out sampled", first=0, last=0, low=0.1, high=0.2, basis="")
    measured = Measurement(seed=1, before=0.1, after=0.85, stderr=0.01, seconds=1, load="1")
    recipe = make_recipe(bands=(start, LEVEL), measured=(measured,))
    assert recipe.verdict({"held-out sampled": [0.1, 0.95]}) == (
        False,
        "a: missed: held-out sampled at the end 0.950, band 0.800 to 0.900",
    )
    assert recipe.verdict({"held-out sampled": [0.2, 0.8]})[0]
    assert recipe.verdict({"reward": [0.85]})[1].startswith("a: missed: held-out sampled before training too few")
    assert make_recipe().verdict({}) == (False, "a: not checked: the recipe has no band")


@pytest.mark.parametrize(
    ("settings", "figure", "where"),
    [
        ({"first": -2}, 0.75, "mean of the last 2"),
        ({"first": 0, "of": "highest"}, 1.0, "highest of all"),
        ({"first": 1, "last": 2}, 0.75, "mean of numbers 1 to 2"),
        ({"first": -4}, None, "mean of the last 4"),
        ({"first": 3, "last": 3}, None, "number 3"),
    ],
)
def test_a_band_selects_the_values_of_its_figure(settings: Any, figure: float | None, where: str) -> None:
    band = Band(metric="reward", low=0, high=1, basis="", **settings)
    assert band.figure({"reward": [1.0, 0.5, 1.0]}) == pytest.approx(figure)
    assert band.where.endswith(where)


def test_data_files_are_checked_by_hash(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    right = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    pinned = make_recipe(data=(Data(name=str(file), sha256=right, url="https://example.org/rows"),))
    with pytest.raises(staleflow.ConfigError, match="no such file; download https://"):
        list(recipes.check_data(pinned))
    file.write_text("")
    assert list(recipes.check_data(pinned)) == []
    file.write_text("other")
    with pytest.raises(staleflow.ConfigError, match=f"not {right}; download"):
        list(recipes.check_data(pinned))
    (warning,) = recipes.check_data(make_recipe(data=(Data(name="owner/rows"),)))
    assert warning.startswith("owner/rows: hash not pinned: data was not available")


def test_invalid_recipe_commands_give_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert command.main(["sum"]) == 2
    assert capsys.readouterr().err == "recipe: 'sum': no such recipe; did you mean sums?\n"
    assert command.main(["sums", "--make"]) == 0
    assert capsys.readouterr().out == "running-sums-model\n"
    assert command.main(["sums", "--set", "steps=none"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    distillation, jobs = recipes.load("distillation"), Path.cwd()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(staleflow.ConfigError, match=r"distillation needs it: `make recipe NAME=sums`"):
        command.require_run(distillation, Path("runs/recipe-sums-7"))
    monkeypatch.chdir(jobs)


def test_a_stored_run_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_simulation(tmp_path, "name=a", "steps=3")
    assert command.main(["sums", "--check", str(run)]) == 1
    missed, *_ = capsys.readouterr().out.splitlines()
    assert missed == "sums: missed: held-out sampled at the end too few values, band 0.750 to 0.950"
    config = run / "config.toml"
    config.write_text(config.read_text().replace("steps = 3", "steps = 4"))
    assert command.main(["sums", "--check", str(run)]) == 1
    assert "3 of 4 steps are done; `staleflow resume" in capsys.readouterr().out


def test_a_run_of_a_recipe_has_its_picture_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored_simulation(tmp_path, "name=a", "steps=3")
    monkeypatch.setattr(command, "run", lambda *_: run)
    assert command.main(["sums"]) == 1
    verdict, *_, line = capsys.readouterr().out.splitlines()
    assert verdict.startswith("sums: missed: ")
    assert line == f"sums: picture: {run}/recipe.png"
    assert (run / "recipe.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_plot_of_each_run_with_its_curve_and_bands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored_simulation(tmp_path, "name=a", "steps=3")
    figures, rewards = list[Figure](), [0.1 * i for i in range(15)]
    monkeypatch.setattr(recipes, "curves", lambda _: {"reward": rewards})
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    picture.main([str(tmp_path / "recipes.png"), f"sums={run}", f"agent_game={run}"])
    sums, game = figures[0].axes
    assert [axes.get_title() for axes in (sums, game)] == ["sums", "agent_game"]
    assert list(np.asarray(sums.lines[0].get_ydata())) == rewards
    boxes = [[c.get_datalim(axes.transData) for c in axes.collections] for axes in (sums, game)]
    assert [[list(box.extents) for box in row] for row in boxes] == [
        [[14, 0.75, 15, 0.95]], [[14, 0.94, 15, 1.0], [10, 0.78, 14, 0.95]],
    ]  # fmt: skip


def test_the_similarity_of_reversed_texts() -> None:
    similarity = user_code.load(f"{FOLDER}/reverse_text/reward.py:similarity", "")
    assert similarity(" cba ", {"prompt": "abc"}) == 1.0
    assert similarity("", {"prompt": "abc"}) == 0.0
    assert similarity("cb", {"prompt": "abc"}) == pytest.approx(0.8)


def test_the_search_tool_returns_passages_and_answers_match_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"{FOLDER}/search_agent/search.py"
    exact_match = user_code.load(f"{file}:exact_match", "")
    assert exact_match("The  Beatles!", {"golden_answers": ["Wings", "beatles"]}) == 1.0
    assert exact_match("Beatles band", {"golden_answers": ["beatles"]}) == 0.0

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = [{"document": {"contents": f"{asked['queries'][0]} {i}"}, "score": 1.0} for i in range(2)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"result": [found]}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{server.server_port}/retrieve")
        assert user_code.load(f"{file}:search", "")("Lima") == "Lima 0\n\nLima 1"


def test_the_last_tenth_of_the_agent_tasks_is_held_out(tmp_path: Path) -> None:
    instance_of = user_code.load(f"{FOLDER}/swe_agent/agent.py:instance_of", "")
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"instance_id": "{i}"}}\n' for i in range(20)))

    def drawn(index: int, held_out: bool) -> str:
        task = SimpleNamespace(index=index, held_out=held_out, options={"tasks": str(file)})
        return str(instance_of(task)["instance_id"])

    assert [drawn(i, False) for i in (0, 17, 18)] == ["0", "17", "0"]
    assert [drawn(i, True) for i in (0, 1, 2)] == ["18", "19", "18"]
