"""Compilation of expert products (`kernels/experts.py`): tokens are grouped by experts once for all products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamado.devices.compile import columns, copies
from llamado.devices.compile.copies import intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.kernels import experts, matmul
from llamado.devices.kernels.activations import TILE
from llamado.devices.kernels.formats import FORMATS, in_blocks
from llamado.devices.kernels.formats.format import Blocks256, Plain
from llamado.devices.kernels.tiles import experts as expert_tiles
from llamado.devices.kernels.tiles.matmul import panels_together
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

BlocksEmitter = Callable[[Emitter, Tensor, Tensor, Tensor, Tensor], None]
"""Emits a product of matrices in blocks with contiguous columns: node, matrices, columns, choices."""


def multiply(out: Emitter, node: Tensor, blocks: BlocksEmitter | None = None) -> None:
    """MUL_MAT_ID. `blocks`: for devices with kernels of their own."""
    w, x, ids = node.src[0], node.src[1], node.src[2]
    assert w is not None and x is not None and ids is not None
    if node.type != TensorType.F32 or not node.is_contiguous():
        result = intermediate(TensorType.F32, node.ne, node.name)
        result.op, result.src = node.op, (w, x, ids)
        multiply(out, result, blocks)
        copies.copy(out, result, node)
        return
    if x.ne[1] not in (1, node.ne[1]):  # its columns serve several choices of a token each
        whole = intermediate(TensorType.F32, (x.ne[0], node.ne[1], x.ne[2], 1), x.name)
        copies.repeat(out, plain_rows(out, x), whole)
        x = whole
    elif not x.is_contiguous() or x.type != TensorType.F32:
        plain = intermediate(TensorType.F32, x.ne, x.name)
        copies.copy(out, x, plain)
        x = plain
    product = Tensor(node.type, node.ne, node.nb, node.op, (w, x, ids), view_src=node, name=node.name)
    if columns.takes_blocks(product):
        (blocks or _blocks)(out, product, w, x, ids)
        return
    known = isinstance(FORMATS.get(w.type), Plain) and w.has_contiguous_rows()
    _floats(out, product, w if known else plain_rows(out, w), x, ids)


def multiply_each(out: Emitter, node: Tensor, w: Tensor, x: Tensor) -> None:
    """MUL_MAT of contiguous x, taken apart, with matrices in blocks, each with its columns of dimension 2.

    It is a product of experts whose routes are known.
    """
    each = x.nrows // w.ne[2]
    acts = columns.activations(out, x, columns.layout_of(node, out.lowering))
    fields, parameters = _columns(out, node, w, acts)
    reads = [out.span(w), ByteSpan(Place(acts, 0), acts.size)]
    if each == 1:
        parameters |= _one_column(w, parameters["panel_rows"])
        ids = out.constant(np.arange(w.ne[2], dtype=np.int32))
        fields |= {"ids": ids, "id0": 4, "id1": 0, "n_used": w.ne[2], "n_experts": w.ne[2]}
        kernel = experts.experts_one
    else:
        fields |= {"x_token": 0, "n_experts": w.ne[2], "routes": out.constant(experts.routes(w.ne[2], each))}
        kernel = experts.experts_many
        parameters |= _tiled(out, node, w, fields, reads)
    out.emit(kernel, parameters, fields, reads, [out.span(node)], f"{w.type.name} {w.name}")


def _blocks(out: Emitter, node: Tensor, w: Tensor, x: Tensor, ids: Tensor) -> None:
    acts = columns.activations(out, x, columns.layout_of(node, out.lowering))
    fields, parameters = _columns(out, node, w, acts)
    x_token: int | float | Place = 0
    if x.ne[1] == 1:  # a column serves all slots of its token
        x_token, fields["x_slot"] = fields["x_slot"], 0
    reads = [out.span(w), ByteSpan(Place(acts, 0), acts.size)]
    if x.ne[2] == 1:
        parameters |= _one_column(w, parameters["panel_rows"])
        fields |= choices(out, ids, w.ne[2])
        kernel = experts.experts_one
        reads.append(out.span(ids))
    else:
        fields |= routed(out, ids, w.ne[2], reads)
        fields |= {"x_token": x_token}
        kernel = experts.experts_many
        parameters |= _tiled(out, node, w, fields, reads)
    out.emit(kernel, parameters, fields, reads, [out.span(node)], f"{w.type.name} {w.name}")


def _tiled(out: Emitter, node: Tensor, w: Tensor, fields: Fields, reads: list[ByteSpan]) -> dict[str, int]:
    """Emit products in tiles for experts that get many columns, if there can be any. Return the parameters that exclude
    these experts from `experts_many`.

    `fields` and `reads` are those of `experts_many`, weights first.
    """
    big = isinstance(in_blocks(w.type), Blocks256)
    if not out.lowering.tiles or not big or w.ne[1] < TILE or node.nrows < expert_tiles.MANY * w.ne[2] // 2:
        return {}
    tiles = _gathered(out, node, w, fields, reads[1:])
    own: Fields = {"x": Place(tiles, 0), "share": 1, "panels": panels_together(w.ne[1], out.n_threads)}
    own |= {name: fields[name] for name in expert_tiles.experts_tiles.fields if name not in own}
    own_reads = [*reads, ByteSpan(Place(tiles, 0), tiles.size)]
    label = f"{w.type.name} {w.name}"
    out.emit(expert_tiles.experts_tiles, {"weights": w.type.name}, own, own_reads, [out.span(node)], label)
    return {"most": expert_tiles.MANY - 1}


def _gathered(out: Emitter, node: Tensor, w: Tensor, fields: Fields, reads: list[ByteSpan]) -> Temporary:
    """Gather the columns of experts that get many, in tiles, once for all products of these columns and choices."""
    form = in_blocks(w.type)
    asked = {name: fields[name] for name in ("x", "x_slot", "x_token", "n_experts", "routes")}
    key = ("gathered", *asked.items(), w.ne[0], form.columns)
    if key not in out.shared:
        size = w.ne[0] // form.block * form.column_bytes
        tiles = Temporary(expert_tiles.gathered_bytes(w.ne[2], node.nrows, size))
        gather = asked | {"n_parts": w.ne[0] // form.columns, "tiles": Place(tiles, 0)}
        writes = [ByteSpan(Place(tiles, 0), tiles.size)]
        out.emit(expert_tiles.gather_tiles, {"block": form.columns}, gather, reads, writes, "columns of experts")
        out.shared[key] = tiles
    return out.shared[key]


def _floats(out: Emitter, node: Tensor, w: Tensor, x: Tensor, ids: Tensor) -> None:
    fields = _fields(out, node, w) | {"x": out.place(x), "n": w.ne[0], "x1": x.nb[1], "x_used": x.ne[1]}
    reads = [out.span(w), out.span(x)]
    fields |= routed(out, ids, w.ne[2], reads)
    parameters = {"weights": w.type.name}
    out.emit(experts.experts_float, parameters, fields, reads, [out.span(node)], f"{w.type.name} {w.name}")


def _columns(out: Emitter, node: Tensor, w: Tensor, acts: Temporary) -> tuple[Fields, dict[str, Any]]:
    """Fields and parameters of a product of quantized columns, one for each slot."""
    form = in_blocks(w.type)
    step = w.ne[0] // form.block * form.column_bytes
    fields = _fields(out, node, w) | {"x": Place(acts, 0), "x_slot": step, "n_blocks": w.ne[0] // form.block}
    return fields, {"weights": w.type.name, "panel_rows": out.lowering.rows_of_panel(w.ne[1])}


def _one_column(w: Tensor, panel_rows: int) -> dict[str, Any]:
    """Parameters of a product of one column per matrix; `panel_rows`: rows unpacked together for several columns."""
    form = in_blocks(w.type)
    panel_rows = matmul.rows_of_one_column(form, panel_rows)
    return {"panel_rows": panel_rows, "near": matmul.prefetches_to_l1(form, panel_rows * w.nb[1])}


def _fields(out: Emitter, node: Tensor, w: Tensor) -> Fields:
    n_matrices = min(w.ne[2], node.nrows)
    return {
        "w": out.place(w), "row_bytes": w.nb[1], "expert_bytes": w.nb[2], "n_rows": w.ne[1],
        "y": out.place(node), "y_stride": node.nb[1],
        "share": max(1, min(8, n_matrices * w.ne[1] // (128 * out.n_threads))),
    }  # fmt: skip


def choices(out: Emitter, ids: Tensor, n_experts: int) -> Fields:
    return {
        "ids": out.place(ids), "id0": ids.nb[0], "id1": ids.nb[1], "n_used": ids.ne[0], "n_experts": n_experts
    }  # fmt: skip


def routed(out: Emitter, ids: Tensor, n_experts: int, reads: list[ByteSpan]) -> Fields:
    """Fields of the table of routes, which is built once for all products with the same choices."""
    key = ("routes", *out.contents_key(ids), n_experts)
    if key not in out.shared:
        routes = Temporary(experts.routes_bytes(n_experts, ids.nelements))
        counts = Temporary(experts.counts_bytes(n_experts, ids.nelements))
        fields = choices(out, ids, n_experts)
        fields |= {"n_tokens": ids.ne[1], "counts": Place(counts, 0), "routes": Place(routes, 0)}
        writes = [ByteSpan(Place(t, 0), t.size) for t in (routes, counts)]
        out.emit(experts.group_by_expert, {}, fields, [out.span(ids)], writes, "experts")
        out.shared[key] = routes
    routes = out.shared[key]
    reads.append(ByteSpan(Place(routes, 0), routes.size))
    return {"n_experts": n_experts, "routes": Place(routes, 0)}
