"""Switches of the endpoints: availability, and defaults of their behavior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamado.text.grammar.source import GrammarSource


@dataclass(frozen=True, kw_only=True)
class PredictRoutes:
    """Routes and port that Vertex AI requires of a container; `health` is "" for the default path."""

    predict: str = "/predict"
    health: str = ""
    port: int = 8080

    @staticmethod
    def read(environ: Mapping[str, str]) -> PredictRoutes | None:
        """Read the environment; None outside of a Vertex AI container. Raises ValueError for an invalid port."""
        if environ.get("AIP_MODE") != "PREDICTION":
            return None
        predict, health = (environ.get(f"AIP_{name}_ROUTE", "") for name in ("PREDICT", "HEALTH"))
        port = int(environ.get("AIP_HTTP_PORT") or 8080)
        if not 0 <= port <= 65535:
            raise ValueError(f"there is no port {port}")
        return PredictRoutes(predict=_rooted(predict) or "/predict", health=_rooted(health), port=port)


def _rooted(path: str) -> str:
    return path if not path or path.startswith("/") else f"/{path}"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Switches of the endpoints."""

    metrics: bool = False
    slots: bool = True
    props: bool = False
    prefill_assistant: bool = True
    sse_ping_interval: int = 30
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    jinja: bool = True
    """False: only built-in templates, and no tools."""
    skip_chat_parsing: bool = False
    """Return the whole output as content."""
    reasoning_format: str = "auto"
    """none, deepseek, deepseek-legacy; auto is deepseek."""
    reasoning: str = "auto"
    """on, off, or auto: the template's default."""
    reasoning_budget: int = -1
    """Most tokens of reasoning; -1: no limit."""
    reasoning_budget_message: str = ""
    reasoning_effort: str = "default"
    reasoning_preserve: bool = True
    slot_save_path: str | None = None
    """Folder for `/slots/{id}?action=save`; None: the endpoint is off."""
    api_prefix: str = ""
    media_path: str | None = None
    """Folder of pictures and sounds that requests may name as `file://`; None: none."""
    media_url: bool = False
    """Fetch pictures and sounds from http(s) URLs in requests."""
    static_path: str | None = None
    """Folder of files to serve instead of the page."""
    page: bool = True
    """Serve the page at `/`."""
    page_settings: Mapping[str, Any] = field(default_factory=dict)
    """Initial settings of the page, in place of its own defaults."""
    chats: str | None = None
    """Folder of the page's chats; None: only browsers store them."""
    max_prompts: int = 1024
    """Most prompts of one request."""
    sleep_idle_seconds: int = -1
    """Unload the model after so many seconds without a request; -1: never."""
    hang_timeout: float = 600.0
    """Seconds after which `/livez` reports an unfinished step as hung; 0: never."""
    cluster_token: str | None = None
    """The secret of workers that join; None: no worker may join."""
    spm_infill: bool = False
    """Put the suffix before the prefix in prompts of `/infill`."""
    predict: PredictRoutes | None = None
    """Routes of Vertex AI; None outside of its containers."""
    verbose: bool = False
    """Default of `verbose`: answers of the OpenAI endpoints have their native form, `__verbose`."""
    grammar: GrammarSource | None = None
    """Default grammar of answers."""
    metrics_labels: tuple[tuple[str, str], ...] | None = None
    """Labels of all metrics besides engine, engine_version and model_id; None: no labels at all."""
