"""Compilation of matrix products: weights in blocks in the file's layout, everything else as floats."""

from __future__ import annotations

from typing import Any

from llamado.devices.compile import columns, copies, experts
from llamado.devices.compile.copies import intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.kernels import floats, matmul
from llamado.devices.kernels.formats import FORMATS, in_blocks
from llamado.devices.kernels.formats.format import Blocks, Blocks32, Plain
from llamado.devices.kernels.tiles.matmul import matmul_tiles, panels_together
from llamado.devices.lowering import Lowering
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_MANY = 12
"""Columns from which on a product of plain floats expands its weights first."""


class Products:
    """Compiles the products of a graph. Each product of few columns gets the address of the next one's weights, to
    prefetch them; the last one gets the first one's.
    """

    def __init__(self, out: Emitter) -> None:
        self._out = out
        self._first_few: Fields | None = None
        self._last_few: Fields | None = None

    def emit(self, node: Tensor) -> None:
        """Emit a product of any form."""
        out, w, x = self._out, node.src[0], node.src[1]
        assert w is not None and x is not None
        if node.type != TensorType.F32 or not node.has_contiguous_rows():
            result = intermediate(TensorType.F32, node.ne, node.name)
            result.op, result.src = node.op, (w, x)
            self.emit(result)
            copies.copy(out, result, node)
            return
        x = plain_rows(out, x)
        if columns.takes_blocks(node):
            if not x.is_contiguous():
                columns_in = intermediate(TensorType.F32, x.ne, x.name)
                copies.copy(out, x, columns_in)
                x = columns_in
            self._blocks(node, w, x)
            return
        # few rows of weights: as f32 if they are in blocks
        plain = isinstance(FORMATS.get(w.type), Plain) and w.has_contiguous_rows()
        self._floats(node, w if plain else plain_rows(out, w), x)

    def _blocks(self, node: Tensor, w: Tensor, x: Tensor) -> None:
        """Emit a product of one or more matrices in blocks with contiguous columns."""
        out, form, n_columns = self._out, in_blocks(w.type), x.nrows
        if w.ne[2] > 1:
            experts.multiply_each(out, node, w, x)
            return
        layout = columns.layout_of(node, out.lowering)
        acts = columns.activations(out, x, layout)
        if layout.place == "tiles":
            self._tiles(node, w, x, acts)
            return
        panel_rows = out.lowering.rows_of_panel(w.ne[1])
        if n_columns == 1:
            panel_rows = matmul.rows_of_one_column(form, panel_rows)
        panels = -(-w.ne[1] // panel_rows)
        few = _columns_of_few(n_columns, form, out.lowering)
        kernel = matmul.matmul_many
        parameters: dict[str, Any] = {"weights": w.type.name, "panel_rows": panel_rows}
        if few is not None:
            parameters |= {"columns": few, "near": matmul.prefetches_to_l1(form, panel_rows * w.nb[1])}
            kernel = matmul.matmul_few
        fields: Fields = {
            "w": out.place(w),
            "row_bytes": w.nb[1],
            "n_blocks": w.ne[0] // form.block,
            "n_rows": w.ne[1],
            "x": Place(acts, 0),
            "n_columns": n_columns,
            "y": out.place(node),
            "y_stride": node.nb[1],
            "share": max(1, min(8, panels // (16 * out.n_threads))),
        }
        if few is not None:
            mine: Fields = {"next": fields["w"], "next_panels": panels, "next_panel_bytes": panel_rows * w.nb[1]}
            self._first_few = self._first_few or mine
            fields |= self._first_few  # the weights of the next run, unless another product follows
            if self._last_few is not None:
                self._last_few |= mine
            self._last_few = fields
        reads = [out.span(w), ByteSpan(Place(acts, 0), acts.size)]
        out.emit(kernel, parameters, fields, reads, [out.span(node)], f"{w.type.name} {w.name}")

    def _tiles(self, node: Tensor, w: Tensor, x: Tensor, acts: Temporary) -> None:
        out, form = self._out, in_blocks(w.type)
        fields: Fields = {
            "w": out.place(w), "row_bytes": w.nb[1], "n_blocks": w.ne[0] // form.block, "n_rows": w.ne[1],
            "x": Place(acts, 0), "n_columns": x.nrows,
            "y": out.place(node), "y_stride": node.nb[1],
            "share": 1, "panels": panels_together(w.ne[1], out.n_threads),
        }  # fmt: skip
        reads = [out.span(w), ByteSpan(Place(acts, 0), acts.size)]
        parameters = {"weights": w.type.name}
        out.emit(matmul_tiles, parameters, fields, reads, [out.span(node)], f"{w.type.name} {w.name}")

    def _floats(self, node: Tensor, w: Tensor, x: Tensor) -> None:
        out = self._out
        fields = self._float_fields(node, w, x)
        kernel = floats.matmul_float
        parameters: dict[str, Any] = {"weights": w.type.name, "columns": max(1, min(x.ne[1], floats.COLUMNS))}
        size = floats.tile(out.lowering.panel_rows)
        if x.ne[1] >= _MANY and w.ne[0] >= 8 and w.ne[1] >= size.rows:
            kernel = floats.matmul_float_many
            parameters = {"weights": w.type.name, **size._asdict()}
            width = max(4, floats.STRETCH // (4 * w.ne[0]) // size.columns) * size.columns
            fields |= {"width": width, **out.share_scratch(floats.many_scratch(w.ne[0], width, size))}
        reads = [out.span(w), out.span(x)]
        out.emit(kernel, parameters, fields, reads, [out.span(node)], f"{w.type.name} {w.name}")

    def _float_fields(self, node: Tensor, w: Tensor, x: Tensor) -> Fields:
        """Fields of all products of plain floats."""
        out = self._out
        return {
            "n": w.ne[0], "n_rows": w.ne[1], "n_columns": x.ne[1], "n2": x.ne[2], "n3": x.ne[3],
            "r2": x.ne[2] // w.ne[2], "r3": x.ne[3] // w.ne[3],
            "w": out.place(w), "w1": w.nb[1], "w2": w.nb[2], "w3": w.nb[3],
            "x": out.place(x), "x1": x.nb[1], "x2": x.nb[2], "x3": x.nb[3],
            "y": out.place(node), "y1": node.nb[1], "y2": node.nb[2], "y3": node.nb[3],
        }  # fmt: skip


def _columns_of_few(n: int, form: Blocks, lowering: Lowering) -> int | None:
    """Return the `columns` of `matmul_few` for a product of n columns; None if `matmul_many` is faster: super-blocks
    take longer to unpack a second time.

    There is a kernel for each number of columns that fits the registers, and for every fourth number beyond.
    """
    if n <= lowering.few:
        return n
    second = lowering.few if isinstance(form, Blocks32) else lowering.columns
    return -(-n // matmul.MIN_GROUP) * matmul.MIN_GROUP if n <= lowering.few + second * (lowering.passes - 1) else None
