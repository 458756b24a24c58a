"""Where the server stands: loading with progress, ready, or failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamado.http.access import AccessRules
from llamado.http.metrics import Traffic, UsageReports
from llamado.server.errors import loading
from llamado.server.live.live import Live
from llamado.server.model import Served, ServedLab
from llamado.server.switches import Switches
from llamado.tools.api import ToolsApi

if TYPE_CHECKING:
    from llamado.server.ops.sleep import Sleep
    from llamado.server.ops.tracing import Tracing


@dataclass
class ServerState:
    """Shared by all endpoints; `served` is None until the model is loaded."""

    access: AccessRules = field(default_factory=AccessRules)
    switches: Switches = field(default_factory=Switches)
    served: Served | None = None
    failure: str | None = None
    progress: float = 0.0
    stage: str = "starting"
    started: float = field(default_factory=time.time)
    traffic: Traffic = field(default_factory=Traffic)
    sleep: Sleep | None = None
    """Puts the model to sleep and wakes it; None: it is always awake."""
    tracing: Tracing | None = None
    ending: Callable[[], bool] = lambda: False
    """Whether the process finishes what it has: what is sent without end comes to its end."""
    lab: ServedLab | None = None
    """None: `--lab` was not given."""
    tools: ToolsApi = field(default_factory=ToolsApi)
    live: Live = field(default_factory=Live)
    usage: UsageReports = field(default_factory=UsageReports)

    def loaded(self) -> Served:
        """The model. Raises ApiError while it is not loaded."""
        if self.served is None:
            raise loading()
        return self.served

    def report(self, progress: float, stage: str) -> None:
        """Note how far loading is, from 0 to 1; any thread."""
        self.progress, self.stage = progress, stage
