"""Routes of router and gateway: Starlette routes, found by one lookup and answered by any ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Route, Router

from llamado.http.answer import App, Receive, Scope, Send
from llamado.http.errors import not_found

Endpoint = Callable[[Request], Awaitable[App]]
"""Returns the response: a Starlette `Response`, or another ASGI application that sends it."""

ANY = "*"
"""Method of a route for all methods."""
_REST = ":path}"


class ApiRoute(Route):
    """One method (or `ANY`) of a path. A path may end in a parameter `{name:path}`, which takes all that follows.

    `name`: the route's endpoint in the metrics, by default its path.
    """

    def __init__(self, method: str, path: str, endpoint: Endpoint, *, name: str | None = None) -> None:
        super().__init__(path, endpoint, methods=None if method == ANY else [method])
        self.method = method
        self.name = name or self.path_format
        self.app = partial(_respond, endpoint)
        prefix, _, parameter = path.partition("{")
        self.prefix = prefix
        self.parameter = parameter.removesuffix(_REST) if path.endswith(_REST) else parameter.removesuffix("}")
        self.takes_rest = path.endswith(_REST)


async def _respond(endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    response = await endpoint(Request(scope, receive, send))
    await response(scope, receive, send)


class ApiRouter(Router):
    """Starlette router with an index of fixed paths. A wrong method is an unknown path, as in llama-server: 404.

    Raises ApiError (404), and whatever the endpoints raise.
    """

    def __init__(self, routes: Iterable[ApiRoute]) -> None:
        super().__init__([*routes], redirect_slashes=False, default=_unknown)
        self._fixed: dict[tuple[str, str], ApiRoute] = {}
        self._open: list[ApiRoute] = []
        for route in routes:
            if route.parameter:
                self._open.append(route)
            else:
                self._fixed.setdefault((route.method, route.path), route)

    def find(self, method: str, path: str) -> tuple[ApiRoute, dict[str, Any]] | None:
        """Return the route of a request, and its path parameters."""
        route = self._fixed.get((method, path)) or self._fixed.get((ANY, path))
        if route is not None:
            return route, {}
        for route in self._open:
            if route.method in (method, ANY) and path.startswith(route.prefix):
                rest = path[len(route.prefix) :]
                if route.takes_rest or (rest and "/" not in rest):
                    return route, {route.parameter: rest}
        return None

    def endpoint(self, method: str, path: str) -> str:
        """Return the name of a request's endpoint; "" if there is none."""
        if route := self._fixed.get((method, path)):
            return route.name
        found = self.find(method, path)
        return "" if found is None else found[0].name

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self.find(scope["method"], scope["path"])
        if found is None:
            await self.default(scope, receive, send)
            return
        scope["route"], scope["path_params"] = found
        await found[0].app(scope, receive, send)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    raise not_found()
