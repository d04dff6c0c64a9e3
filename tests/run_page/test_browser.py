"""The run page in Chromium, on a desktop and on a phone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from staleflow.pipeline.run_page.api import RunApi
from staleflow.pipeline.run_page.page_server import listen, make_server
from staleflow.pipeline.run_page.run_reader import RunReader
from staleflow.pipeline.runtime.evaluation_figures import PromptRewards, compute_figures
from staleflow.pipeline.runtime.evaluation_results import Evaluation, write_evaluations
from staleflow.stores.trajectories.versioned import VersionedStore
from staleflow.stores.trajectory import AbortReason, Fate, FinishReason
from staleflow.tasks.sources.reward_process import ScoredResponse
from tests.support.browser import in_browser, open_browser, open_page
from tests.support.stored_runs import Response, StoredRun

pytestmark = in_browser

RUNNER = asyncio.Runner()
RUN = RUNNER.run
BROWSERS: list[Any] = []
"""The browser of this module's tests."""


@pytest.fixture(scope="module", autouse=True)
def _browser() -> Iterator[None]:
    opening = open_browser()
    with RUNNER:
        BROWSERS.append(RUN(opening.__aenter__()))
        yield
        RUN(opening.__aexit__(None, None, None))


HOSTILE = (
    "</pre></script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "\x1b[31mred\x1b[0m \u202eevil\u202c \u200bzero\ufeff &lt;b&gt; \u05e9\u05dc\u05d5\u05dd "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467"
)
"""Markup, a terminal escape sequence, direction marks, zero-width characters, right-to-left letters, and an emoji with
joiners."""
VIEWS = ("/", "/step/1", "/group/1", "/trajectories", "/trajectory/2", "/lanes", "/compare", "/job")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@contextlib.asynccontextmanager
async def serving(run_dir: Path, other: Path | None = None) -> AsyncIterator[str]:
    """Serve the page of a run from a thread; yields its address. other: a second run."""
    listening = listen("127.0.0.1", 0, exactly=True)
    server = make_server(RunApi(*map(RunReader, filter(None, (run_dir, other)))), "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)
        listening.close()


@contextlib.asynccontextmanager
async def open_run_page(
    run: StoredRun, other: StoredRun | None = None, **context: Any
) -> AsyncIterator[tuple[Any, str]]:
    """Open a browser page for a run, and for a second one; yields the page and the address."""
    async with (
        serving(run.run_dir, other.run_dir if other else None) as address,
        open_page(BROWSERS[0], viewport=DESKTOP, **context) as page,
    ):
        yield page, address


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    stored = StoredRun(tmp_path, group=3)
    stored.train([("one plus one", [Response("two", 1.0), Response("three", 0.0), Response("2", 1.0)])])
    stored.train(
        [
            (
                f"prompt {HOSTILE}",
                [
                    Response(f"answer {HOSTILE}", 1.0, versions=(0, 1), parts={"<b>form</b>": 0.5}),
                    Response("wrong " * 400, 0.0, error="<i>reward</i> failed", finish=FinishReason.LENGTH),
                    Response("late", fate=Fate.ABORTED, reason=AbortReason.SURPLUS_MEMBER),
                ],
            )
        ]
    )
    (stored.run_dir / "events.jsonl").write_text(JOURNAL)
    rewards = {f"prompt {i}": PromptRewards(sampled=(0.0, 1.0), greedy=(1.0,)) for i in range(12)}
    scores = [ScoredResponse(reward=reward) for reward in (0.0, 1.0)] * 12
    figures = compute_figures(rewards, 2, rewards)
    evaluation = Evaluation.summarize(3, scores, [], {}, name=f"set {HOSTILE}", samples=2, figures=figures)
    write_evaluations(stored.run_dir, [evaluation])
    return stored


def journal() -> str:
    """Write the events of both steps: each group arrives, is sampled on a separate instance, scored and trained."""
    lines: list[tuple[float, dict[str, Any], list[dict[str, Any]]]] = []
    for instance in (0, 1):
        lines.append(
            (0.0, {"type": "InstanceJoined", "instance": f"rollout-{instance}", "version": 0, "max_running": 4}, [])
        )
    for step in (0, 1):
        ids, at = range(3 * step, 3 * step + 3), 10.0 * step
        routes = [{"type": "Route", "trajectory": i, "instance": f"rollout-{step}", "version": step} for i in ids]
        lines.append((at + 1, {"type": "GroupsArrived", "groups": [{"group": step}]}, routes))
        lines += [(at + 2 + i % 3, {"type": "TrajectorySampled", "trajectory": i, "tokens": 5}, []) for i in ids]
        lines += [(at + 5, {"type": "TrajectoryScored", "trajectory": i, "reward": 1.0}, []) for i in ids]
        lines.append((at + 6, {"type": "Tick"}, [{"type": "Train", "step": step, "trajectories": [*ids]}]))
        lines.append((at + 9, {"type": "VersionPublished", "version": step + 1}, []))
    return "".join(
        json.dumps({"now": now, "event": event, "commands": commands}) + "\n" for now, event, commands in lines
    )


JOURNAL = journal()


async def test_model_output_is_shown_escaped_and_never_executed(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        for view in (
            "/",
            "/step/1",
            "/trajectories?sort=trajectory",
            "/trajectory/3",
            "/trajectory/3?colour=probability",
        ):
            await page.goto(address + view)
            await page.get_by_text("</script>").first.wait_for()
            assert await page.evaluate("window.hacked") is None, view
            assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0, view
            unseen = await page.locator(".unseen").all_inner_texts()
            assert {"ESC", "ZWSP", "BOM", "U+202E", "U+202C"} <= set(unseen), view
            assert view.startswith("/trajectory/") or "ZWJ" not in unseen, view  # the family is one character
        await page.goto(f"{address}/trajectory/3")
        await page.get_by_text("<b>form</b>").wait_for()


async def test_a_newly_stored_step_appears_without_reloading(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        await page.goto(address)
        steps = page.locator(".tile", has_text="of 3").locator("b")
        await page.get_by_text("of 3").wait_for()
        assert await steps.inner_text() == "2"
        await page.evaluate("window.kept = true")
        assert not await page.get_by_text("turns", exact=True).count()
        responses = [Response("3", 1.0), Response("4", 0.0), Response("5", 0.0)]
        await asyncio.to_thread(run.train, [("three", responses)], turns_mean=1.5, turns_max=2.0)
        await page.get_by_text("turns", exact=True).first.wait_for()
        await asyncio.to_thread(run.end)
        await steps.filter(has_text="3").wait_for()
        await page.get_by_text("finished", exact=True).wait_for()
        (run.run_dir / "summary.json").write_text(json.dumps({"notes": ["written after the end"]}))
        await page.get_by_text("written after the end").wait_for()
        assert await page.evaluate("window.kept") is True


async def test_steps_that_were_undone_while_the_tab_was_hidden_are_replaced(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}})"
        await page.goto(address)
        reward = page.locator(".tile", has_text="reward, all steps").locator("b")
        await reward.wait_for()
        await page.evaluate(hide.format("true"))
        VersionedStore.rewind(run.run_dir / "store", 1)
        run.store, run.step = VersionedStore.open(run.run_dir / "store"), 1
        for reward_of_step in (7.0, 9.0):
            run.train([("p", [Response("a", reward_of_step), Response("b", reward_of_step)])])
        await page.evaluate(hide.format("false"))
        await reward.filter(has_text="5.56").wait_for()  # the mean of 2/3, 7 and 9


async def test_a_filter_is_part_of_the_address_and_an_invalid_one_gives_one_line(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        await page.goto(f"{address}/trajectories")
        await page.get_by_label("Where").fill("fate == 'aborted'")
        await page.get_by_label("Where").press("Enter")
        await page.get_by_text("1 trajectory", exact=True).wait_for()
        assert "where=fate" in page.url
        await page.reload()
        await page.get_by_text("aborted: surplus member").wait_for()
        assert await page.get_by_label("Where").input_value() == "fate == 'aborted'"
        await page.get_by_label("Where").fill("rewad > 0")
        await page.get_by_role("button", name="Filter").click()
        line = page.get_by_role("alert")
        await line.wait_for()
        assert await line.inner_text() == "'rewad > 0': there is no column 'rewad'; did you mean 'reward'?"
        await page.go_back()
        await page.get_by_text("aborted: surplus member").wait_for()


async def test_a_token_is_described_on_hover_and_by_the_arrow_keys(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        await page.goto(f"{address}/step/0")
        await page.get_by_role("link", name="1 ›", exact=True).first.click()  # a sibling, or the next step
        await page.goto(f"{address}/trajectory/1")
        await page.locator(".t").nth(2).hover()
        details = page.locator(".details")
        assert '"r"' in await details.inner_text()
        assert "3 of 5" in await details.inner_text()
        await page.locator(".tokens").focus()
        await page.keyboard.press("ArrowRight")
        assert "4 of 5" in await details.inner_text()


async def test_time_is_zoomed_by_dragging_and_the_trainer_links_to_its_step(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        await page.goto(f"{address}/lanes")
        plot = page.get_by_role("img", name="instances and trainer over time")
        await plot.wait_for()
        assert {"rollout-0", "rollout-1", "trainer"} <= set(await page.locator(".lane-name").all_text_contents())
        box = await plot.bounding_box()
        await page.mouse.move(box["x"] + 150, box["y"] + 20)
        assert "rollout-0: version 0" in await page.locator("#tip").inner_text()
        trainer = box["y"] + 2 * 52 + 20
        await page.mouse.click(box["x"] + box["width"] - 30, trainer)
        await page.get_by_role("heading", name="Step 1").wait_for()
        await page.get_by_role("img", name="lives of the batch").wait_for()
        await page.go_back()
        await plot.wait_for()
        await page.mouse.move(box["x"] + 200, box["y"] + 20)
        await page.mouse.down()
        await page.mouse.move(box["x"] + 600, box["y"] + 20, steps=5)
        await page.mouse.up()
        await page.get_by_text("Whole run").wait_for()
        assert "from=" in page.url


async def test_a_trajectory_shows_its_story_and_the_reasons_of_a_replay(run: StoredRun) -> None:
    async with open_run_page(run) as (page, address):
        await page.goto(f"{address}/trajectory/3")
        await page.get_by_text("routed to rollout-1 at version 1").wait_for()
        await page.get_by_role("button", name="Why?").click()
        # This journal was not written by a coordinator, so its replay differs, which the page reports.
        await page.locator(".error").wait_for()


async def test_every_view_fits_the_width_and_has_content(run: StoredRun) -> None:
    async with open_run_page(run, color_scheme="dark", has_touch=True) as (page, address):
        for viewport, view in (*((PHONE, view) for view in VIEWS), (DESKTOP, "/"), (DESKTOP, "/lanes")):
            await page.set_viewport_size(viewport)
            await page.goto(address + view)
            await page.locator("main h1, main .tile").first.wait_for()
            if view == "/":
                await page.get_by_text("0.500 ± 0.000 [0.254, 0.746]").wait_for()
                await page.get_by_text("greedy since version 0: +0.000 [0.000, 0.000], p = 1.000").wait_for()
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= viewport["width"], (view, viewport)
            assert len(await page.locator("main").inner_text()) > 60, (view, viewport)


async def test_a_chart_is_zoomed_by_dragging_and_a_click_opens_a_step(tmp_path: Path) -> None:
    run = StoredRun(tmp_path, steps=20)
    for step in range(20):
        run.train([(f"prompt {step}", [Response("a", step / 20), Response("b", 0.0)])])

    async with open_run_page(run) as (page, address):
        await page.goto(address)
        chart = page.get_by_role("img", name="reward", exact=True)
        await chart.wait_for()
        box = await chart.bounding_box()
        await page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
        assert "step 8" in await page.locator(".chart .legend").first.inner_text()
        await page.mouse.down()
        await page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
        await page.mouse.up()
        await page.get_by_text("show all").wait_for()
        assert "from=8" in page.url
        await page.get_by_text("show all").click()
        await page.get_by_text("show all").wait_for(state="detached")
        box = await chart.bounding_box()  # of the chart that is drawn again
        await page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
        await page.locator(".chart .legend").first.filter(has_text="step 8").wait_for()
        await page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 60)
        await page.get_by_role("heading", name="Step 8").wait_for()
        assert "/step/8" in page.url
        assert "from=" not in page.url


async def test_a_conversation_is_navigated_token_by_token_with_roles(tmp_path: Path) -> None:
    stored = StoredRun(tmp_path)
    turns = (("tool", f"4 {HOSTILE}", 2.5, "four"), ("user", "ok", 0.0, "bye"))
    stored.train([("2+2", [Response("ask", 1.0, versions=(0,), turns=turns), Response("5")])])

    async with open_run_page(stored) as (page, address):
        await page.goto(f"{address}/trajectory/0")
        block = page.locator(".tokens")
        await block.wait_for()
        assert await block.locator(".speaker b").all_inner_texts() == [
            "assistant",
            "tool",
            "assistant",
            "user",
            "assistant",
        ]
        assert await block.locator(".passage.given").count() == 2
        assert "2.5 s" in await block.locator(".speaker").nth(1).inner_text()
        assert await page.evaluate("window.hacked") is None
        await block.focus()
        for _ in range(4):  # three sampled tokens, and the first that was given
            await page.keyboard.press("ArrowRight")
        details = await page.locator(".details").inner_text()
        assert "given by" in details and "tool" in details and "logprob" not in details
        assert await block.locator(".t.at").get_attribute("data-i") == "3"
        await page.goto(f"{address}/trajectory/0?colour=probability")
        await page.locator(".by-probability").wait_for()
        assert await page.locator(".t.given").first.get_attribute("style") in (None, "")
        await page.goto(f"{address}/group/0")
        await page.locator(".sibling .passage").first.wait_for()
        assert await page.locator(".sibling .passage").count() == 5


async def test_two_runs_are_shown_together_and_their_settings_compared(run: StoredRun, tmp_path: Path) -> None:
    other = StoredRun(tmp_path / "second", group=3, eta=0)
    for step in range(4):
        other.train([("p", [Response("a", float(step)), Response("b"), Response("c")])])

    async with open_run_page(run, other) as (page, address):
        await page.goto(address)
        await page.locator("svg path.line.other").first.wait_for()
        reward = page.locator(".card", has=page.get_by_role("heading", name="reward", exact=False)).first
        assert await reward.locator("path.line").count() == 2
        await page.get_by_text(f"Dashed: {other.run_dir}").wait_for()
        drawn = await reward.locator("path.line.other").get_attribute("d")
        other.train([("p", [Response("a", 40.0), Response("b"), Response("c")])])
        await page.wait_for_function(
            "drawn => document.querySelector('svg path.line.other').getAttribute('d') !== drawn", arg=drawn
        )
        await page.get_by_role("link", name="Job").click()
        row = page.locator("tr", has_text="staleness.eta")
        await row.wait_for()
        assert await row.locator("code").all_inner_texts() == ["1", "0", "1"]
        await page.get_by_role("heading", name="Where the trainer's time went").wait_for()
        assert await page.get_by_role("row", name="trained tokens").locator("td").count() == 3
        await page.get_by_role("button", name="Audit what is stored").click()
        await page.get_by_text("The audit: ").wait_for()


async def test_every_version_of_a_view_has_a_different_colour(tmp_path: Path) -> None:
    """For any number of versions; with a fixed palette the ninth had the colour of the first."""
    run = StoredRun(tmp_path, group=2, eta=40)
    versions = (*range(30),)
    run.train([("p", [Response("x" * 60, 1.0, versions=versions), Response("y")])])

    async with open_run_page(run) as (page, address):
        await page.goto(f"{address}/trajectory/0")
        await page.locator(".swatch").first.wait_for()
        colours = await page.evaluate(
            "[...document.querySelectorAll('.swatch')].map((one) => getComputedStyle(one).backgroundColor)"
        )
        assert len(colours) == len(set(colours)) == len(versions)
