"""Commands that start another llamado process or install a missing extra in this environment."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

PROGRAMS = {"llama-server": "serve", "rpc-server": "worker", "ggml-rpc-server": "worker", "llama-gguf-split": "gguf"}
"""Commands of llamado by the names of llama.cpp's programs: as the first word, or as the name of a link to llamado."""


def python_command(*arguments: str) -> list[str]:
    """Return a command of this Python. `-P`: the working directory may hold hostile files and is not imported from."""
    return [sys.executable, "-P", *arguments]


def own_command(*arguments: str) -> list[str]:
    """Return a llamado command, for example `own_command("worker", "-p", "0")`."""
    return python_command("-m", "llamado", *arguments)


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra ("hub", "otel", "plot") in this process's environment.

    From a clone it installs the folder. Otherwise it names the packages of the extra: llamado may come from a file or
    repository, so it need not be in a package index.
    """
    folder, requirements = _clone(), _requirements(extra)
    if folder is not None:
        wanted = ["-e", f"{folder}[{extra}]"]
    else:
        wanted = requirements or [f"llamado[{extra}]"]
    if folder is None and (Path(sys.prefix) / "pipx_metadata.json").exists():
        return _join(["pipx", "inject", Path(sys.prefix).name, *wanted])
    if importlib.util.find_spec("pip") is None:  # uv creates environments without pip
        return _join(["uv", "pip", "install", "--python", sys.executable, *wanted])
    return _join([sys.executable, "-m", "pip", "install", *_system_option(), *wanted])


def _join(command: list[str]) -> str:
    """Quote a command for the system's shell."""
    if sys.platform == "win32":  # < and > of a version would be redirections
        return " ".join(word if re.fullmatch(r"[\w.:/\\-]+", word) else f'"{word}"' for word in command)
    return shlex.join(command)


def _system_option() -> list[str]:
    """Return pip's option for an externally managed system Python (PEP 668). llamado was installed there with it."""
    marked = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    return ["--break-system-packages"] if sys.prefix == sys.base_prefix and marked.exists() else []


def _clone() -> Path | None:
    """Return the folder of an editable installation or of a clone that is not installed, else None."""
    import importlib.metadata  # slow to import, and needed for a hint only

    try:
        text = importlib.metadata.distribution("llamado").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        folder = Path(__file__).parents[2]
        return folder if (folder / "pyproject.toml").exists() else None
    origin = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        return None
    from urllib.request import url2pathname

    return Path(url2pathname(urlsplit(origin["url"]).path))


def _requirements(extra: str) -> list[str]:
    """Return the requirements that the package declares for an extra."""
    import importlib.metadata

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
