"""Routes of endpoints by family, with their entries in the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]
_E = TypeVar("_E", bound=Endpoint)
_UNDESCRIBED = {200: {"description": "done", "content": {"application/json": {"schema": {}}}}}


class ApiRoute(Route):
    """An endpoint of one method. A layer in front of all endpoints answers HEAD with GET."""

    def __init__(self, path: str, endpoint: Endpoint, method: str, operation: Mapping[str, Any] | None) -> None:
        super().__init__(path, endpoint)
        self.method = method
        self.methods = {method}
        self.operation = operation
        """The operation in the OpenAPI document; None: hidden."""


class Routes:
    """The endpoints of one family, in the order of matching."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.routes: list[ApiRoute] = []

    def get(self, path: str, **described: Any) -> Callable[[_E], _E]:
        """Decorate the endpoint of GET for a path; `described`: see `add`."""
        return lambda endpoint: self.add("GET", path, endpoint, **described)

    def post(self, path: str, **described: Any) -> Callable[[_E], _E]:
        """Decorate the endpoint of POST for a path; `described`: see `add`."""
        return lambda endpoint: self.add("POST", path, endpoint, **described)

    def add(
        self,
        method: str,
        path: str,
        endpoint: _E,
        *,
        responses: Mapping[int, Any] | None = None,
        operation: Mapping[str, Any] | None = None,
        hidden: bool = False,
    ) -> _E:
        """Add an endpoint and return it.

        `responses`: OpenAPI descriptions of its answers by status; `operation`: further fields of its OpenAPI
        operation; `hidden`: not in the document.
        """
        name = endpoint.__name__
        found = {
            "tags": [self.tag],
            "summary": name.replace("_", " ").title(),
            "operationId": re.sub(r"\W", "_", f"{name}{path}_{method.lower()}"),
            **(operation or {}),
            "responses": {str(status): answer for status, answer in (responses or _UNDESCRIBED).items()},
        }
        if fields := re.findall(r"\{(\w+)(?::path)?\}", path):
            inside = [{"name": field, "in": "path", "required": True, "schema": {"type": "string"}} for field in fields]
            found["parameters"] = [*inside, *found.get("parameters", [])]
        self.routes.append(ApiRoute(path, endpoint, method, None if hidden else found))
        return endpoint


def document(families: Iterable[Routes], title: str, version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    for family in families:
        for route in family.routes:
            if route.operation is not None:
                paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = route.operation
    return {"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": paths}
