"""The list of chats: undo, pins, copies, selection, export, other tabs."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import choose_action, listed_chats, make_chats, send
from playwright.sync_api import BrowserContext, Error, Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def page(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    """A page with three chats."""
    with scripted_server(engine) as address:
        page.goto(address)
        make_chats(page, "Rivers", "Lakes", "Seas")
        yield page


def test_a_deleted_chat_is_restored_with_its_draft(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("and the next")
    choose_action(page, "Seas", "Delete")
    expect(listed_chats(page)).to_have_text(["Lakes", "Rivers"])
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("status").filter(has_text="Chat deleted.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes", "Rivers"])
    expect(page.locator("article")).to_have_count(2)
    expect(page.get_by_label("Message", exact=True)).to_have_value("and the next")
    choose_action(page, "Seas", "Delete")
    page.get_by_role("button", name="Close notice").click()
    page.reload()
    expect(listed_chats(page)).to_have_text(["Lakes", "Rivers"])


def test_a_pinned_chat_stays_at_the_top(page: Page) -> None:
    choose_action(page, "Rivers", "Pin")
    expect(page.locator(".chats-head").first).to_have_text("Pinned")
    expect(listed_chats(page)).to_have_text(["Rivers", "Seas", "Lakes"])
    page.reload()
    expect(listed_chats(page)).to_have_text(["Rivers", "Seas", "Lakes"])
    choose_action(page, "Rivers", "Unpin")
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes", "Rivers"])


def test_a_duplicate_is_independent(page: Page) -> None:
    choose_action(page, "Rivers", "Duplicate")
    page.get_by_role("heading", name="Rivers (copy)", level=1).wait_for()
    send(page, "More")
    expect(page.locator("article.assistant .markdown")).to_have_text(["Answer to 1.", "Answer to 2."])
    page.get_by_role("link", name="Rivers", exact=True).click()
    expect(page.locator("article.assistant .markdown")).to_have_text(["Answer to 1."])


def test_selected_chats_are_exported_and_deleted(page: Page, tmp_path: Path) -> None:
    page.get_by_role("button", name="Select", exact=True).click()
    page.get_by_role("checkbox", name="Rivers").check()
    page.get_by_role("checkbox", name="Seas").check()
    page.get_by_role("status").filter(has_text="2 selected").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "chats.json")
    exported = json.loads((tmp_path / "chats.json").read_text())["conversations"]
    assert sorted(one["conversation"]["title"] for one in exported) == ["Rivers", "Seas"]
    page.locator(".sidebar-foot").get_by_role("button", name="Delete").click()
    expect(listed_chats(page)).to_have_text(["Lakes"])
    page.get_by_text("2 chats deleted.").wait_for()
    page.get_by_role("button", name="Undo").click()
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes", "Rivers"])


def test_one_chat_is_exported_as_markdown(page: Page, tmp_path: Path) -> None:
    with page.expect_download() as download:
        choose_action(page, "Lakes", "Export as Markdown")
    assert download.value.suggested_filename == "Lakes.md"
    download.value.save_as(tmp_path / "chat.md")
    assert (tmp_path / "chat.md").read_text() == "# Lakes\n\n## You\n\nLakes\n\n## fake\n\nAnswer to 1.\n"


def test_the_menu_of_a_chat_works_by_keyboard(page: Page) -> None:
    page.get_by_role("button", name="Actions for Lakes").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_hidden()
    expect(page.get_by_role("button", name="Actions for Lakes")).to_be_focused()


def test_chats_and_answers_appear_in_other_tabs(page: Page, engine: ScriptedEngine, context: BrowserContext) -> None:
    goes_on = threading.Event()
    other = context.new_page()
    other.goto(page.url)
    expect(other.locator("article.assistant .markdown")).to_have_text(["Answer to 1."])
    engine.say, engine.piece, engine.pause = "The Ebro rises in Cantabria.", 8, lambda: goes_on.wait(120)
    try:
        send(page, "Again")
        expect(other.locator("article.user")).to_have_count(2)
        expect(other.locator("article.streaming")).to_have_count(1)
        expect(other.get_by_text("Interrupted")).to_have_count(0)
    finally:
        goes_on.set()
    expect(other.locator("article.assistant .markdown").last).to_have_text("The Ebro rises in Cantabria.")
    expect(other.locator("article.streaming")).to_have_count(0)
    choose_action(other, "Rivers", "Rename")
    other.get_by_label("Chat title").fill("Ríos")
    other.keyboard.press("Enter")
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes", "Ríos"])
    choose_action(other, "Seas", "Delete")
    expect(listed_chats(page)).to_have_text(["Lakes", "Ríos"])
    expect(page.locator("article")).to_have_count(0)


def test_an_answer_of_a_crashed_tab_ends_in_other_tabs(
    page: Page, engine: ScriptedEngine, context: BrowserContext
) -> None:
    goes_on = threading.Event()
    context.route("**/v1/streams/lookup", lambda route: route.fulfill(json=[]))  # without resumable streams
    other = context.new_page()
    other.goto(page.url)
    expect(other.locator("article.assistant .markdown")).to_have_text(["Answer to 1."])
    engine.say, engine.piece, engine.pause = "The Ebro rises in Cantabria.", 8, lambda: goes_on.wait(120)
    try:
        send(page, "Again")
        expect(other.locator("article.streaming")).to_have_count(1)
        expect(other.locator("article.assistant .markdown").last).to_have_text("The Ebro")
        with page.expect_event("crash"), contextlib.suppress(Error):
            page.goto("chrome://crash")
        expect(other.locator("article.streaming")).to_have_count(0)
        expect(other.get_by_text("Interrupted")).to_have_count(1)
        expect(other.locator("article.assistant .markdown").last).to_have_text("The Ebro")
    finally:
        goes_on.set()
