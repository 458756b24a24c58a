"""Layout of answers in a browser; their elements are tested in web/src/markdown."""

from __future__ import annotations

import pytest
from browsing import send
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

TABLE = "| River | Length |\n|---|---|\n" + "".join(
    f"| {name} {'and its tributaries ' * 12}| 1,23{n}/4.5 |\n" for n, name in enumerate(["Ebro", "Tajo"])
)


def test_tables_break_no_words(page: Page) -> None:
    with scripted_server(ScriptedEngine(TABLE)) as address:
        page.goto(address)
        page.set_viewport_size({"width": 390, "height": 800})
        send(page, "Go")
        cell = page.locator(".markdown td", has_text="4.5").first
        cell.wait_for()
        page.get_by_role("button", name="Send", exact=True).wait_for()
        lines = (
            "(cell) => { const all = document.createRange(); all.selectNodeContents(cell);"
            " return all.getClientRects().length }"
        )
        assert cell.evaluate(lines) == 1


def test_lists_from_right_to_left_have_their_markers_at_the_right(page: Page) -> None:
    with scripted_server(ScriptedEngine("1. אחת\n\n2. שתיים\n")) as address:
        page.goto(address)
        send(page, "Go")
        item = page.locator(".markdown ol li").first
        item.wait_for()
        page.get_by_role("button", name="Send", exact=True).wait_for()
        right = "(one) => one.closest('.markdown').getBoundingClientRect().right - one.getBoundingClientRect().right"
        assert item.evaluate(right) > 15  # the space of the marker


def test_a_reference_leads_to_its_footnote(page: Page) -> None:
    with scripted_server(ScriptedEngine("Water[^1] boils.\n\nSteam.\n\n[^1]: At 100 degrees.")) as address:
        page.goto(address)
        send(page, "Go")
        page.get_by_role("button", name="Send", exact=True).wait_for()
        page.get_by_role("button", name="Footnote 1").click()
        note = page.locator(".footnote")
        expect(note).to_be_focused()
        expect(note).to_contain_text("At 100 degrees.")
