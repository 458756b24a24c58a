"""Models in Ollama's API: names, details, and the body of `/api/show`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llamado.engine.parameters import PARAMETERS
from llamado.engine.request import Defaults
from llamado.server.model_facts import FOREVER, ModelFacts, read_header, timestamp

TAG = "latest"
# The Ollama version with the same features; clients use it to choose features.
API_VERSION = "0.12.11"
_COLUMN = 30  # column of the values in `parameters`


def tagged(name: str) -> str:
    """Return a model's name with its tag, `latest` by default."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{TAG}"


def untagged(name: str) -> str:
    """Return a name without the default tag."""
    return name.removesuffix(f":{TAG}")


def details(facts: ModelFacts | None) -> dict[str, Any]:
    """Return `details` of a model; empty without facts."""
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
    """Return a model as an entry of `/api/tags`."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(0.0 if facts is None else facts.modified),
        "size": 0 if facts is None else facts.size,
        "digest": "" if facts is None else facts.digest,
        "details": details(facts),
    }


def running(name: str, facts: ModelFacts | None, *, n_ctx: int, seconds: float | None) -> dict[str, Any]:
    """Return a model as an entry of `/api/ps`. `seconds`: time until it is unloaded, None: never."""
    entry = listed(name, facts)
    del entry["modified_at"]
    left = FOREVER.total_seconds() if seconds is None else seconds
    return {**entry, "expires_at": timestamp(time.time() + left), "size_vram": 0, "context_length": n_ctx}


def shown(
    name: str, facts: ModelFacts, *, template: str, parameters: str, capabilities: Sequence[str], everything: bool
) -> dict[str, Any]:
    """Return the body of `/api/show`; `everything`: with long arrays and the tensors."""
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
    """Return the server's defaults that differ from the parameters' own, under Ollama's names, one per line."""
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
