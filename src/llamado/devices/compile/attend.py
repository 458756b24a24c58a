"""Compilation of attention (`kernels/attention/`); visible blocks and tiles are computed once per graph."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from llamado.devices.compile import copies
from llamado.devices.compile.copies import intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter, Fields, no_operand
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.compile.rope import alibi_slopes
from llamado.devices.device import DeviceError
from llamado.devices.kernel import Kernel
from llamado.devices.kernels.attention import flash
from llamado.devices.kernels.attention.results import SegmentResult, combine_segments
from llamado.devices.kernels.attention.visible import MaskRow, Tile, find_tiles, visible_blocks, words_of
from llamado.devices.kernels.formats import FORMATS
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_MAX_HEAD = 1024
_MOST, _SMALL_HEAD = 128, 256
"""Queries of a tile, which share their loads from the cache; half as many for heads larger than these."""
_UNITS = 4
"""Units of work per thread, if there are enough tokens."""
_MOST_PARTIALS = 16 << 20
"""Most bytes of segment results; larger ones are not divided among threads."""


@dataclass(frozen=True)
class Operands:
    """Operands of flash attention in the forms that kernels take, and its parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    scale: float
    max_bias: float
    softcap: float

    @staticmethod
    def of(out: Emitter, node: Tensor) -> Operands:
        """Return the operands of a node; emit the conversions that they need. Raise `DeviceError` for a form without
        kernel.
        """
        q, k, v, mask, sinks = node.src[0], node.src[1], node.src[2], node.source(3), node.source(4)
        assert q is not None and k is not None and v is not None
        scale, max_bias, softcap = _checked(node, k.ne[0], v.ne[0])
        q, k, v = plain_rows(out, q), _cache(out, k), _cache(out, v)
        if mask is not None:
            mask = _mask(out, mask, q.ne[2])
        return Operands(q, k, v, mask, sinks, scale, max_bias, softcap)

    @property
    def n_tokens(self) -> int:
        return self.q.ne[1]

    @property
    def n_heads(self) -> int:
        return self.q.ne[2]

    @property
    def n_streams(self) -> int:
        return self.q.ne[3]

    @property
    def n_kv(self) -> int:
        return self.k.ne[1]

    @property
    def n_heads_kv(self) -> int:
        return self.k.ne[2]

    @property
    def group(self) -> int:
        """Heads that share the keys and values of one head."""
        return self.n_heads // self.n_heads_kv

    @property
    def biased(self) -> bool:
        """True if heads weigh the mask by slopes."""
        return self.mask is not None and self.max_bias > 0

    def fields(self, out: Emitter, node: Tensor) -> Fields:
        """Return places, strides and numbers of operands and result."""
        q, k, v, mask = self.q, self.k, self.v, self.mask
        return {
            "q": out.place(q), "q_token": q.nb[1], "q_head": q.nb[2], "q_stream": q.nb[3],
            "k": out.place(k), "k_head": k.nb[2], "k_stream": k.nb[3],
            "v": out.place(v), "v_head": v.nb[2], "v_stream": v.nb[3],
            "mask": no_operand() if mask is None else out.place(mask),
            "mask_token": 0 if mask is None else mask.nb[1],
            "mask_head": 0 if mask is None or mask.ne[2] == 1 else mask.nb[2],
            "mask_stream": 0 if mask is None or mask.ne[3] == 1 else mask.nb[3],
            "slopes": out.constant(alibi_slopes(self.n_heads, self.max_bias)) if self.max_bias > 0 else no_operand(),
            "sinks": no_operand() if self.sinks is None else out.place(self.sinks),
            "scale": self.scale / self.softcap if self.softcap else self.scale, "softcap": self.softcap,
            "out": out.place(node), "out_head": node.nb[1], "out_token": node.nb[2], "out_stream": node.nb[3],
            "n_tokens": self.n_tokens, "group": self.group, "n_kv": self.n_kv, "n_words": words_of(self.n_kv),
        }  # fmt: skip

    def reads(self, out: Emitter) -> list[ByteSpan]:
        return [out.span(t) for t in (self.q, self.k, self.v, self.mask, self.sinks) if t is not None]


def attend(out: Emitter, node: Tensor) -> None:
    """Emit flash attention, with or without a mask."""
    attend_operands(out, node, Operands.of(out, node))


def attend_operands(out: Emitter, node: Tensor, operands: Operands) -> None:
    """Emit flash attention over operands."""
    q, k, v, mask, sinks = operands.q, operands.k, operands.v, operands.mask, operands.sinks
    head_k, head_v, n_heads_kv, n_words = k.ne[0], v.ne[0], operands.n_heads_kv, words_of(operands.n_kv)
    n_tokens, n_heads, n_streams, n_kv = operands.n_tokens, operands.n_heads, operands.n_streams, operands.n_kv
    shared = (out.place(k), k.type, k.nb) == (out.place(v), v.type, v.nb) and head_v <= head_k
    wide = out.lowering.panel_rows == 16
    most = _MOST if max(head_k, head_v) <= _SMALL_HEAD else _MOST // 2
    partials = Temporary(n_tokens * n_heads * n_streams * n_words * SegmentResult.bytes(head_v))
    units = _UNITS * out.n_threads
    divided = n_words > 1 and n_tokens * n_heads_kv * n_streams <= units and partials.size <= _MOST_PARTIALS
    rows, steps = _rows(out, mask, n_kv)
    tiles = _tiles(out, mask, rows, steps, q, k, most, units, divided=divided)
    fields: Fields = {
        **operands.fields(out, node),
        "rows": Place(rows, 0), "row_token": steps[0], "row_head": steps[1], "row_stream": steps[2],
        "tiles": Place(tiles, 0), "partials": Place(partials, 0) if divided else no_operand(),
        "n_heads_kv": n_heads_kv, "n_heads": n_heads, "n_streams": n_streams,
        **out.share_scratch(flash.scratch_bytes(head_k, head_v, most)),
    }  # fmt: skip
    parameters = {
        "head_k": head_k, "head_v": head_v, "keys": k.type.name, "values": v.type.name, "k_cell": k.nb[1],
        "v_cell": v.nb[1], "most": most, "few": _few(head_k, wide=wide), "lanes": 16 if wide else 8, "divided": divided,
        "masked": mask is not None, "capped": bool(operands.softcap), "sinks": sinks is not None and not divided,
        "biased": operands.biased, "shared": shared,
    }  # fmt: skip
    reads = operands.reads(out) + [ByteSpan(Place(t, 0), t.size) for t in (rows, tiles)]
    if not divided:
        _emit(out, flash.flash_attention, parameters, fields, reads, [out.span(node)], "attention")
        return
    apart = ByteSpan(Place(partials, 0), partials.size)
    _emit(out, flash.flash_attention, parameters, fields, reads, [apart], "attention")
    parameters = {"head_v": head_v, "sinks": sinks is not None}
    _emit(out, combine_segments, parameters, fields, [apart, *reads], [out.span(node)], "attention, segments")


def _emit(
    out: Emitter, kernel: Kernel, parameters: dict[str, Any], fields: Fields, reads: list[ByteSpan],
    writes: list[ByteSpan], label: str,
) -> None:  # fmt: skip
    """Emit a kernel with those of the fields that it has."""
    out.emit(kernel, parameters, {name: fields[name] for name in kernel.fields}, reads, writes, label)


def _few(head: int, *, wide: bool) -> int:
    """Most queries of a block that is read in place. For more queries it is expanded, which costs as much as some
    queries and, with large heads, much of L1.
    """
    if not wide:
        return 3
    return 12 if head <= _SMALL_HEAD else 24


def _checked(node: Tensor, head_k: int, head_v: int) -> tuple[float, float, float]:
    """Return scale, maximum bias and soft cap. Raise `DeviceError` for a form without kernel."""
    scale, max_bias, softcap = struct.unpack_from("<3f", node.op_params)
    if head_k % 8 or head_v % 8 or max(head_k, head_v) > _MAX_HEAD:
        raise DeviceError(f"attention with heads of {head_k} and {head_v} is not supported here")
    if node.type != TensorType.F32 or not node.has_contiguous_rows():
        raise DeviceError(f"a result of {node.type.name} with strides {list(node.nb)} is not supported here")
    return scale, max_bias, softcap


def _cache(out: Emitter, cache: Tensor) -> Tensor:
    """Return keys or values in a type that attention reads."""
    form = FORMATS.get(cache.type)
    if form is not None and form.cached and cache.has_contiguous_rows():
        return cache
    return plain_rows(out, cache)


def _mask(out: Emitter, mask: Tensor, n_heads: int) -> Tensor:
    """Return a contiguous mask in f16, with one mask or one for each head."""
    if mask.ne[2] not in (1, n_heads):
        raise DeviceError(f"attention of {n_heads} heads with {mask.ne[2]} masks is not supported here")
    if mask.type == TensorType.F16 and mask.has_contiguous_rows() and mask.ne[2] == mask.ne[3] == 1:
        return mask
    if mask.type == TensorType.F16 and mask.is_contiguous():
        return mask
    plain = intermediate(TensorType.F16, mask.ne)
    copies.copy(out, mask, plain)
    return plain


def _rows(out: Emitter, mask: Tensor | None, n_kv: int) -> tuple[Temporary, tuple[int, int, int]]:
    """Find the visible blocks of each mask row, once per graph. Return them and the bytes from one token, head and
    stream to the next.
    """
    n_words = words_of(n_kv)
    step = MaskRow.bytes(n_words)
    n_rows, key = 1, ("visible", n_kv) if mask is None else ("visible", *out.contents_key(mask))
    if mask is not None:
        n_rows = mask.ne[1] * mask.ne[2] * mask.ne[3]
    if key not in out.shared:
        rows = out.shared[key] = Temporary(step * n_rows)
        fields: Fields = {**_mask_fields(out, mask, n_kv), "n_rows": n_rows, "rows": Place(rows, 0), "row_step": step}
        reads = [] if mask is None else [out.span(mask)]
        out.emit(visible_blocks, {"masked": mask is not None}, fields, reads, [ByteSpan(Place(rows, 0), rows.size)])
    if mask is None:
        return out.shared[key], (0, 0, 0)
    head, stream = step * mask.ne[1], step * mask.ne[1] * mask.ne[2]
    return out.shared[key], (step, 0 if mask.ne[2] == 1 else head, 0 if mask.ne[3] == 1 else stream)


def _mask_fields(out: Emitter, mask: Tensor | None, n_kv: int) -> Fields:
    return {
        "mask": no_operand() if mask is None else out.place(mask), "nb1": 0 if mask is None else mask.nb[1],
        "n_kv": n_kv, "n_words": words_of(n_kv),
    }  # fmt: skip


def _tiles(
    out: Emitter, mask: Tensor | None, rows: Temporary, steps: tuple[int, int, int], q: Tensor, k: Tensor, most: int,
    units: int, *, divided: bool,
) -> Temporary:  # fmt: skip
    """Find the tiles of tokens, once for all layers of the same shape."""
    n_tokens, n_streams, n_words = q.ne[1], q.ne[3], words_of(k.ne[1])
    shape = {"n_tokens": n_tokens, "n_streams": n_streams, "n_heads_kv": k.ne[2], "group": q.ne[2] // k.ne[2]}
    key = ("tiles", rows, *shape.values(), most, divided)
    if key not in out.shared:
        tiles = out.shared[key] = Temporary(Tile.LIST + Tile.BYTES * n_tokens * n_streams * (n_words if divided else 1))
        step = MaskRow.bytes(n_words)
        fields: Fields = {
            **_mask_fields(out, mask, k.ne[1]), **shape, "rows": Place(rows, 0), "row_step": step,
            "n_rows": rows.size // step, "token_step": steps[0], "stream_step": steps[2], "most": most, "units": units,
            "threads": out.n_threads, "tiles": Place(tiles, 0),
        }  # fmt: skip
        reads = [] if mask is None else [out.span(mask)]
        writes = [ByteSpan(Place(t, 0), t.size) for t in (rows, tiles)]
        out.emit(find_tiles, {"masked": mask is not None, "divided": divided}, fields, reads, writes, "tiles")
    return out.shared[key]
