"""Languages of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import assert_accessible, open_view, send
from playwright.sync_api import Browser, Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def german(browser: Browser) -> Iterator[Page]:
    """A tab of a browser whose user prefers Austrian German."""
    context = browser.new_context(locale="de-AT", viewport={"width": 1280, "height": 800}, service_workers="block")
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()


def test_the_page_has_the_language_of_the_browser(german: Page) -> None:
    with scripted_server(ScriptedEngine("Sehr gut.")) as address:
        german.goto(address)
        expect(german.locator("html")).to_have_attribute("lang", "de")
        expect(german.get_by_role("button", name="Etwas erklären")).to_be_visible()
        expect(german.get_by_placeholder("Nachricht an fake")).to_be_focused()
        german.get_by_label("Nachricht", exact=True).fill("Wie geht es?")
        german.keyboard.press("Enter")
        german.get_by_text("Sehr gut.").wait_for()
        expect(german.locator(".stats")).to_contain_text("erstes Token")
        german.get_by_role("button", name="Einstellungen").click()
        german.get_by_label("temperature", exact=True).wait_for()  # names of the API stay
        assert_accessible(german)


def test_a_chosen_language_is_kept(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        languages = page.get_by_role("combobox", name="Language")
        expect(languages.locator("option")).to_have_text(
            ["Same as the browser", "English", "Deutsch", "Español", "简体中文"]
        )
        for tag, group, tab in (
            ("de", "Server", "Labor"),
            ("es", "Servidor", "Laboratorio"),
            ("zh-Hans", "服务器", "实验室"),
        ):
            page.locator(".language select").select_option(tag[:2])
            expect(page.locator("html")).to_have_attribute("lang", tag)
            page.get_by_role("link", name=group, exact=True).click()
            page.get_by_role("link", name=tab, exact=True).click()
            expect(page).to_have_title(f"{tab} · llamado")
        page.reload()
        expect(page).to_have_title("实验室 · llamado")
        page.locator(".language select").select_option("system")
        open_view(page, "Chat")
        send(page, "Hello")
        page.get_by_text("All is well.").wait_for()


def test_other_languages_are_fetched_only_if_chosen(page: Page) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        scripts = [url for url in fetched if "/assets/" in url]
        page.locator(".language select").select_option("es")
        page.get_by_role("link", name="Servidor").wait_for()
        assert len([url for url in fetched if "/assets/" in url]) == len(scripts) + 1
