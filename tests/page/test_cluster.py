"""The cluster view, with SmolLM2 on two workers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from browsing import assert_accessible, serving, take_picture
from playwright.sync_api import Locator, Page, expect
from scripted import ScriptedEngine, scripted_server
from workers import WorkerProcess

pytestmark = [pytest.mark.browser, pytest.mark.full]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    folder = tmp_path_factory.mktemp("workers")
    found = [WorkerProcess(folder, name) for name in ("first", "second")]
    yield found
    for one in found:
        one.close()


@pytest.fixture(scope="module")
def split_server(tmp_path_factory: pytest.TempPathFactory, workers: list[WorkerProcess]) -> Iterator[str]:
    """A server of SmolLM2, with a third of it on each worker."""
    endpoints = ",".join(one.endpoint for one in workers)
    with serving(
        tmp_path_factory.mktemp("split"), "-m", "smollm2", "-c", "4096", "-np", "2", "--rpc", endpoints,
        "-ts", "1,1,1", "--rpc-failover", "1",
    ) as address:  # fmt: skip
        yield address


def answer(address: str) -> str:
    body = {"prompt": "The rivers of Spain are", "temperature": 0, "n_predict": 24, "cache_prompt": False}
    return str(httpx.post(f"{address}/completion", json=body, timeout=60).json()["content"])


def lane(page: Page, number: int) -> Locator:
    return page.locator(".lane").nth(number)


def place(page: Page, number: int, at: int) -> Locator:
    return lane(page, number).locator(".places i").nth(at)


def has(page: Page, number: int) -> list[int]:
    """Return the places that a lane shows as assigned."""
    return list(
        page.locator(".lane")
        .nth(number)
        .locator(".places i")
        .evaluate_all("all => all.flatMap((one, i) => one.classList.contains('has') ? [i] : [])")
    )


def drag(page: Page, start: Locator, end: Locator) -> None:
    a, b = start.bounding_box(), end.bounding_box()
    assert a is not None and b is not None
    page.mouse.move(a["x"] + a["width"] / 2, a["y"] + a["height"] / 2)
    page.mouse.down()
    for step in (0.3, 0.6, 1.0):
        page.mouse.move(
            a["x"] + a["width"] / 2 + step * (b["x"] + b["width"] / 2 - a["x"] - a["width"] / 2),
            a["y"] + a["height"] / 2 + step * (b["y"] - a["y"]),
        )
    page.mouse.up()


def test_layers_are_moved_by_mouse_and_keyboard_and_answers_stay_equal(page: Page, split_server: str) -> None:
    before = answer(split_server)
    page.goto(f"{split_server}/#/cluster")
    expect(page.locator(".lane")).to_have_count(3)
    first, second, third = (has(page, n) for n in range(3))
    assert [*second, *third, *first] == list(range(31)), "30 layers and the head"
    expect(page.get_by_role("article", name="This machine")).to_be_visible()
    assert page.locator(".worker").count() == 2
    assert_accessible(page)

    predicted = page.locator(".figure", has_text="predicted")
    expect(predicted.locator("strong")).to_have_text("–")
    predicted.get_by_role("button", name="Measure").click()
    expect(predicted.locator("strong")).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(lane(page, 1).get_by_title("predicted time per token")).to_have_text(re.compile(r"^[\d.]+ ms$"))

    # The first worker's last three layers go to the second one.
    last = second[-1]
    drag(page, place(page, 1, last - 2), place(page, 2, last))
    draft_bar = page.locator(".draft-bar")
    expect(draft_bar).to_contain_text(re.compile(r"layout takes \d+(\.\d+)? ms"))
    assert has(page, 2) == [last - 2, last - 1, last, *third], "the draft is shown"
    body = httpx.get(f"{split_server}/cluster").json()
    assert body["devices"][1]["layers"][-1] == last, "nothing moves before it is applied"
    assert all(one["predicted"]["seconds"] for one in body["devices"] if one["layers"]), "speeds are measured"

    # One more by the keyboard.
    lane(page, 2).get_by_role("button", name=f"Move layer {last - 3} to RPC1").focus()
    page.keyboard.press("Enter")
    expect(draft_bar).to_contain_text(re.compile(r"layout takes \d+(\.\d+)? ms"))
    assert has(page, 2) == [*range(last - 3, last + 1), *third]
    predicted_ms = float(re.search(r"takes ([\d.]+) ms", draft_bar.inner_text())[1])  # type: ignore[index]
    take_picture(page, "cluster")
    draft_bar.get_by_role("button", name="Apply").click()
    expect(draft_bar.get_by_role("button")).to_have_count(0)
    body = httpx.get(f"{split_server}/cluster").json()
    assert body["devices"][2]["layers"] == [i for i in [*range(last - 3, last + 1), *third] if i < 30]
    assert body["predicted_seconds"] * 1e3 == pytest.approx(predicted_ms, rel=0.01, abs=0.06), (
        "the prediction is the same after the move"
    )
    assert answer(split_server) == before
    page.get_by_text("moved").first.wait_for()

    # Discarded: nothing changes.
    place(page, 0, 20).click()
    expect(draft_bar.get_by_role("button", name="Discard")).to_be_visible()
    draft_bar.get_by_role("button", name="Discard").click()
    expect(draft_bar.get_by_role("button")).to_have_count(0)
    assert httpx.get(f"{split_server}/cluster").json()["devices"] is not None
    assert has(page, 2)[0] == last - 3


def test_a_killed_worker_is_shown_and_returns(page: Page, split_server: str, workers: list[WorkerProcess]) -> None:
    page.expected_errors.append("503")  # /health, while the worker is gone
    page.goto(f"{split_server}/#/cluster")
    expect(page.locator(".lane")).to_have_count(3)
    before, held = answer(split_server), has(page, 2)
    workers[1].kill()
    lost, checks = page.locator(".lane.lost, .lane.away"), 0
    while not lost.count():  # counted, not timed: a busy machine delays checks and events alike
        checks += 1
        assert checks <= 50, "within a second"
        page.wait_for_timeout(20)
    page.locator(".worker.lost, .worker.away").wait_for()
    page.locator(".lane.away").wait_for()
    expect(page.locator(".events")).to_contain_text("moved")
    assert not has(page, 2), "other devices hold its layers"
    assert answer(split_server) == before
    take_picture(page, "cluster-lost")
    workers[1].start()
    page.locator(".lane.ready").nth(2).wait_for()
    expect(page.locator(".events")).to_contain_text("back")
    assert has(page, 2) == held and answer(split_server) == before


def test_a_model_that_is_not_split_shows_how_to_start(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}/#/cluster")
        page.get_by_text("The model runs on this machine only").wait_for()
        expect(page.get_by_text("llamado up --nodes 3")).to_be_visible()
