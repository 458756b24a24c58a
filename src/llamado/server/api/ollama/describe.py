"""What Ollama's API tells of models: names, details, and all that `/api/show` says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llamado.engine.parameters import PARAMETERS
from llamado.engine.request import Defaults
from llamado.server.model_facts import FOREVER, ModelFacts, read_header, timestamp

TAG = "latest"
# Clients ask which features they may use; these are the ones of that version.
API_VERSION = "0.12.11"
_COLUMN = 30  # where the values of `parameters` begin


def tagged(name: str) -> str:
    """A model's name with its tag, which is `latest` where it has none."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{TAG}"


def untagged(name: str) -> str:
    """A name without the tag that says nothing."""
    return name.removesuffix(f":{TAG}")


def details(facts: ModelFacts | None) -> dict[str, Any]:
    """`details` of a model; empty where nothing is known of it."""
    family = "" if facts is None else facts.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if facts is None else facts.parameter_size,
        "quantization_level": "" if facts is None else facts.quantization,
    }


def listed(name: str, facts: ModelFacts | None) -> dict[str, Any]:
    """A model as an entry of `/api/tags`."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(0.0 if facts is None else facts.modified),
        "size": 0 if facts is None else facts.size,
        "digest": "" if facts is None else facts.digest,
        "details": details(facts),
    }


def running(name: str, facts: ModelFacts | None, *, n_ctx: int, seconds: float | None) -> dict[str, Any]:
    """A model as an entry of `/api/ps`, which stays for so many seconds; None: for ever."""
    entry = listed(name, facts)
    del entry["modified_at"]
    left = FOREVER.total_seconds() if seconds is None else seconds
    return {**entry, "expires_at": timestamp(time.time() + left), "size_vram": 0, "context_length": n_ctx}


def shown(
    name: str, facts: ModelFacts, *, template: str, parameters: str, capabilities: Sequence[str], everything: bool
) -> dict[str, Any]:
    """A model as `/api/show` tells it; `everything`: long arrays and the tensors, too."""
    header = read_header(facts.path) if everything else None
    file = [f"# {name}, as llamado serves it", f"FROM {facts.path}"]
    if template:
        file.append(f'TEMPLATE """{template}"""')
    file += [f"PARAMETER {line}" for line in parameters.splitlines()]
    answer: dict[str, Any] = {
        "modelfile": "\n".join(file),
        "parameters": parameters,
        "template": template,
        "details": details(facts),
        "model_info": facts.info if header is None else header.info,
        "capabilities": list(capabilities),
        "modified_at": timestamp(facts.modified),
    }
    if facts.license:
        answer["license"] = facts.license
    if header is not None:
        answer["tensors"] = header.tensors
    return answer


def parameter_lines(defaults: Defaults) -> str:
    """What a request gets that does not say, where the server was told so, under Ollama's names."""
    lines = []
    for row in PARAMETERS:
        if row.ollama and hasattr(_holder(defaults, row.of), row.name):
            value = getattr(_holder(defaults, row.of), row.name)
            if value != row.default:
                lines += [f"{row.ollama:<{_COLUMN}} {_text(one)}" for one in _each(value)]
    return "\n".join(lines)


def _holder(defaults: Defaults, of: str) -> object:
    return defaults.sampling if of == "sampling" else defaults


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
