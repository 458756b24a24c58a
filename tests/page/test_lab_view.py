"""The latency lab, over the real SmolLM2 on two workers that the server started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from browsing import serving, take_picture, until
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = [pytest.mark.browser, pytest.mark.full]
AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"

FACTOR = 1.4
"""How far off the formula the best of some runs may be: tests share their machine with others."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(
        tmp_path_factory.mktemp("lab"), "-m", "smollm2", "-c", "4096", "-np", "2", "--lab", "2", "-ts", "1,1,1",
        "--rpc-failover", "1",
    ) as address:  # fmt: skip
        yield address


def runs(page: Page) -> int:
    found = re.search(r"(\d+) answers", page.locator(".badge").inner_text())
    return int(found[1]) if found else 0


def more_runs(page: Page, n: int) -> list[float]:
    """Tokens a second of `n` runs more."""
    found = []
    for _ in range(n):
        before = runs(page)
        until(page, lambda before=before: runs(page) > before, 60)  # type: ignore[misc]
        found.append(float(page.locator(".figure strong").first.inner_text()))
    return found


def test_delays_cost_what_theory_says_and_bytes_stay(page: Page, lab: str) -> None:
    page.goto(f"{lab}/#/lab")
    expect(page.locator("fieldset")).to_have_count(2)
    fast = max(more_runs(page, 8))
    if AXE.exists():
        page.evaluate(AXE.read_text())
        assert [found["id"] for found in page.evaluate("axe.run()")["violations"]] == []
    page.get_by_label("Delay").first.fill("60")
    page.get_by_label("Delay").last.fill("40")
    expect(page.locator(".figure").nth(2)).to_contain_text("100 ms")
    more_runs(page, 1)  # which may have begun before
    slow = max(more_runs(page, 3))
    expected = float(page.locator(".figure strong").nth(1).inner_text())
    told = httpx.get(f"{lab}/lab").json()
    assert told["on"] and [link["latency_ms"] for link in told["links"]] == [60, 40]
    assert slow < fast / 2, "the curve falls"
    assert expected / FACTOR < slow < expected * FACTOR, (slow, expected)
    expect(page.locator(".badge")).to_contain_text("Bytes are equal")
    take_picture(page, "lab")


DRAG = """async () => {
  const slider = document.querySelectorAll("fieldset input[type=range]")[0];
  const see = () => ({
    theory: Number(document.querySelectorAll(".figure strong")[1].innerText),
    ring: Number(document.querySelector(".curve circle.now").getAttribute("cy")),
    share: document.querySelector("fieldset .share").innerText,
    answers: document.querySelector(".badge").innerText.split(",")[0],
  });
  const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const seen = [];
  for (const value of [0, 10, 20, 40, 80]) {
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await frames();
    seen.push(see());
  }
  slider.value = 0;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  return seen;
}"""
"""Drags a slider to the right, and looks two frames after each step."""


def test_theory_follows_the_sliders_while_they_are_dragged(page: Page, lab: str) -> None:
    """Without a run between: by what the server reckons where no run without delays told it yet."""
    links = [link | {"latency_ms": 30} for link in httpx.get(f"{lab}/lab").json()["links"]]
    httpx.post(f"{lab}/lab/links", json={"links": links})
    page.goto(f"{lab}/#/lab")
    expect(page.locator(".figure").nth(1)).to_contain_text("predicted")
    assert 1 < float(page.locator(".figure strong").nth(1).inner_text()) < 1 / 0.06
    for _ in range(5):  # between two runs there is time for one
        seen = page.evaluate(DRAG)
        if len({one["answers"] for one in seen}) == 1:
            break
    assert len({one["answers"] for one in seen}) == 1, "no run ended meanwhile: what is seen is theory"
    theory = [1 / one["theory"] for one in seen]
    steps = [1e3 * (b - a) for a, b in pairwise(theory)]
    assert steps == pytest.approx([10, 10, 20, 40], abs=4), "each millisecond of the link is one of a token"
    assert sorted(one["ring"] for one in seen) == [one["ring"] for one in seen], "it goes down the curve"
    assert [one["share"] for one in seen] == [f"+ {ms} ms per token" for ms in ("0.0", "10", "20", "40", "80")]
    page.get_by_label("Delay").last.fill("0")
    expect(page.locator(".figure").nth(1)).not_to_contain_text("predicted")


def test_a_worker_is_killed_and_started_again(page: Page, lab: str) -> None:
    page.expected_errors.append("503")  # /health, while it is waited for
    page.goto(f"{lab}/#/lab")
    more_runs(page, 1)
    page.get_by_role("button", name="Kill worker").first.click()
    again = page.get_by_role("button", name="Restart worker")
    again.wait_for()
    page.locator("fieldset .state.lost, fieldset .state.away").wait_for()
    more_runs(page, 2)  # its layers are with the others
    again.click()
    page.get_by_role("button", name="Kill worker").nth(1).wait_for()
    expect(page.locator("fieldset .state.ready")).to_have_count(2)
    more_runs(page, 2)
    expect(page.locator(".badge")).to_contain_text("Bytes are equal")


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """`llamado up` with two workers and the lab: its address."""
    command = [sys.executable, "-m", "llamado", "up", "-m", "smollm2", "--nodes", "3", "--port", "0", "--"]
    command += ["--lab", "-c", "2048", "-np", "2", "--rpc-failover", "1"]
    (folder / "run").mkdir()
    with (folder / "log").open("wb") as log:
        environment = os.environ | {"XDG_RUNTIME_DIR": str(folder / "run")}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        end = time.monotonic() + 120
        while (found := re.search(r"ready: (\S+)", (folder / "log").read_text())) is None:
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.02)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


WATCH = """() => {
  const began = performance.now();
  globalThis.seen = [];
  const look = () => {
    const state = [...document.querySelectorAll("fieldset .state")].at(-1).classList[1];
    if (state !== (globalThis.seen.at(-1)?.[1] ?? "ready")) globalThis.seen.push([performance.now() - began, state]);
  };
  const all = { subtree: true, attributes: true, childList: true };
  new MutationObserver(look).observe(document.querySelector(".links"), all);
}"""
"""Keeps which states the last worker is shown in, and since when (ms)."""


def test_a_worker_of_a_cluster_dies_and_returns_by_itself(page: Page, tmp_path: Path) -> None:
    """`llamado up` started it, ends it, and starts it again; the map shows each."""
    with cluster(tmp_path) as address:
        page.goto(f"{address}/#/lab")
        more_runs(page, 1)
        kill = page.get_by_role("button", name="Kill worker")
        expect(kill).to_have_count(2)
        page.evaluate(WATCH)
        kill.last.click()
        until(page, lambda: page.evaluate("globalThis.seen.at(-1)?.[1]") in ("ready", "idle"), 60)
        print("SEEN", page.evaluate("globalThis.seen"))
        assert page.evaluate("globalThis.seen[0][1]") == "lost"
        expect(kill.last).to_be_enabled()
        expect(page.get_by_role("button", name="Restart worker")).to_have_count(0)
        more_runs(page, 2)
        expect(page.locator(".badge")).to_contain_text("Bytes are equal")


def test_it_is_closed_unless_the_server_opens_it(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}/#/lab")
        page.get_by_text("The lab is off").wait_for()
        assert httpx.post(f"{address}/lab/links", json={"links": []}).status_code == 501
