"""A real browser for the page: Debian's Chromium, driven by Playwright. Without one these tests are skipped."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import WITHOUT_TITLES, Listener, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page
    from scripted import ScriptedEngine

# tests/page/run.sh installs playwright; without it the tests that need a browser are not collected.
_needing_browser = [path for path in Path(__file__).parent.glob("test_*.py") if "mark.browser" in path.read_text()]
collect_ignore = [] if find_spec("playwright") else _needing_browser
CHROMIUM = os.environ.get("LLAMADO_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        # As root, as in containers, Chromium runs only without its sandbox; it opens only our own page.
        # The fake microphone beeps.
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    # Requests of a service worker would bypass `page.route`; tests/page/test_offline.py allows it.
    found = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light", service_workers="block")
    found.set_default_timeout(60_000)
    found.add_init_script(WITHOUT_TITLES)
    yield found
    found.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab. The test fails after a console error, an exception of a script, or a request to another machine."""
    found = context.new_page()
    errors: list[str] = []
    expected: list[str] = []
    found.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("request", lambda request: errors.append(request.url) if _is_remote(request.url) else None)
    found.expected_errors = expected  # type: ignore[attr-defined]
    yield found
    unexpected = [line for line in errors if not any(re.search(pattern, line) for pattern in expected)]
    assert not unexpected, unexpected


@pytest.fixture
def engine() -> ScriptedEngine:
    """The scripted model of `chat`. Modules with other answers have their own."""
    from scripted import ScriptedEngine

    return ScriptedEngine(lambda prompt: f"Answer to {prompt.count('<user>')}.", delay=0.001)


@pytest.fixture
def chat(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    """A tab with the chat open."""
    from scripted import scripted_server

    with scripted_server(engine) as address:
        page.goto(address)
        page.get_by_label("Message", exact=True).wait_for()
        yield page


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A foreign server that should get no request."""
    found = Listener()
    yield found
    found.close()


def _is_remote(url: str) -> bool:
    return not re.match(r"(http://127\.0\.0\.1[:/]|data:|blob:|about:)", url)


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server process with SmolLM2 and eight slots."""
    with serving(
        tmp_path_factory.mktemp("smollm2"), "-m", "smollm2", "-c", "16384", "-np", "8", "--metrics"
    ) as address:
        yield address
