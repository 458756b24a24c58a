"""The live view of a server, and of a router."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browsing import assert_accessible, serving, take_picture, until
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = [pytest.mark.browser, pytest.mark.full]


@pytest.fixture
def streams(smollm2_server: str) -> Iterator[list[threading.Thread]]:
    """Eight concurrent answers, one to a long prompt, until the test ends."""
    over = threading.Event()

    def ask(i: int) -> None:
        text = "Tell me of the rivers of Spain. " * (60 if i == 0 else 1)
        body = {"prompt": f"{i} {text}", "n_predict": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{smollm2_server}/completion", json=body, timeout=300) as answer:
            for _ in answer.iter_lines():
                if over.is_set():
                    return

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    yield threads
    over.set()
    for thread in threads:
        thread.join(60)


def test_eight_concurrent_requests_are_shown(page: Page, smollm2_server: str, streams: list[threading.Thread]) -> None:
    page.goto(f"{smollm2_server}#/live")
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(8)
    expect(page.locator(".lane.state-generating")).to_have_count(8)

    def context() -> list[int]:
        bars = page.get_by_role("progressbar", name="Context")
        texts = [bars.nth(i).locator("xpath=../span[2]").inner_text() for i in range(8)]
        return [int(text.partition(" /")[0].replace(",", "")) for text in texts]

    before = context()
    until(page, lambda: all(b < a for b, a in zip(before, context(), strict=True)))
    expect(page.locator(".lane-rate b").first).not_to_have_text("0")

    rows = page.locator(".waterfall tr.running")
    expect(rows).to_have_count(8)
    track = rows.first.locator(".track")
    label = track.get_attribute("aria-label")
    expect(track).not_to_have_attribute("aria-label", label or "")
    assert re.search(r"generation \d", track.get_attribute("aria-label") or "")
    expect(page.get_by_label("Now").get_by_text("of 8")).to_be_visible()

    chart = page.locator("figure.chart").first
    expect(chart).to_have_attribute("data-points", re.compile(r"^([5-9]|\d\d+)$"))
    expect(chart.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"Generation: tokens/s [1-9]"))
    # The canvas is not empty, and its colors follow the theme.
    line = "(c) => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((v) => v).length"
    assert chart.locator("canvas").evaluate(line) > 1000
    color = (
        "(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let s = 0;"
        " for (let i = 0; i < d.length; i += 4) if (d[i + 3] == 255) s = Math.max(s, d[i] + d[i + 1] + d[i + 2]);"
        " return s }"
    )
    light = chart.locator("canvas").evaluate(color)
    page.emulate_media(color_scheme="dark")
    until(page, lambda: chart.locator("canvas").evaluate(color) != light)
    dark = chart.locator("canvas").evaluate(color)
    page.emulate_media(color_scheme="light")
    until(page, lambda: chart.locator("canvas").evaluate(color) != dark)
    take_picture(page, "live")


def test_the_log_is_filtered_and_paused(page: Page, smollm2_server: str) -> None:
    page.goto(f"{smollm2_server}#/live")
    log = page.get_by_role("log")
    log.get_by_text("model loaded in").wait_for()
    httpx.post(f"{smollm2_server}/tokenize", json={"content": "a"}, headers={"X-Request-Id": "find-me"})
    log.get_by_text("POST /tokenize 200").first.wait_for()
    page.get_by_label("Search the log").fill("find-me")
    expect(log.locator(".line")).to_have_count(1)
    page.get_by_label("Search the log").fill("")
    page.get_by_label("Log level").select_option("warnings and errors")
    expect(log.get_by_text("model loaded in")).to_have_count(0)
    page.get_by_label("Log level").select_option("everything")
    page.get_by_role("button", name="Pause").click()
    n = log.locator(".line").count()
    httpx.post(f"{smollm2_server}/tokenize", json={"content": "a"})
    page.get_by_role("button", name=re.compile(r"Resume \(\d+ new\)")).wait_for()
    assert log.locator(".line").count() == n
    page.get_by_role("button", name="Resume").click()
    expect(log.locator(".line")).not_to_have_count(n)


def test_results_of_requests_are_shown(page: Page) -> None:
    engine = ScriptedEngine("All is well.")
    with scripted_server(engine) as address:
        page.goto(f"{address}#/live")
        page.get_by_text("No requests yet.").wait_for()
        httpx.post(f"{address}/completion", json={"prompt": "SECRET", "n_predict": 3})
        httpx.post(f"{address}/completion", json={"prompt": "a", "n_predict": "x"})
        page.get_by_text("token limit").wait_for()
        page.locator(".outcome.bad", has_text="400").wait_for()
        engine.delay = 2.0
        body = {"prompt": "a", "n_predict": 12, "stream": True}
        with httpx.stream("POST", f"{address}/completion", json=body, timeout=60) as response:
            next(response.iter_lines())  # then disconnect
        page.locator(".figure", has_text="Canceled").get_by_text("1", exact=True).wait_for()
        assert "SECRET" not in page.content()
        assert_accessible(page)
        page.get_by_role("link", name="Lab", exact=True).focus()  # the last tab; the keyboard reaches the view
        for _ in range(2):
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('.live') !== null")


def test_contents_of_the_prompt_cache_are_shown(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path, "-m", "smollm2", "-c", "1024", "-np", "1") as address:
        page.goto(f"{address}#/live")
        page.get_by_text("Contents").click()
        page.get_by_text("Empty, except for the prompts in slots.").wait_for()
        for prompt in ("The rivers of Spain are long. " * 20, "Castles stand on hills. " * 20):
            httpx.post(f"{address}/completion", json={"prompt": prompt, "n_predict": 2}, timeout=60)
        row = page.locator(".cache-entries tbody tr")
        expect(row).to_have_count(1)
        expect(row).to_contain_text("The rivers of Spain are long.")
        expect(row).to_contain_text("ago")
        assert_accessible(page)


def test_a_lost_connection_is_shown(page: Page) -> None:
    page.expected_errors.append("ERR_|Failed to load|404")  # type: ignore[attr-defined]
    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}#/live")
        page.locator(".lane").first.wait_for()
    page.locator(".live .notice").wait_for()


def test_models_of_a_router_are_loaded_and_unloaded(page: Page, tmp_path: Path) -> None:
    source = next((Path.home() / ".cache/llamado/models").glob("SmolLM2*.gguf"), None)
    if source is None:
        pytest.skip("SmolLM2 is not on this machine")
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.gguf").symlink_to(source)
    router = serving(tmp_path, "--models-dir", str(folder), "-c", "512", "-np", "2", words="server listening on")
    with router as address:
        page.goto(f"{address}#/live")
        one, two = (page.locator(f"[data-model={name}]") for name in ("one", "two"))
        one.get_by_text("not loaded", exact=True).wait_for()
        for model, name in ((one, "one"), (two, "two")):
            model.get_by_role("button", name=f"Load {name}").click()
            model.get_by_text("loaded", exact=True).wait_for()
        expect(page.locator(".lane")).to_have_count(2)
        two.get_by_role("button", name="Show two").click()
        page.get_by_role("heading", name="two").wait_for()
        httpx.post(f"{address}/v1/completions", json={"model": "two", "prompt": "a", "max_tokens": 3}, timeout=60)
        page.get_by_text("token limit").wait_for()
        page.get_by_label("Model", exact=True).select_option("one")
        expect(page.get_by_role("log").get_by_text("[one]").first).to_be_visible()
        expect(page.get_by_role("log").get_by_text("[two]")).to_have_count(0)
        for model, name in ((two, "two"), (one, "one")):
            model.get_by_role("button", name=f"Unload {name}").click()
            model.get_by_text("not loaded", exact=True).wait_for()
        page.get_by_text("Load a model to see its slots and requests.").wait_for()
        running = json.loads(httpx.get(f"{address}/running").content)["running"]
        assert running == []
