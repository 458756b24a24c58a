"""Chats that the server keeps (`--chats`): two devices show the same, and none loses a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import WITHOUT_TITLES, send, until
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def device(browser: Browser, address: str) -> Iterator[Page]:
    """Open the page with a storage of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, service_workers="block")
    context.add_init_script(WITHOUT_TITLES)
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(address)
    try:
        yield page
    finally:
        context.close()


def look(page: Page) -> Page:
    """Return to the page, which then asks the server for changes at once."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    return page


def test_two_devices_show_the_same_chats(browser: Browser, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    engine = ScriptedEngine(lambda prompt: f"Answer {prompt.count('<user>')}.")
    with (
        scripted_server(engine, chats=str(tmp_path)) as address,
        device(browser, address) as phone,
        device(browser, address) as laptop,
    ):
        expect(phone.get_by_text("Chats are stored in this browser and on the server.")).to_be_visible()
        send(phone, "Rivers of Spain")
        expect(phone.get_by_text("Answer 1.")).to_be_visible()
        # The laptop shows the chat, continues it, and the phone shows that.
        until(phone, lambda: any(tmp_path.rglob("chat-*.json")))
        look(laptop).get_by_role("link", name="Rivers of Spain").click()
        expect(laptop.get_by_text("Answer 1.")).to_be_visible()
        send(laptop, "And of France?")
        expect(laptop.get_by_text("Answer 2.")).to_be_visible()
        stored = next(tmp_path.rglob("chat-*.json"))
        until(laptop, lambda: "Answer 2." in stored.read_text())
        expect(look(phone).get_by_text("Answer 2.")).to_be_visible()

        # Both change the chat without the server: both states are kept.
        for one, words in ((phone, "From the phone"), (laptop, "From the laptop")):
            one.route("**/chats", lambda route: route.abort())
            one.route("**/chats/*", lambda route: route.abort())
            send(one, words)
            expect(one.get_by_text("Answer 3.")).to_be_visible()
        for one in (phone, laptop):
            one.unroute_all()
        look(phone)
        until(phone, lambda: "From the phone" in stored.read_text())
        expect(look(laptop).get_by_role("link", name="Rivers of Spain (other device)")).to_be_visible()
        until(laptop, lambda: len([*tmp_path.rglob("chat-*.json")]) == 2 and "From the laptop" in stored.read_text())
        expect(look(phone).get_by_role("link", name="Rivers of Spain (other device)")).to_be_visible()
        expect(phone.get_by_text("From the laptop")).to_be_visible()
        seen = set()
        for name in ("Rivers of Spain", "Rivers of Spain (other device)"):
            phone.get_by_role("link", name=name, exact=True).click()
            last = phone.get_by_role("log").get_by_text("From the")
            expect(last).to_have_count(1)
            seen.add(last.inner_text())
        assert seen == {"From the phone", "From the laptop"}
