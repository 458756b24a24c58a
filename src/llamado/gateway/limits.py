"""What each key may use: requests and tokens a minute, and a day."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from llamado.gateway.options import GatewayError, KeyOptions
from llamado.http.access import digest, key_digests
from llamado.http.errors import ApiError

log = logging.getLogger("llamado.gateway")

KEPT_EVERY = 1.0
"""Seconds from one writing of the quotas' file to the next: what a gateway that is killed forgets."""
_DAY = 86400


class _Bucket:
    """So much a minute: it fills steadily, up to one minute's worth."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60
        self._most = max(1.0, per_minute)
        self._level = self._most
        self._at = now

    def wait(self, least: float, now: float) -> float:
        """Seconds until it holds `least`; 0 where it does."""
        self._level = min(self._most, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
        return max(0.0, (least - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Take out; it may go below zero."""
        self._level -= amount


class KeyUse:
    """How much a key has used. `clock`: seconds of the epoch."""

    def __init__(self, options: KeyOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.refused: Counter[str] = Counter()
        """Requests turned away, by the limit."""
        self.requests = 0
        self.tokens = 0
        now = clock()
        self._clock = clock
        self._minutes = {
            what: None if limit is None else _Bucket(limit, now)
            for what, limit in (("requests", options.requests_per_minute), ("tokens", options.tokens_per_minute))
        }
        self._days = {"requests": options.requests_per_day, "tokens": options.tokens_per_day}
        self._today = int(now // _DAY)
        self._used = {"requests": 0, "tokens": 0}

    @property
    def used(self) -> dict[str, Any]:
        """What it has used of its day: `day`, `requests`, `tokens`."""
        return {"day": _date(self._today), **self._used}

    def resume(self, used: Mapping[str, Any]) -> None:
        """Go on where an earlier process was, if that was on the same day. Raises KeyError, TypeError, ValueError."""
        counts = {what: used[what] for what in self._used}
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise ValueError("expected whole numbers")
        if used["day"] == _date(self._today):
            self._used = counts

    def admit(self, tokens: int) -> None:
        """Begin a request with a prompt of about so many tokens. Raises ApiError (429)."""
        now = self._clock()
        if int(now // _DAY) != self._today:
            self._today, self._used = int(now // _DAY), {"requests": 0, "tokens": 0}
        for what, limit in self._days.items():
            if limit is not None and self._used[what] >= limit:
                self._refuse(f"{what}_per_day", limit, f"{what} a day", (self._today + 1) * _DAY - now)
        for what, bucket in self._minutes.items():
            # Tokens are known afterwards: whoever is in debt waits.
            wait = 0.0 if bucket is None else bucket.wait(1.0 if what == "requests" else 1e-9, now)
            if wait > 0:
                limit = getattr(self.options, f"{what}_per_minute")
                self._refuse(f"{what}_per_minute", limit, f"{what} a minute", wait)
        self._take("requests", 1)
        self._take("tokens", tokens)

    def settle(self, tokens: int, estimate: int) -> None:
        """A request is over: it took so many tokens, where `estimate` were taken at its beginning."""
        self._take("tokens", tokens - estimate)

    def _take(self, what: str, amount: int) -> None:
        if what == "requests":
            self.requests += amount
        else:
            self.tokens += amount
        self._used[what] += amount
        bucket = self._minutes[what]
        if bucket is not None:
            bucket.take(amount)

    def _refuse(self, name: str, limit: float, what: str, wait: float) -> None:
        self.refused[name] += 1
        message = f"key {self.options.name!r} has used its {limit:g} {what}"
        raise ApiError("rate_limit_error", message, retry_after=max(1, math.ceil(wait)), limit=name)


def _date(day: int) -> str:
    """A day since 1970, in UTC, as 2026-01-31."""
    return datetime.datetime.fromtimestamp(day * _DAY, datetime.UTC).date().isoformat()


class KeyLimits:
    """All keys of a gateway.

    `file`: what they have used of their day is read from it, and kept in it by `keep` and `save`. Raises GatewayError
    for one that cannot be read or written.
    """

    def __init__(
        self, keys: Sequence[KeyOptions], file: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._by_digest = {digest(key.key.encode()): KeyUse(key, clock) for key in keys}
        self._file = file
        self._written = b""
        self._writing = threading.Lock()
        if file is not None:
            self._resume(file)
            try:
                self.save()
            except OSError as error:
                raise GatewayError(f"quota_file: {file}: {error.strerror or error}") from None

    def _resume(self, file: Path) -> None:
        try:
            told = orjson.loads(file.read_bytes())
            for use in self.uses:
                if use.options.name in told:
                    use.resume(told[use.options.name])
        except FileNotFoundError:
            return
        except OSError as error:
            raise GatewayError(f"quota_file: {file}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise GatewayError(
                f"quota_file: {file}: not what a gateway wrote ({error!r}); remove it, and today's quotas begin anew"
            ) from None

    def save(self) -> None:
        """Write the quotas' file where something has changed: the old one or the new one is there. Raises OSError."""
        told = orjson.dumps({use.options.name: use.used for use in self.uses}, option=orjson.OPT_INDENT_2)
        if self._file is None:
            return
        with self._writing:
            if told == self._written:
                return
            new = self._file.with_name(self._file.name + ".new")
            with new.open("wb") as file:
                file.write(told)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._file)
            self._written = told

    async def keep(self) -> None:
        """Write the quotas' file again and again."""
        said = ""
        while self._file is not None:
            await asyncio.sleep(KEPT_EVERY)
            try:
                await asyncio.to_thread(self.save)
                said = ""
            except OSError as error:
                if str(error) != said:
                    log.error("quotas: %s: not saved: %s", self._file, error.strerror or error)
                said = str(error)

    @property
    def uses(self) -> list[KeyUse]:
        """Of all keys."""
        return list(self._by_digest.values())

    def of(self, headers: Mapping[bytes, bytes]) -> KeyUse | None:
        """The use of the key that a request came with; None: one without limits."""
        # Looking up a digest tells by its time nothing about the key.
        return next((self._by_digest[d] for d in key_digests(headers) if d in self._by_digest), None)
