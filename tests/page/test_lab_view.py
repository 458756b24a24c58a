"""The latency lab, with SmolLM2 on two workers that the server started."""

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
from browsing import assert_accessible, serving, take_picture, until
from playwright.sync_api import Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = [pytest.mark.browser, pytest.mark.full]

FACTOR = 1.4
"""Allowed ratio of the fastest run to the formula: other processes share the machine."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(
        tmp_path_factory.mktemp("lab"), "-m", "smollm2", "-c", "4096", "-np", "2", "--lab", "2", "-ts", "1,1,1",
        "--rpc-failover", "1",
    ) as address:  # fmt: skip
        yield address


def runs(page: Page) -> int:
    found = re.search(r"(\d+) answers?", page.locator(".badge").inner_text())
    return int(found[1]) if found else 0


def more_runs(page: Page, n: int) -> list[float]:
    """Return the tokens/s of the next `n` runs."""
    found = []
    for _ in range(n):
        before = runs(page)
        until(page, lambda before=before: runs(page) > before, 60)  # type: ignore[misc]
        found.append(float(page.locator(".figure strong").first.inner_text()))
    return found


def test_delays_match_the_theory_and_keep_the_bytes(page: Page, lab: str) -> None:
    page.goto(f"{lab}/#/lab")
    expect(page.locator("fieldset")).to_have_count(2)
    fast = max(more_runs(page, 8))
    assert_accessible(page)
    page.get_by_label("Delay").first.fill("60")
    page.get_by_label("Delay").last.fill("40")
    expect(page.locator(".figure").nth(2)).to_contain_text("100 ms")
    more_runs(page, 1)  # it may have started before
    slow = max(more_runs(page, 3))
    expected = float(page.locator(".figure strong").nth(1).inner_text())
    state = httpx.get(f"{lab}/lab").json()
    assert state["on"] and [link["latency_ms"] for link in state["links"]] == [60, 40]
    assert slow < fast / 2, "the curve falls"
    assert expected / FACTOR < slow < expected * FACTOR, (slow, expected)
    expect(page.locator(".badge")).to_contain_text("Answers identical")
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
"""Drag a slider to the right, and read the page two frames after each step."""


def test_the_theory_follows_the_sliders(page: Page, lab: str) -> None:
    """It needs no run: without a measured compute time it uses the predicted one."""
    links = [link | {"latency_ms": 30} for link in httpx.get(f"{lab}/lab").json()["links"]]
    httpx.post(f"{lab}/lab/links", json={"links": links})
    page.goto(f"{lab}/#/lab")
    expect(page.locator(".figure").nth(1)).to_contain_text("predicted")
    assert 1 < float(page.locator(".figure strong").nth(1).inner_text()) < 1 / 0.06
    for _ in range(5):  # until no run ends during the drag
        seen = page.evaluate(DRAG)
        if len({one["answers"] for one in seen}) == 1:
            break
    assert len({one["answers"] for one in seen}) == 1, "a run ended during each drag"
    theory = [1 / one["theory"] for one in seen]
    steps = [1e3 * (b - a) for a, b in pairwise(theory)]
    assert steps == pytest.approx([10, 10, 20, 40], abs=4), "a millisecond of link time adds a millisecond per token"
    assert sorted(one["ring"] for one in seen) == [one["ring"] for one in seen], "the ring moves down the curve"
    assert [one["share"] for one in seen] == [f"+ {ms} ms per token" for ms in ("0.0", "10", "20", "40", "80")]
    page.get_by_label("Delay").last.fill("0")
    expect(page.locator(".figure").nth(1)).not_to_contain_text("predicted")


def test_a_worker_is_killed_and_restarted(page: Page, lab: str) -> None:
    page.expected_errors.append("503")  # /health, while the worker is gone
    page.goto(f"{lab}/#/lab")
    more_runs(page, 1)
    page.get_by_role("button", name="Kill worker").first.click()
    again = page.get_by_role("button", name="Restart worker")
    again.wait_for()
    page.locator("fieldset .state.lost, fieldset .state.away").wait_for()
    more_runs(page, 2)  # other devices hold its layers
    again.click()
    page.get_by_role("button", name="Kill worker").nth(1).wait_for()
    expect(page.locator("fieldset .state.ready")).to_have_count(2)
    more_runs(page, 2)
    expect(page.locator(".badge")).to_contain_text("Answers identical")


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Run `llamado up` with two workers and the lab; yield its address."""
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
"""Record the states of the last worker, with the time of each in ms."""


def test_a_killed_worker_of_a_cluster_is_restarted(page: Page, tmp_path: Path) -> None:
    """`llamado up` kills and restarts the worker; the view shows both."""
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
        expect(page.locator(".badge")).to_contain_text("Answers identical")


def test_the_lab_is_off_by_default(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}/#/lab")
        page.get_by_text("The lab is off").wait_for()
        assert httpx.post(f"{address}/lab/links", json={"links": []}).status_code == 501
