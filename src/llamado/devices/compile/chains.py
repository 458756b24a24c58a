"""Chains of row operations (`kernels/rows.py`) under construction, and the simplest chain."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.compile.program import ByteSpan, Place
from llamado.devices.device import DeviceError
from llamado.devices.kernels import rows
from llamado.ggml.tensor import Tensor


@dataclass
class Chain:
    """A chain under construction: its stages, and fields of each."""

    out: Emitter
    value: Tensor  # the tensor whose row the chain holds now
    stages: list[rows.Stage] = field(default_factory=list)
    fields: Fields = field(default_factory=dict)
    reads: list[ByteSpan] = field(default_factory=list)
    writes: list[ByteSpan] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, stage: rows.Stage, name: str, **fields: int | float | Place) -> None:
        """Append a stage."""
        prefix = f"s{len(self.stages)}_"
        self.stages.append(stage)
        for key, value in fields.items():
            self.fields[prefix + key] = value
        self.names.append(name)

    def operand(
        self, stage: rows.Stage, operand: Tensor, like: Tensor, name: str, *, write: bool = False, **fields: float
    ) -> None:
        """Append a stage that reads (or writes) a row of `operand` for each row of `like`."""
        span, (s1, s2, s3) = self.out.span(operand), row_strides(operand, like)
        self.add(stage, name, x=span.place, s1=s1, s2=s2, s3=s3, **fields)
        (self.writes if write else self.reads).append(span)

    def finish(self, shape: Tensor) -> None:
        """Emit the chain, for every row of `shape`."""
        out, (n1, n2, n3) = self.out, shape.ne[1:]
        count = n1 * n2 * n3
        fields = self.fields | {"n": shape.ne[0], "n1": n1, "n2": n2, "n3": n3}
        fields |= {"share": max(1, min(16, count // (4 * out.n_threads)))}
        fields |= out.share_scratch(4 * shape.ne[0])
        stages = tuple(self.stages)
        label = " ".join(filter(None, self.names))
        out.emit(rows.rows_kernel(stages), {"stages": stages}, fields, self.reads, self.writes, label)


def row_strides(operand: Tensor, like: Tensor) -> tuple[int, int, int]:
    """Strides of an operand over the row numbers of `like`; a dimension of one is repeated."""
    (_, m1, m2, m3), (_, n1, n2, n3), (_, s1, s2, s3) = operand.ne, like.ne, operand.nb
    if (m1 != n1 and m1 != 1) or (m2 != n2 and m2 != 1) or (m3 != n3 and m3 != 1):
        raise DeviceError(f"{like.op.name} repeats {list(operand.ne)} over {list(like.ne)}: not supported here")
    return s1 if m1 == n1 else 0, s2 if m2 == n2 else 0, s3 if m3 == n3 else 0


def move_rows(out: Emitter, label: str, x: Tensor, load: rows.Stage, y: Tensor, put: rows.Stage) -> None:
    """Emit an operation that loads each row of x and stores it in y."""
    chain = Chain(out, x)
    chain.operand(load, x, y, label)
    chain.operand(put, y, y, "", write=True)
    chain.finish(y)
