"""Answers match the OpenAPI document: no 500, and no status, type or body that it lacks."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from fakes import client
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tiers import first_of
from waiting import GUARD
from wire import serving

from llamado.page.files import page_routes
from llamado.server.app import create_app

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server over the fake engine."""
    with serving(metrics=True) as wire:
        yield wire.url


@pytest.mark.slow
@pytest.mark.parametrize("examples", first_of([2, 8]))
def test_answers_are_as_described(address: str, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    n_endpoints = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if not {"400", "501", "503"} & operation.definition.raw["responses"].keys():
            continue  # its answers have no description yet

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=GUARD)
            assert response.status_code != 500, response.text
            case.validate_response(response, checks=CHECKS)

        check()
        n_endpoints += 1
    assert n_endpoints > 20


async def test_the_document_lists_all_routes_but_the_hidden_ones() -> None:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
        there = {route.path.replace(":path}", "}") for route in create_app(http.state)._app.router.routes}
    paths = document["paths"]
    forms = {f"{version}/audio/{name}" for version in ("", "/v1") for name in ("transcriptions", "translations")}
    hidden = {"/openapi.json", "/cors-proxy", *forms}
    pages = {route.path for route in page_routes()}
    assert there - paths.keys() - pages == hidden and pages <= there
    assert not paths.keys() - there
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(names) == len(set(names)) > 40
    fields = [(field["name"], field["in"]) for field in paths["/slots/{id_slot}"]["post"]["parameters"]]
    assert fields == [("id_slot", "path"), ("action", "query")]
    assert paths["/health"]["get"]["tags"] == ["monitor"] and "503" in paths["/health"]["get"]["responses"]


@pytest.mark.slow
def test_every_endpoint_that_generates_is_described(address: str) -> None:
    document = httpx.get(f"{address}/openapi.json").json()
    for path in ("/completion", "/infill", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        operation = document["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body["required"] and len(body["properties"]) > 10
        assert set(operation["responses"]) >= {"200", "400", "500", "503"}
        assert "text/event-stream" in operation["responses"]["200"]["content"]
