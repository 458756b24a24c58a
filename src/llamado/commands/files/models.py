"""`llamado list`, `show` and `rm`: models on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table
from rich.text import Text

from llamado.errors import LlamadoError
from llamado.gguf import GGUFFile
from llamado.gguf.errors import SourceError
from llamado.gguf.inspect import size_text, value_text
from llamado.gguf.sources.stored import StoredModel, find_stored, models_in, parts_of, remove, stored_models
from llamado.server.model_facts import ModelFacts, read_facts, timestamp
from llamado.terminal.console import Console
from llamado.terminal.text import print

_PIPE_WIDTH = 160  # columns of output to a file or pipe


class RemovalError(LlamadoError):
    """A model was not deleted: it is in use, or the user did not confirm."""


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def _print_json(value: Any) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def run_list(folder: str | None, *, as_json: bool) -> int:
    """Show the models in the caches, Ollama's store and an optional folder. Raises SourceError."""
    models = stored_models()
    if folder is not None:
        models += [StoredModel(name, path, parts_of(path), "folder") for name, path in models_in(folder).items()]
    rows = [(model, read_facts(model.path) if model.is_complete else None) for model in models]
    if as_json:
        _print_json([_row(model, facts) for model, facts in rows])
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "ARCHITECTURE", "PARAMETERS", "QUANTIZATION"):
        table.add_column(heading, no_wrap=True)
    table.add_column("SIZE", no_wrap=True, justify="right")
    for heading in ("USED", "FROM"):
        table.add_column(heading, no_wrap=True)
    for model, facts in rows:
        columns = ("", "", "") if facts is None else (facts.architecture, facts.parameter_size, facts.quantization)
        name = model.spec if model.is_complete else f"{model.spec} (incomplete)"
        table.add_row(Text(name), *columns, size_text(model.size), _ago(model.last_used), model.source)
    _console().print(table if rows else "no models; llamado pull smollm2 downloads one")
    return 0


def _row(model: StoredModel, facts: ModelFacts | None) -> dict[str, Any]:
    return {
        "name": model.spec,
        "path": str(model.path),
        "files": [str(file) for file in model.files],
        "source": model.source,
        "whole": model.is_complete,
        "size": model.size,
        "used": timestamp(model.last_used),
        "architecture": "" if facts is None else facts.architecture,
        "parameter_size": "" if facts is None else facts.parameter_size,
        "quantization": "" if facts is None else facts.quantization,
    }


def _ago(seconds: float) -> str:
    n = max(0, int(time.time() - seconds))
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if n >= unit:
            return f"{n // unit} {name}{'s' if n >= 2 * unit else ''} ago"
    return "just now"


def run_show(name: str, *, template: bool, as_json: bool) -> int:
    """Show the properties of a model by its name or path, without loading it. Raises SourceError."""
    path = Path(name).expanduser()
    stored = None if path.is_file() else find_stored(name)
    facts = read_facts(path if stored is None else stored.path)
    if facts is None and stored:
        raise SourceError(f"{name}: the download is incomplete; llamado pull {name} resumes it")
    if facts is None:
        GGUFFile.open(path).close()  # raises an error with the reason
        raise SourceError(f"{name}: its metadata is too incomplete to show; llamado inspect {name}")
    if template:
        print(facts.template)
        return 0
    shown: dict[str, Any] = {
        "name": name,
        "path": facts.path,
        "size": facts.size,
        "architecture": facts.architecture,
        "parameters": facts.parameter_size,
        "quantization": facts.quantization,
        "context length": facts.n_ctx_train,
        "embedding length": facts.n_embd,
        "license": facts.license,
        "used": None if stored is None else timestamp(stored.last_used) if as_json else _ago(stored.last_used),
        "template": facts.template,
    }
    if as_json:
        _print_json({key.replace(" ", "_"): value for key, value in shown.items()} | {"metadata": facts.info})
        return 0
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for key, value in shown.items():
        if value in (None, "", 0):
            continue
        table.add_row(key, Text(size_text(value) if key == "size" else value_text(value)))
    _console().print(table)
    return 0


def run_rm(name: str, *, yes: bool, force: bool) -> int:
    """Delete all files of a downloaded model, after asking. Raises SourceError and RemovalError."""
    model = find_stored(name)
    if not model.is_removable:
        remove(model)  # raises an error with the reason
    users = mapping_processes(model.files)
    if users and not force:
        shown = ", ".join(f"{pid} ({command})" for pid, command in users)
        raise RemovalError(f"{model.name} is in use by process {shown}; stop it, or give --force")
    for file in model.files:
        print(f"{file}  {size_text(file.stat().st_size)}")
    if not yes:
        if not sys.stdin.isatty():
            raise RemovalError("cannot ask for confirmation without a terminal; -y deletes without asking")
        if input(f"Delete {model.name}, {size_text(model.size)}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise RemovalError("nothing was deleted")
    print(f"{model.name}: {size_text(remove(model))} deleted")
    return 0


def mapping_processes(files: Sequence[Path]) -> list[tuple[int, str]]:
    """Return ID and command of this user's processes that map one of the files; [] without /proc."""
    paths = {str(file.resolve()) for file in files}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid() or int(folder.name) == os.getpid():
                continue
            lines = (folder / "maps").read_text().splitlines()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except (OSError, ValueError):
            continue
        # Address, permissions, offset, device, inode and path (proc(5)).
        if any(len(words := line.split(None, 5)) == 6 and words[5] in paths for line in lines):
            found.append((int(folder.name), command.strip()[:80]))
    return sorted(found)
