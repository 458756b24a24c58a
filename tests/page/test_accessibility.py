"""Accessibility: axe-core over each view, and a chat by keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest
from browsing import AXE, send, unfold
from playwright.sync_api import Browser, Page, expect
from scripted import ScriptedEngine, scripted_server
from tiers import first_of

pytestmark = pytest.mark.browser

VIEWS = ("chat", "compare", "complete", "infill")
ANSWER = (
    "# Title\n\nSome **text**, `code`, [a link](https://example.org) and $x^2$.\n\n- one\n- two\n\n> said\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\ndef f(x):  # why\n    return 'a' + 1\n```\n"
)


def violations(page: Page) -> list[str]:
    found: list[dict[str, Any]] = page.evaluate(
        "async () => (await axe.run(document, { resultTypes: ['violations'] })).violations"
    )
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:160]} {one['nodes'][0]['failureSummary'][:300]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.skipif(not AXE.exists(), reason="cd web && npm ci")
@pytest.mark.parametrize("scheme", first_of(["light", "dark"]))
@pytest.mark.parametrize("width", [1280, 390])
def test_views_have_no_serious_violations(browser: Browser, scheme: Any, width: int) -> None:
    wrong: list[str] = []
    with scripted_server(ScriptedEngine(ANSWER), keys=("k",)) as address:
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        page.add_init_script(AXE.read_text())

        def check(where: str) -> None:
            wrong.extend(f"{where}: {one}" for one in violations(page))

        page.goto(address)
        page.get_by_role("dialog").wait_for()
        check("key")
        page.get_by_label("API key", exact=True).fill("k")
        page.get_by_role("button", name="Continue").click()
        for view in VIEWS:
            page.goto(f"{address}#/{view}")
            heading = page.get_by_role("heading", level=1)
            heading.wait_for()
            check(view)
            if view in ("chat", "compare"):
                send(page, "Hello")
                page.locator(".hljs-keyword").first.wait_for()
                page.get_by_role("button", name="Send", exact=True).wait_for()
                check(f"{view}, answered")
            elif view == "complete":
                page.get_by_label("Text", exact=True).fill("Hello")
                page.get_by_role("button", name="Complete", exact=True).click()
                page.locator(".stats:not(.streaming)").wait_for()
                check(f"{view}, done")
            page.get_by_role("button", name="settings").first.click()
            unfold(page, "Sampling", "Advanced")
            page.get_by_label("top_k", exact=True).wait_for()
            check(f"{view}, settings")
            page.get_by_role("button", name="Close settings").click()
        for view, content in (("live", ".lane"), ("cluster", ".start"), ("lab", ".start")):
            page.goto(f"{address}#/{view}")
            page.locator(content).first.wait_for()
            check(view)
        page.goto(f"{address}#/chat")
        if width < 760:
            page.get_by_role("button", name="Chats").click()
            check("list")
        page.close()
    assert not wrong, "\n".join(wrong)


def test_the_keyboard_alone_operates_a_chat(page: Page) -> None:
    with scripted_server(ScriptedEngine(lambda prompt: f"Answer to {prompt.count('<user>')}.")) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()

        def go(name: str) -> None:
            """Move the focus to the control with a name."""
            for _ in range(60):
                page.keyboard.press("Tab")
                focused = page.evaluate(
                    "() => { const one = document.activeElement;"
                    " return one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent.trim() }"
                )
                if focused == name:
                    return
            raise AssertionError(name)

        expect(page.get_by_label("Message", exact=True)).to_be_focused()  # ready to type
        skip = page.get_by_role("link", name="Skip to content")
        skip.focus()
        expect(skip).to_be_in_viewport()
        page.keyboard.press("Enter")
        go("Message")
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        expect(page.locator("article.assistant .markdown")).to_have_text("Answer to 1.")
        page.evaluate("document.getElementById('main').focus()")
        go("Regenerate")
        page.keyboard.press("Enter")
        page.get_by_text("2 of 2").wait_for()
        expect(page.get_by_role("button", name="Previous version")).to_be_enabled()
        go("Previous version")
        page.keyboard.press("Enter")
        page.get_by_text("1 of 2").wait_for()
        page.evaluate("document.getElementById('main').focus()")
        go("Settings")
        page.keyboard.press("Enter")
        go("System prompt")
        page.keyboard.type("Brief")
        page.evaluate("document.getElementById('main').focus()")
        go("New chat")
        page.keyboard.press("Enter")
        expect(page.locator("article")).to_have_count(0)


def test_screen_readers_find_messages_and_controls_by_name(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 844})
    with scripted_server(ScriptedEngine(ANSWER)) as address:
        page.goto(address)
        send(page, "Hello")
        page.locator(".hljs-keyword").first.wait_for()
        page.get_by_role("button", name="Send", exact=True).wait_for()
        expect(page.get_by_role("region", name="Conversation")).to_match_aria_snapshot("""
            - log "Messages":
              - article "You":
                - text: Hello
                - button "Copy"
                - button "Edit"
                - button "Delete"
              - article "fake":
                - heading "Title" [level=1]
                - paragraph
                - list:
                  - listitem: one
                  - listitem: two
                - blockquote
                - table
                - text: python
                - button "Copy"
                - code
                - button "Copy"
                - button "Edit"
                - button "Regenerate"
                - button "Continue"
                - button "Delete"
            - button "Attach files"
            - textbox "Message"
            - button "Send"
            - button "Saved prompts"
            """)
        # Hidden inputs of files stand behind buttons that have a name.
        expect(page.get_by_role("button", name="Files to attach")).to_have_count(0)
        expect(page.get_by_role("button", name="Chat file")).to_have_count(0)
    page.close()
