"""`/tools` and `/cors-proxy` among the server's endpoints."""

from __future__ import annotations

from llamado.server.api.routes import Routes
from llamado.server.state import ServerState

_BODY = {"description": "a JSON object", "content": {"application/json": {"schema": {"type": "object"}}}}
_ERRORS = {status: {"description": text} for status, text in ((400, "no such call"), (403, "not offered"))}


def tools_router(state: ServerState) -> Routes:
    """Return the routes of tools that a client may call for its model."""
    router = Routes("tools")
    answers = {200: {"description": "done", "content": {"application/json": {"schema": {}}}}, **_ERRORS}
    router.add("GET", "/tools", state.tools.list_tools, responses=answers)
    call = {"requestBody": {"required": True, **_BODY}}
    not_found = {404: {"description": "no such tool"}}
    router.add("POST", "/tools", state.tools.call_tool, responses=answers | not_found, operation=call)
    router.add("GET", "/cors-proxy", state.tools.pass_on, hidden=True)
    router.add("POST", "/cors-proxy", state.tools.pass_on, hidden=True)
    return router
