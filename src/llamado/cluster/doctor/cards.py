"""Checks of this machine's graphics cards: driver, permission, visibility, and memory that other processes hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.devices.accelerators import Accelerators
from llamado.devices.cards import cards, has_card
from llamado.devices.device import Device, DeviceError
from llamado.errors import LlamadoError

_KIND = "cuda"
_MODULE = "nvidia"
"""Kernel module that a card needs."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LEAST_FREE = 0.1
"""Share of a card's memory that should be free."""
_OLD = re.compile(r"too old|insufficient|unsupported (?:toolchain|version)|(?:update|reinstall) the", re.IGNORECASE)
_SECONDS = 5.0


def examine_cards(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return the findings of graphics cards; none on a machine without a card."""
    with closing(Accelerators()) as found:
        if found.devices:
            return [*_memory(found.devices)]
        problem = found.problems.get(_KIND)
        is_hidden = _VISIBLE in environ and cards(_KIND, root)
        return [_unusable(problem, root, environ)] if problem and (is_hidden or has_card(_KIND, root)) else []


def _unusable(problem: LlamadoError, root: Path, environ: Mapping[str, str]) -> Finding:
    """Return the finding of cards that cannot be used, from its likeliest cause on."""
    text = str(problem)
    present = cards(_KIND, root)
    where = ", ".join(card.address for card in present) or "this machine"
    if _VISIBLE in environ:
        return finding("cards-hidden", where, f"{_VISIBLE} is {environ[_VISIBLE]!r}: {text}")
    others = {card.driver for card in present} - {_MODULE}
    if others and not (root / "dev/nvidiactl").exists():
        modules = " and ".join(sorted(name for name in others if name)) or "no kernel module"
        return finding("card-no-driver", where, f"{modules} has the card: {text}")
    files = [path for path in sorted((root / "dev").glob("nvidia*")) if path.is_char_device() or path.is_file()]
    if closed := [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]:
        return finding("card-forbidden", where, f"this user may not open {', '.join(closed)}: {text}")
    return finding("card-old-driver" if _OLD.search(text) else "card-unusable", where, text)


def _memory(devices: Sequence[Device]) -> Iterator[Finding]:
    for device in devices:
        with suppress(DeviceError):
            free, total = device.memory()
            if free < _LEAST_FREE * total:
                users = card_users()
                by = f", used by {', '.join(users)}" if users else ""
                text = f"{free / 1e6:.0f} MB of {total / 1e6:.0f} are free{by}"
                yield finding("card-in-use", device.name, text)


def card_users() -> list[str]:
    """Return the processes that compute on cards, as nvidia-smi lists them; empty if it does not run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [f"{Path(row[1]).name} (process {row[0]}, {row[2]})" for row in rows if len(row) == 3]
