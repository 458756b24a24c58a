"""The field for messages: pasted texts, waiting messages, token counts, and the editor of a message."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from browsing import computing, send
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

PASTE = """([selector, text]) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  const pasted = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  return document.querySelector(selector).dispatchEvent(pasted);
}"""


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: f"Answer to {prompt.count('<user>')}.")


@pytest.fixture
def page(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        yield page


def test_a_long_pasted_text_becomes_an_attachment(page: Page, engine: ScriptedEngine) -> None:
    assert page.evaluate(PASTE, ["#message", "x" * 2499])  # the browser pastes it
    expect(page.locator(".chip")).to_have_count(0)
    assert not page.evaluate(PASTE, ["#message", "b" * 200_000])
    assert not page.evaluate(PASTE, ["#message", "a" * 2500])
    expect(page.locator(".chip")).to_have_text(["pasted text 1.txt", "pasted text 2.txt"])
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.get_by_role("button", name="Remove pasted text 1.txt").click()
    expect(page.locator(".chip")).to_have_text(["pasted text 2.txt"])
    page.get_by_label("Message", exact=True).fill("What is this?")
    page.keyboard.press("Enter")
    page.get_by_text("Answer to 1.").wait_for()
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert "a" * 2500 in prompt and "bb" not in prompt and "What is this?" in prompt


def test_a_key_is_cheap_in_a_long_draft(page: Page) -> None:
    page.get_by_label("Message", exact=True).evaluate("""(field) => {
      field.value = "A line of words.\\n".repeat(12_000);
      field.dispatchEvent(new InputEvent("input", { bubbles: true }));
      field.focus();
    }""")
    page.keyboard.type("ab")
    with computing(page) as tasks:
        for key in "cdefg":
            page.keyboard.press(key)
    # The slowest task of five keys. Measuring the height took five times as long.
    assert max(tasks) < 50, sorted(tasks)[-5:]


def test_messages_wait_for_the_end_of_an_answer(page: Page, engine: ScriptedEngine) -> None:
    goes_on = threading.Event()
    engine.pause = lambda: goes_on.wait(120)
    try:
        send(page, "One")
        page.get_by_role("button", name="Stop", exact=True).wait_for()
        for text in ("Two", "Three", "Four"):
            send(page, text)
        waiting = page.get_by_role("list", name="Waiting messages").get_by_role("listitem")
        expect(waiting).to_have_count(3)
        expect(page.locator("article.user .message-text")).to_have_text(["One"])
        waiting.nth(1).get_by_role("button", name="Remove this waiting message").click()
        waiting.nth(1).get_by_role("button", name="Edit this waiting message").click()
        expect(page.get_by_label("Message", exact=True)).to_have_value("Four")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.get_by_label("Message", exact=True).fill("Five")
        page.get_by_role("button", name="Send after this answer").click()
        expect(waiting).to_have_count(2)
        page.get_by_role("link", name="New chat").click()  # they follow in their own chat
    finally:
        goes_on.set()
    page.get_by_role("link", name="One", exact=True).click()
    expect(page.locator("article.assistant .markdown")).to_have_text(["Answer to 1.", "Answer to 2.", "Answer to 3."])
    expect(page.locator("article.user .message-text")).to_have_text(["One", "Two", "Five"])
    expect(waiting).to_have_count(0)


def test_a_stopped_answer_keeps_messages_waiting(page: Page, engine: ScriptedEngine) -> None:
    engine.say, engine.delay, engine.piece = "word " * 2000, 0.02, 5
    send(page, "One")
    page.locator("article.assistant .markdown", has_text="word").wait_for()
    send(page, "Two")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped.").wait_for()
    page.reload()
    waiting = page.get_by_role("list", name="Waiting messages").get_by_role("listitem")
    expect(waiting).to_have_count(1)
    engine.say, engine.delay = "Done.", 0.0
    waiting.get_by_role("button", name="Send now").click()
    expect(page.locator("article.assistant .markdown").last).to_have_text("Done.")
    expect(waiting).to_have_count(0)


def test_the_tokens_of_a_draft_are_counted(page: Page) -> None:
    expect(page.locator(".composer-foot")).to_contain_text("fake")
    page.get_by_label("Message", exact=True).fill("Rivers")
    expect(page.locator(".composer-foot .draft-tokens")).to_have_text("+ 6 tokens")
    page.keyboard.press("Enter")
    page.get_by_text("Answer to 1.").wait_for()
    expect(page.locator(".composer-foot .draft-tokens")).to_have_count(0)
    expect(page.locator(".composer-foot .context")).to_have_text(re.compile(r"\d+%"))


def test_the_editor_of_a_message_works_by_keyboard(page: Page) -> None:
    send(page, "One")
    page.get_by_role("button", name="Send", exact=True).wait_for()
    answer = page.locator("article.assistant")
    edit = answer.get_by_role("button", name="Edit")
    field = answer.get_by_label("Edit the message")
    for key, text in (("Escape", "Answer to 1."), ("Control+Enter", "Changed")):
        edit.click()
        expect(field).to_be_focused()
        assert field.evaluate("(one) => getComputedStyle(one).outlineStyle") == "solid"
        field.fill("Changed")
        field.press(key)
        expect(answer.locator(".markdown")).to_have_text(text)
        expect(edit).to_be_focused()


def test_the_arrows_between_versions_keep_the_focus(page: Page) -> None:
    send(page, "One")
    answer = page.locator("article.assistant")
    for _ in range(2):
        page.get_by_role("button", name="Send", exact=True).wait_for()
        answer.get_by_role("button", name="Regenerate").click()
    page.get_by_text("3 of 3").wait_for()
    page.get_by_role("button", name="Send", exact=True).wait_for()
    previous = answer.get_by_role("button", name="Previous version")
    previous.focus()
    for at in ("2 of 3", "1 of 3", "1 of 3"):
        page.keyboard.press("Enter")
        page.get_by_text(at).wait_for()
        expect(previous).to_be_focused()
