"""Keyboard shortcuts, and titles of chats and of the tab."""

from __future__ import annotations

import pytest
from browsing import assert_accessible, open_view, send, unfold
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine

pytestmark = pytest.mark.browser


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: "Title: “Water”" if "Write a title" in prompt else "It flows.")


def ask(chat: Page, text: str) -> None:
    send(chat, text)
    chat.get_by_role("heading", name=text, level=1).wait_for()
    chat.get_by_text("It flows.").wait_for()
    chat.get_by_role("button", name="Send", exact=True).wait_for()


def test_shortcuts_operate_the_chat(chat: Page) -> None:
    field, heading = chat.get_by_label("Message", exact=True), chat.get_by_role("heading", level=1)
    ask(chat, "Rivers")
    chat.keyboard.press("ControlOrMeta+Shift+O")
    expect(heading).to_have_text("New chat")
    expect(field).to_be_focused()
    ask(chat, "Lakes")
    chat.keyboard.press("Alt+ArrowDown")
    expect(heading).to_have_text("Rivers")
    chat.keyboard.press("Alt+ArrowUp")
    expect(heading).to_have_text("Lakes")
    chat.keyboard.press("ControlOrMeta+Shift+S")
    expect(chat.get_by_label("Search chats")).to_be_hidden()
    chat.keyboard.press("ControlOrMeta+K")
    expect(chat.get_by_label("Search chats")).to_be_focused()
    chat.keyboard.type("riv")
    expect(chat.locator(".chats-row a")).to_have_text(["Rivers"])
    chat.get_by_label("Search chats").fill("")
    chat.keyboard.press("Shift+Escape")
    expect(field).to_be_focused()
    chat.keyboard.press("ControlOrMeta+.")
    chat.get_by_role("complementary", name="Settings").wait_for()
    chat.keyboard.press("ControlOrMeta+.")
    expect(chat.get_by_role("complementary", name="Settings")).to_have_count(0)
    field.press("ArrowUp")
    editor = chat.get_by_label("Edit the message")
    expect(editor).to_have_value("Lakes")
    chat.keyboard.press("Escape")
    expect(editor).to_have_count(0)
    chat.locator(".messages").focus()
    chat.keyboard.type("a question?")  # from anywhere, into the field
    expect(field).to_have_value("a question?")
    chat.keyboard.press("ControlOrMeta+Shift+Backspace")
    expect(chat.locator(".chats-row a")).to_have_text(["Rivers"])


def test_the_editor_has_the_focus_before_it_is_painted(chat: Page) -> None:
    """Keys typed in between would go to the field of new messages. Pages are painted after all microtasks."""
    ask(chat, "Lakes")
    focused = chat.get_by_label("Message", exact=True).evaluate("""async (field) => {
        field.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
        for (let i = 0; i < 20; i++) await null;
        return document.activeElement.value;
    }""")
    assert focused == "Lakes"


def test_the_help_sheet_lists_the_shortcuts(chat: Page) -> None:
    sheet = chat.get_by_role("dialog", name="Keyboard shortcuts")
    chat.keyboard.type("?")
    expect(sheet).to_have_count(0)  # it is text in a field
    chat.locator(".messages").focus()
    chat.keyboard.press("?")
    sheet.get_by_text("Search the chats").wait_for()
    assert_accessible(chat)
    chat.keyboard.press("Escape")
    expect(sheet).to_have_count(0)
    chat.get_by_role("button", name="Shortcuts").click()
    sheet.get_by_text("New chat").wait_for()


def test_the_tab_has_the_title_of_the_chat(chat: Page) -> None:
    expect(chat).to_have_title("Chat · llamado")
    ask(chat, "Rivers")
    expect(chat).to_have_title("Rivers · llamado")
    open_view(chat, "Live")
    expect(chat).to_have_title("Live · llamado")
    chat.go_back()
    expect(chat).to_have_title("Rivers · llamado")
    chat.get_by_role("link", name="New chat").click()
    expect(chat).to_have_title("Chat · llamado")


def test_the_model_names_a_chat_once_it_is_idle(chat: Page, engine: ScriptedEngine) -> None:
    ask(chat, "Rivers")
    assert len(engine.requests) == 1  # switched off
    chat.get_by_role("button", name="Settings").click()
    unfold(chat, "All chats")
    chat.get_by_label("Let the model name new chats").check()
    chat.get_by_role("button", name="Close settings").click()
    chat.get_by_role("link", name="New chat").click()
    busy = {"running": 1, "waiting": 1}
    chat.route("**/live/requests", lambda route: route.fulfill(json=busy))
    with chat.expect_response("**/live/requests"):
        send(chat, "Lakes")
    with chat.expect_response("**/live/requests"):
        pass  # it asks again
    assert len(engine.requests) == 2
    chat.unroute_all()
    chat.get_by_role("heading", name="Water", level=1).wait_for()
    expect(chat).to_have_title("Water · llamado")
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert "Lakes" in prompt and "It flows." in prompt and engine.requests[-1].params.n_predict <= 32
    send(chat, "More")
    expect(chat.locator("article.assistant .markdown")).to_have_text(["It flows.", "It flows."])
    assert len(engine.requests) == 4
