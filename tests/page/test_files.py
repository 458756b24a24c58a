"""HTTP responses of the page's files."""

from __future__ import annotations

import asyncio
import gzip
import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from llamado.page.files import BUILT, page_paths, page_response, page_routes

client = TestClient(Starlette(routes=list(page_routes())))


def test_the_start_page_and_its_files_are_served() -> None:
    start = client.get("/")
    assert start.status_code == 200 and start.headers["content-type"] == "text/html; charset=utf-8"
    assert start.content == client.get("/index.html").content
    named = [path for path in page_paths() if path.lstrip("/") in start.text]
    assert any(path.endswith(".js") for path in named) and any(path.endswith(".css") for path in named)
    for path in page_paths():
        assert client.get(path).status_code == 200, path


def test_types_and_security_headers_of_files() -> None:
    types = {
        "html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml",
        "mjs": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "png": "image/png",
        "woff2": "font/woff2", "webmanifest": "application/manifest+json",
    }  # fmt: skip
    by_type = {path.rpartition(".")[2]: path for path in sorted(page_paths() - {"/"})}
    assert by_type.keys() == types.keys()
    for path in ("/index.html", "/preview.html", *by_type.values()):
        headers = client.get(path).headers
        assert headers["content-type"] == types[path.rpartition(".")[2]], path
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin" and headers["x-dns-prefetch-control"] == "off"
        assert headers["permissions-policy"] == "camera=(), geolocation=(), microphone=(self)"
        sandboxed = "sandbox allow-scripts" in headers["content-security-policy"]
        assert sandboxed == (path == "/preview.html"), path


def test_small_files_are_not_compressed() -> None:
    """The packed form of few bytes may be larger."""
    sizes = {path: (BUILT / path.lstrip("/")).stat().st_size for path in page_paths() if path.startswith("/assets/")}
    small = max((path for path in sizes if sizes[path] < 1024), key=sizes.__getitem__)
    large = min((path for path in sizes if sizes[path] >= 1024), key=sizes.__getitem__)
    found = {path: client.get(path, headers={"accept-encoding": "gzip"}).headers for path in (small, large)}
    assert "content-encoding" not in found[small] and found[large]["content-encoding"] == "gzip"


def test_other_paths_are_not_found() -> None:
    for path in ("/assets/none.js", "/assets/..%2findex.html", "/sources.sha256", "/files.py", "/assets/"):
        assert client.get(path).status_code == 404, path


def test_the_policy_allows_scripts_of_the_server_only() -> None:
    policy = dict(part.split(" ", 1) for part in client.get("/").headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' blob:" and policy["media-src"] == "blob:"
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == "'none'"
    assert policy["frame-src"] == "'self'"


def test_previews_run_without_an_origin_and_without_requests() -> None:
    policy = dict(
        part.split(" ", 1) for part in client.get("/preview.html").headers["content-security-policy"].split("; ")
    )
    assert policy == {
        "default-src": "'none'", "script-src": "'unsafe-inline'", "style-src": "'unsafe-inline'", "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'self'",
        "sandbox": "allow-scripts",
    }  # fmt: skip


def test_files_are_cached_and_compressed() -> None:
    (path,) = (path for path in page_paths() if path.startswith("/assets/highlight-"))  # large enough to be compressed
    plain = client.get(path, headers={"accept-encoding": "identity"})
    packed = client.get(path, headers={"accept-encoding": "gzip"})
    assert "immutable" in plain.headers["cache-control"] and "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip" and packed.content == plain.content
    assert len(gzip.compress(plain.content)) >= int(packed.headers["content-length"]) * 0.9
    start = client.get("/")
    assert start.headers["cache-control"] == "no-cache"
    assert {plain.headers["vary"], start.headers["vary"]} == {"Accept, Accept-Encoding"}
    again = client.get("/", headers={"if-none-match": start.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    for name in ("etag", "cache-control", "vary", "content-security-policy"):
        assert again.headers[name] == start.headers[name], name


@pytest.mark.parametrize("accept", [None, "*/*", "text/html,application/xml;q=0.9"])
def test_only_clients_that_ask_for_other_types_do_not_get_the_page(accept: str | None) -> None:
    headers = {} if accept is None else {"accept": accept}
    assert b"<html" in asyncio.run(page_response("/", headers)).body
    assert asyncio.run(page_response("/", {"accept": "application/json"})).body == b"Ollama is running"


def test_only_assets_are_immutable() -> None:
    for path in page_paths():
        control = client.get(path).headers["cache-control"]
        assert control == ("public, max-age=31536000, immutable" if path.startswith("/assets/") else "no-cache"), path


def test_the_page_explains_itself_without_scripts_in_its_languages() -> None:
    html = client.get("/").text
    (text,) = re.findall(r"<noscript>(.*?)</noscript>", html, re.DOTALL)
    assert re.findall(r'<p(?: lang="(.*?)")?>.*?JavaScript.*?/openapi.json', text) == ["", "de", "es", "zh-Hans"]
