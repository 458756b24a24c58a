"""The web page at `/`: serves the files built from `web/`.

Browsers cache files in `assets/` forever, because their names change with their contents. The page sends requests to
its own server only; the Content-Security-Policy enforces that, whatever a model's answer contains.
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
START_PATHS = ("/", "/index.html")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}
# Scripts come from the server's own files only. Elements may have inline styles (a bar's width, spacing of a formula);
# pictures and sounds may be attachments, which the page shows from `blob:` URLs; `trusted-types` keeps text from
# becoming a script.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' blob:",
        "media-src blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "frame-src 'self'",
        "worker-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types llamado",
    )
)
PREVIEW_PATH = "/preview.html"
# The frame in which users preview HTML and SVG of an answer: scripts run without an origin, and without any request.
_PREVIEW_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
        "sandbox allow-scripts",
    )
)
_SECURITY_HEADERS = {
    "X-DNS-Prefetch-Control": "off",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(self)",
}
# Ollama clients, which accept JSON, request / to check that a server runs.
_PAGE_TYPES = ("text/", "*/*")
_MIN_GZIP_BYTES = 1024  # bytes; smaller files are sent uncompressed


@cache
def page_paths() -> frozenset[str]:
    """Return the URL paths of the page's files."""
    files = [path for path in BUILT.rglob("*") if path.suffix in _TYPES]
    return frozenset(START_PATHS) | {"/" + path.relative_to(BUILT).as_posix() for path in files}


@cache
def load_file(path: str) -> tuple[bytes, bytes, str]:
    """Return a file's bytes, the same compressed by gzip, and its ETag."""
    content = (BUILT / path.lstrip("/")).read_bytes()
    packed = gzip.compress(content, 9, mtime=0) if len(content) >= _MIN_GZIP_BYTES else content
    return content, packed, f'"{blake2b(content, digest_size=12).hexdigest()}"'


async def page_response(path: str, headers: Mapping[str, str]) -> Response:
    """Return the response to GET of one of `page_paths`, for a request with these headers.

    A file is read and compressed once, in a thread: the PDF reader takes longer than `/health` may wait.
    """
    if path == "/" and not any(kind in headers.get("accept", "*/*") for kind in _PAGE_TYPES):
        return Response("Ollama is running", headers={"Vary": "Accept"}, media_type="text/plain")
    path = "/index.html" if path == "/" else path
    content, packed, tag = await asyncio.to_thread(load_file, path)
    is_immutable = path.startswith("/assets/")
    response_headers = {
        **_SECURITY_HEADERS,
        "Content-Security-Policy": _PREVIEW_POLICY if path == PREVIEW_PATH else _POLICY,
        "ETag": tag,
        "Cache-Control": "public, max-age=31536000, immutable" if is_immutable else "no-cache",
        "Vary": "Accept, Accept-Encoding",
    }
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=response_headers)
    if packed is not content and "gzip" in headers.get("accept-encoding", ""):
        response_headers["Content-Encoding"], content = "gzip", packed
    return Response(content, headers=response_headers, media_type=_TYPES[Path(path).suffix])


async def _serve(request: Request) -> Response:
    path = request.scope["path"]
    if path not in page_paths():
        return json_response(not_found().body, 404)
    return await page_response(path, request.headers)


def page_routes() -> list[Route]:
    """Return the page's routes for a Starlette application."""
    other = sorted(path for path in page_paths() if not path.startswith("/assets/"))
    return [Route(path, _serve) for path in [*other, "/assets/{file}"]]
