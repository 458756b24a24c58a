"""The frame of the page: navigation, server status, API key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from browsing import open_view, send, take_picture
from playwright.sync_api import Browser, Page, Route, expect
from scripted import ScriptedEngine, scripted_server

from llamado.text.template.templates import TEMPLATES

pytestmark = pytest.mark.browser


def test_the_page_asks_for_the_api_key(page: Page) -> None:
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
        send(page, "Hello")
        page.get_by_text("All is well.").wait_for()
        page.reload()
        page.get_by_text("fake", exact=True).first.wait_for()
        assert not dialog.is_visible()


def test_an_unreachable_server_is_shown(page: Page) -> None:
    page.expected_errors.append("ERR_CONNECTION|Failed to load")
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        page.get_by_text("fake", exact=True).first.wait_for()
    page.get_by_text("Cannot reach the server", exact=True).wait_for()


def test_a_view_that_failed_to_load_opens_once_the_server_is_back(page: Page) -> None:
    page.expected_errors.append("ERR_|Failed to load")  # type: ignore[attr-defined]
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        page.route(re.compile("/(health|assets/)"), lambda route: route.abort())
        open_view(page, "Live")
        notice = page.locator("main .notice")
        expect(notice).to_contain_text("this view opens when the server answers")
        expect(notice).to_have_count(1)
        page.unroute_all()
        page.locator(".lane").first.wait_for()
        expect(notice).to_have_count(0)


VIEWS = ("Chat", "Compare", "Complete", "Infill", "Live", "Cluster", "Lab")


def test_style_sheets_of_other_views_change_no_view(page: Page) -> None:
    """The style sheet of each view stays loaded."""

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
            open_view(page, view)
            expect(page).to_have_title(f"{view} · llamado")
            page.locator("main > *").first.wait_for()
        open_view(page, "Live")
        assert places() == before


def assert_fits_a_phone(page: Page) -> None:
    """Fail if the view is wider than the screen, or if a control is too small for a finger."""
    wide = "() => [document.documentElement, document.querySelector('main')].map((e) => e.scrollWidth)"
    assert max(page.evaluate(wide)) <= 360
    controls = "button:visible, select:visible, input:not(.hidden, [type=checkbox]):visible, nav a"
    small = page.locator(controls).evaluate_all(
        "(all) => all.map((one) => [one.ariaLabel || one.textContent, one.getBoundingClientRect()])"
        ".filter(([, box]) => box.height < 44 || box.width < 44).map(([text]) => text)"
    )
    assert small == [], "too small for a finger"


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_reaches_all_views_without_horizontal_scrolling(browser: Browser, view: str) -> None:
    name = "Qwen3-30B-A3B-Instruct"
    with scripted_server(ScriptedEngine()) as address:
        page = browser.new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        page.route("**/props*", lambda route: route.fulfill(json=route.fetch().json() | {"model_alias": name}))
        page.goto(address)
        words = page.locator(".status .words")
        expect(words).to_have_text(name)
        assert words.evaluate("(one) => one.scrollWidth <= one.clientWidth"), "the name of the model is cut"
        open_view(page, view)
        expect(page).to_have_title(f"{view} · llamado")
        page.locator("main > *").first.wait_for()
        for link in page.get_by_role("navigation").get_by_role("link").all():
            expect(link).to_be_in_viewport(ratio=1)
        assert_fits_a_phone(page)
        page.close()


def test_an_open_lab_fits_a_phone(browser: Browser) -> None:
    link = {"latency_ms": 100, "jitter_ms": 50, "bandwidth": None, "own": True, "running": True, "watched": False}
    links = [link | {"endpoint": f"127.0.0.1:{port}", "worker": f"127.0.0.1:{port}"} for port in (50_001, 50_002)]
    cluster = {"model": "fake", "devices": [], "tokens_per_second": None, "token_seconds": None, "events": []}
    event = json.dumps({"sequence": 1, "cluster": cluster | {"predicted_seconds": None}})
    with scripted_server(ScriptedEngine()) as address:
        page = browser.new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        page.route("**/lab", lambda route: route.fulfill(json={"on": True, "links": links}))
        events = f"data: {event}\n\n"
        page.route("**/cluster/events", lambda route: route.fulfill(content_type="text/event-stream", body=events))
        page.goto(f"{address}#/lab")
        expect(page.locator("fieldset")).to_have_count(2)
        assert_fits_a_phone(page)
        page.close()


@pytest.mark.parametrize("fragment", ["#/lab", "#lab"])
def test_addresses_of_views_within_a_group_open_them(page: Page, fragment: str) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}{fragment}")
        expect(page).to_have_title("Lab · llamado")
        expect(page.get_by_role("link", name="Lab", exact=True)).to_have_attribute("aria-current", "page")
        open_view(page, "Chat")
        page.get_by_role("link", name="Server", exact=True).click()  # opens the view that was open last
        expect(page).to_have_title("Lab · llamado")


def test_a_new_chat_shows_the_model_and_examples(page: Page) -> None:
    engine = ScriptedEngine(lambda prompt: "Blue is scattered." if "sky is blue" in prompt else "What?")
    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_role("heading", name="fake", level=2).wait_for()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.get_by_role("button", name="Explain something").click()
        page.get_by_text("Blue is scattered.").wait_for()
        expect(page.locator(".welcome")).to_have_count(0)


def test_requests_name_a_loaded_model_until_another_is_chosen(page: Page) -> None:
    """A router rejects requests without a model."""

    def respond(route: Route, more: dict[str, Any]) -> None:
        route.fulfill(json=route.fetch().json() | more)

    listed = [{"id": "a", "status": {"value": "unloaded"}}, {"id": "b", "status": {"value": "loaded"}}]
    with scripted_server(ScriptedEngine()) as address:
        page.route("**/props*", lambda route: respond(route, {"role": "router"}))
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
        page.goto(address)
        page.get_by_text("1 of 2 models loaded").wait_for()
        picker = page.get_by_role("combobox", name="Model")
        expect(picker).to_have_value("b")
        for view, name in (("Chat", "Message"), ("Compare", "Message"), ("Complete", "Text")):
            open_view(page, view)
            page.get_by_role("heading", level=1).wait_for()
            page.get_by_label(name, exact=True).fill("Hello")
            with page.expect_request(re.compile("completion")) as asked:
                page.keyboard.press("ControlOrMeta+Enter" if name == "Text" else "Enter")
            assert asked.value.post_data_json["model"] == "b", view
            page.locator(".stats:not(.streaming)").last.wait_for()
        for view in ("Cluster", "Lab"):  # a router has neither
            open_view(page, view)
            page.get_by_role("heading", name="This address is a router").wait_for()
        open_view(page, "Chat")
        picker.select_option("a")
        page.get_by_label("Message", exact=True).fill("Hello")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["model"] == "a"
        page.unroute_all(behavior="wait")


def test_a_base_model_is_named_and_limited(page: Page) -> None:
    """It may never end an answer."""
    instead = {"chat_template": TEMPLATES["chatml"]}  # the server's fallback
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


def test_the_states_of_a_routers_models_stay_fresh(page: Page) -> None:
    """Another client loads a model: its state and its parameters appear without a reload."""
    status = {"value": "unloaded"}
    with scripted_server(ScriptedEngine()) as address:
        page.route("**/props*", lambda route: route.fulfill(json=route.fetch(url=f"{address}/props").json() | ROUTER))
        page.route(
            "**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "a"}, {"id": "b", "status": status}]})
        )
        page.goto(address)
        picker = page.locator(".composer-foot").get_by_role("combobox", name="Model")
        picker.select_option("b")
        expect(picker.get_by_role("option")).to_have_text(["a", "b (not loaded)"])
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("The parameters appear once the model is loaded.").wait_for()
        status["value"] = "loaded"
        expect(picker.get_by_role("option")).to_have_text(["a", "b"])
        page.get_by_label("Find a parameter").wait_for()


ROUTER = {"role": "router"}


def test_the_model_that_loads_is_named(page: Page, engine: ScriptedEngine) -> None:
    page.expected_errors.append("503")  # type: ignore[attr-defined]
    loading = {"error": {"code": 503, "message": "Loading model"}, "progress": 0.4, "stage": "weights"}
    with scripted_server(engine) as address:
        page.route("**/health", lambda route: route.fulfill(status=503, json=loading | {"model": "smollm2"}))
        page.goto(address)
        expect(page.locator("header [role=status]")).to_have_text("Loading smollm2, 40%")
        page.unroute("**/health")
        page.route("**/health", lambda route: route.fulfill(status=503, json=loading))  # as llama-server does
        expect(page.locator("header [role=status]")).to_have_text("Loading the model, 40%")
