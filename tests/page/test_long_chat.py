"""Speed in a chat of 300 messages: processor time of the page, which does not depend on the load of the machine."""

from __future__ import annotations

import pytest
from browsing import computing, import_chat, shorten_requests
from playwright.sync_api import Page
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

ANSWER = "## Rivers\n\nThe **Ebro** is `930` km long.\n\n- one\n- two\n\n```python\nx = 1\n```\n\n"
FILL = """() => {
  const field = document.getElementById("message");
  field.value = "A line of words.\\n".repeat(12_000);
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
}"""
MOST_MS = 50


def test_a_long_chat_stays_responsive(page: Page) -> None:
    """Keys, with a draft of 200 kB too, and a streaming answer."""
    engine = ScriptedEngine(ANSWER)
    with scripted_server(engine) as address:
        shorten_requests(page)
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        import_chat(page, "Long", [ANSWER * 3 if n % 2 else "And the next?" for n in range(300)])
        page.locator("article").nth(299).wait_for()
        # Elements are found by CSS: to find one by its role, the page itself computes the roles of all.
        for before in ("() => null", FILL):
            page.evaluate(before)
            page.locator("#message").focus()
            page.keyboard.press("a")
            with computing(page) as keys:
                for key in "bcdef":
                    page.keyboard.press(key)
            assert max(keys) < MOST_MS, sorted(keys)[-5:]
        page.locator("#message").fill("Go")
        engine.say, engine.delay = ANSWER * 3, 0.01
        with computing(page) as tasks:
            page.keyboard.press("Enter")
            page.locator(".message.streaming").wait_for()
            page.locator(".message.streaming").wait_for(state="detached")
        assert max(tasks) < MOST_MS, sorted(tasks)[-5:]
