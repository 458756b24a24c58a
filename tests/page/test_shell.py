"""The page's frame: it comes up at once, says what the server does, asks for the key."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browsing import take_picture
from playwright.sync_api import Browser, Page, Route, expect
from scripted import ScriptedEngine, scripted_server

from llamado.text.template.templates import TEMPLATES

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
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_role("button", name="Continue").click()
        dialog.get_by_text("The server rejected this key.").wait_for()
        take_picture(page, "key")
        dialog.get_by_label("API key").fill("secret")
        dialog.get_by_role("button", name="Continue").click()
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


def test_a_view_that_could_not_be_fetched_opens_when_the_server_is_back(page: Page) -> None:
    page.expected_errors.append("ERR_|Failed to load")  # type: ignore[attr-defined]
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        page.route(re.compile("/(health|assets/)"), lambda route: route.abort())
        page.get_by_role("link", name="Live", exact=True).click()
        notice = page.locator("main .notice")
        expect(notice).to_contain_text("this view opens when the server answers")
        expect(notice).to_have_count(1)
        page.unroute_all()
        page.locator(".lane").first.wait_for()
        expect(notice).to_have_count(0)


VIEWS = ("Chat", "Compare", "Complete", "Infill", "Live", "Cluster", "Lab")


def test_a_view_looks_the_same_whatever_was_looked_at_before(page: Page) -> None:
    """Each view's style sheet stays when another view is shown."""

    def places() -> list[Any]:
        page.locator(".lane").first.wait_for()
        found: list[Any] = page.locator(".lanes *, .section-head *").evaluate_all(
            "(all) => all.map((one) => { const { x, y, width, height } = one.getBoundingClientRect();"
            " return [one.className, x, y, width, height, getComputedStyle(one).display] })"
        )
        return found

    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}#/live")
        before = places()
        for view in VIEWS:
            page.get_by_role("link", name=view, exact=True).click()
            expect(page).to_have_title(f"{view} · llamado")
            page.locator("main > *").first.wait_for()
        page.get_by_role("link", name="Live", exact=True).click()
        assert places() == before


@pytest.mark.parametrize("view", VIEWS)
def test_on_a_phone_nothing_hangs_over_and_all_views_are_reached(browser: Browser, view: str) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page = browser.new_page(viewport={"width": 390, "height": 800}, has_touch=True)
        page.goto(address)
        link = page.get_by_role("link", name=view, exact=True)
        expect(link).to_be_hidden()
        page.get_by_role("button", name="Select view: Chat").click()
        link.click()
        expect(link).to_be_hidden()
        page.get_by_role("button", name=f"Select view: {view}").wait_for()
        page.locator("main > *").first.wait_for()
        wide = "() => [document.documentElement, document.querySelector('main')].map((e) => e.scrollWidth)"
        assert max(page.evaluate(wide)) <= 390
        small = page.locator("main button:visible").evaluate_all(
            "(all) => all.map((one) => [one.textContent, one.getBoundingClientRect()])"
            ".filter(([, box]) => box.height < 36 || box.width < 36).map(([text]) => text)"
        )
        assert small == [], "too small for a finger"
        page.close()


def test_a_new_chat_says_what_answers_and_what_may_be_asked(page: Page) -> None:
    engine = ScriptedEngine(lambda prompt: "Blue is scattered." if "sky is blue" in prompt else "What?")
    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_role("heading", name="fake", level=2).wait_for()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.get_by_role("button", name="Explain something").click()
        page.get_by_text("Blue is scattered.").wait_for()
        expect(page.locator(".welcome")).to_have_count(0)


def test_of_many_models_one_that_is_loaded_is_asked_until_another_is_chosen(page: Page) -> None:
    """A router refuses a request that names no model."""

    def told(route: Route, more: dict[str, Any]) -> None:
        route.fulfill(json=route.fetch().json() | more)

    listed = [{"id": "a", "status": {"value": "unloaded"}}, {"id": "b", "status": {"value": "loaded"}}]
    with scripted_server(ScriptedEngine()) as address:
        page.route("**/props*", lambda route: told(route, {"role": "router"}))
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
        page.goto(address)
        page.get_by_text("1 of 2 models loaded").wait_for()
        picker = page.get_by_role("combobox", name="Model")
        expect(picker).to_have_value("b")
        for view, name in (("Chat", "Message"), ("Compare", "Message"), ("Complete", "Text")):
            page.get_by_role("link", name=view, exact=True).click()
            page.get_by_role("heading", level=1).wait_for()
            page.get_by_label(name, exact=True).fill("Hello")
            with page.expect_request(re.compile("completion")) as asked:
                page.keyboard.press("ControlOrMeta+Enter" if name == "Text" else "Enter")
            assert asked.value.post_data_json["model"] == "b", view
            page.locator(".stats").last.wait_for()
        for view in ("Cluster", "Lab"):  # which a router has not
            page.get_by_role("link", name=view, exact=True).click()
            page.get_by_role("heading", name="This address is a router").wait_for()
        page.get_by_role("link", name="Chat", exact=True).click()
        picker.select_option("a")
        page.get_by_label("Message", exact=True).fill("Hello")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["model"] == "a"


def test_a_model_without_a_template_is_said_and_limited(page: Page) -> None:
    """It was not made for conversations, and may never end an answer."""
    instead = {"chat_template": TEMPLATES["chatml"]}  # what the server takes where there is none
    with scripted_server(ScriptedEngine()) as address:
        page.route("**/props*", lambda route: route.fulfill(json=route.fetch().json() | instead))
        page.goto(address)
        page.get_by_text("base model without a chat template").wait_for()
        for typed, most in (("", 1024), ("7", 7)):
            if typed:
                page.get_by_role("button", name="Settings").click()
                page.get_by_label("max_tokens", exact=True).fill(typed)
            page.get_by_label("Message", exact=True).fill("Hello")
            with page.expect_request("**/v1/chat/completions") as asked:
                page.keyboard.press("Enter")
            assert asked.value.post_data_json["max_tokens"] == most
            page.get_by_role("button", name="Send", exact=True).wait_for()
