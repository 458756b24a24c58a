"""Cost of the page in a browser: bytes and time until it shows, memory after 200 messages, frames while tokens come.

A Chromium that shows no window is driven by CDP against a server in this process whose model writes Markdown at a given
rate, so that the figures are the page's and not a model's.

usage: page.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "page"))

from conftest import CHROMIUM
from playwright.sync_api import Page, sync_playwright
from scripted import ScriptedEngine, scripted_server

MESSAGES = 200
RATE = 100
"""Tokens a second, of 4 characters."""
ANSWER = "## Rivers\n\nThe **Ebro** is `930` km long; so it is said.\n\n- one\n- two\n\n```python\nx = 1\n```\n\n"
FRAMES = """() => {
  globalThis.frames = [];
  let last = performance.now();
  const each = (now) => {
    globalThis.frames.push(now - last);
    last = now;
    requestAnimationFrame(each);
  };
  requestAnimationFrame(each);
}"""


def first_load(page: Page, address: str) -> dict[str, float]:
    """Bytes as they were sent, and milliseconds until something, and until the place to write, is there."""
    page.goto(address)
    page.get_by_label("Message", exact=True).wait_for()
    ready = page.evaluate("performance.now()")
    page.wait_for_timeout(300)
    sizes = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    sent = page.evaluate(f"{sizes}.reduce((sum, one) => sum + one.transferSize, 0)")
    return {"bytes": sent, "first_paint_ms": paint, "ready_ms": ready}


def heap(page: Page) -> float:
    """Bytes of the script's heap after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return float(found["JSHeapUsedSize"])


def say(page: Page, text: str) -> None:
    """One turn, to its end."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop", exact=True).wait_for()
    page.get_by_role("button", name="Send", exact=True).wait_for(timeout=120_000)


def import_messages(page: Page) -> None:
    """A conversation of 200 messages, as a file brings it."""
    rows = [
        {"id": f"m{n}", "parent": f"m{n - 1}" if n else None, "role": "assistant" if n % 2 else "user",
         "content": ANSWER * 3 if n % 2 else "And the next?", "created": n}
        for n in range(MESSAGES)
    ]  # fmt: skip
    kept = {"conversation": {"title": "long", "leaf": rows[-1]["id"], "updated": 1}, "messages": rows}
    text = json.dumps({"format": "llamado-conversations", "version": 1, "conversations": [kept]})
    file: Any = {"name": "x.json", "mimeType": "application/json", "buffer": text.encode()}
    page.get_by_label("Chat file").set_input_files(file)
    page.get_by_role("link", name="long").click()
    page.locator("article").nth(MESSAGES - 1).wait_for()
    page.wait_for_timeout(500)


def measure() -> dict[str, float]:
    """All figures."""
    engine = ScriptedEngine(ANSWER, piece=4)
    with scripted_server(engine) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        found = first_load(page, address)
        found["heap_empty"] = heap(page)
        import_messages(page)
        found["heap_200"] = heap(page)
        found["nodes_200"] = page.evaluate("document.querySelectorAll('*').length")
        page.get_by_role("link", name="New chat").click()
        engine.say, engine.delay = ANSWER * 12, 1 / RATE
        page.evaluate(FRAMES)
        say(page, "Tell me")
        frames: list[float] = page.evaluate("globalThis.frames.slice(5)")
        found["frame_ms_median"] = statistics.median(frames)
        found["frame_ms_99"] = sorted(frames)[int(len(frames) * 0.99)]
        found["frame_ms_most"] = max(frames)
        browser.close()
    return found


def table(found: dict[str, float]) -> str:
    """Return the table of the README."""
    rows = [
        ("first load, all files, packed", f"{found['bytes'] / 1e3:,.0f} kB"),
        ("first paint", f"{found['first_paint_ms']:,.0f} ms"),
        ("ready to write", f"{found['ready_ms']:,.0f} ms"),
        ("script's memory, empty", f"{found['heap_empty'] / 1e6:,.1f} MB"),
        (f"after {MESSAGES} messages", f"{found['heap_200'] / 1e6:,.1f} MB, {found['nodes_200']:,.0f} elements"),
        (f"pictures while {RATE} tokens/s come, median", f"{1e3 / found['frame_ms_median']:,.0f} a second"),
        ("time of a picture, 99%", f"{found['frame_ms_99']:,.0f} ms (most {found['frame_ms_most']:,.0f})"),
    ]
    return "\n".join(["| page | |", "|---|---:|", *(f"| {what} | {value} |" for what, value in rows)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure()
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
