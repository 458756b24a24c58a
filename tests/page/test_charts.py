"""Charts of the live view."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser

OVERHANG = """(chart) => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = "11px Inter, system-ui, sans-serif";
  const ticks = 15;
  const axes = [...chart.querySelectorAll(".u-axis")].map((axis) => axis.getBoundingClientRect().width);
  return context.measureText("1 min 40 s").width + ticks - Math.min(...axes);
}"""


def first_state(address: str) -> dict[str, Any]:
    """Return the first event of the live view's stream."""
    with httpx.stream("GET", f"{address}/live/events") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("no event")


def test_labels_of_axes_are_not_clipped(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        state = first_state(address)
        names = ("prompt", "answer", "running", "waiting", "cells", "first_token", "errors")
        state["samples"] = {"at": [1e9, 1e9 + 60]} | {name: [100.0, 100.0] for name in names}
        events = f"data: {json.dumps(state)}\n\n"
        page.route("**/live/events*", lambda route: route.fulfill(content_type="text/event-stream", body=events))
        page.goto(f"{address}#/live")
        chart = page.locator(".chart", has_text="Time to first token")
        chart.locator(".u-axis").first.wait_for(state="attached")
        chart.get_by_text("1 min 40 s").wait_for()
        assert chart.evaluate(OVERHANG) <= 0
