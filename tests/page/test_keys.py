"""Keyboard shortcuts, and titles of chats and of the tab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import assert_accessible, open_view, send, unfold
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: "Title: “Water”" if "Write a title" in prompt else "It flows.")


@pytest.fixture
def page(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        yield page


def ask(page: Page, text: str) -> None:
    send(page, text)
    page.get_by_role("heading", name=text, level=1).wait_for()
    page.get_by_text("It flows.").wait_for()
    page.get_by_role("button", name="Send", exact=True).wait_for()


def test_shortcuts_operate_the_chat(page: Page) -> None:
    field, heading = page.get_by_label("Message", exact=True), page.get_by_role("heading", level=1)
    ask(page, "Rivers")
    page.keyboard.press("ControlOrMeta+Shift+O")
    expect(heading).to_have_text("New chat")
    expect(field).to_be_focused()
    ask(page, "Lakes")
    page.keyboard.press("Alt+ArrowDown")
    expect(heading).to_have_text("Rivers")
    page.keyboard.press("Alt+ArrowUp")
    expect(heading).to_have_text("Lakes")
    page.keyboard.press("ControlOrMeta+Shift+S")
    expect(page.get_by_label("Search chats")).to_be_hidden()
    page.keyboard.press("ControlOrMeta+K")
    expect(page.get_by_label("Search chats")).to_be_focused()
    page.keyboard.type("riv")
    expect(page.locator(".chats-row a")).to_have_text(["Rivers"])
    page.get_by_label("Search chats").fill("")
    page.keyboard.press("Shift+Escape")
    expect(field).to_be_focused()
    page.keyboard.press("ControlOrMeta+.")
    page.get_by_role("complementary", name="Settings").wait_for()
    page.keyboard.press("ControlOrMeta+.")
    expect(page.get_by_role("complementary", name="Settings")).to_have_count(0)
    field.press("ArrowUp")
    expect(page.get_by_label("Edit the message")).to_have_value("Lakes")
    page.keyboard.press("Escape")
    page.locator(".messages").focus()
    page.keyboard.type("a question?")  # from anywhere, into the field
    expect(field).to_have_value("a question?")
    page.keyboard.press("ControlOrMeta+Shift+Backspace")
    expect(page.locator(".chats-row a")).to_have_text(["Rivers"])


def test_the_help_sheet_lists_the_shortcuts(page: Page) -> None:
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    page.keyboard.type("?")
    expect(sheet).to_have_count(0)  # it is text in a field
    page.locator(".messages").focus()
    page.keyboard.press("?")
    sheet.get_by_text("Search the chats").wait_for()
    assert_accessible(page)
    page.keyboard.press("Escape")
    expect(sheet).to_have_count(0)
    page.get_by_role("button", name="Shortcuts").click()
    sheet.get_by_text("New chat").wait_for()


def test_the_tab_has_the_title_of_the_chat(page: Page) -> None:
    expect(page).to_have_title("Chat · llamado")
    ask(page, "Rivers")
    expect(page).to_have_title("Rivers · llamado")
    open_view(page, "Live")
    expect(page).to_have_title("Live · llamado")
    page.go_back()
    expect(page).to_have_title("Rivers · llamado")
    page.get_by_role("link", name="New chat").click()
    expect(page).to_have_title("Chat · llamado")


def test_the_model_names_a_chat_once_it_is_idle(page: Page, engine: ScriptedEngine) -> None:
    ask(page, "Rivers")
    assert len(engine.requests) == 1  # switched off
    page.get_by_role("button", name="Settings").click()
    unfold(page, "All chats")
    page.get_by_label("Let the model name new chats").check()
    page.get_by_role("button", name="Close settings").click()
    page.get_by_role("link", name="New chat").click()
    busy = {"running": 1, "waiting": 1}
    page.route("**/live/requests", lambda route: route.fulfill(json=busy))
    with page.expect_response("**/live/requests"):
        send(page, "Lakes")
    with page.expect_response("**/live/requests"):
        pass  # it asks again
    assert len(engine.requests) == 2
    page.unroute_all()
    page.get_by_role("heading", name="Water", level=1).wait_for()
    expect(page).to_have_title("Water · llamado")
    prompt = bytes(engine.requests[-1].prompt).decode()
    assert "Lakes" in prompt and "It flows." in prompt and engine.requests[-1].params.n_predict <= 32
    send(page, "More")
    expect(page.locator("article.assistant .markdown")).to_have_text(["It flows.", "It flows."])
    assert len(engine.requests) == 4
