"""Instructions of matrix products on 64-bit ARM, counted in the code that is made for it: no ARM machine is needed.

usage: arm.py [TYPE...]

Of each weight type eight rows of a block times one column, times four (both with what unpacking takes), and times four
of a prompt's columns, for which weights were unpacked before: that is spread over PROMPT columns. Ratios of
instructions are no ratios of time, but all kernels are made of much the same ones, and bound by how many are done a
cycle.
"""

from __future__ import annotations

import argparse
import re
from types import SimpleNamespace

from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.devices.kernel import kernel
from llamado.devices.kernels import matmul
from llamado.devices.kernels.formats import FORMATS, in_blocks
from llamado.devices.kernels.formats.format import Blocks, Blocks256
from llamado.devices.lowering import Lowering
from llamado.devices.simd import Code, Work
from llamado.gguf.types import TensorType

TRIPLE = "aarch64-unknown-linux-gnu"
ARM = [lowering for lowering in LOWERINGS.values() if not lowering.needs or "neon" in lowering.needs]
COLUMNS = (1, 4)
PROMPT = 64


@kernel("w", "row_bytes", "n_blocks", "to")
def unpack_blocks(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """The part of a prompt's product that is done once for all columns."""
    form = in_blocks(TensorType[weights])
    panel = matmul.RowPanel(c, a.w, a.row_bytes, 8)
    with c.range(0, a.n_blocks) as i:
        matmul.unpack(c, form, panel.block(i, form.block_bytes), a.to + i * (32 * matmul.slots(form)))


@kernel("scratch", "n_blocks", "x", "y", "y_stride")
def multiply_unpacked(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """The part of a prompt's product that is done for each group of columns."""
    form, n = in_blocks(TensorType[weights]), c.lowering.columns
    targets = [a.y + j * a.y_stride for j in range(n)]
    matmul.add_panel(c, form, a.scratch, a.n_blocks, matmul.InterleavedColumns(a.x, n), targets, a.y > 0, 8)


def loops(assembly: str) -> tuple[list[str], list[tuple[int, int]]]:
    """All instructions, and where each loop of them begins and ends; those inside others come first."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in map(str.strip, assembly.splitlines()):
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"[a-z]", line) and not re.match(r"[\w.]+:", line):
            code.append(line)
    found = []
    for end, line in enumerate(code):
        target = re.search(r"(\.L\w+)$", line) if re.match(r"(b|b\..+|cbn?z|tbn?z)\s", line) else None
        if target and labels.get(target[1], end + 1) <= end:
            found.append((labels[target[1]], end + 1))
    return code, sorted(found, key=lambda loop: loop[1] - loop[0])


class Counter:
    """Instructions of one lowering's kernels."""

    def __init__(self, lowering: Lowering) -> None:
        self._jit = Jit(lowering, host=("generic", dict.fromkeys(("neon", *lowering.needs), True)), triple=TRIPLE)

    def block(self, type: TensorType, columns: int) -> int:
        """For eight rows of one block times `columns` columns, unpacking included."""
        assembly = self._jit.assembly(matmul.matmul_few, weights=type.name, columns=columns, near=False, panel_rows=8)
        found = loops(assembly)[1]
        inner = [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]
        return max(end - start for start, end in inner)

    def prompt(self, type: TensorType) -> int:
        """For eight rows of one block times a prompt's columns, by four of these."""
        form = in_blocks(type)
        parts = form.n_parts if isinstance(form, Blocks256) else 1
        of_loops = []
        for one, repeated in ((unpack_blocks, 1), (multiply_unpacked, parts)):
            sizes = [end - start for start, end in loops(self._jit.assembly(one, weights=type.name))[1]]
            of_loops.append(sizes[-1] + sum(sizes[:-1]) * (repeated - 1))
        unpacking, multiplying = of_loops
        return multiplying * 4 // self._jit.lowering.columns + unpacking * 4 // PROMPT


def table(types: list[TensorType]) -> list[list[str]]:
    """A head and a row for each type."""
    counters = [Counter(one) for one in ARM]
    head = [f"{one.name}, {n} column{'s' * (n > 1)}" for n in COLUMNS for one in ARM]
    rows = [["weights", *head, *(f"{one.name}, 4 of a prompt" for one in ARM)]]
    for type in types:
        counts = [one.block(type, n) for n in COLUMNS for one in counters] + [one.prompt(type) for one in counters]
        rows.append([type.name, *(f"{count:,}" for count in counts)])
    return rows


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    counted = [type.name for type, form in FORMATS.items() if isinstance(form, Blocks)]
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"of {', '.join(counted)}; all unless given")
    flags = parser.parse_args()
    for name in flags.types:
        if name not in counted:
            parser.error(f"no products of blocks are made for {name}; types are {', '.join(counted)}")
    head, *rows = table([TensorType[name] for name in flags.types or counted])
    for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
