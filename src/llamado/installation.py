"""How this installation is started and extended: commands for other processes of ours, and for what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

PROGRAMS = {"llama-server": "serve", "rpc-server": "worker", "ggml-rpc-server": "worker", "llama-gguf-split": "gguf"}
"""llama.cpp's names of commands: as the first word, or as the name of a link to this program."""


def python_command(*arguments: str) -> list[str]:
    """This Python with arguments. Nothing in the working directory is imported: anybody may have put files there."""
    return [sys.executable, "-P", *arguments]


def own_command(*arguments: str) -> list[str]:
    """A command of llamado's, for example `own_command("worker", "-p", "0")`."""
    return python_command("-m", "llamado", *arguments)


def install_command(extra: str) -> str:
    """What installs an extra ("hub", "otel", "plot") in the environment that this process runs in, for a shell.

    A clone is named by its folder; otherwise the extra's packages are, because llamado may have come from a file, a
    folder or a repository, and no index need know it.
    """
    folder, requirements = _clone(), _requirements(extra)
    if folder is not None:
        wanted = ["-e", f"{folder}[{extra}]"]
    else:
        wanted = requirements or [f"llamado[{extra}]"]
    if folder is None and (Path(sys.prefix) / "pipx_metadata.json").exists():
        return _join(["pipx", "inject", Path(sys.prefix).name, *wanted])
    if importlib.util.find_spec("pip") is None:  # uv's environments have none
        return _join(["uv", "pip", "install", "--python", sys.executable, *wanted])
    return _join([sys.executable, "-m", "pip", "install", *_against_the_system(), *wanted])


def _join(command: list[str]) -> str:
    """A command as the system's shell reads it."""
    if sys.platform == "win32":  # < and > of a version would lead to files
        return " ".join(word if re.fullmatch(r"[\w.:/\\-]+", word) else f'"{word}"' for word in command)
    return shlex.join(command)


def _against_the_system() -> list[str]:
    """What pip wants to hear outside of a virtual environment where the system's packages are another program's:
    whoever installed llamado there has said so before (PEP 668).
    """
    marked = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    return ["--break-system-packages"] if sys.prefix == sys.base_prefix and marked.exists() else []


def _clone() -> Path | None:
    """The folder that is installed as it is (`pip install -e`), or that this file lies in without being installed."""
    try:
        text = importlib.metadata.distribution("llamado").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        folder = Path(__file__).parents[2]
        return folder if (folder / "pyproject.toml").exists() else None
    told = json.loads(text) if text else {}
    if not told.get("dir_info", {}).get("editable"):
        return None
    from urllib.request import url2pathname  # brings much, and is wanted for a hint alone

    return Path(url2pathname(urlsplit(told["url"]).path))


def _requirements(extra: str) -> list[str]:
    """An extra's packages with their versions, as the package declares them."""
    try:
        declared = importlib.metadata.requires("llamado") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in declared:
        wanted, _, marker = requirement.partition(";")
        if marker.replace('"', "'").strip() == f"extra == '{extra}'":
            found.append(wanted.strip())
    return found
