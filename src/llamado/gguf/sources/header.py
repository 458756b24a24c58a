"""Headers of model files on a server, so that a file that cannot run is not downloaded.

Range requests fetch little more than the header. If the server does not support ranges, the start of the file is read
and the connection is closed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import closing

import httpx

from llamado.gguf.errors import SourceError, TruncatedFile
from llamado.gguf.header import Header, parse_header
from llamado.gguf.sources.fetch import ATTEMPTS, PAUSE, RETRIED, Incomplete, display_url
from llamado.numerals import whole_number
from llamado.outgoing import limits

_FIRST = 1 << 20
_LATER = 1 << 16  # the vocabulary is in the first shard
_LIMIT = 64 << 20  # the header of a vocabulary of 262,144 words has 7 MB


Check = Callable[[Header], None]
"""Callback with the header of a file before the rest is fetched; raises a LlamadoError to stop the download."""


def fetch_header(client: httpx.Client, url: httpx.URL | str, source: str, shard: int = 0) -> Header:
    """Return the header of the file at `url`; raise SourceError, or GgufError if the file is not GGUF."""
    data = bytearray()
    first = _LATER if shard else _FIRST
    for attempt in range(ATTEMPTS):
        try:
            with closing(_fetch_more(client, url, data, first)) as arrivals:
                return _parse(arrivals, data, source, shard, first)
        except (httpx.HTTPError, httpx.InvalidURL, Incomplete) as error:
            if attempt == ATTEMPTS - 1 or not isinstance(error, (httpx.TransportError, Incomplete)):
                raise SourceError(
                    f"cannot fetch {display_url(url)}: {error or type(error).__name__}; check the network (or proxy)"
                ) from error
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError


def _parse(arrivals: Generator[int, None, None], data: bytearray, source: str, shard: int, due: int) -> Header:
    """Parse the header as soon as `data` holds enough of it; retry each time the data has doubled."""
    for n in arrivals:
        if n < due:
            continue
        try:
            return parse_header(bytes(data), source, shard)
        except TruncatedFile:
            if n >= _LIMIT:
                raise
            due = 2 * n
    return parse_header(bytes(data), source, shard)


def _fetch_more(client: httpx.Client, url: httpx.URL | str, data: bytearray, first: int) -> Generator[int, None, None]:
    """Append the next bytes of the file to `data`, and yield its length after each chunk."""
    while True:
        end = max(2 * len(data), first)
        headers = {"Range": f"bytes={len(data)}-{end - 1}"}
        with client.stream("GET", url, headers=headers, extensions=limits(math.inf)) as response:
            if response.status_code == 416:
                return
            if response.status_code in RETRIED:
                raise Incomplete(f"the server answers {response.status_code} {response.reason_phrase}")
            if response.is_error:
                raise SourceError(
                    f"cannot fetch {display_url(url)}: "
                    f"the server answers {response.status_code} {response.reason_phrase}"
                )
            ranged = response.status_code == 206
            if not ranged:
                data.clear()
            for chunk in response.iter_bytes():
                data += chunk
                yield len(data)
        total = response.headers.get("content-range", "").rpartition("/")[2]
        if not ranged or ((size := whole_number(total)) is not None and len(data) >= size):
            return
