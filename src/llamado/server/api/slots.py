"""Saving, restoring and erasing slots: `POST /slots/{id}?action=save|restore|erase`.

All files are in one folder. Names in requests cannot leave it: a name is one component of a path, and links are not
followed.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, runtime_checkable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.engine.cache.slot_file import SlotFile
from llamado.engine.errors import NoRoom, SlotFileError, SlotNotSaved
from llamado.http.answer import json_response
from llamado.http.json_body import read_json
from llamado.server.api.routes import Routes
from llamado.server.errors import ApiError, invalid, not_supported
from llamado.server.state import ServerState

# As C's strtol: everything after the digits is ignored.
_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")
# Characters that are special for file systems or shells, and characters that look like dots and slashes.
_FORBIDDEN = re.compile(
    r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u2024\u2044\u2215\u2216\u29f8\u29f9\ufe68\uff0e\uff0f\uff3c\ufeff\ufffd\ud800-\udfff]'
)
_ACTION = {"parameters": [{"name": "action", "in": "query", "required": False, "schema": {"type": "string"}}]}
_LONGEST_NAME = 255  # bytes, on all usual file systems


@runtime_checkable
class SlotFileEngine(Protocol):
    """An engine that saves slots to files and restores them."""

    def save_slot(self, id_slot: int, path: Path) -> Future[SlotFile]: ...

    def restore_slot(self, id_slot: int, path: Path) -> Future[SlotFile]: ...

    def erase_slot(self, id_slot: int) -> Future[int]: ...


def is_plain_name(name: str) -> bool:
    """Return True for the name of a file directly in a folder.

    Stricter than llama.cpp's fs_validate_filename: no hidden files, which include unfinished slot files.
    """
    return (
        name != ""
        and not _FORBIDDEN.search(name)
        and len(name.encode()) <= _LONGEST_NAME
        and ".." not in name
        and name[0] not in " ."
        and name[-1] not in " ."
    )


async def _filename(request: Request) -> str:
    """Return `filename` of the body. Raises ApiError."""
    body = await read_json(request)
    if not isinstance(body, dict) or "filename" not in body:
        raise invalid("key 'filename' not found")
    name = body["filename"]
    if not isinstance(name, str):
        raise invalid("'filename' must be a string")
    if not is_plain_name(name):
        raise invalid("Invalid filename")
    return name


def slots_router(state: ServerState) -> Routes:
    """Return the routes of slot files, which are in the folder `state.switches.slot_save_path`."""
    router = Routes("slots")

    @router.post("/slots/{id_slot}", operation=_ACTION)
    async def act(request: Request) -> Response:
        id_slot, action = request.path_params["id_slot"], request.query_params.get("action", "")
        folder = state.switches.slot_save_path
        engine = state.served.engine if state.served is not None else None
        if folder is None or not isinstance(engine, SlotFileEngine):
            raise not_supported("This server does not support slots action. Start it with `--slot-save-path`")
        number = _NUMBER.match(id_slot)
        if number is None or abs(id := int(number[1][:20])) > 0x7FFF_FFFF:
            raise invalid("Invalid slot ID")
        if action == "erase":
            n_erased = await asyncio.wrap_future(engine.erase_slot(id))
            return json_response(orjson.dumps({"id_slot": id, "n_erased": n_erased}))
        if action not in ("save", "restore"):
            raise invalid("Invalid action")
        name = await _filename(request)
        path = Path(folder) / name
        try:
            if action == "save":
                done = await asyncio.wrap_future(engine.save_slot(id, path))
            else:
                done = await asyncio.wrap_future(engine.restore_slot(id, path))
        except (SlotFileError, NoRoom) as error:
            raise invalid(f"Unable to restore slot: {error}") from error
        except SlotNotSaved as error:
            raise ApiError("server_error", f"Unable to save slot: {error}") from error
        return json_response(orjson.dumps(answer(action, id, name, done)))

    return router


def answer(action: str, id_slot: int, name: str, done: SlotFile) -> dict[str, object]:
    """Return llama-server's answer for a saved or restored slot."""
    tokens, size, ms = (
        ("n_saved", "n_written", "save_ms") if action == "save" else ("n_restored", "n_read", "restore_ms")
    )
    return {
        "id_slot": id_slot,
        "filename": name,
        tokens: done.n_tokens,
        size: done.n_bytes,
        "timings": {ms: round(1e3 * done.seconds, 3)},
    }
