"""The compare, complete and infill views, with scripted answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browsing import send, take_picture, unfold, until
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("One.", delay=0.001)


@pytest.fixture
def address(engine: ScriptedEngine) -> Iterator[str]:
    with scripted_server(engine) as found:
        yield found


MARKED = "() => [...(CSS.highlights.get('differs') ?? [])].map((range) => range.toString())"


def test_two_sides_stream_at_once_and_differences_are_highlighted(
    page: Page, address: str, engine: ScriptedEngine
) -> None:
    def say(prompt: str) -> str:
        start = "Short" if "<system>brief" in prompt else "Long"
        return f"{start} answer {prompt.count('<user>')} of **rivers**." + " word" * 300 * ("slow" in prompt)

    engine.say = say
    page.goto(f"{address}#/compare")
    page.get_by_role("button", name="Left settings").click()
    page.get_by_label("System prompt").fill("brief")
    page.get_by_role("button", name="Right settings").click()
    unfold(page, "Sampling")
    page.get_by_label("top_k", exact=True).fill("5")
    page.get_by_label("top_k", exact=True).blur()
    expect(page.locator(".compare-head .what")).to_have_text(["fake · system prompt", "fake · top_k 5"])
    page.get_by_role("button", name="Close settings").click()

    send(page, "Rivers?")
    page.get_by_text("2 of 12 words differ").wait_for()
    expect(page.locator(".compared .markdown")).to_have_text(["Short answer 1 of rivers.", "Long answer 1 of rivers."])
    until(page, lambda: page.evaluate(MARKED) == ["Short", "Long"])
    expect(page.locator(".compared .stats:not(.streaming)")).to_have_count(2)
    assert sorted(request.params.sampling.top_k for request in engine.requests) == [5, 40]

    engine.delay = 0.02
    send(page, "And slow ones?")
    for side in ("Left", "Right"):
        expect(page.get_by_label(f"{side} answer").last).to_contain_text("answer 2 of rivers. word")
    assert engine.busy == 2
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send", exact=True).wait_for()
    until(page, lambda: len(engine.cancelled) == 2)
    assert (
        "Long answer 1 of **rivers**"
        in bytes(engine.requests[-1].prompt).decode() + bytes(engine.requests[-2].prompt).decode()
    )  # each side continues from its own answers
    page.get_by_label("Highlight differences").click()
    until(page, lambda: page.evaluate(MARKED) == [])
    page.reload()
    expect(page.locator(".compare-head .what").last).to_have_text("fake · top_k 5")


@pytest.mark.full
def test_an_error_on_one_side_keeps_the_other_answer(page: Page, address: str, engine: ScriptedEngine) -> None:
    page.goto(f"{address}#/compare")
    page.get_by_role("button", name="Right settings").click()
    unfold(page, "Advanced")
    page.get_by_label("JSON schema").fill("{")
    page.get_by_label("JSON schema").blur()
    send(page, "Hello")
    page.get_by_label("Right answer").get_by_text("The JSON schema").wait_for()
    expect(page.get_by_label("Left answer")).to_contain_text("One.")


@pytest.mark.full
def test_scrolling_up_stops_autoscroll_of_a_comparison(page: Page, address: str, engine: ScriptedEngine) -> None:
    engine.say, engine.delay, engine.piece = "A line.\n\n" * 300, 0.02, 9
    page.goto(f"{address}#/compare")
    send(page, "Go")
    list_ = page.locator(".compare-turns")
    until(page, lambda: list_.evaluate("(all) => all.scrollTop > 300"))  # autoscroll
    list_.evaluate("(all) => all.scrollTo(0, 0)")
    shown = page.locator(".compared").inner_text()
    until(page, lambda: len(page.locator(".compared").inner_text()) > len(shown) + 100)
    assert list_.evaluate("(all) => all.scrollTop") == 0
    page.get_by_role("button", name="Stop").click()


def test_a_text_is_continued_in_place(page: Page, address: str, engine: ScriptedEngine) -> None:
    page.goto(f"{address}#/complete")
    text = page.get_by_label("Text", exact=True)
    page.get_by_role("button", name="Settings").click()
    unfold(page, "Sampling", "Advanced")
    page.get_by_label("Probabilities: ").fill("2")
    page.get_by_label("Probabilities: ").blur()
    page.get_by_label("top_k", exact=True).fill("3")
    assert page.get_by_label("n_predict", exact=True).input_value() == "128"
    text.fill("Upon a time ")
    text.press("Control+Enter")
    expect(text).to_have_value("Upon a time One.")
    page.get_by_text("The model ended here.").wait_for()
    request = engine.requests[-1]
    assert bytes(request.prompt).endswith(b"Upon a time ") and b"<user>" not in bytes(request.prompt)
    assert (request.params.n_predict, request.params.sampling.top_k) == (128, 3)
    page.locator(".complete-foot").get_by_role("button", name="Probabilities").click()
    page.locator(".token").first.hover()
    expect(page.locator(".candidates .taken")).to_have_text(re.compile(r"O\s*50\.0%"))
    page.locator(".complete-foot").get_by_role("button", name="Probabilities").click()

    engine.say, engine.delay = "more " * 500, 0.02
    page.get_by_role("button", name="Retry").click()
    expect(text).to_have_value(re.compile("Upon a time more more"))
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    until(page, lambda: bool(engine.cancelled) and text.is_editable())
    page.get_by_role("button", name="Undo").click()
    expect(text).to_have_value("Upon a time ")


def test_a_gap_is_filled(page: Page, address: str, engine: ScriptedEngine) -> None:
    engine.say = "return 1"
    page.goto(f"{address}#/infill")
    page.get_by_label("Before").fill("def f():\n    ")
    page.get_by_label("After").fill("\nprint(f())")
    page.get_by_label("Context files").set_input_files(
        {"name": "other.py", "mimeType": "text/plain", "buffer": b"seven = 7"}
    )
    expect(page.locator(".chip")).to_have_text("other.py")
    page.get_by_role("button", name="Fill in").click()
    expect(page.get_by_role("region", name="Between")).to_have_text("return 1")
    take_picture(page, "infill")
    prompt = bytes(token for token in engine.requests[-1].prompt if token not in (3, 4, 5)).decode()
    assert "seven = 7" in prompt and prompt.endswith("def f():\n    \nprint(f())")
    page.get_by_role("button", name="Insert").click()
    expect(page.get_by_label("Before")).to_have_value("def f():\n    return 1")
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Before")).to_have_value("def f():\n    ")
    expect(page.get_by_role("region", name="Between")).to_have_text("return 1")


@pytest.mark.full
def test_a_model_without_infill_tokens_is_reported(page: Page, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakes.FakeTokenizer.fim_pre", None)
    page.expected_errors.append("501")  # type: ignore[attr-defined]
    page.goto(f"{address}#/infill")
    page.get_by_role("button", name="Fill in").click()
    page.get_by_role("alert").get_by_text("no infill tokens").wait_for()
