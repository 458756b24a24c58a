"""Which endpoints are served and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamado.text.grammar.source import GrammarSource


@dataclass(frozen=True, kw_only=True)
class PredictRoutes:
    """What the platform asks for: paths, and the port to listen on; `health` is "" where the usual one will do."""

    predict: str = "/predict"
    health: str = ""
    port: int = 8080

    @staticmethod
    def read(environ: Mapping[str, str]) -> PredictRoutes | None:
        """From the environment; None where this is no such container. Raises ValueError for a port that is none."""
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
    """Which endpoints are served and how."""

    metrics: bool = False
    slots: bool = True
    props: bool = False
    prefill_assistant: bool = True
    sse_ping_interval: int = 30
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    jinja: bool = True
    """Off: only built-in templates, and no tools."""
    skip_chat_parsing: bool = False
    """Everything a model says is content."""
    reasoning_format: str = "auto"
    """none, deepseek, deepseek-legacy; auto is deepseek."""
    reasoning: str = "auto"
    """on, off, or auto: as the template does."""
    reasoning_budget: int = -1
    """Most tokens of thinking; -1: no limit."""
    reasoning_budget_message: str = ""
    reasoning_effort: str = "default"
    reasoning_preserve: bool = True
    slot_save_path: str | None = None
    """Folder for `/slots/{id}?action=save`; None: the endpoint is off."""
    api_prefix: str = ""
    static_path: str | None = None
    """Folder of files to serve in the page's stead."""
    page: bool = True
    """Whether browsers are shown the page at `/`."""
    page_settings: Mapping[str, Any] = field(default_factory=dict)
    """What the page begins with in place of its own defaults."""
    max_prompts: int = 1024
    """Most prompts of one request."""
    sleep_idle_seconds: int = -1
    """Unload the model after this long without a request; -1: never."""
    hang_timeout: float = 600.0
    """Seconds after which `/livez` calls a step that has not come to its end hung; 0: never."""
    cluster_token: str | None = None
    """What workers that join must know; None: nobody joins."""
    spm_infill: bool = False
    predict: PredictRoutes | None = None
    """What Vertex AI asks for; None: this is no container of its."""
    verbose: bool = False
    """Answers of the OpenAI endpoints hold their native form, `__verbose`, where the request does not say."""
    grammar: GrammarSource | None = None
    """What answers must look like where the request does not say."""
    metrics_labels: tuple[tuple[str, str], ...] | None = None
    """Labels of all metrics beside engine, engine_version and model_id; None: no labels at all."""
