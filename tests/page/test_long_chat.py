"""Work of the page in a chat of 300 messages: no more than in a short one. `benchmarks/page.py` has the times."""

from __future__ import annotations

import pytest
from browsing import calling, import_chat, shorten_requests
from playwright.sync_api import Page
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

ANSWER = "## Rivers\n\nThe **Ebro** is `930` km long.\n\n- one\n- two\n\n```python\nx = 1\n```\n\n"
FILL = """() => {
  const field = document.getElementById("message");
  field.value = "A line of words.\\n".repeat(12_000);
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
}"""


def test_a_long_chat_takes_no_more_work(page: Page) -> None:
    """Keys, with a draft of 200 kB too, and a streaming answer."""
    engine = ScriptedEngine(ANSWER)
    with scripted_server(engine) as address:
        shorten_requests(page)
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        short, long = (_work(page, engine, n) for n in (2, 300))
    keys, keys_with_draft, answer = zip(short, long, strict=True)
    # Drawing all messages again for each key takes 17 times as many calls.
    assert keys[1] < 2 * keys[0] and keys_with_draft[1] < 2 * keys_with_draft[0]
    # The number of frames that show parts of an answer depends on the machine.
    assert answer[1] < 3 * answer[0]


def _work(page: Page, engine: ScriptedEngine, n_messages: int) -> list[int]:
    """Return the numbers of functions called for five keys, for five with a long draft, and for an answer."""
    engine.say, engine.delay = ANSWER, 0.0
    import_chat(page, f"Chat of {n_messages}", [ANSWER * 3 if n % 2 else "And the next?" for n in range(n_messages)])
    page.locator("article").nth(n_messages - 1).wait_for()
    found = []
    # Elements are found by CSS: to find one by its role, the page itself computes the roles of all.
    for before in ("() => null", FILL):
        page.evaluate(before)
        page.locator("#message").focus()
        page.keyboard.press("a")
        with calling(page) as keys:
            for key in "bcdef":
                page.keyboard.press(key)
        found += keys
    page.locator("#message").fill("Go")
    engine.say, engine.delay = ANSWER * 3, 0.01
    with calling(page) as answer:
        page.keyboard.press("Enter")
        page.locator(".message.streaming").wait_for()
        page.locator(".message.streaming").wait_for(state="detached")
    return [*found, *answer]
