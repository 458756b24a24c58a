"""The history that a server keeps: a sample per second, the last requests, the last lines of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llamado.engine.request import EngineSnapshot
from llamado.server.live.log_tail import LogTail
from llamado.server.live.requests import RecentRequests
from llamado.server.live.samples import Samples

_SAMPLE_SECONDS = 1.0


@dataclass
class LiveHistory:
    """The history of one server."""

    samples: Samples = field(default_factory=Samples)
    requests: RecentRequests = field(default_factory=RecentRequests)
    log: LogTail = field(default_factory=LogTail)

    async def watch(self, snapshot: Callable[[], EngineSnapshot | None]) -> None:
        """Take a sample every second until cancelled. `snapshot` returns None until the model is loaded."""
        while True:
            if (now := snapshot()) is not None:
                self.samples.take(time.time(), now, self.requests.n_errors)
            await asyncio.sleep(_SAMPLE_SECONDS)
