"""Settings of a server: model, engine, access rules, addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults
from llamado.http.access import AccessRules
from llamado.server.switches import Switches
from llamado.tools.settings import ToolSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything `serve` needs."""

    source: ModelSource
    """Empty for a router, which serves several models."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    access: AccessRules = field(default_factory=AccessRules)
    switches: Switches = field(default_factory=Switches)
    defaults: Defaults = field(default_factory=Defaults)
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    reuse_port: bool = False
    ssl_key: str | None = None
    ssl_cert: str | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timeout: int = 3600
    """Seconds without data after which a connection in the middle of a request or an answer is closed."""
    threads_http: int | None = None
    """Threads for long texts; None: automatic."""
    max_connections: int | None = None
    """None: the system's limit for this process."""
    otel: bool = False
    tools: ToolSettings = field(default_factory=ToolSettings)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; the first is its ID."""
        return self.aliases or (self.source.name,)
