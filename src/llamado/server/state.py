"""Where the server stands: loading with progress, ready, or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamado.http.access import AccessRules
from llamado.http.metrics import Traffic
from llamado.server.api.predict import PredictRoutes
from llamado.server.loaded_model import Served
from llamado.text.grammar.source import GrammarSource

if TYPE_CHECKING:
    from llamado.server.ops.sleep import Sleep
    from llamado.server.ops.tracing import Tracing


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
    max_prompts: int = 1024
    """Most prompts of one request."""
    sleep_idle_seconds: int = -1
    """Unload the model after this long without a request; -1: never."""
    spm_infill: bool = False
    predict: PredictRoutes | None = None
    """What Vertex AI asks for; None: this is no container of its."""
    verbose: bool = False
    """Answers of the OpenAI endpoints hold their native form, `__verbose`, where the request does not say."""
    grammar: GrammarSource | None = None
    """What answers must look like where the request does not say."""
    metrics_labels: tuple[tuple[str, str], ...] | None = None
    """Labels of all metrics beside engine, engine_version and model_id; None: no labels at all."""


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

    def report(self, progress: float, stage: str) -> None:
        """Note how far loading is, from 0 to 1; any thread."""
        self.progress, self.stage = progress, stage
