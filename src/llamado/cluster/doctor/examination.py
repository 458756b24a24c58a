"""Examination: run the checks for all targets of a command, and format the findings as text or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamado.client.requests import base
from llamado.cluster.doctor.cards import examine_cards
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


class UnknownTarget(LlamadoError):
    """An argument that is neither an address nor an existing file."""


@dataclass(frozen=True)
class Targets:
    """Servers, workers, models and logs to check."""

    urls: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    logs: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Examination:
    """The checked targets and the findings."""

    checked: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 without findings, otherwise 1."""
        return 1 if self.findings else 0

    def as_json(self) -> str:
        """Return the examination as JSON."""
        found = [{"title": one.title, **asdict(one)} for one in self.findings]
        return json.dumps({"healthy": not found, "looked_at": list(self.checked), "findings": found}, indent=2)

    def __str__(self) -> str:
        """Return the examination as text."""
        if not self.findings:
            return "No problem found. Checked: " + ", ".join(self.checked)
        parts = [
            f"{one.title} ({one.where})\n  found:  {one.found}\n  cause:  {one.cause}\n  fix:    {one.command}"
            for one in self.findings
        ]
        return "\n\n".join(parts)


def parse_targets(named: Sequence[str]) -> Targets:
    """Sort the arguments of a command line into URLs, workers (tcp://, tls://), models and logs.

    Raises UnknownTarget.
    """
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
            raise UnknownTarget(f"{text!r}: no such file, and not an address such as http://host:port")
    return Targets(tuple(urls), tuple(workers), tuple(models), tuple(logs))


def examine(
    targets: Targets,
    options: EngineOptions,
    machine: MachineOptions,
    *,
    split: SplitOptions | None = None,
    context_given: bool = False,
    key: str | None = None,
    timeout: float = 5.0,
    patience: float = 10.0,
) -> Examination:
    """Check all targets; without targets only this machine. Raises LlamadoError for a target that cannot be checked.

    `context_given`: the user chose the context size. `timeout` and `patience`: see `examine_servers`.
    """
    workers = () if split is None else split.rpc
    checked: list[str] = [*targets.urls, *workers, *targets.models, *map(str, targets.logs)]
    findings: list[Finding] = []
    for log in targets.logs:
        findings += explain(log)
    if targets.urls:
        findings += examine_servers(targets.urls, key=key, timeout=timeout, patience=patience)
    if split is not None:
        findings += examine_workers(split, timeout=timeout)
    for model in targets.models:
        findings += examine_model(model, options, context_given=context_given)
    if machine != MachineOptions() or targets.models or not checked:
        checked.append("this machine")
        findings += examine_machine(machine)
        findings += examine_cards()
    return Examination(tuple(checked), tuple(findings))
