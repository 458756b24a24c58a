"""Compilation of attention for cards (`cuda/kernels/attention`)."""

from __future__ import annotations

from typing import Any

from llamado.devices.compile import attend
from llamado.devices.compile.attend import Operands
from llamado.devices.compile.emitter import Emitter, Fields, no_operand
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.cuda.kernel import Shape, ShapedOperation, SimtKernel
from llamado.devices.cuda.kernels.attention import combine, scores, tile_list, tiles, values, visible
from llamado.devices.cuda.kernels.attention.cells import PLAIN, CellFormat
from llamado.devices.cuda.kernels.attention.tile_list import TileList
from llamado.devices.cuda.kernels.attention.tiles import TileShape
from llamado.devices.cuda.kernels.attention.visible import VisibleRow
from llamado.devices.kernels.attention.results import SegmentResult
from llamado.devices.kernels.attention.visible import BLOCK, words_of
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_FEW_TOKENS = 64
"""Most tokens that are processed one by one: a batch of so many may be of as many sequences, which share nothing."""
_MOST_TILE_HEAD = 256
"""Most elements of a head for which a tile fits the registers."""
_TILES_PER_PROCESSOR = 2
"""Tiles that a processor has room for."""
_MOST_SCORES = 64 << 20
"""Most bytes of scores; more tokens are processed in several passes."""
_MOST_ROWS = 65535
"""Most blocks on the y axis of a grid."""
_BLOCKS_PER_PROCESSOR = 8
"""Blocks of threads that divide the keys, if there are enough keys."""
_SEGMENTS_PER_PROCESSOR = 16
"""Blocks of threads for segments, if there are enough: most of them may be empty."""


class CardAttention:
    """Emits attention for one card: in its own kernels, and in those of the CPU if they do not have the form."""

    def __init__(self, out: Emitter, processors: int, shared_bytes: int) -> None:
        """`shared_bytes`: most shared memory of a block of threads."""
        self._out, self._processors, self._shared_bytes = out, processors, shared_bytes

    def emit(self, node: Tensor) -> None:
        """Emit flash attention, with or without a mask."""
        operands = Operands.of(self._out, node)
        if operands.n_tokens > _FEW_TOKENS and self._emit_tiles(node, operands):
            return
        plan = _Few(self._out, node, operands, self._processors)
        if plan.shared_bytes > self._shared_bytes or not plan.tokens_at_once:
            attend.attend_operands(self._out, node, operands)
            return
        for first in range(0, operands.n_tokens, plan.tokens_at_once):
            plan.emit(first, min(plan.tokens_at_once, operands.n_tokens - first))

    def _emit_tiles(self, node: Tensor, operands: Operands) -> bool:
        """Emit the attention of many tokens. Return False if there is no kernel for the form."""
        out, k, v, mask = self._out, operands.k, operands.v, operands.mask
        shape = TileShape.of(k.ne[0], v.ne[0], operands.group)
        if shape.shared_bytes > self._shared_bytes or max(shape.head_k, shape.head_v) > _MOST_TILE_HEAD:
            return False
        rows, steps = visible_rows(out, operands)
        listed, n_words = self._tile_list(rows, steps, operands, shape), words_of(operands.n_kv)
        n_units = operands.n_tokens * operands.n_streams * operands.n_heads // shape.heads
        n_blocks = max(1, min(n_units, _TILES_PER_PROCESSOR * self._processors))
        kept = Temporary(0 if n_words == 1 else n_blocks * shape.kept_bytes)
        fields: Fields = {
            **operands.fields(out, node), "k_cell": k.nb[1], "v_cell": v.nb[1], "n_heads": operands.n_heads,
            "rows": Place(rows, 0), "row_token": steps[0], "row_head": steps[1], "row_stream": steps[2],
            "tiles": Place(listed, 0), "kept": Place(kept, 0) if kept.size else no_operand(),
        }  # fmt: skip
        keys, values_ = _format(out, k), _format(out, v)
        parameters = {
            "head_k": shape.head_k, "head_v": shape.head_v, "heads": shape.heads, "keys": keys.type.name,
            "values": values_.type.name, "direct_k": keys.direct, "direct_v": values_.direct,
            "masked": mask is not None, "apart": mask is not None and mask.ne[2] > 1,
            "capped": bool(operands.softcap), "biased": operands.biased, "sinks": operands.sinks is not None,
            "single": n_words == 1,
        }  # fmt: skip
        reads = [*operands.reads(out), span(rows), span(listed)]
        writes = [out.span(node), *([span(kept)] if kept.size else [])]
        launch = Shape((n_blocks, 1), tiles.THREADS, shape.shared_bytes)
        emit(out, tiles.attend_tiles, parameters, fields, (reads, writes), "attention", launch)
        return True

    def _tile_list(
        self, rows: Temporary, steps: tuple[int, int, int], operands: Operands, shape: TileShape
    ) -> Temporary:
        """Form the tiles of tokens, once for all layers of the same shape."""
        out, n_tokens, n_streams = self._out, operands.n_tokens, operands.n_streams
        key = ("tile list", rows, steps, n_tokens, n_streams, shape.tokens)
        if key not in out.shared:
            listed = out.shared[key] = Temporary(TileList.bytes(n_tokens * n_streams))
            fields: Fields = {
                "rows": Place(rows, 0), "row_token": steps[0], "row_stream": steps[2],
                "n_words": words_of(operands.n_kv), "n_tokens": n_tokens, "n_streams": n_streams,
                "most": shape.tokens, "tiles": Place(listed, 0),
            }  # fmt: skip
            launch = Shape((1, 1), tile_list.THREADS, tile_list.SHARED_BYTES)
            emit(out, tile_list.form_tiles, {}, fields, ([span(rows)], [span(listed)]), "tiles", launch)
        return out.shared[key]


class _Few:
    """Attention of a few tokens."""

    def __init__(self, out: Emitter, node: Tensor, operands: Operands, processors: int) -> None:
        self._out, self._node, self._operands, self._processors = out, node, operands, processors
        k, v, mask = operands.k, operands.v, operands.mask
        group = operands.group if mask is None or mask.ne[2] == 1 else 1  # heads with the same visible cells
        self._heads = max(n for n in range(1, scores.MOST_HEADS + 1) if group % n == 0)
        self._keys, self._values = _format(out, k), _format(out, v)
        self._part = values.Division.of(v.ne[0], self._heads, self._values)
        self._n_words = words_of(operands.n_kv)
        self._score_bytes = scores.ScoreRecord.bytes(self._n_words)
        self.shared_bytes = max(scores.shared_bytes(k.ne[0], self._heads, self._keys), self._part.shared_bytes)
        """Shared memory of a block of threads."""
        n_heads = operands.n_heads * operands.n_streams
        rows = n_heads // self._heads * self._part.n_slices
        self.tokens_at_once = min(
            operands.n_tokens, max(1, _MOST_SCORES // (self._score_bytes * n_heads)), _MOST_ROWS // max(rows, n_heads)
        )
        """Tokens of a pass."""

    def emit(self, first: int, n: int) -> None:
        """Emit the attention of `n` tokens."""
        out, node, operands, n_words = self._out, self._node, self._operands, self._n_words
        n_queries = n * operands.n_heads * operands.n_streams
        kept = Temporary(n_queries * self._score_bytes)
        rows, steps = visible_rows(out, operands)
        fields: Fields = {
            **operands.fields(out, node), "k_cell": operands.k.nb[1], "v_cell": operands.v.nb[1],
            "rows": Place(rows, 0), "row_token": steps[0], "row_head": steps[1], "row_stream": steps[2],
            "n_heads": operands.n_heads, "n_tokens": n, "scores": Place(kept, 0), "partials": no_operand(),
        }  # fmt: skip
        for name, step in (("q", "q_token"), ("mask", "mask_token"), ("rows", "row_token"), ("out", "out_token")):
            place, bytes_ = fields[name], fields[step]
            assert isinstance(place, Place) and isinstance(bytes_, int)
            fields[name] = Place(place.base, place.offset + first * bytes_)
        reads, writes = [*operands.reads(out), span(rows)], [out.span(node)]
        n_units = n_queries // self._heads
        n_blocks = -(-operands.n_kv // BLOCK)
        slots = max(1, min(n_blocks, _BLOCKS_PER_PROCESSOR * self._processors // n_units))
        parameters: dict[str, Any] = {
            "head": operands.k.ne[0], "heads": self._heads, "keys": self._keys.type.name, "direct": self._keys.direct,
            "masked": operands.mask is not None, "capped": bool(operands.softcap), "biased": operands.biased,
        }  # fmt: skip
        threads = 32 * scores.warps_of(self._keys)
        shape = Shape((slots, n_units), threads, scores.shared_bytes(operands.k.ne[0], self._heads, self._keys))
        emit(out, scores.compute_scores, parameters, fields, (reads, [span(kept)]), "attention, scores", shape)

        part, single, sinks = self._part, n_words == 1, operands.sinks is not None
        results = Temporary(0 if single else n_queries * n_words * SegmentResult.bytes(part.head))
        parameters = {
            "head": part.head, "heads": part.heads, "values": self._values.type.name, "direct": self._values.direct,
            "single": single, "sinks": sinks and single,
        }  # fmt: skip
        n_rows = n_units * part.n_slices
        slots = max(1, min(n_words, _SEGMENTS_PER_PROCESSOR * self._processors // n_rows))
        shape = Shape((slots, n_rows), part.threads, part.shared_bytes)
        made = writes if single else [span(results)]
        if not single:
            fields["partials"] = Place(results, 0)
        emit(out, values.add_values, parameters, fields, ([span(kept), *reads], made), "attention, values", shape)
        if not single:
            parameters = {"head": part.head, "sinks": sinks}
            shape = Shape((-(-part.head // combine.THREADS), n_queries), combine.THREADS)
            accesses = ([*made, *reads], writes)
            emit(out, combine.combine_segments, parameters, fields, accesses, "attention, segments", shape)


def visible_rows(out: Emitter, operands: Operands) -> tuple[Temporary, tuple[int, int, int]]:
    """Find the visible blocks of each mask row, once per graph. Return them and the bytes from one token, head and
    stream to the next.
    """
    mask, n_kv = operands.mask, operands.n_kv
    n_words = words_of(n_kv)
    step = VisibleRow.bytes(n_words)
    n_rows = 1 if mask is None else mask.ne[1] * mask.ne[2] * mask.ne[3]
    key = ("visible rows", n_kv) if mask is None else ("visible rows", *out.contents_key(mask))
    if key not in out.shared:
        rows = out.shared[key] = Temporary(step * n_rows)
        fields: Fields = {
            "mask": no_operand() if mask is None else out.place(mask), "mask_row": 0 if mask is None else mask.nb[1],
            "n_kv": n_kv, "n_words": n_words, "rows": Place(rows, 0), "row_step": step,
        }  # fmt: skip
        wide = mask is not None and n_kv % 8 == 0 and is_aligned(out, mask)
        parameters = {"masked": mask is not None, "wide": wide}
        shape = Shape((n_rows, 1), visible.THREADS, visible.SHARED_BYTES)
        accesses = ([] if mask is None else [out.span(mask)], [span(rows)])
        emit(out, visible.find_visible, parameters, fields, accesses, "visible cells", shape)
    if mask is None:
        return out.shared[key], (0, 0, 0)
    head, stream = step * mask.ne[1], step * mask.ne[1] * mask.ne[2]
    return out.shared[key], (step, 0 if mask.ne[2] == 1 else head, 0 if mask.ne[3] == 1 else stream)


def emit(
    out: Emitter, kernel: SimtKernel, parameters: dict[str, Any], fields: Fields,
    accesses: tuple[list[ByteSpan], list[ByteSpan]], label: str, shape: Shape,
) -> None:  # fmt: skip
    """Append a kernel with those of the fields that it has. `accesses`: what it reads and writes."""
    own = {name: fields[name] for name in kernel.fields}
    out.operations.append(ShapedOperation(kernel, parameters, own, *accesses, label=label, shape=shape))


def span(temporary: Temporary) -> ByteSpan:
    return ByteSpan(Place(temporary, 0), temporary.size)


def is_aligned(out: Emitter, tensor: Tensor) -> bool:
    """Return True if all rows begin at multiples of 16 bytes."""
    steps = [step for n, step in zip(tensor.ne[1:], tensor.nb[1:], strict=True) if n > 1]
    return not any(step % 16 for step in (out.place(tensor).offset, *steps))


def _format(out: Emitter, cache: Tensor) -> CellFormat:
    return CellFormat(TensorType(cache.type), cache.type in PLAIN and is_aligned(out, cache))
