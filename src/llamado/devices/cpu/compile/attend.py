"""Attention (`kernels/attention.py`), and the visible range of each mask row, found once per graph."""

from __future__ import annotations

import struct

from llamado.devices.cpu.compile import copies
from llamado.devices.cpu.compile.copies import made, straight
from llamado.devices.cpu.compile.emitter import Emitter, Fields, nothing
from llamado.devices.cpu.compile.program import ByteSpan, Place, Temporary
from llamado.devices.cpu.compile.rope import alibi_slopes
from llamado.devices.cpu.kernels import attention
from llamado.devices.cpu.kernels.formats import FORMATS
from llamado.devices.device import DeviceError
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_MAX_HEAD = 1024
_TILE = 32
"""Queries that share one expanded key block in prompt processing."""


def attend(out: Emitter, node: Tensor) -> None:
    """Flash attention, with a mask or without."""
    q, k, v, mask, sinks = node.src[0], node.src[1], node.src[2], node.source(3), node.source(4)
    assert q is not None and k is not None and v is not None
    scale, max_bias, softcap = _checked(node, k.ne[0], v.ne[0])
    head_k, head_v = k.ne[0], v.ne[0]
    q, k, v = straight(out, q), _cache(out, k), _cache(out, v)
    if mask is not None:
        mask = _mask(out, mask, q.ne[2])
    n_tokens, n_heads, n_streams = q.ne[1], q.ne[2], q.ne[3]
    n_kv, n_heads_kv = k.ne[1], k.ne[2]
    ranges = _ranges(out, mask) if mask is not None else None
    shared = (out.place(k), k.type, k.nb) == (out.place(v), v.type, v.nb) and head_v <= head_k
    tile = _tile(n_tokens, n_heads // n_heads_kv, n_heads_kv * n_streams, out.n_threads)
    fields: Fields = {
        "q": out.place(q), "q_token": q.nb[1], "q_head": q.nb[2], "q_stream": q.nb[3],
        "k": out.place(k), "k_cell": k.nb[1], "k_head": k.nb[2], "k_stream": k.nb[3],
        "v": out.place(v), "v_cell": v.nb[1], "v_head": v.nb[2], "v_stream": v.nb[3],
        "mask": nothing() if mask is None else out.place(mask),
        "mask_token": 0 if mask is None else mask.nb[1],
        "mask_head": 0 if mask is None or mask.ne[2] == 1 else mask.nb[2],
        "mask_stream": 0 if mask is None or mask.ne[3] == 1 else mask.nb[3],
        "ranges": nothing() if ranges is None else Place(ranges, 0),
        "ranges_head": 0 if mask is None or mask.ne[2] == 1 else 8 * mask.ne[1],
        "ranges_stream": 0 if mask is None or mask.ne[3] == 1 else 8 * mask.ne[1] * mask.ne[2],
        "sinks": nothing() if sinks is None else out.place(sinks),
        "slopes": out.constant(alibi_slopes(n_heads, max_bias)) if max_bias > 0 else nothing(),
        "out": out.place(node), "out_head": node.nb[1], "out_token": node.nb[2], "out_stream": node.nb[3],
        "n_tokens": n_tokens, "n_heads_kv": n_heads_kv, "n_streams": n_streams, "group": n_heads // n_heads_kv,
        "n_kv": n_kv, "scale": scale / softcap if softcap else scale, "softcap": softcap,
        **out.share_scratch(attention.scratch_bytes(head_k, head_v, tile)),
    }  # fmt: skip
    parameters = {
        "head_k": head_k, "head_v": head_v, "keys": k.type.name, "values": v.type.name,
        "tile": tile, "lanes": out.lowering.panel_rows, "masked": mask is not None, "capped": bool(softcap),
        "sinks": sinks is not None, "biased": mask is not None and max_bias > 0, "shared": shared,
    }  # fmt: skip
    reads = [out.span(t) for t in (q, k, v, mask, sinks) if t is not None]
    if ranges is not None:
        reads.append(ByteSpan(Place(ranges, 0), ranges.size))
    out.emit(attention.flash_attention, parameters, fields, reads, [out.span(node)], "attention")


def _tile(n_tokens: int, group: int, n_groups: int, n_threads: int) -> int:
    """Queries that are taken together: they share what is read of the cache."""
    if n_tokens > 8:
        return _TILE
    if group > attention.DIRECT * n_threads and n_groups < n_threads:  # one key head: its queries are all there is
        share = -(-group // n_threads)
        return min(_TILE, share + share % 2)
    return 2 if group % 2 == 0 else 1


def _checked(node: Tensor, head_k: int, head_v: int) -> tuple[float, float, float]:
    """Scale, greatest bias and soft cap; DeviceError for a form that the kernel does not have."""
    scale, max_bias, softcap = struct.unpack_from("<3f", node.op_params)
    if head_k % 8 or head_v % 8 or max(head_k, head_v) > _MAX_HEAD:
        raise DeviceError(f"attention with heads of {head_k} and {head_v} is not supported here")
    if node.type != TensorType.F32 or not node.has_contiguous_rows():
        raise DeviceError(f"a result of {node.type.name} with strides {list(node.nb)} is not supported here")
    return scale, max_bias, softcap


def _cache(out: Emitter, cache: Tensor) -> Tensor:
    """Keys or values in a type that attention reads."""
    form = FORMATS.get(cache.type)
    if form is not None and form.cached and cache.has_contiguous_rows():
        return cache
    return straight(out, cache)


def _mask(out: Emitter, mask: Tensor, n_heads: int) -> Tensor:
    """A mask in f16, or one for each head, those of streams one behind the other."""
    if mask.ne[2] not in (1, n_heads):
        raise DeviceError(f"attention of {n_heads} heads with {mask.ne[2]} masks is not supported here")
    if mask.type == TensorType.F16 and mask.has_contiguous_rows() and mask.ne[2] == mask.ne[3] == 1:
        return mask
    if mask.type == TensorType.F16 and mask.is_contiguous():
        return mask
    plain = made(TensorType.F16, mask.ne)
    copies.copy(out, mask, plain)
    return plain


def _ranges(out: Emitter, mask: Tensor) -> Temporary:
    key = ("ranges", *out.contents(mask))
    if key not in out.made:
        n_rows = mask.ne[1] * mask.ne[2] * mask.ne[3]
        ranges = Temporary(8 * n_rows)
        fields: Fields = {
            "mask": out.place(mask), "nb1": mask.nb[1], "n_kv": mask.ne[0], "n_rows": n_rows, "ranges": Place(ranges, 0)
        }  # fmt: skip
        out.emit(attention.mask_ranges, {}, fields, [out.span(mask)], [ByteSpan(Place(ranges, 0), ranges.size)])
        out.made[key] = ranges
    return out.made[key]
