"""The page at `/`: the files that `web/` is built into, and how they are answered.

A browser keeps what lies in `assets/` for ever: those names change with their contents. Nothing of the page asks any
address but the server's own, and the Content-Security-Policy holds it to that, whatever a model's answer contains.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamado.http.answer import json_response
from llamado.http.errors import not_found

BUILT = Path(__file__).parent / "built"
START = ("/", "/index.html")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}
# Scripts are the server's own files alone. Styles may stand at elements (a bar's width, a formula's space); pictures
# may be what the user attached; `trusted-types` leaves no way from a text to a script.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types llamado",
    )
)
_SAFE = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
# Ollama's clients, which want JSON, look here whether a server runs.
_WANTED = ("text/", "*/*")
_PACKED_FROM = 1024  # bytes; what is smaller is sent as it is


@cache
def page_paths() -> frozenset[str]:
    """Where the page's files are."""
    files = [path for path in BUILT.rglob("*") if path.suffix in _TYPES]
    return frozenset(START) | {"/" + path.relative_to(BUILT).as_posix() for path in files}


@cache
def _file(path: str) -> tuple[bytes, bytes, str]:
    """A file's bytes, the same packed by gzip, and what names this version of it."""
    content = (BUILT / path.lstrip("/")).read_bytes()
    packed = gzip.compress(content, 9, mtime=0) if len(content) >= _PACKED_FROM else content
    return content, packed, f'"{blake2b(content, digest_size=12).hexdigest()}"'


async def page_response(path: str, headers: Mapping[str, str]) -> Response:
    """The answer to GET of one of `page_paths`, for a request with these headers.

    A file is read and packed once, in a thread: the reader of PDFs takes longer than `/health` may wait.
    """
    if path == "/" and not any(kind in headers.get("accept", "*/*") for kind in _WANTED):
        return Response("Ollama is running", headers={"Vary": "Accept"}, media_type="text/plain")
    path = "/index.html" if path == "/" else path
    content, packed, tag = await asyncio.to_thread(_file, path)
    lasting = path.startswith("/assets/")
    said = {
        **_SAFE,
        "ETag": tag,
        "Cache-Control": "public, max-age=31536000, immutable" if lasting else "no-cache",
        "Vary": "Accept, Accept-Encoding",
    }
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=said)
    if packed is not content and "gzip" in headers.get("accept-encoding", ""):
        said["Content-Encoding"], content = "gzip", packed
    return Response(content, headers=said, media_type=_TYPES[Path(path).suffix])


async def _answer(request: Request) -> Response:
    path = request.scope["path"]
    if path not in page_paths():
        return json_response(not_found().body, 404)
    return await page_response(path, request.headers)


def page_routes() -> list[Route]:
    """For an application of Starlette's."""
    other = sorted(path for path in page_paths() if not path.startswith("/assets/"))
    return [Route(path, _answer) for path in [*other, "/assets/{file}"]]
