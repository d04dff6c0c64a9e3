"""The built site in a browser: no page is wider than a phone or desktop, and the navigation works."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.browser import in_browser, open_page

SITE = Path("build/site").resolve()
WIDTHS = (360, 1400)

pytestmark = [
    pytest.mark.slow,
    in_browser,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: make docs"),
]


def pages() -> list[str]:
    paths = {path for path in SITE.rglob("*.html") if "_static" not in path.parts} - {SITE / "index.html"}
    return sorted(str(path.relative_to(SITE)) for path in paths)


async def test_no_page_is_wider_than_the_window() -> None:
    assert len(pages()) > 30
    wide = []
    for width in WIDTHS:
        async with open_page(viewport={"width": width, "height": 900}) as page:
            for name in pages():
                await page.goto(f"file://{SITE}/{name}")
                needed = await page.evaluate("document.scrollingElement.scrollWidth")
                wide += [(name, width, needed)] * (needed > width)
    assert wide == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_navigation_links_to_every_page(width: int) -> None:
    async def visit() -> tuple[list[str], str]:
        async with open_page(viewport={"width": width, "height": 900}) as page:
            await page.goto(f"file://{SITE}/index.html")
            await page.wait_for_url("**/docs/index.html")
            captions = await page.locator(".sidebar-tree .caption-text").all_inner_texts()
            if width < 1000:
                await page.locator(".nav-overlay-icon").first.click()
            await page.locator(".sidebar-tree a", has_text="Staleness protocol").click()
            await page.wait_for_url("**/docs/protocol.html")
            return captions, await page.locator("h1").inner_text()

    captions, heading = asyncio.run(visit())
    assert [caption.lower() for caption in captions] == [
        "tutorials", "how to", "reference", "explanation", "results",
    ]  # fmt: skip
    assert "staleness" in heading.lower()
