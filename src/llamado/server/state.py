"""Where the server stands: loading with progress, ready, or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamado.server.served import Served


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """Who may call: keys, and what browsers are told."""

    api_keys: tuple[bytes, ...] = ()
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Which endpoints are served and how."""

    metrics: bool = False
    slots: bool = True
    props: bool = False
    prefill_assistant: bool = True
    sse_ping_interval: int = 30
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


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

    def report(self, progress: float, stage: str) -> None:
        """Note how far loading is, from 0 to 1; any thread."""
        self.progress, self.stage = progress, stage
