"""Folders in the list of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import WITHOUT_TITLES, assert_accessible, choose_action, listed_chats, make_chats, send
from playwright.sync_api import Browser, Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def page(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    """A page with three chats."""
    with scripted_server(engine) as address:
        page.goto(address)
        make_chats(page, "Rivers", "Lakes", "Seas")
        yield page


def move(page: Page, title: str, folder: str) -> None:
    """Move a chat to a new folder."""
    choose_action(page, title, "Move to folder…")
    page.get_by_role("textbox", name="New folder").fill(folder)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_chat_is_moved_to_a_folder_and_out_of_it(page: Page) -> None:
    move(page, "Rivers", "Water")
    folder = page.get_by_role("button", name="Water 1")
    expect(folder).to_have_attribute("aria-expanded", "true")
    expect(listed_chats(page)).to_have_text(["Rivers", "Seas", "Lakes"])
    choose_action(page, "Seas", "Move to folder…")
    assert_accessible(page)
    page.get_by_role("dialog").get_by_role("button", name="Water").click()
    expect(listed_chats(page)).to_have_text(["Seas", "Rivers", "Lakes"])
    page.reload()
    expect(page.get_by_role("button", name="Water 2")).to_be_visible()
    choose_action(page, "Rivers", "Move to folder…")
    page.get_by_role("button", name="No folder").click()
    expect(page.get_by_role("button", name="Water 1")).to_be_visible()
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes", "Rivers"])


def test_a_closed_folder_stays_closed(page: Page) -> None:
    move(page, "Rivers", "Water")
    folder = page.get_by_role("button", name="Water 1")
    folder.press("Enter")
    expect(folder).to_have_attribute("aria-expanded", "false")
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes"])
    assert_accessible(page)
    page.reload()
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes"])
    page.keyboard.press("Control+K")
    expect(page.get_by_label("Search chats")).to_be_focused()
    page.keyboard.type("River")
    expect(listed_chats(page)).to_have_text(["Rivers"])


def test_a_folder_is_renamed_and_removed(page: Page) -> None:
    move(page, "Rivers", "Water")
    page.get_by_role("button", name="Actions for folder Water").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_role("textbox", name="Folder name").fill("Fresh water")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Fresh water 1")).to_be_visible()
    page.get_by_role("button", name="Actions for folder Fresh water").click()
    page.get_by_role("menuitem", name="Remove folder, keep chats").click()
    expect(page.locator(".folder")).to_have_count(0)
    expect(listed_chats(page)).to_have_text(["Seas", "Lakes", "Rivers"])
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name="Fresh water 1")).to_be_visible()


def test_selected_chats_are_moved_together_and_exported_with_their_folder(page: Page, tmp_path: Path) -> None:
    page.get_by_role("button", name="Select", exact=True).click()
    page.get_by_role("checkbox", name="Rivers").check()
    page.get_by_role("checkbox", name="Seas").check()
    page.get_by_role("button", name="Move", exact=True).click()
    page.get_by_role("textbox", name="New folder").fill("Water")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("button", name="Water 2")).to_be_visible()
    expect(page.get_by_role("checkbox")).to_have_count(0)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "chats.json")
    exported = json.loads((tmp_path / "chats.json").read_text())["conversations"]
    assert {one["conversation"]["title"]: one["conversation"].get("folder", "") for one in exported} == {
        "Rivers": "Water",
        "Seas": "Water",
        "Lakes": "",
    }
    page.get_by_label("Chat file").set_input_files(tmp_path / "chats.json")
    expect(page.get_by_role("button", name="Water 4")).to_be_visible()


def test_folders_work_by_keyboard(page: Page) -> None:
    page.get_by_role("button", name="Actions for Lakes").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Move to folder…")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Move to folder")).to_be_visible()
    page.get_by_role("textbox", name="New folder").focus()
    page.keyboard.type("Water")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Water 1").press("Space")
    expect(listed_chats(page)).to_have_text(["Seas", "Rivers"])
    page.get_by_role("button", name="Actions for Rivers").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Actions for Rivers")).to_be_focused()


def test_folders_work_on_a_phone(browser: Browser, engine: ScriptedEngine) -> None:
    with scripted_server(engine) as address:
        phone = browser.new_page(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
        phone.add_init_script(WITHOUT_TITLES)
        phone.goto(address)
        send(phone, "Rivers")
        phone.get_by_role("button", name="Send", exact=True).wait_for()
        phone.get_by_role("button", name="Chats", exact=True).click()
        move(phone, "Rivers", "Water with a very long name " * 3)
        folder = phone.locator(".folder")
        box = folder.bounding_box()
        assert box and box["height"] >= 44 and box["x"] + box["width"] <= 390
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        folder.tap()
        expect(listed_chats(phone)).to_have_count(0)
        phone.close()
