"""An HTTP client for thousands of requests to one server, which httpx would take most of the time for."""

from __future__ import annotations

from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
from waiting import GUARD


class KeptConnection:
    """A connection to a server, which is kept between requests; each has the same `headers` and path `prefix`."""

    def __init__(self, url: str, prefix: str = "", **headers: str) -> None:
        self.host = urlsplit(url).netloc
        self._connection = HTTPConnection(self.host, timeout=GUARD)
        self._prefix, self._headers = prefix, headers

    def ask(self, method: str, path: str, **headers: str) -> httpx.Response:
        """Send an empty object, or no body for methods without one. Nothing is read of a stream: it may be endless."""
        body = b"{}" if method in ("POST", "PUT") else None
        self._connection.request(method, self._prefix + path, body, {**self._headers, **headers})
        answer = self._connection.getresponse()
        if method == "GET" and "content-length" not in answer.headers:
            content = b""
            self.close()  # the next request opens another
        else:
            content = answer.read()
        return httpx.Response(answer.status, headers=answer.headers.items(), content=content)

    def close(self) -> None:
        self._connection.close()
