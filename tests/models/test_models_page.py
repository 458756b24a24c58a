"""The page of architectures: it matches the registry and the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny import TINY

from llamado.models.architectures.page import markdown
from llamado.models.encoders.registry import PICTURES, SOUNDS
from llamado.models.encoders.registry import UNSUPPORTED as NO_PROJECTORS
from llamado.models.registry import ARCHITECTURES, UNSUPPORTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"


def test_the_page_is_generated_from_the_registry() -> None:
    assert PAGE.read_text() == markdown(), "run: python -m llamado.models.architectures.page > docs/models.md"
    command = [sys.executable, "-m", "llamado.models.architectures.page"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert made.stdout == markdown() and not made.stderr


def test_every_architecture_is_a_row_of_the_page() -> None:
    architectures, _ = PAGE.read_text().split("## Projectors")
    rows = [line.split(" | ") for line in architectures.splitlines() if line.startswith("| `")]
    rows = [row for row in rows if row[0] != "| `general.architecture`"]
    of_kinds = [name for name in sorted(ARCHITECTURES) for _ in range(1 + len(ARCHITECTURES[name].variants))]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in of_kinds]
    assert all(models and compared in ("answers", "vectors") for _, models, compared, _ in rows)
    # The tests make a file of every architecture and variant.
    made = {(tiny.architecture, tiny.variant) for tiny in TINY.values()}
    assert {name for name, _ in made} >= set(ARCHITECTURES)
    assert made >= {(name, kind) for name, row in ARCHITECTURES.items() for kind in row.variants}
    assert not UNSUPPORTED.keys() & ARCHITECTURES.keys()
    assert sum(bool(row.tested) for row in ARCHITECTURES.values()) == 3


def test_every_projector_of_the_reference_is_on_the_page() -> None:
    _, section = PAGE.read_text().split("## Projectors")
    rows = {line.split("`")[1]: line.split(" | ")[1] for line in section.splitlines() if line.startswith("| `")}
    del rows["projector_type"]
    assert rows == dict.fromkeys(PICTURES, "pictures") | dict.fromkeys(SOUNDS, "sounds")
    assert not NO_PROJECTORS.keys() & rows.keys()
    assert all(f"`{name}`" in section for name in NO_PROJECTORS)
