"""How this installation is started and extended: commands for other processes of ours, and for what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


def python_command(*arguments: str) -> list[str]:
    """This Python with arguments. Nothing in the working directory is imported: anybody may have put files there."""
    return [sys.executable, "-P", *arguments]


def own_command(*arguments: str) -> list[str]:
    """A command of llamado's, for example `own_command("worker", "-p", "0")`."""
    return python_command("-m", "llamado", *arguments)


def install_command(extra: str) -> str:
    """What installs an extra ("hub", "otel", "plot") in the environment that this process runs in, for a shell.

    A clone is named by its folder; otherwise the extra's packages are, because llamado may have come from a folder or a
    repository that is not there any more.
    """
    folder, requirements = _clone(), _requirements(extra)
    if folder is not None:
        wanted = ["-e", f"{folder}[{extra}]"]
    else:
        wanted = requirements or [f"llamado[{extra}]"]
    if folder is None and (Path(sys.prefix) / "pipx_metadata.json").exists():
        return shlex.join(["pipx", "inject", Path(sys.prefix).name, *wanted])
    if importlib.util.find_spec("pip") is None:  # uv's environments have none
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *wanted])
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])


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
    return Path(unquote(urlsplit(told["url"]).path))


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
