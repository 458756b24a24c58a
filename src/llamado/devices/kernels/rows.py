"""Row operations: a chain of operations on one row at a time is one kernel.

A chain is a tuple of stages. The first loads a row; the others change or store it. One pass over the row applies
consecutive stages that need only the element itself; a norm ends a pass, because it needs the whole row first. So
RMS_NORM → MUL → ADD → RMS_NORM → MUL → quantize is one kernel, one trip through memory and one operation of the
program.

Rows are counted over three dimensions (n1, n2, n3). An operand is at address + i1·s1 + i2·s2 + i3·s3; a stride of 0
repeats it.

stage                          fields                    meaning
("row",)                       x s1 s2 s3                the row itself, f32
("load", type)                 x s1 s2 s3                a row of any type, as f32
("get_rows", type)             x nb1 nb2 nb3 ids         row ids[i1, i2, i3] of a table of `rows` (its first row
                               id1 id2 id3 rows          for an invalid number)
("add"|"sub"|"mul"|"div",)     x s1 s2 s3                with an operand row
("add_id",)                    x nb1 ids id1 id2 rows    plus row ids[i1, i2] of a matrix of `rows` (as above)
("element", op)                x s1 s2 s3                the same with one number for the whole row
("rms_norm",) ("norm",)        eps                       by the row's root mean square; by its mean and deviation
("l2_norm",)                   eps                       by the row's length, which is at least eps
("scale",)                     factor, bias              ·factor + bias
("clamp",)                     low, high
("unary", op)                                            a UnaryOp or an Op that is a function of one number
("leaky_relu",)                slope
("xielu",)                     negative positive beta    x > 0: positive·x² + beta·x, else negative·(exp(min(x, eps))
                               eps                       − 1 − x) + beta·x
("glu", op)                    x s1 s2 s3                op(row) · operand
("swiglu_oai",)                x s1 s2 s3 alpha limit    with g = min(row, limit): g·sigmoid(alpha·g)·(1 + operand),
                                                         the operand within ±limit
("swiglu_clamp",)              x s1 s2 s3 limit          silu(min(row, limit)) · operand within ±limit
("rope", mode)                 table step n_dims         rotation of `n_dims` elements from `offset` on by the table
                               offset                    of token i2 (rope_table)
("soft_max", mask, sinks)      scale mask s1 s2 s3       softmax(row · scale + slope[i2] · mask[i1, i2 % m2, i3 % m3]);
                               m2 m3 slopes sinks        mask: its type or None; sinks: with one more key per head
("store",)                     x s1 s2 s3                to memory, f32
("keep", type)                 x s1 s2 s3                to memory, as any type
("set_rows", type, wide, how)  x nb1 nb2 nb3 ids         to row ids[i1, i2 % m2, i3 % m3] of a cache of `rows` (wide:
                               id1 id2 id3 m2 m3         64-bit ids; invalid ids are skipped); how "flat": ids[row];
                               part rows                 "heads": to byte i1·part of row ids[i2]; "deep": as above
("quantize", block, place)     x columns                 to column (flat row number) of quantized activations: in
                                                         groups, each "apart" or in "units", or in "tiles"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from llamado.devices.kernel import Kernel, kernel
from llamado.devices.kernels import maths
from llamado.devices.kernels.activations import (
    BYTES_PER_COLUMN,
    RUN,
    TILE,
    UNIT,
    UNIT_BYTES,
    quantize_row,
    quantize_units,
)
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Cached32, Plain
from llamado.devices.simd import F32, F64, I32, I64, Code, Type, Value, Work
from llamado.ggml.ops import GluOp, RopeMode
from llamado.gguf.types import TensorType

Stage = tuple[Any, ...]

_OPERAND = ("x", "s1", "s2", "s3")
_FIELDS: dict[str, tuple[str, ...]] = {
    "row": _OPERAND,
    "load": _OPERAND,
    "get_rows": ("x", "nb1", "nb2", "nb3", "ids", "id1", "id2", "id3", "rows"),
    "add": _OPERAND,
    "sub": _OPERAND,
    "mul": _OPERAND,
    "div": _OPERAND,
    "element": _OPERAND,
    "rms_norm": ("eps",),
    "l2_norm": ("eps",),
    "norm": ("eps",),
    "scale": ("factor", "bias"),
    "clamp": ("low", "high"),
    "unary": (),
    "leaky_relu": ("slope",),
    "xielu": ("negative", "positive", "beta", "eps"),
    "add_id": ("x", "nb1", "ids", "id1", "id2", "rows"),
    "glu": _OPERAND,
    "swiglu_oai": (*_OPERAND, "alpha", "limit"),
    "swiglu_clamp": (*_OPERAND, "limit"),
    "rope": ("table", "step", "n_dims", "offset"),
    "soft_max": ("scale", "mask", "s1", "s2", "s3", "m2", "m3", "slopes", "sinks"),
    "store": _OPERAND,
    "keep": _OPERAND,
    "set_rows": ("x", "nb1", "nb2", "nb3", "ids", "id1", "id2", "id3", "m2", "m3", "part", "rows"),
    "quantize": ("x", "columns"),
}
_ARITHMETIC: dict[str, Callable[[Value, Value], Value]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@lru_cache(4096)  # clients may send ever new chains
def rows_kernel(stages: tuple[Stage, ...]) -> Kernel:
    """Return the kernel for a chain; a stage's fields carry its number as prefix ("s2_x", "s2_s1", …)."""
    fields = ["n", "n1", "n2", "n3", "scratch", "scratch_step", "share"]
    for i, stage in enumerate(stages):
        fields += [f"s{i}_{name}" for name in _FIELDS[stage[0]]]
    return Kernel("rows", tuple(fields), _trace)


PART = 256
"""Rows are divided into parts of a multiple of so many elements: whole blocks of any format."""
_WHOLE = frozenset({"rms_norm", "norm", "l2_norm", "soft_max", "rope", "element"})
"""Stages that read others of the row's elements than they change; "element" may, if its number is one of the row."""


_ROW_OPERANDS = frozenset({*_ARITHMETIC, "glu", "swiglu_oai", "swiglu_clamp"})
"""Stages that load a row."""


def is_divisible(stages: tuple[Stage, ...]) -> bool:
    """Return True if parts of a row can be items of work of their own."""
    return not any(stage[0] in _WHOLE for stage in stages)


def _trace(c: Code, a: SimpleNamespace, work: Work, *, stages: tuple[Stage, ...], part: int = 0) -> None:
    """`part`: elements of an item of work, a multiple of PART; 0: whole rows."""
    scratch = c.team_scratch(a.scratch, a.scratch_step, work)
    n_rows = a.n1 * a.n2 * a.n3
    parts = (a.n + (part - 1)) // part if part else c.i64(1)
    with c.shares(work, n_rows * parts if part else n_rows, a.share) as item:
        row = item // parts if part else item
        rest = row // a.n1
        code = _RowCode(c, a, scratch, row, (row % a.n1, rest % a.n2, rest // a.n2))
        if part:
            code.restrict(item % parts * part, part)
        code.run(stages)


class _RowCode:
    """Emits the code of one row, or of the part from element `first` to `stop`.

    `at`: address of the row; `pending`: functions to apply to each element on the next pass.
    """

    def __init__(
        self, c: Code, a: SimpleNamespace, scratch: Value, row: Value, index: tuple[Value, Value, Value]
    ) -> None:
        self.c, self.a, self.scratch, self.row, self.index = c, a, scratch, row, index
        self.at = scratch
        self.pending: list[Callable[[Value, Value], Value]] = []
        self.first: Value = c.i64(0)
        self.stop: Value = a.n
        self._is_part = False

    def restrict(self, first: Value, n: int) -> None:
        """Compute only (at most) n elements from `first` on. Scratch has room for these alone."""
        self.first, self.stop, self._is_part = first, self.c.min(first + n, self.a.n), True
        self.at = self.scratch = self.scratch - first * 4

    @property
    def _count(self) -> Value:
        """Elements of the part."""
        count: Value = self.stop - self.first if self._is_part else self.stop
        return count

    def _skip(self, row: Value, step: int | Value = 4, elements: int = 1) -> Value:
        """Address of the part in a row with `step` bytes for so many elements."""
        part: Value = row + self.first // elements * step if self._is_part else row
        return part

    def field(self, i: int, name: str) -> Value:
        value: Value = getattr(self.a, f"s{i}_{name}")
        return value

    def number(self, i: int, name: str) -> Value:
        return self.field(i, name).to(I32).bits(F32)

    def operand(self, i: int) -> Value:
        i1, i2, i3 = self.index
        return self.field(i, "x") + i1 * self.field(i, "s1") + i2 * self.field(i, "s2") + i3 * self.field(i, "s3")

    def _announce(self, stages: tuple[Stage, ...]) -> None:
        """Announce the operands that are loaded after a sum of the row."""
        late = False
        for i, stage in enumerate(stages):
            if late and stage[0] in _ROW_OPERANDS:
                self.c.announce(self.operand(i), self.a.n * 4)
            late = late or stage[0] in _WHOLE

    def run(self, stages: tuple[Stage, ...]) -> None:
        if not self.c.fused:
            self._announce(stages)
        for i, stage in enumerate(stages):
            match stage[0]:
                case "row":
                    self.at = self.operand(i)
                case "load":
                    self._expand(TensorType[stage[1]], self.operand(i))
                case "get_rows":
                    self._get_rows(i, TensorType[stage[1]])
                case "add" | "sub" | "mul" | "div":
                    self._with_operand(_ARITHMETIC[stage[0]], self.operand(i))
                case "element":
                    self._with_element(_ARITHMETIC[stage[1]], self.operand(i))
                case "rms_norm":
                    self._rms_norm(i)
                case "l2_norm":
                    self._l2_norm(i)
                case "norm":
                    self._norm(i)
                case "scale":
                    self._scale(self.number(i, "factor"), self.number(i, "bias"))
                case "clamp":
                    self._clamp(self.number(i, "low"), self.number(i, "high"))
                case "unary":
                    self._apply(maths.FUNCTIONS[stage[1]])
                case "leaky_relu":
                    self._leaky_relu(self.number(i, "slope"))
                case "xielu":
                    self._xielu(*(self.number(i, name) for name in ("negative", "positive", "beta", "eps")))
                case "add_id":
                    self._add_id(i)
                case "swiglu_oai":
                    self._swiglu_oai(self.operand(i), self.number(i, "alpha"), self.number(i, "limit"))
                case "swiglu_clamp":
                    self._swiglu_clamp(self.operand(i), self.number(i, "limit"))
                case "glu":
                    self._gate(maths.GATE[GluOp[stage[1]]], self.operand(i))
                case "rope":
                    self._rope(i, RopeMode[stage[1]])
                case "soft_max":
                    self._soft_max(i, None if stage[1] is None else TensorType[stage[1]], with_sinks=stage[2])
                case "store":
                    self._store(self.operand(i), is_last=i + 1 == len(stages))
                case "keep":
                    self._put(TensorType[stage[1]], self.operand(i))
                case "set_rows":
                    self._set_rows(i, TensorType[stage[1]], wide=stage[2], how=stage[3])
                case "quantize":
                    self._quantize(i, stage[1], stage[2])

    def _then(self, function: Callable[[Value], Value]) -> None:
        """Add a function to apply to each element on the next pass."""
        self.pending.append(lambda v, _: function(v))

    def _with_operand(self, op: Callable[[Value, Value], Value], operand: Value) -> None:
        self.pending.append(lambda v, j: op(v, self.c.load(v.type, operand + j * 4)))

    def _with_element(self, op: Callable[[Value, Value], Value], address: Value) -> None:
        number = self.c.once(lambda: self.c.load(F32, address))
        self._then(lambda v: op(v, _like(number, v)))

    def _scale(self, factor: Value, bias: Value) -> None:
        self._then(lambda v: self.c.fma(v, _like(factor, v), _like(bias, v)))

    def _clamp(self, low: Value, high: Value) -> None:
        self._then(lambda v: self.c.min(self.c.max(v, _like(low, v)), _like(high, v)))

    def _leaky_relu(self, slope: Value) -> None:
        self._then(lambda v: self.c.select(v > 0.0, v, v * _like(slope, v)))

    def _xielu(self, negative: Value, positive: Value, beta: Value, eps: Value) -> None:
        def curve(v: Value) -> Value:
            below = maths.exp(self.c, self.c.min(v, _like(eps, v))) - 1.0 - v
            bent = self.c.select(v > 0.0, v * v * _like(positive, v), below * _like(negative, v))
            return self.c.fma(v, _like(beta, v), bent)

        self._then(curve)

    def _apply(self, function: maths.Function) -> None:
        self._then(lambda v: function(self.c, v))

    def _gate(self, function: maths.Function, operand: Value) -> None:
        self._with_operand(lambda v, up: function(self.c, v) * up, operand)

    def _add_id(self, i: int) -> None:
        c, (i1, i2, _) = self.c, self.index
        id_ = c.load(I32, self.field(i, "ids") + i1 * self.field(i, "id1") + i2 * self.field(i, "id2")).to(I64)
        inside = (id_ >= 0) & (id_ < self.field(i, "rows"))
        row = self.field(i, "x") + c.select(inside, id_, c.i64(0)) * self.field(i, "nb1")
        self._with_operand(lambda v, more: v + more, row)

    def _swiglu_oai(self, operand: Value, alpha: Value, limit: Value) -> None:
        c = self.c

        def gated(v: Value, up: Value) -> Value:
            most = _like(limit, v)
            gate, value = c.min(v, most), c.min(c.max(up, -most), most)
            return gate * maths.sigmoid(c, gate * _like(alpha, v)) * (value + 1.0)

        self._with_operand(gated, operand)

    def _swiglu_clamp(self, operand: Value, limit: Value) -> None:
        c = self.c

        def gated(v: Value, up: Value) -> Value:
            most = _like(limit, v)
            return maths.silu(c, c.min(v, most)) * c.min(c.max(up, -most), most)

        self._with_operand(gated, operand)

    def sweep(self, each: Callable[[Value, Value], None]) -> None:
        """Run one pass over the row: apply the pending functions to every vector, and to single elements at the end."""
        c, n8 = self.c, self.stop // 8 * 8
        for lanes, start, stop in ((8, self.first, n8), (1, n8, self.stop)):
            with c.several(start, stop, lanes) as turns:
                values = [self._element(turn.at, lanes) for turn in turns]
                for (j, guard), v in zip(turns, values, strict=True):
                    with guard:
                        each(v, j)
        c.join()

    def _element(self, j: Value, lanes: int) -> Value:
        """Load elements from j on and apply the pending functions."""
        v = self.c.load(Type("f32", lanes), self.at + j * 4)
        for function in self.pending:
            v = function(v, j)
        return v

    def settle(self, to: Value) -> None:
        """Apply the pending functions and store the row at `to`."""
        self.sweep(lambda v, j: self.c.store(to + j * 4, v))
        self.at, self.pending = to, []

    def _store(self, to: Value, *, is_last: bool) -> None:
        """Settle at `to`. The scratch of a team is faster than memory, so later stages read a copy there."""
        if self.c.fused or is_last:
            self.settle(to)
            return

        def each(v: Value, j: Value) -> None:
            self.c.store(to + j * 4, v)
            self.c.store(self.scratch + j * 4, v)

        self.sweep(each)
        self.at, self.pending = self.scratch, []

    def _sum(self, term: Callable[[Value], Value], start: Value | None = None) -> Value:
        """Sum a function of each element, in order: eight sums (element mod 8), and one from `start` on of the elements
        after the last vector. Afterwards the row is stored at `at`.
        """
        c = self.c
        sums = (c.var(c.const(Type("f32", 8), 0.0)), c.var(c.f32(0.0) if start is None else start))
        move = bool(self.pending)

        def add(v: Value) -> None:
            total = sums[0] if v.type.lanes == 8 else sums[1]
            total.value = total.value + v

        def each(v: Value, j: Value) -> None:
            add(term(v))
            if move:
                c.store(self.scratch + j * 4, v)

        def ordered(lanes: int, j: Value) -> Value:
            return term(self._element(j, lanes))

        def in_order() -> Value:
            n8 = self.a.n // 8 * 8
            for lanes, first, stop in ((8, c.i64(0), n8), (1, n8, self.a.n)):
                c.in_order(first, stop, lanes, partial(ordered, lanes), add)
            return c.sum_lanes(sums[0].value) + sums[1].value

        if not c.fused:
            if self.at is not self.scratch or move:
                self.settle(self.scratch)
            return c.once(in_order)
        self.sweep(each)
        if move:
            self.at, self.pending = self.scratch, []
        return c.sum_lanes(sums[0].value) + sums[1].value

    def _rms_norm(self, i: int) -> None:
        c = self.c
        mean = self._sum(lambda v: v * v) / self.a.n.to(F32)
        factor = c.f32(1.0) / c.sqrt(mean + self.number(i, "eps"))
        self._then(lambda v: v * _like(factor, v))

    def _l2_norm(self, i: int) -> None:
        c = self.c
        factor = c.f32(1.0) / c.max(c.sqrt(self._sum(lambda v: v * v)), self.number(i, "eps"))
        self._then(lambda v: v * _like(factor, v))

    def _norm(self, i: int) -> None:
        c = self.c
        if self.pending:
            self.settle(self.scratch)
        mean = self._sum(lambda v: v) / self.a.n.to(F32)

        def square(v: Value) -> Value:
            away = v - _like(mean, v)
            return away * away

        variance = self._sum(square) / self.a.n.to(F32)
        factor = c.f32(1.0) / c.sqrt(variance + self.number(i, "eps"))
        self._then(lambda v: (v - _like(mean, v)) * _like(factor, v))

    def _soft_max(self, i: int, mask_type: TensorType | None, *, with_sinks: bool) -> None:
        """Compute weights e^(score − maximum) / sum; a row that sees nothing gets zeros."""
        c, (i1, i2, i3) = self.c, self.index
        scale = self.number(i, "scale")
        if mask_type is None:
            self._then(lambda v: v * _like(scale, v))
        else:
            mask = self.field(i, "mask") + i1 * self.field(i, "s1")
            mask = mask + i2 % self.field(i, "m2") * self.field(i, "s2")
            mask = mask + i3 % self.field(i, "m3") * self.field(i, "s3")
            slope = c.load(F32, self.field(i, "slopes") + i2 * 4)

            def masked(v: Value, j: Value) -> Value:
                m = FORMATS[mask_type].load(c, mask, j, v.type.lanes)
                return v * _like(scale, v) + m * _like(slope, v)

            self.pending.append(masked)
        lowest = -1e30  # finite, so that −inf − maximum stays −inf
        peaks = (c.var(c.const(Type("f32", 8), lowest)), c.var(c.f32(lowest)))

        def scored(v: Value, j: Value) -> None:
            c.store(self.scratch + j * 4, v)
            peak = peaks[0] if v.type.lanes == 8 else peaks[1]
            peak.value = c.max(v, peak.value)

        self.sweep(scored)
        self.at, self.pending = self.scratch, []
        greatest = c.greatest(peaks[0].value, peaks[1].value)
        start: Value | None = None
        if with_sinks:
            sink = c.load(F32, self.field(i, "sinks") + i2 * 4)
            greatest = c.max(sink, greatest)
            start = maths.exp(c, sink - greatest)
        self._then(lambda v: maths.exp(c, v - _like(greatest, v)))
        total = self._sum(lambda v: v, start)
        inverse = c.select(total > 0.0, c.f32(1.0) / total, c.f32(0.0))
        self._then(lambda v: v * _like(inverse, v))

    def _get_rows(self, i: int, type_: TensorType) -> None:
        c, (i1, i2, i3) = self.c, self.index
        at = self.field(i, "ids") + i1 * self.field(i, "id1") + i2 * self.field(i, "id2") + i3 * self.field(i, "id3")
        id_ = c.load(I32, at).to(I64)
        inside = (id_ >= 0) & (id_ < self.field(i, "rows"))
        row = self.field(i, "x") + c.select(inside, id_, c.i64(0)) * self.field(i, "nb1")
        self._expand(type_, row + i2 * self.field(i, "nb2") + i3 * self.field(i, "nb3"))

    def _expand(self, type_: TensorType, row: Value) -> None:
        """Continue with the row of any type at `row`, as f32."""
        form = FORMATS[type_]
        source = self._skip(row, form.block_bytes, form.block)
        self.at = form.expand(self.c, source, self._count, self._skip(self.scratch))
        if self._is_part:
            self.at = self.at - self.first * 4
        self.c.join()

    def _rope(self, i: int, mode: RopeMode) -> None:
        c = self.c
        if self.pending:
            self.settle(self.scratch)
        start, n_dims = self.field(i, "offset"), self.field(i, "n_dims")
        source, to = self.at + start * 4, self.scratch + start * 4
        table = self.field(i, "table") + self.index[1] * self.field(i, "step")
        half = n_dims // 2
        if mode == RopeMode.NEOX:
            with c.singles(0, half) as j:
                x0, x1 = c.load(F32, source + j * 4), c.load(F32, source + (half + j) * 4)
                cos, sin = c.load(F32, table + j * 8), c.load(F32, table + j * 8 + 4)
                c.store(to + j * 4, c.fma(x0, cos, -(x1 * sin)))
                c.store(to + (half + j) * 4, c.fma(x0, sin, x1 * cos))
        else:
            with c.singles(0, half) as j:
                x0, x1 = c.load(F32, source + j * 8), c.load(F32, source + j * 8 + 4)
                cos, sin = c.load(F32, table + j * 8), c.load(F32, table + j * 8 + 4)
                c.store(to + j * 8, c.fma(x0, cos, -(x1 * sin)))
                c.store(to + j * 8 + 4, c.fma(x0, sin, x1 * cos))
        for first, stop in ((c.i64(0), start), (start + n_dims, self.a.n)):
            with c.singles(first, stop) as j:
                c.store(self.scratch + j * 4, c.load(F32, self.at + j * 4))
        c.join()
        self.at = self.scratch

    def _set_rows(self, i: int, type_: TensorType, *, wide: bool, how: str) -> None:
        c = self.c
        i1, i2, i3 = self.index
        number = {"flat": self.row, "heads": i2, "deep": i1}[how]
        at = self.field(i, "ids") + number * self.field(i, "id1")
        if how == "deep":
            at = at + i2 % self.field(i, "m2") * self.field(i, "id2") + i3 % self.field(i, "m3") * self.field(i, "id3")
        # once: if the graph writes row numbers while it reads them, all of a team still take the same branch
        id_ = c.once(lambda: c.load(I64, at) if wide else c.load(I32, at).to(I64))
        row = self.field(i, "x") + id_ * self.field(i, "nb1")
        if how == "heads":
            row = row + i1 * self.field(i, "part")
        elif how == "deep":
            row = row + i2 * self.field(i, "nb2") + i3 * self.field(i, "nb3")
        if self.pending:
            self.settle(self.scratch)
        with c.when((id_ >= 0) & (id_ < self.field(i, "rows"))):
            self._put(type_, row)

    def _put(self, type_: TensorType, row: Value) -> None:
        """Store the row at `row` in any type; later stages still read the f32 row."""
        form = FORMATS[type_]
        if isinstance(form, Plain):
            self.sweep(lambda v, j: form.store(self.c, row, j, v))
            return
        assert isinstance(form, Cached32)
        if self.pending:
            self.settle(self.scratch)
        form.store_row(self.c, self._skip(row, form.block_bytes, form.block), self._count, self._skip(self.at))
        self.c.join()

    def _quantize(self, i: int, block: int, place: str) -> None:
        c = self.c
        if self.pending or not (c.fused or self.at is self.scratch):  # scratch is aligned
            self.settle(self.scratch)
        to = self.field(i, "x")
        if place == "units":
            to = self._skip(to + self.row * ((self.a.n + (UNIT - 1)) // UNIT * UNIT_BYTES), UNIT_BYTES, UNIT)
            quantize_units(c, self._skip(self.at), self._count, to, block=block)
            c.join()
            return
        columns, run = c.i64(1), 4
        column = c.i64(0)
        per_column = self.a.n // block * BYTES_PER_COLUMN[block]
        if place == "apart":
            to = to + self.row * per_column
        elif place == "tiles":
            column, columns, run = self.row % TILE, c.i64(TILE), RUN[block]
            to = to + (self.row - column) * per_column
        else:
            to, column, columns = self._place_in_groups(to, self.field(i, "columns"), per_column)
            run = c.lowering.run
        to = self._skip(to, BYTES_PER_COLUMN[block] * columns, block)
        quantize_row(c, self._skip(self.at), self._count, to, column, columns, block=block, run=run)
        c.join()

    def _place_in_groups(self, at: Value, columns: Value, per_column: Value) -> tuple[Value, Value, Value]:
        """Return the address of the row's group of columns, its number in the group, and the columns of the group. One
        group holds all columns if they fit; otherwise whole groups, and a last group of 4 if the rest fits it.
        """
        c = self.c
        wide = c.lowering.columns
        first = self.row // wide * wide
        rest = columns - first
        last = c.select(rest > 4, c.i64(wide), c.i64(min(4, wide)))
        group = c.select(columns > wide, c.select(rest >= wide, c.i64(wide), last), columns)
        column = c.select(columns > wide, self.row - first, self.row)
        return at + c.select(columns > wide, first, c.i64(0)) * per_column, column, group


def _like(number: Value, v: Value) -> Value:
    """Broadcast a scalar to the lanes of v."""
    return number if v.type.lanes == 1 else number.splat(v.type.lanes)


@kernel("positions", "sections", "frequencies", "factors", "table", "n_tokens", "n_pairs", "magnitude")
def rope_table(c: Code, a: SimpleNamespace, work: Work, *, factored: bool, sectioned: bool) -> None:
    """cos and sin (interleaved f32, times magnitude) of position · frequency (f64) [/ factor] per token and pair.

    With `sectioned`, each pair has a section (i64), and each token has one position per section.
    """
    magnitude = a.magnitude.to(I32).bits(F32)
    with c.shares(work, a.n_tokens, c.i64(4)) as token:
        position = c.load(I32, a.positions + token * 4).to(F64)
        with c.singles(0, a.n_pairs) as i:
            if sectioned:
                section = c.load(I64, a.sections + i * 8)
                position = c.load(I32, a.positions + (section * a.n_tokens + token) * 4).to(F64)
            frequency = c.load(F64, a.frequencies + i * 8)
            if factored:
                frequency = frequency / c.load(F32, a.factors + i * 4).to(F64)
            sine, cosine = maths.sincos(c, position * frequency)
            to = a.table + (token * a.n_pairs + i) * 8
            c.store(to, cosine.to(F32) * magnitude)
            c.store(to + 4, sine.to(F32) * magnitude)
