"""Usage limits of API keys: requests and tokens per minute and per day."""

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
"""Seconds between two writes of the quota file: the usage that is lost if the gateway is killed."""
_DAY = 86400


class _Bucket:
    """Token bucket: refills at a constant rate and holds up to one minute's worth."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60
        self._most = max(1.0, per_minute)
        self._level = self._most
        self._at = now

    def wait(self, least: float, now: float) -> float:
        """Return the seconds until the bucket holds `least`; 0 if it does."""
        self._level = min(self._most, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
        return max(0.0, (least - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Take an amount out; the level may become negative."""
        self._level -= amount


class KeyUsage:
    """Usage of one key. `clock`: seconds of the epoch."""

    def __init__(self, options: KeyOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.refused: Counter[str] = Counter()
        """Rejected requests, by limit."""
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
        """Usage of the current day: `day`, `requests`, `tokens`."""
        return {"day": _date(self._today), **self._used}

    def resume(self, used: Mapping[str, Any]) -> None:
        """Continue an earlier process's count if it is of the same day. Raises KeyError, TypeError, ValueError."""
        counts = {what: used[what] for what in self._used}
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise ValueError("expected whole numbers")
        if used["day"] == _date(self._today):
            self._used = counts

    def admit(self, tokens: int) -> None:
        """Start a request with an estimate of its prompt tokens. Raises ApiError (429)."""
        now = self._clock()
        if int(now // _DAY) != self._today:
            self._today, self._used = int(now // _DAY), {"requests": 0, "tokens": 0}
        for what, limit in self._days.items():
            if limit is not None and self._used[what] >= limit:
                self._refuse(f"{what}_per_day", limit, f"{what} a day", (self._today + 1) * _DAY - now)
        for what, bucket in self._minutes.items():
            # The actual tokens are counted afterwards, so a key in debt must wait.
            wait = 0.0 if bucket is None else bucket.wait(1.0 if what == "requests" else 1e-9, now)
            if wait > 0:
                limit = getattr(self.options, f"{what}_per_minute")
                self._refuse(f"{what}_per_minute", limit, f"{what} a minute", wait)
        self._take("requests", 1)
        self._take("tokens", tokens)

    def settle(self, tokens: int, estimate: int) -> None:
        """End a request: replace the estimate by the tokens it used."""
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
    """Return a day, counted from 1970 in UTC, as 2026-01-31."""
    return datetime.datetime.fromtimestamp(day * _DAY, datetime.UTC).date().isoformat()


class KeyLimits:
    """The usage of all keys.

    `file`: today's usage is read from it and written to it by `keep` and `save`. Raises GatewayError if it cannot be
    read or written.
    """

    def __init__(
        self, keys: Sequence[KeyOptions], file: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._by_digest = {digest(key.key.encode()): KeyUsage(key, clock) for key in keys}
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
            stored = orjson.loads(file.read_bytes())
            for usage in self.usages:
                if usage.options.name in stored:
                    usage.resume(stored[usage.options.name])
        except FileNotFoundError:
            return
        except OSError as error:
            raise GatewayError(f"quota_file: {file}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise GatewayError(
                f"quota_file: {file}: not a gateway's quota file ({error!r}); remove it to start from zero"
            ) from None

    def save(self) -> None:
        """Write the quota file if the usage has changed. Atomic. Raises OSError."""
        data = orjson.dumps({usage.options.name: usage.used for usage in self.usages}, option=orjson.OPT_INDENT_2)
        if self._file is None:
            return
        with self._writing:
            if data == self._written:
                return
            new = self._file.with_name(self._file.name + ".new")
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._file)
            self._written = data

    async def keep(self) -> None:
        """Write the quota file periodically."""
        last_error = ""
        while self._file is not None:
            await asyncio.sleep(KEPT_EVERY)
            try:
                await asyncio.to_thread(self.save)
                last_error = ""
            except OSError as error:
                if str(error) != last_error:
                    log.error("quotas: %s: not saved: %s", self._file, error.strerror or error)
                last_error = str(error)

    @property
    def usages(self) -> list[KeyUsage]:
        """Usage of all keys."""
        return list(self._by_digest.values())

    def find(self, headers: Mapping[bytes, bytes]) -> KeyUsage | None:
        """Return the usage of a request's key; None if the key has no limits."""
        # Looking up a hash reveals nothing about the key by its timing.
        return next((self._by_digest[d] for d in key_digests(headers) if d in self._by_digest), None)
