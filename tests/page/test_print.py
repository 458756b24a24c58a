"""Printing a chat."""

from __future__ import annotations

import re

import pytest
from browsing import import_chat
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


def test_the_whole_chat_is_printed(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        import_chat(page, "Long", [f"{n}. " + "A line of words. " * 40 for n in range(40)])
        expect(page.locator("article")).to_have_count(40)
        page.emulate_media(media="print")
        for hidden in (".bar", ".sidebar", ".composer", ".actions"):
            expect(page.locator(hidden).first).to_be_hidden()
        pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf()))
        assert pages >= 5, pages
