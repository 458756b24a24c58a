"""`/tools` lists and runs tools, with llama-server's bodies (b11434); `/cors-proxy` forwards requests of the page.

The page or another client gets tool calls from a model and runs them here. The model's slot is free meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.access import AccessRules
from llamado.http.answer import error_response, json_response
from llamado.http.errors import ApiError, invalid, not_found
from llamado.http.json_body import read_object
from llamado.http.sockets import is_local
from llamado.http.streams import PartStream, unless_disconnected
from llamado.tools.errors import InvalidCall, ToolsError
from llamado.tools.proxy import McpProxy
from llamado.tools.settings import ToolSettings
from llamado.tools.tool import Call, Tool

if TYPE_CHECKING:
    from llamado.tools.toolbox import Toolbox

DISABLED = orjson.dumps({"error": {"message": "this feature is disabled", "type": "feature_disabled"}})
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


def disabled() -> Response:
    """Return 403: the feature is not enabled."""
    return json_response(DISABLED, 403)


def _bare(error: ApiError) -> Response:
    """Return an error in this endpoint's format: without the enclosing `error` object."""
    return json_response(orjson.dumps(error.error), error.status)


def check_reach(settings: ToolSettings, access: AccessRules, hosts: Sequence[str]) -> None:
    """Raise ToolsError if other machines or sites could call tools without a key."""
    if not settings.reach_out or access.api_keys:
        return
    what = "tools and MCP servers" if settings.any else "the MCP proxy"
    if reachable := [host for host in hosts if not is_local(host)]:
        raise ToolsError(
            f"--host {', '.join(reachable)}: with {what}, anyone who reaches this server acts in its user's name: "
            "give --api-key KEY, or --host 127.0.0.1"
        )
    if access.cors_origins == "*":
        raise ToolsError(
            f"--cors-origins '*': with {what}, every page that its user visits could act in that user's name: "
            "give --api-key KEY, or name the origins"
        )


class ToolsApi:
    """The endpoints. `toolbox` and `proxy` are None if they are disabled."""

    def __init__(self, toolbox: Toolbox | None = None, proxy: McpProxy | None = None) -> None:
        self._toolbox = toolbox
        self._proxy = proxy

    @staticmethod
    def open(settings: ToolSettings, access: AccessRules, hosts: Sequence[str]) -> ToolsApi:
        """Return the endpoints for the settings. Raises ToolsError."""
        check_reach(settings, access, hosts)
        proxy = McpProxy() if settings.proxy else None
        if not settings.any:
            return ToolsApi(None, proxy)
        from llamado.tools.toolbox import Toolbox

        return ToolsApi(Toolbox(settings), proxy)

    @property
    def offers(self) -> bool:
        """True if `/tools` is enabled."""
        return self._toolbox is not None

    @property
    def proxies(self) -> bool:
        """True if `/cors-proxy` is enabled."""
        return self._proxy is not None

    async def pass_on(self, request: Request) -> Response:
        """`GET` and `POST /cors-proxy`."""
        return disabled() if self._proxy is None else await self._proxy.pass_on(request)

    def close(self) -> None:
        """Stop all running tools."""
        if self._toolbox is not None:
            self._toolbox.close()

    async def list_tools(self, request: Request) -> Response:
        """`GET /tools`."""
        if self._toolbox is None:
            return disabled()
        return json_response(orjson.dumps([tool.entry() for tool in await self._toolbox.tools()]))

    async def call_tool(self, request: Request) -> Response:
        """`POST /tools`."""
        toolbox = self._toolbox
        if toolbox is None:
            return disabled()
        try:
            body = await read_object(request)
            name, stream, call = _read(body, request)
            tool = await toolbox.find(name)
            if tool is None or (stream and not tool.streams):
                return error_response(not_found())
            if stream:
                return PartStream(_events(toolbox, tool, call), headers=_EVENTS)
            found = await unless_disconnected(request.receive, toolbox.use(tool, call))
        except ApiError as error:
            return _bare(error)
        except InvalidCall as error:
            return _bare(invalid(str(error)))
        except ToolsError as error:
            return _bare(ApiError("server_error", str(error)))
        return json_response(_json(found))


def _json(value: Any) -> bytes:
    """Encode as JSON. Tools may return lone surrogates, which are replaced."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_replace_surrogates(value))


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(one) for key, one in value.items()}
    return [_replace_surrogates(one) for one in value] if isinstance(value, list) else value


def _read(body: dict[str, Any], request: Request) -> tuple[str, bool, Call]:
    name, params, stream = body.get("tool"), body.get("params", {}), body.get("stream", False)
    if not isinstance(name, str):
        raise InvalidCall('"tool" must be a string')
    if not isinstance(stream, bool):
        raise InvalidCall('"stream" must be true or false')
    headers = request.headers
    return name, stream, Call(
        params=params if isinstance(params, dict) else {},
        cwd=headers.get("x-tool-cwd", ""),
        runtime=headers.get("x-tool-runtime", ""),
        as_base64=headers.get("x-resp-type", "") == "base64",
    )  # fmt: skip


async def _events(toolbox: Toolbox, tool: Tool, call: Call) -> AsyncGenerator[bytes, None]:
    """Yield the output as events while the tool runs; the call ends with the client's connection."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[str | None] = asyncio.Queue()

    def on_output(text: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, text)

    task = asyncio.ensure_future(toolbox.use(tool, replace(call, on_output=on_output)))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield b"data: " + _json({"chunk": piece}) + b"\n\n"
        done: dict[str, Any] = {"done": True}
        try:
            done |= {key: value for key, value in task.result().items() if key == "error"}
        except Exception as error:
            done["error"] = str(error)
        yield b"data: " + _json(done) + b"\n\n"
    finally:
        task.cancel()
