"""`/chats`: the page's chats on the server, separate for each API key, so that several devices show the same.

Changes are conditional (RFC 9110, 13.1): `If-Match` with the revision that the client knows, or `If-None-Match: *` for
a new chat. A client that missed another device's change gets 412 and loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.access import AccessRules, digest, key_digests
from llamado.http.answer import json_response
from llamado.http.bodies import body_of
from llamado.http.errors import ApiError, invalid, not_supported
from llamado.page.chat_folder import (
    MAX_CHAT_BYTES,
    ChatConflict,
    ChatError,
    ChatFolder,
    TooManyChats,
    UnknownChat,
    is_chat_id,
)

T = TypeVar("T")

CHATS, CHAT = "/chats", "/chats/{id}"
_STATUS = {UnknownChat: 404, ChatConflict: 412, TooManyChats: 507}
_TYPES = {404: "not_found_error", 412: "invalid_request_error"}
_SHARED = "everybody"
"""Name of the folder of a server without keys."""


def is_chats_path(path: str) -> bool:
    """Return True for the paths of this API, which need no model."""
    return path == CHATS or path.startswith(CHATS + "/")


class ChatsApi:
    """The endpoints. `folder`: None if the server keeps no chats."""

    def __init__(self, folder: str | None, access: AccessRules) -> None:
        self.is_on = folder is not None
        owners = {digest(key): _owner(key) for key in access.api_keys}
        self._owners: Mapping[bytes, str] = owners
        names = [_SHARED, *owners.values()] if folder is not None else []
        self._folders = {name: ChatFolder(Path(folder or "") / name) for name in names}

    async def list_chats(self, request: Request) -> Response:
        """`GET /chats`."""
        folder, owner = self._folder(request)
        chats, deleted = await _run(folder.entries)
        body = {
            "owner": owner,
            "chats": [
                {"id": one.id, "revision": one.revision, "updated": one.updated, "bytes": one.bytes} for one in chats
            ],
            "deleted": deleted,
        }
        return json_response(orjson.dumps(body), headers={"Cache-Control": "no-store"})

    async def get_chat(self, request: Request) -> Response:
        """`GET /chats/{id}`."""
        folder, _ = self._folder(request)
        chat, revision = await _run(lambda: folder.read(_id(request)))
        headers = {"ETag": f'"{revision}"', "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return json_response(chat, headers=headers)

    async def put_chat(self, request: Request) -> Response:
        """`PUT /chats/{id}`."""
        folder, _ = self._folder(request)
        id, expected = _id(request), _expected(request)
        chat = await body_of(request.scope).read(request.scope, request.receive)
        if len(chat) > MAX_CHAT_BYTES:
            raise ApiError("invalid_request_error", f"a chat has at most {MAX_CHAT_BYTES} bytes", status=413)
        if not (chat.startswith(b"{") and chat.endswith(b"}")):
            raise invalid("the request body must be a JSON object")
        entry = await _run(lambda: folder.write(id, chat, expected))
        headers = {"ETag": f'"{entry.revision}"'}
        return json_response(orjson.dumps({"revision": entry.revision, "updated": entry.updated}), headers=headers)

    async def delete_chat(self, request: Request) -> Response:
        """`DELETE /chats/{id}`."""
        folder, _ = self._folder(request)
        id, expected = _id(request), _expected(request)
        if expected is None:
            raise invalid("to delete a chat, send If-Match with its revision")
        await _run(lambda: folder.delete(id, expected))
        return json_response(b'{"success":true}')

    def _folder(self, request: Request) -> tuple[ChatFolder, str]:
        """Return the folder of the request's key, and its name. Raises ApiError if the server keeps no chats."""
        if not self.is_on:
            raise not_supported("This server keeps no chats. Start it with `--chats FOLDER`")
        given = key_digests(dict(request.scope["headers"]))
        owner = next((self._owners[one] for one in given if one in self._owners), _SHARED)
        return self._folders[owner], owner


def _owner(key: bytes) -> str:
    """Return the name of a key's folder, which does not reveal the key."""
    return blake2b(key, digest_size=16, person=b"llamado chats").hexdigest()


def _id(request: Request) -> str:
    id = str(request.path_params["id"])
    if not is_chat_id(id):
        raise invalid("a chat's id has up to 64 lower-case letters, digits and hyphens")
    return id


def _expected(request: Request) -> str | None:
    """Return the revision that the client knows; None: the chat is new. Raises ApiError if both headers are missing."""
    if request.headers.get("if-none-match") == "*":
        return None
    if revision := request.headers.get("if-match", "").strip('"'):
        return revision
    message = "send If-Match with the revision that you know, or If-None-Match: * for a new chat"
    raise ApiError("invalid_request_error", message, status=428)


async def _run(work: Callable[[], T]) -> T:
    """Run work on files in a thread. Raises ApiError."""
    try:
        return await asyncio.to_thread(work)
    except ChatError as error:
        status = _STATUS.get(type(error), 500)
        raise ApiError(_TYPES.get(status, "server_error"), str(error), status=status) from None
    except OSError as error:
        raise ApiError("server_error", f"chats cannot be read or stored: {error.strerror}") from None
