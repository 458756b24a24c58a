"""Layout of the chat: widths, distances, the empty chat, settings, progress, formulas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import send
from playwright.sync_api import Locator, Page, Route, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

LONG = "word " * 200
ANSWER = f"{LONG}\n\n```python\n{'x = 1  # ' + 'wide ' * 60}\n```\n"
REM = 15  # pixels
COLUMN = 44 * REM


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(ANSWER)


@pytest.fixture
def chat(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    with scripted_server(engine) as address:
        page.set_viewport_size({"width": 1600, "height": 900})
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        yield page


def box(one: Locator) -> dict[str, float]:
    found: dict[str, float] = one.evaluate("(one) => one.getBoundingClientRect().toJSON()")
    return found


def test_an_empty_chat_has_the_composer_in_the_middle(chat: Page) -> None:
    composer = box(chat.locator(".composer-box"))
    assert 0.4 * 900 < (composer["top"] + composer["bottom"]) / 2 < 0.6 * 900
    expect(chat.locator(".welcome")).to_contain_text("1K parameters, 2.0 KiB · 4,096 tokens of context")
    examples = chat.locator(".examples button")
    expect(examples).to_have_count(3)
    assert box(examples.first)["top"] > composer["bottom"]
    expect(chat.get_by_placeholder("Message fake")).to_be_focused()
    send(chat, "Hello")
    chat.locator(".stats:not(.streaming)").wait_for()
    assert box(chat.locator(".composer-box"))["bottom"] > 0.95 * 900


def test_questions_stand_with_their_answers(chat: Page) -> None:
    for count, text in enumerate(("Hi", LONG), 1):
        send(chat, text)
        expect(chat.locator(".stats:not(.streaming)")).to_have_count(count)
    chat.locator(".messages").evaluate("(all) => all.scrollTo(0, 0)")
    articles = chat.locator("article")
    bubbles = chat.locator("article.user .message-text")
    assert box(articles.nth(1))["top"] - box(bubbles.nth(0))["bottom"] == pytest.approx(10, abs=1)
    assert box(articles.nth(2))["top"] - box(articles.nth(1))["bottom"] == pytest.approx(32, abs=1)
    assert box(bubbles.nth(0))["width"] < 60
    assert box(bubbles.nth(1))["width"] == pytest.approx(0.8 * COLUMN, abs=1)


def test_only_code_is_wider_than_the_column(chat: Page) -> None:
    send(chat, "Hello")
    chat.locator(".stats:not(.streaming)").wait_for()
    text, code = box(chat.locator(".markdown p")), box(chat.locator(".markdown .code"))
    assert text["width"] == pytest.approx(COLUMN, abs=1)
    assert code["width"] > COLUMN + 100
    assert (code["left"] + code["right"]) / 2 == pytest.approx((text["left"] + text["right"]) / 2, abs=1)


def test_common_settings_come_first_and_others_are_folded(chat: Page) -> None:
    chat.get_by_role("button", name="Settings").click()
    settings = chat.get_by_role("complementary", name="Settings")
    settings.get_by_label("max_tokens", exact=True).wait_for()
    shown = settings.locator("label:visible")
    expect(shown).to_have_text(["System prompt", "temperature", "top_p", "max_tokens"])
    expect(settings.locator("summary")).to_have_text(["Sampling", "Penalties", "Advanced", "All chats"])
    settings.get_by_text("Penalties", exact=True).click()
    expect(settings.get_by_label("repeat_penalty", exact=True)).to_be_visible()
    settings.get_by_label("Find a parameter").fill("schema")
    expect(settings.get_by_label("JSON schema of the answer")).to_be_visible()
    settings.get_by_label("Find a parameter").fill("")
    expect(settings.get_by_label("JSON schema of the answer")).to_be_hidden()
    chat.get_by_role("button", name="Close settings").click()
    chat.get_by_role("button", name="Settings").click()
    expect(settings.get_by_label("repeat_penalty", exact=True)).to_be_visible()  # it stays unfolded


def test_waiting_shows_the_loaded_part_of_a_model_and_the_time(chat: Page) -> None:
    """A router loads a model at the first request."""

    def list_models(route: Route) -> None:
        status = {"value": "loading", "progress": {"value": 0.4}}
        route.fulfill(json={"data": [{"id": "gemma3", "status": status}, {"id": "other"}]})

    def respond(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | {"role": "router"})

    pending: list[Route] = []
    chat.route("**/v1/models", list_models)
    chat.route("**/props*", respond)
    chat.route("**/v1/chat/completions", lambda route: pending.append(route))
    chat.reload()
    send(chat, "Hello")
    waiting = chat.locator(".waiting")
    expect(waiting).to_contain_text("Loading gemma3, 40%")
    expect(waiting).to_contain_text(re.compile(r"\d s$"))
    pending[0].abort()
    chat.expected_errors.append("ERR_FAILED")  # type: ignore[attr-defined]
    expect(waiting).to_have_count(0)
    chat.unroute_all(behavior="wait")


def test_the_font_of_formulas_is_fetched_with_the_first_formula(chat: Page, engine: ScriptedEngine) -> None:
    fetched: list[str] = []
    chat.on("request", lambda request: fetched.append(request.url))
    send(chat, "Hello")
    chat.locator(".stats:not(.streaming)").wait_for()
    assert not [url for url in fetched if "woff2" in url or "tex" in url]
    engine.say = "The Lagrangian $\\mathscr{L}$."
    with chat.expect_request("**/*.woff2"):
        send(chat, "And a formula?")
    chat.locator("math .mathscr").wait_for()


def test_actions_of_an_answer_have_words(chat: Page) -> None:
    send(chat, "Hello")
    chat.locator(".stats:not(.streaming)").wait_for()
    actions: Any = chat.locator("article.assistant .actions button")
    expect(actions).to_have_text([" Copy", " Edit", " Regenerate", "", ""])
