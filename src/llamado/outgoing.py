"""HTTP clients for untrusted servers: the size and duration of responses are bounded.

Compressed bodies are rejected, because a few bytes could become gigabytes. A request sets its own limits by
`extensions=limits(…)`. httpx bounds headers (100 KiB). `read_json` parses JSON, and `fit` converts it to an expected
form. `PublicReader` reads files that clients name, from public addresses only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import orjson

from llamado.numerals import whole_number

MAX_BYTES = 16 << 20
"""Maximum bytes of a body, unless the request has its own limit."""
MAX_SECONDS = 120.0
"""Maximum seconds from the headers of a response to its end."""
MOST_ITEMS, MOST_CHARACTERS, LARGEST = 4096, 4096, 1e18
"""Maximum items of a list, characters of a text and absolute value of a number that `fit` returns."""
_HEADERS = {"accept-encoding": "identity"}


class AnswerTooLarge(httpx.HTTPError):
    """A response that exceeds its limits, or is compressed."""


def limits(max_bytes: float = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> dict[str, Any]:
    """Return the `extensions` of a request that has its own limits."""
    return {"max_bytes": max_bytes, "max_seconds": max_seconds}


def open_client(**options: Any) -> httpx.Client:
    """Return an `httpx.Client` with bounded responses, which raises AnswerTooLarge. `options`: those of httpx."""
    client = httpx.Client(**options, event_hooks={"response": [_bound]})
    client.headers.update(_HEADERS)
    return client


class NotPublic(httpx.HTTPError):
    """A URL that does not lead to a public address of the internet."""


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_MOST_REDIRECTS = 3


class PublicReader:
    """Reads files that clients name by URL, but nothing on this machine or its network.

    Names are resolved here, and connections go to the checked address, so a name cannot change its address in between.
    Redirects are checked the same way. Proxies of the environment are not used, because they resolve names themselves.
    """

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None
        self._opening = asyncio.Lock()

    async def read(self, url: str, *, max_bytes: int, max_seconds: float) -> bytes:
        """Return the contents of an http(s) URL.

        Raises NotPublic, AnswerTooLarge, and httpx.HTTPError for everything else, also for a status other than 200.
        """
        try:
            async with asyncio.timeout(max_seconds):
                return await self._follow(url, limits(max_bytes, max_seconds))
        except TimeoutError:
            raise AnswerTooLarge(f"the response takes longer than {max_seconds:g} s") from None
        except httpx.InvalidURL as error:
            raise NotPublic(f"invalid URL: {error}") from None

    async def _follow(self, url: str, bounds: dict[str, Any]) -> bytes:
        async with self._opening:  # loading certificates holds the interpreter's lock: once, not for each request
            if self._client is None:
                self._client = await asyncio.to_thread(self._open)
        target = httpx.URL(url)
        for _ in range(1 + _MOST_REDIRECTS):
            address = await public_address(target)
            request = self._client.build_request(
                "GET",
                target.copy_with(host=address, fragment=None),
                headers={"host": target.netloc.decode("ascii")},
                extensions={**bounds, "sni_hostname": target.host},
            )
            response = await self._client.send(request, stream=True)
            try:
                if not response.has_redirect_location:
                    if response.status_code != 200:
                        raise httpx.HTTPError(f"the server answers {response.status_code}")
                    return await response.aread()
                target = target.join(response.headers["location"])
            finally:
                await response.aclose()
        raise httpx.TooManyRedirects(f"more than {_MOST_REDIRECTS} redirects")

    def _open(self) -> httpx.AsyncClient:
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        return open_async_client(
            trust_env=False,
            verify=ssl.create_default_context(),
            timeout=httpx.Timeout(10.0),
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),  # clients must not share cookies
        )


async def public_address(url: httpx.URL) -> str:
    """Return an address of a URL's host. Raises NotPublic, also if only one of its addresses is not public."""
    if url.scheme not in ("http", "https"):
        raise NotPublic(f"unsupported URL scheme: {url.scheme[:20]}")
    if not url.host:
        raise NotPublic("the URL has no host")
    if url.userinfo:
        raise NotPublic("user names and passwords in URLs are not supported")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.raw_host.decode("ascii"), url.port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise NotPublic(f"{url.host[:253]} has no address: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_public(address):
            raise NotPublic(f"{url.host[:253]} is not a public address of the internet")
    return addresses[0]


def is_public(address: str) -> bool:
    """Return True for an address of the internet, also behind the forms of IPv6 that hold one of IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def open_async_client(**options: Any) -> httpx.AsyncClient:
    """Return an `httpx.AsyncClient` with bounded responses, which raises AnswerTooLarge. `options`: those of httpx."""
    client = httpx.AsyncClient(**options, event_hooks={"response": [_bound_async]})
    client.headers.update(_HEADERS)
    return client


class Maybe(NamedTuple):
    """Form for `fit` of an optional value: None if it is absent or does not fit."""

    form: Any


def read_json(response: httpx.Response) -> Any:
    """Return the JSON of a response, of any type. Raises ValueError, also for JSON that is nested too deeply."""
    return orjson.loads(response.content)


def fit(value: Any, form: Any) -> Any:
    """Convert untrusted JSON to the form of an example.

    An object keeps only the keys of the example, and the items of a list have the form of its one item. The example's
    value replaces one that is missing, has another type, or is too long or large.
    """
    if isinstance(form, Maybe):
        return fit(value, form.form) if _is_like(value, form.form) else None
    if isinstance(form, dict):
        found = value if isinstance(value, dict) else {}
        return {key: fit(found.get(key), one) for key, one in form.items()}
    if isinstance(form, list):
        return [fit(one, form[0]) for one in value[:MOST_ITEMS]] if isinstance(value, list) else []
    if not _is_like(value, form):
        return form
    return value[:MOST_CHARACTERS] if isinstance(form, str) else value


def _is_like(value: Any, form: Any) -> bool:
    """Return True if a value has the type of an example and is not too large. An int counts as a float."""
    if isinstance(form, dict | list | str | bool):
        return isinstance(value, type(form))
    if isinstance(value, bool) or not isinstance(value, int | type(form)):
        return False
    return bool(abs(value) <= LARGEST)  # False for NaN


class _Limit:
    """Remaining bytes and seconds of a response."""

    def __init__(self, response: httpx.Response) -> None:
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            raise AnswerTooLarge(f"the response is compressed ({encoding[:50]}), which the request forbids")
        self._max_bytes = response.request.extensions.get("max_bytes", MAX_BYTES)
        self._max_seconds = response.request.extensions.get("max_seconds", MAX_SECONDS)
        length = response.headers.get("content-length", "")
        if length and response.request.method != "HEAD":
            announced = whole_number(length)
            if announced is None:
                raise AnswerTooLarge(f"the response announces {length[:30]!r} bytes")
            self._check_bytes(announced)
        self._n_bytes = 0
        self._deadline = time.monotonic() + self._max_seconds

    def spend(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._check_bytes(self._n_bytes)
        if time.monotonic() > self._deadline:
            raise AnswerTooLarge(f"the response takes longer than {self._max_seconds:g} s")

    def _check_bytes(self, n_bytes: int) -> None:
        if n_bytes > self._max_bytes:
            raise AnswerTooLarge(f"the response has more than {self._max_bytes} bytes")


class _Stream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, limit: _Limit) -> None:
        self._stream, self._limit = stream, limit

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._limit.spend(len(piece))
            yield piece

    def close(self) -> None:
        self._stream.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, limit: _Limit) -> None:
        self._stream, self._limit = stream, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._limit.spend(len(piece))
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _bound(response: httpx.Response) -> None:
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Stream(response.stream, _Limit(response))


async def _bound_async(response: httpx.Response) -> None:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    response.stream = _AsyncStream(response.stream, _Limit(response))
