"""The page's frame: it comes up at once, says what the server does, asks for the key."""

from __future__ import annotations

import re

import pytest
from browsing import take_picture
from playwright.sync_api import Page
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


def test_send_and_read(page: Page) -> None:
    engine = ScriptedEngine(lambda prompt: "Ebro, Tajo, Duero." if "rivers" in prompt else "What?")
    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).fill("Name three rivers.")
        page.keyboard.press("Enter")
        page.get_by_text("Ebro, Tajo, Duero.").wait_for()
        page.get_by_text("fake", exact=True).first.wait_for()


def test_asks_for_the_key(page: Page) -> None:
    page.expected_errors.append("401")
    with scripted_server(ScriptedEngine(), keys=("secret",)) as address:
        page.goto(address)
        dialog = page.get_by_role("dialog", name=re.compile("key"))
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Go on").click()
        dialog.get_by_text("not one of the server's").wait_for()
        take_picture(page, "key")
        dialog.get_by_label("Key").fill("secret")
        dialog.get_by_role("button", name="Go on").click()
        page.get_by_text("fake", exact=True).first.wait_for()
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        page.get_by_text("All is well.").wait_for()
        page.reload()
        page.get_by_text("fake", exact=True).first.wait_for()
        assert not dialog.is_visible()


def test_a_server_that_ends_and_comes_back(page: Page) -> None:
    page.expected_errors.append("ERR_CONNECTION|Failed to load")
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        page.get_by_text("fake", exact=True).first.wait_for()
    page.get_by_text("the server cannot be reached").wait_for()
