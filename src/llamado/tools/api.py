"""`/tools`: what there is, and calls, with llama-server's bodies (b11434); and `/cors-proxy`.

The page or the client asks a model for calls and makes them here; the model's slot is free meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llamado.http.access import AccessRules
from llamado.http.answer import Receive, error_response, json_response
from llamado.http.errors import ApiError, ClientDisconnected, invalid, not_found
from llamado.http.json_body import read_object
from llamado.http.sockets import is_local
from llamado.tools.errors import BadCall, ToolsError
from llamado.tools.proxy import McpProxy
from llamado.tools.settings import ToolSettings
from llamado.tools.tool import Call, Tool

if TYPE_CHECKING:
    from llamado.tools.toolbox import Toolbox

DISABLED = orjson.dumps({"error": {"message": "this feature is disabled", "type": "feature_disabled"}})
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

T = TypeVar("T")


def disabled() -> Response:
    """403, where the server was not told to have such a thing."""
    return json_response(DISABLED, 403)


def _bare(error: ApiError) -> Response:
    """An error as this endpoint has it: without the object around it."""
    return json_response(orjson.dumps(error.error), error.status)


def check_reach(settings: ToolSettings, access: AccessRules, hosts: Sequence[str]) -> None:
    """Raise ToolsError where somebody on another machine could call tools without a key."""
    if not settings.reach_out or access.api_keys:
        return
    what = "tools and MCP servers" if settings.any else "the MCP proxy"
    if strangers := [host for host in hosts if not is_local(host)]:
        raise ToolsError(
            f"--host {', '.join(strangers)}: with {what}, whoever reaches this server acts in its user's name: "
            "give --api-key KEY, or --host 127.0.0.1"
        )
    if access.cors_origins == "*":
        raise ToolsError(
            f"--cors-origins '*': with {what}, every page that its user visits could act in that user's name: "
            "give --api-key KEY, or name the origins"
        )


class ToolsApi:
    """The endpoints; `toolbox` and `proxy` are None where there is no such thing."""

    def __init__(self, toolbox: Toolbox | None = None, proxy: McpProxy | None = None) -> None:
        self._toolbox = toolbox
        self._proxy = proxy

    @staticmethod
    def open(settings: ToolSettings, access: AccessRules, hosts: Sequence[str]) -> ToolsApi:
        """The endpoints as the settings want them. Raises ToolsError."""
        check_reach(settings, access, hosts)
        proxy = McpProxy() if settings.proxy else None
        if not settings.any:
            return ToolsApi(None, proxy)
        from llamado.tools.toolbox import Toolbox

        return ToolsApi(Toolbox(settings), proxy)

    @property
    def offers(self) -> bool:
        """Whether `/tools` is there."""
        return self._toolbox is not None

    @property
    def proxies(self) -> bool:
        """Whether `/cors-proxy` passes requests on."""
        return self._proxy is not None

    async def pass_on(self, request: Request) -> Response:
        """`GET` and `POST /cors-proxy`."""
        return disabled() if self._proxy is None else await self._proxy.pass_on(request)

    def close(self) -> None:
        """End all that runs."""
        if self._toolbox is not None:
            self._toolbox.close()

    async def list_tools(self, request: Request) -> Response:
        """`GET /tools`."""
        if self._toolbox is None:
            return disabled()
        return json_response(orjson.dumps([tool.described() for tool in await self._toolbox.tools()]))

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
                return StreamingResponse(_events(toolbox, tool, call), 200, _EVENTS)
            found = await unless_gone(request.receive, toolbox.use(tool, call))
        except ApiError as error:
            return _bare(error)
        except BadCall as error:
            return _bare(invalid(str(error)))
        except ToolsError as error:
            return _bare(ApiError("server_error", str(error)))
        return json_response(_json(found))


def _json(value: Any) -> bytes:
    """JSON, also of texts with halves of characters beyond 16 bits, as tools may give them."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_whole(value))


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_whole(key): _whole(one) for key, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _read(body: dict[str, Any], request: Request) -> tuple[str, bool, Call]:
    name, params, stream = body.get("tool"), body.get("params", {}), body.get("stream", False)
    if not isinstance(name, str):
        raise BadCall('"tool" must be a string')
    if not isinstance(stream, bool):
        raise BadCall('"stream" must be true or false')
    headers = request.headers
    return name, stream, Call(
        params=params if isinstance(params, dict) else {},
        cwd=headers.get("x-tool-cwd", ""),
        runtime=headers.get("x-tool-runtime", ""),
        as_base64=headers.get("x-resp-type", "") == "base64",
    )  # fmt: skip


async def _events(toolbox: Toolbox, tool: Tool, call: Call) -> AsyncIterator[bytes]:
    """The output while it comes, as events; the call ends with the client's connection."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[str | None] = asyncio.Queue()

    def say(text: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, text)

    task = asyncio.ensure_future(toolbox.use(tool, _saying(call, say)))
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


def _saying(call: Call, say: Callable[[str], None]) -> Call:
    return Call(**{**vars(call), "said": say})


async def unless_gone(receive: Receive, what: Awaitable[T]) -> T:
    """Wait for something as long as the client does. Raises ClientDisconnected."""
    task = asyncio.ensure_future(what)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected("the client went away before the tool was done")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
