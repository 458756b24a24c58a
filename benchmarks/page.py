"""Cost of the page in a browser: bytes, time until it shows, memory, input delay and frames in a chat of 300 messages.

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

sys.path.append(str(Path(__file__).parents[1] / "tests" / "page"))

from browsing import import_chat, shorten_requests
from conftest import CHROMIUM, WITHOUT_TITLES
from playwright.sync_api import Page, sync_playwright
from scripted import ScriptedEngine, scripted_server

MESSAGES = 300
PASTED = 200_000
"""Characters of a long draft."""
KEYS = 20
RATE = 100
"""Tokens a second, of 4 characters."""
TO_END = "(all) => all.scrollHeight - all.scrollTop - all.clientHeight"
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

DELAYS = """() => {
  globalThis.delays = [];
  addEventListener("keydown", ({ timeStamp }) => {
    requestAnimationFrame(() => {
      // A message is handled after the frame was drawn.
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => globalThis.delays.push(performance.now() - timeStamp);
      port2.postMessage(null);
    });
  }, true);
}"""
FILL = """(length) => {
  const field = document.getElementById("message");
  field.value = "A line of words.\\n".repeat(length / 17);
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
  field.focus();
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
    """Send a message and wait for the end of the answer. Roles are not used: finding one takes long in a long page."""
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".message.streaming").wait_for()
    page.locator(".message.streaming").wait_for(state="detached", timeout=120_000)


def import_messages(page: Page) -> None:
    """Import a long conversation and open it."""
    import_chat(page, "long", [ANSWER * 3 if n % 2 else "And the next?" for n in range(MESSAGES)])
    page.locator("article").nth(MESSAGES - 1).wait_for()
    page.wait_for_timeout(500)


def input_delay(page: Page) -> float:
    """Return the longest time from a key to its frame, in milliseconds."""
    page.locator("#message").focus()
    page.evaluate("globalThis.delays = []")
    for _ in range(KEYS):
        page.keyboard.press("a")
        page.wait_for_timeout(80)
    page.wait_for_timeout(200)
    return float(max(page.evaluate("globalThis.delays")))


def measure() -> dict[str, float]:
    """All figures."""
    engine = ScriptedEngine(ANSWER, piece=4)
    with scripted_server(engine) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script(WITHOUT_TITLES)
        shorten_requests(page)
        found = first_load(page, address)
        found["heap_empty"] = heap(page)
        import_messages(page)
        found["heap_long"] = heap(page)
        found["nodes_long"] = page.evaluate("document.querySelectorAll('*').length")
        found["from_end_px"] = page.locator(".messages").evaluate(TO_END)
        page.evaluate(DELAYS)
        found["input_delay_ms"] = input_delay(page)
        page.evaluate(FILL, PASTED)
        found["input_delay_pasted_ms"] = input_delay(page)
        page.locator("#message").evaluate("(field) => (field.value = '')")
        engine.say, engine.delay = ANSWER * 40, 1 / RATE
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
        (f"after {MESSAGES} messages", f"{found['heap_long'] / 1e6:,.1f} MB, {found['nodes_long']:,.0f} elements"),
        ("they open above their end by", f"{found['from_end_px']:,.0f} px"),
        ("input delay among them, longest", f"{found['input_delay_ms']:,.0f} ms"),
        (f"and with {PASTED / 1000:,.0f} kB in the draft", f"{found['input_delay_pasted_ms']:,.0f} ms"),
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
