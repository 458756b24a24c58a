"""Instructions of matrix products on 64-bit ARM, counted in the code that is made for it: no ARM machine is needed.

usage: arm.py [TYPE...]

Of each weight type's loop over blocks, eight rows of a block times one column, and times four. Ratios of instructions
are no ratios of time, but both kernels are made of much the same ones, and bound by how many are done a cycle.
"""

from __future__ import annotations

import re
import sys

from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.kernels import matmul
from llamado.devices.cpu.kernels.formats import FORMATS
from llamado.devices.cpu.kernels.formats.format import Blocks
from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.devices.cpu.lowerings.lowering import Lowering
from llamado.gguf.types import TensorType

TRIPLE = "aarch64-unknown-linux-gnu"
ARM = [lowering for lowering in LOWERINGS.values() if not lowering.needs or "neon" in lowering.needs]
COLUMNS = (1, 4)


def inner_loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop that has no other in it."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in map(str.strip, assembly.splitlines()):
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"[a-z]", line) and not re.match(r"[\w.]+:", line):
            code.append(line)
    loops = []
    for end, line in enumerate(code):
        target = re.search(r"(\.L\w+)$", line) if re.match(r"(b|b\..+|cbn?z|tbn?z)\s", line) else None
        if target and labels.get(target[1], end + 1) <= end:
            loops.append((labels[target[1]], end + 1))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [code[start:end] for start, end in inner]


def block_instructions(lowering: Lowering, type: TensorType, columns: int) -> int:
    """Instructions for eight rows of one block times `columns` columns."""
    jit = Jit(lowering, host=("generic", dict.fromkeys(("neon", *lowering.needs), True)), triple=TRIPLE)
    assembly = jit.assembly(matmul.matmul_few, weights=type.name, columns=columns, near=False, panel_rows=8)
    return max(map(len, inner_loops(assembly)))


def table(types: list[TensorType]) -> list[list[str]]:
    """A head and a row for each type."""
    rows = [["weights", *(f"{one.name}, {n} column{'s' * (n > 1)}" for n in COLUMNS for one in ARM)]]
    for type in types:
        rows.append([type.name, *(f"{block_instructions(one, type, n):,}" for n in COLUMNS for one in ARM)])
    return rows


def main() -> None:
    types = [TensorType[name] for name in sys.argv[1:]]
    head, *rows = table(types or [type for type, form in FORMATS.items() if isinstance(form, Blocks)])
    for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
