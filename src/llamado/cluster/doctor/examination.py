"""One examination: everything that was asked for is looked at, and told to people or to programs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamado.client.requests import base
from llamado.cluster.doctor.logs import explain
from llamado.cluster.doctor.machine import MachineOptions, examine_machine
from llamado.cluster.doctor.model_files import examine_model
from llamado.cluster.doctor.servers import examine_servers
from llamado.cluster.doctor.symptoms import Finding
from llamado.cluster.doctor.workers import examine_workers
from llamado.devices.split.placement import SplitOptions
from llamado.engine.options import EngineOptions
from llamado.errors import LlamadoError

_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+(?:/.*)?")


class CannotLook(LlamadoError):
    """What was named cannot be looked at at all."""


@dataclass(frozen=True)
class Targets:
    """What is looked at, of all that a command names."""

    urls: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    logs: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Examination:
    """What was looked at, and what was found."""

    looked: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 where nothing was found, else 1."""
        return 1 if self.findings else 0

    def as_json(self) -> str:
        """For programs."""
        found = [{"title": one.title, **asdict(one)} for one in self.findings]
        return json.dumps({"healthy": not found, "looked_at": list(self.looked), "findings": found}, indent=2)

    def __str__(self) -> str:
        """For people."""
        if not self.findings:
            return "Nothing found. Looked at: " + ", ".join(self.looked)
        parts = [
            f"{one.title} ({one.where})\n  found:  {one.found}\n  cause:  {one.cause}\n  mend:   {one.command}"
            for one in self.findings
        ]
        return "\n\n".join(parts)


def targets(named: Sequence[str]) -> Targets:
    """What words on a command line name: URLs, workers (tcp://, tls://), models' files, logs. Raises CannotLook."""
    urls: list[str] = []
    workers: list[str] = []
    models: list[str] = []
    logs: list[Path] = []
    for text in named:
        path = Path(text).expanduser()
        if text.startswith(("tcp://", "tls://")):
            workers.append(text)
        elif "://" in text or (_ADDRESS.fullmatch(text) and not path.exists()):
            urls.append(base(text))
        elif text.startswith("ollama:") or path.suffix == ".gguf":
            models.append(text)
        elif path.is_file():
            logs.append(path)
        else:
            raise CannotLook(f"{text!r} is no address (http://host:port), no log and no model: there is no such file")
    return Targets(tuple(urls), tuple(workers), tuple(models), tuple(logs))


def examine(
    what: Targets,
    options: EngineOptions,
    machine: MachineOptions,
    *,
    split: SplitOptions | None = None,
    context_given: bool = False,
    key: str | None = None,
    timeout: float = 5.0,
    patience: float = 10.0,
) -> Examination:
    """Looks at everything named; at this machine alone where nothing is. Raises LlamadoError where it cannot."""
    looked: list[str] = [*what.urls, *(split.rpc if split is not None else ()), *what.models, *map(str, what.logs)]
    findings: list[Finding] = []
    for log in what.logs:
        findings += explain(log)
    if what.urls:
        findings += examine_servers(what.urls, key=key, timeout=timeout, patience=patience)
    if split is not None:
        findings += examine_workers(split, timeout=timeout)
    for model in what.models:
        findings += examine_model(model, options, asked=context_given)
    if machine != MachineOptions() or what.models or not looked:
        looked.append("this machine")
        findings += examine_machine(machine)
    return Examination(tuple(looked), tuple(findings))
