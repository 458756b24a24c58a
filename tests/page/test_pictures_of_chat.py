"""Screenshots of chat, comparison and completion for the documentation, with answers of a small model."""

from __future__ import annotations

import pytest
from browsing import send, take_picture, unfold
from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.full]


def ask(page: Page, text: str) -> None:
    send(page, text)
    page.locator(".stats:not(.streaming)").last.wait_for()


def setting(page: Page, name: str, value: str) -> None:
    page.get_by_label(name, exact=name[-1] != " ").fill(value)
    page.get_by_label(name, exact=name[-1] != " ").blur()


def test_screenshots_of_text_views(page: Page, smollm2_server: str) -> None:
    page.goto(smollm2_server)
    page.get_by_role("button", name="Settings").click()
    setting(page, "temperature", "0")
    setting(page, "max_tokens", "220")
    page.get_by_role("button", name="Close settings").click()
    ask(page, "Write a short Python function that adds two numbers.")
    page.wait_for_timeout(400)
    take_picture(page, "chat")

    size = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 780})
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(400)
    take_picture(page, "phone")
    assert size is not None
    page.set_viewport_size(size)
    page.emulate_media(color_scheme="light")

    page.goto(f"{smollm2_server}#/compare")
    for side, temperature in (("Left", "0"), ("Right", "0.7")):
        page.get_by_role("button", name=f"{side} settings").click()
        setting(page, "temperature", temperature)
        unfold(page, "Sampling")
        setting(page, "seed", "1")
        setting(page, "max_tokens", "120")
        page.get_by_role("button", name="Close settings").click()
    ask(page, "What is a river? Two sentences.")
    page.get_by_text("words differ").wait_for()
    take_picture(page, "compare")

    page.goto(f"{smollm2_server}#/complete")
    page.get_by_label("Text", exact=True).fill("Once upon a time there was a river that")
    page.get_by_role("button", name="Settings").click()
    unfold(page, "Sampling", "Advanced")
    setting(page, "Probabilities: ", "6")
    setting(page, "n_predict", "60")
    setting(page, "seed", "1")
    page.get_by_role("button", name="Complete", exact=True).click()
    page.locator(".stats:not(.streaming)").wait_for()
    page.locator(".complete-foot").get_by_role("button", name="Probabilities").click()
    page.locator(".token").nth(8).hover()
    page.wait_for_timeout(200)
    take_picture(page, "complete")
