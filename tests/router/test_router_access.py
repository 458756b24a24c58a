"""Access to the router: every route and method, with and without keys, from pages of all origins."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
import pytest
from kept_connection import KeptConnection
from router_process import RouterHere, Start, config, fake
from waiting import until

from llamado.http.access import HEALTH
from llamado.http.routing import ApiRoute

METHODS = ("GET", "HEAD", "POST", "OPTIONS", "DELETE", "PUT")
LOCAL, FOREIGN = "http://localhost:5173", "http://evil.example"
ALLOWED = "Access-Control-Allow-Origin"


DISABLED = ("/tools", "/cors-proxy")
"""Features that are disabled by default, with 403."""


def methods_by_path(here: RouterHere) -> dict[str, set[str]]:
    """Return the methods of each path except the page's, and a path without any."""
    router = here.server.router
    assert router is not None
    found: dict[str, set[str]] = {"/nowhere": set(), "/slots/0": {"POST"}}
    found["/upstream/no/health"] = {"GET", "POST", "DELETE", "PUT"}
    for route in router.routes.routes:
        assert isinstance(route, ApiRoute)
        if not route.parameter and route.path not in router.page:
            found.setdefault(route.path, set()).add(route.method)
    assert len(found) > 60
    return found


def ask(http: KeptConnection, method: str, path: str, headers: dict[str, str]) -> tuple[int, httpx.Headers, bytes]:
    """Return status, headers and body."""
    answer = http.ask(method, path, **headers)
    return answer.status_code, answer.headers, answer.content


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_keys_and_origins_of_every_route(start_router: Start, prefix: str) -> None:
    flags = ["--api-key", "other,sesame", *(["--api-prefix", prefix] if prefix else [])]
    here = start_router(config({"a": fake("A")}), *flags)
    credentials = {
        "none": ({}, False),
        "x-api-key": ({"X-Api-Key": "sesame"}, True),
        "wrong": ({"Authorization": "Bearer sesam", "X-Api-Key": ""}, False),
        "bearer": ({"Authorization": "Bearer sesame"}, True),
    }
    two = {name: credentials[name] for name in ("none", "x-api-key")}
    with contextlib.closing(KeptConnection(here.url, prefix, Origin=LOCAL)) as http:
        paths = methods_by_path(here)
        for path in paths if prefix else ("/health", "/completion", "/tools", "/nowhere"):
            methods = paths[path]
            for method in METHODS:
                exists = method in methods or (method == "HEAD" and "GET" in methods)
                for name, (headers, right) in (credentials if path == "/completion" else two).items():
                    status, response_headers, body = ask(http, method, path, headers)
                    case = (method, path, name, status, body[:100])
                    assert response_headers[ALLOWED] == LOCAL, case
                    if method == "HEAD":
                        assert body == b"", case
                    if method == "OPTIONS":
                        assert status == 200 and response_headers["Access-Control-Allow-Headers"] == "*", case
                    elif not right and path not in HEALTH:
                        assert status == 401, case
                    elif not exists:
                        assert status == 404 and (method == "HEAD" or b"File Not Found" in body), case
                    elif path == "/models/load":
                        assert status == 404, case  # the model is unknown
                    elif path in DISABLED:
                        assert status == 403 and (method == "HEAD" or b"feature_disabled" in body), case
                    else:
                        assert status not in (401, 403, 404, 405), case
            if prefix:
                assert httpx.get(here.url + path, headers={"X-Api-Key": "sesame"}).status_code == 404
    assert not here.server.router.fleet.instances["a"].running  # type: ignore[union-attr]


@pytest.mark.slow
def test_pages_of_other_sites_change_nothing(start_router: Start) -> None:
    here = start_router(config({"a": fake("A")}))
    http = KeptConnection(here.url)
    for path in methods_by_path(here):
        for method in ("GET", "POST", "DELETE"):
            changes = method != "GET" or path == "/unload"
            for headers in ({"Origin": FOREIGN}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
                status, response_headers, _ = ask(http, method, path, headers)
                assert (status == 403) == (changes or path in DISABLED), (method, path, headers)
                assert ALLOWED not in response_headers
        for headers in ({}, {"Origin": LOCAL}, {"Origin": here.url}, {"Sec-Fetch-Site": "same-origin"}):
            assert (ask(http, "POST", path, headers)[0] == 403) == (path in DISABLED), (path, headers)
    http.close()
    # Model processes do not reject what the router accepted: they do not see the origin.
    headers = {"Origin": LOCAL, "Sec-Fetch-Site": "same-site"}
    answer = here.http.post("/completion", json={"model": "a", "echo": True}, headers=headers).json()
    assert not {"origin", "sec-fetch-site"} & set(answer["headers"])


def test_without_a_key_only_known_hosts_are_served(start_router: Start) -> None:
    here = start_router(config({"a": fake("A")}), "--allowed-hosts", "my.router")
    for path in ("/health", "/v1/models", "/running", "/unload"):
        assert here.http.get(path, headers={"Host": "evil.com"}).status_code == 403
        assert here.http.get(path, headers={"Host": "my.router:80"}).status_code == 200


@pytest.mark.slow
def test_usage_comes_from_the_model_that_answered(start_router: Start) -> None:
    here = start_router(config({"a": fake("A"), "b": fake("B")}))
    id = "0" * 32
    for model in ("a", "b"):
        assert here.http.get("/usage", params={"id": id}).status_code == 404
        headers = {"X-Llamado-Usage-Id": id} if model == "b" else {}
        assert here.http.post("/completion", json={"model": model}, headers=headers).status_code == 200
    assert here.http.get("/usage", params={"id": id}).json() == {"total_tokens": 42}
    assert here.http.get("/usage", params={"id": "../"}).status_code == 400


def test_one_model_and_an_unknown_one(start_router: Start) -> None:
    here = start_router(config({"a": fake("A")}))
    listed = here.http.get("/v1/models").json()["data"][0]
    assert here.http.get("/v1/models/a").json() == {
        **listed,
        "created": here.http.get("/v1/models/a").json()["created"],
    }
    assert here.http.get("/v1/models/no/such").status_code == 404
    error = here.http.post("/v1/messages", json={"model": "no"}).json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_llama_swaps_unload_paths(start_router: Start) -> None:
    here = start_router(config({"a": fake("A"), "b": fake("B")}))

    def running() -> set[str]:
        return {one["model"] for one in here.http.get("/running").json()["running"]}

    for model in ("a", "b"):
        assert here.http.post("/completion", json={"model": model}).status_code == 200
    both = running()
    assert "b" in both
    if "a" not in both:  # one may have been swapped for the other
        assert here.http.post("/api/models/unload/a").text == "OK"
    assert here.http.post("/api/models/unload/b").text == "OK" and "b" not in running()
    assert here.http.post("/api/models/unload/no").status_code == 404
    assert here.http.post("/api/models/unload").text == "OK" and not running()
    page = {"Origin": FOREIGN}
    assert here.http.post("/api/models/unload", headers=page).status_code == 403


def test_cors_origins_may_allow_all_sites(start_router: Start) -> None:
    here = start_router(config({"a": fake("A")}), "--cors-origins", "*")
    answer = here.http.post("/models/unload", json={}, headers={"Origin": FOREIGN})
    assert answer.status_code == 400 and answer.headers[ALLOWED] == FOREIGN


@pytest.mark.slow
def test_header_names_and_shutdown(start_router: Start, tmp_path: Path) -> None:
    """Header names are sent in title case, whatever the model's process sends; and new requests get 503 at shutdown."""
    here = start_router(config({"a": fake("A")}))
    with here.http.stream("POST", "/completion", json={"model": "a", "stream": 60, "delay": 0.05}) as answer:
        names = {name.decode() for name, _ in answer.headers.raw}
        assert names == {"Content-Type", "Transfer-Encoding"}
        here.server.should_exit = True
        until(lambda: httpx.get(f"{here.url}/health").status_code == 503)
        refused = httpx.post(f"{here.url}/completion", json={"model": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert (b"Connection", b"close") in refused.headers.raw
        assert answer.read().count(b"data: ") == 60
