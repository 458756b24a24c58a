"""`/chats` among the server's endpoints."""

from __future__ import annotations

from llamado.page.chats_api import CHAT, CHATS, ChatsApi
from llamado.server.api.routes import Routes
from llamado.server.state import ServerState

_BODY = {"description": "a chat: a JSON object", "content": {"application/json": {"schema": {"type": "object"}}}}
_DONE = {200: {"description": "done", "content": {"application/json": {"schema": {"type": "object"}}}}}
_ERRORS = {
    status: {"description": text}
    for status, text in (
        (400, "no id of a chat, or no JSON object"),
        (404, "no such chat"),
        (412, "the chat was changed meanwhile"),
        (428, "neither If-Match nor If-None-Match"),
        (501, "the server keeps no chats"),
    )
}


def chats_router(state: ServerState) -> Routes:
    """Return the routes of the chats that the server keeps for the page."""
    api, router = ChatsApi(state.switches.chats, state.access), Routes("chats")
    answers = _DONE | _ERRORS
    conditions = [_header("If-Match", "the revision that the client knows"), _header("If-None-Match", "*: a new chat")]
    router.add("GET", CHATS, api.list_chats, responses=answers)
    router.add("GET", CHAT, api.get_chat, responses=answers)
    body = {"required": True, **_BODY}
    router.add("PUT", CHAT, api.put_chat, responses=answers, operation={"requestBody": body, "parameters": conditions})
    router.add("DELETE", CHAT, api.delete_chat, responses=answers, operation={"parameters": conditions[:1]})
    return router


def _header(name: str, text: str) -> dict[str, object]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
