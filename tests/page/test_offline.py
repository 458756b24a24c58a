"""The installed page opens without the server, is never older than the server's, and keeps no answers of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import WITHOUT_TITLES, send
from playwright.sync_api import Browser, BrowserContext, Page, expect
from scripted import ScriptedEngine, scripted_server

from llamado.page import files

pytestmark = pytest.mark.browser


@pytest.fixture
def installed(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that allows service workers."""
    found = browser.new_context(viewport={"width": 1280, "height": 800})
    found.set_default_timeout(60_000)
    found.add_init_script(WITHOUT_TITLES)
    yield found
    found.close()


def open_controlled(context: BrowserContext, address: str) -> Page:
    """Open the page, and wait until the service worker controls it."""
    page = context.new_page()
    page.goto(address)
    page.evaluate(
        "() => navigator.serviceWorker.controller"
        " || new Promise((done) => navigator.serviceWorker.addEventListener('controllerchange', () => done(true)))"
    )
    return page


def stored_urls(page: Page) -> list[str]:
    return page.evaluate(
        """async () => {
          const caches_ = await Promise.all((await caches.keys()).map((name) => caches.open(name)));
          const all = await Promise.all(caches_.map((cache) => cache.keys()));
          return all.flat().map((request) => new URL(request.url).pathname);
        }"""
    )


@pytest.mark.parametrize("prefix", ["", "/llama"])
def test_the_page_opens_without_the_server(installed: BrowserContext, prefix: str) -> None:
    with scripted_server(ScriptedEngine(), api_prefix=prefix) as address:
        page = open_controlled(installed, f"{address}{prefix}/")
        send(page, "Hello")
        expect(page.get_by_text("All is well.")).to_be_visible()
        page.reload()
        expect(page.get_by_text("All is well.")).to_be_visible()
        urls = stored_urls(page)
        assert f"{prefix}/" in urls and all(url == f"{prefix}/" or url.startswith(f"{prefix}/assets/") for url in urls)
    page.reload()
    expect(page.get_by_text("Cannot reach the server", exact=True)).to_be_visible()
    expect(page.get_by_text("All is well.")).to_be_visible()
    again = installed.new_page()
    again.goto(f"{address}{prefix}/")
    again.get_by_role("link", name="Hello").click()
    expect(again.get_by_text("All is well.")).to_be_visible()
    for path in ("props", "health", "v1/models"):
        failed = again.evaluate("(path) => fetch(path).then(() => false, () => true)", path)
        assert failed, f"{path} was answered without the server"


def test_an_upgraded_page_is_shown_at_once(installed: BrowserContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new page at the next load, and the old files are deleted once the new ones are stored."""
    original = files.load_file

    def upgraded(path: str) -> tuple[bytes, bytes, str]:
        content, packed, tag = original(path)
        if path == "/index.html":
            content = content.replace(b"</head>", b'<meta name="build" content="new"></head>')
        elif path == "/sw.js":
            content = content.replace(b'"build":"', b'"build":"new')
        else:
            return content, packed, tag
        return content, content, '"new"'

    with scripted_server(ScriptedEngine()) as address:
        page = open_controlled(installed, address)
        (before,) = page.evaluate("caches.keys()")
        monkeypatch.setattr(files, "load_file", upgraded)
        page.reload()
        expect(page.locator('meta[name="build"]')).to_have_count(1)
        page.evaluate("navigator.serviceWorker.ready.then((found) => found.update()).then(() => true)")
        page.evaluate(
            """(before) => new Promise((done) => {
              const look = async () => ((await caches.keys()).includes(before) ? setTimeout(look, 50) : done(true));
              look();
            })""",
            before,
        )
        (after,) = page.evaluate("caches.keys()")
        assert after != before and " new" in after
    page.reload()
    expect(page.locator('meta[name="build"]')).to_have_count(1)


@pytest.mark.parametrize(
    "script",
    [
        "delete Navigator.prototype.serviceWorker",
        "ServiceWorkerContainer.prototype.register = () => Promise.reject(new DOMException('', 'SecurityError'))",
    ],
    ids=["plain HTTP", "forbidden"],
)
def test_the_page_works_where_no_service_worker_is_allowed(page: Page, script: str) -> None:
    page.add_init_script(script)
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        send(page, "Hello")
        expect(page.get_by_text("All is well.")).to_be_visible()


def test_the_manifest_names_files_that_exist(page: Page) -> None:
    with scripted_server(ScriptedEngine()) as address:
        page.goto(address)
        link = page.locator('link[rel="manifest"]').evaluate("(link) => link.href")
        response = page.request.get(link)
        assert response.headers["content-type"].startswith("application/manifest+json")
        manifest = response.json()
        assert manifest["start_url"] == manifest["scope"] == "./" and manifest["display"] == "standalone"
        sizes = set()
        for icon in manifest["icons"]:
            found = page.request.get(f"{address}/{icon['src']}")
            assert found.ok and found.headers["content-type"] == icon["type"]
            sizes.add(icon["sizes"])
        assert {"192x192", "512x512"} <= sizes
