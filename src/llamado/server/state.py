"""The state of a server: loading with progress, ready, or failed; and the parts that endpoints share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamado.http.access import AccessRules
from llamado.http.monitoring.metrics import Traffic, UsageReports
from llamado.http.resumable.registry import StreamRegistry
from llamado.server.errors import loading
from llamado.server.live.live import LiveHistory
from llamado.server.model import ServedLab, ServedModel
from llamado.server.switches import Switches
from llamado.tools.api import ToolsApi

if TYPE_CHECKING:
    from llamado.server.ops.sleep import Sleep
    from llamado.server.ops.tracing import RequestTracer


@dataclass
class ServerState:
    """Shared by all endpoints; `served` is None until the model is loaded."""

    access: AccessRules = field(default_factory=AccessRules)
    switches: Switches = field(default_factory=Switches)
    served: ServedModel | None = None
    failure: str | None = None
    progress: float = 0.0
    stage: str = "starting"
    loading_model: str = ""
    """Name of the model that is being loaded."""
    started: float = field(default_factory=time.time)
    traffic: Traffic = field(default_factory=Traffic)
    sleep: Sleep | None = None
    """Unloads the idle model and reloads it; None: the model stays loaded."""
    tracing: RequestTracer | None = None
    ending: Callable[[], bool] = lambda: False
    """Return True during shutdown, when endless streams must end."""
    lab: ServedLab | None = None
    """None: `--lab` was not given."""
    tools: ToolsApi = field(default_factory=ToolsApi)
    live: LiveHistory = field(default_factory=LiveHistory)
    usage: UsageReports = field(default_factory=UsageReports)
    streams: StreamRegistry = field(default_factory=StreamRegistry)

    def loaded(self) -> ServedModel:
        """Return the model. Raises ApiError while it is not loaded."""
        if self.served is None:
            raise loading()
        return self.served

    def report(self, progress: float, stage: str) -> None:
        """Set the progress of loading, from 0 to 1, and its stage; any thread."""
        self.progress, self.stage = progress, stage
