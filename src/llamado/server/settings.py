"""What a server is told: the model, the engine, who may enter, where it listens."""

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
    """Empty where a router serves several models."""
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
    """Seconds a connection may rest in the middle of a request or an answer."""
    threads_http: int | None = None
    """Threads for long texts; None: automatic."""
    max_connections: int | None = None
    """None: as many as the system lets this process open."""
    otel: bool = False
    tools: ToolSettings = field(default_factory=ToolSettings)
