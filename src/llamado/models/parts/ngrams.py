"""N-gram embeddings (Qwen4): a token and its predecessors are hashed to rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import (
    add,
    cast,
    clamp,
    concat,
    cont,
    mul,
    repeat,
    reshape,
    scale,
    sigmoid,
    silu,
    sum_rows,
    transpose,
    unary,
    view_2d,
    view_3d,
)
from llamado.ggml.graph import sqrt as root
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import NO_TOKEN, NOT_TEXT, Batch
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.inputs import Bytes, Input
from llamado.models.keys import Keys
from llamado.models.parts.streams.stream_gates import StreamNorm
from llamado.models.weights import RoleWeights


@dataclass(frozen=True, slots=True)
class Hashes:
    """Hash parameters: `per_size` hashes for each n-gram length from 2 to `n`.

    A hash is the XOR of each token's product with the multiplier of its place, modulo the size of a part of the table,
    plus that part's offset. N-grams start anew after the token `end`; `other` replaces inputs that are not tokens.
    """

    n: int
    per_size: int
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int
    other: int

    @classmethod
    def read(cls, keys: Keys) -> Hashes:
        """Read the `ple.…` keys. Raises GgufError or InvalidModel."""
        n, per_size = keys.int_("ple.ngram_size"), keys.int_("ple.heads_per_ngram")
        multipliers, offsets, sizes = (
            keys.metadata.ints(keys.name(f"ple.{name}"))
            for name in ("layer_multipliers", "head_offsets", "head_vocab_sizes")
        )
        n_hashes, end = (n - 1) * per_size, keys.int_("ple.eos_token_id")
        if len(multipliers) < n or min(len(offsets), len(sizes)) < n_hashes:
            raise InvalidModel(
                f"metadata keys '{keys.name('ple.layer_multipliers')}', '{keys.name('ple.head_offsets')}' and "
                f"'{keys.name('ple.head_vocab_sizes')}' have {len(multipliers)}, {len(offsets)} and {len(sizes)} "
                f"numbers; {n}, {n_hashes} and {n_hashes} are expected"
            )
        if min(multipliers) < 0:
            raise InvalidModel(
                f"metadata key '{keys.name('ple.layer_multipliers')}' has {min(multipliers)}; unsigned numbers are "
                "expected"
            )
        for offset, size in zip(offsets, sizes, strict=False):
            if not 0 < size < 2**31 or not 0 <= offset < 2**31 - size:
                raise InvalidModel(
                    f"metadata key '{keys.name('ple.head_offsets')}' has {offset} for a part of {size} rows; numbers "
                    "of rows are I32"
                )
        other = keys.int_("ple.image_token_id", 0) or end
        return cls(n, per_size, multipliers[:n], offsets[:n_hashes], sizes[:n_hashes], end, other)

    @property
    def n_rows(self) -> int:
        """Return the number of table rows that hashes can address."""
        return max(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class NgramRows(Input):
    """I32 [n_hashes × n_tokens]: the table rows of each token and its predecessors."""

    def __init__(self, hashes: Hashes, n_tokens: int) -> None:
        super().__init__("ngram_rows", TensorType.I32, len(hashes.sizes) * n_tokens)
        self._hashes = hashes

    def fill(self, batch: Batch) -> Bytes:
        h, n = self._hashes, batch.n_tokens
        tokens = np.full(n, h.other) if batch.tokens is None else batch.tokens
        before = np.full((n, h.n - 1), NO_TOKEN) if batch.before is None else batch.before
        found = np.zeros((self.ne[0] // len(h.sizes), len(h.sizes)), np.int32)
        mixed = tokens.astype(np.uint64) * np.uint64(h.multipliers[0])
        ended = np.zeros(n, np.bool_)
        for i in range(1, h.n):
            token = before[:, -i]
            token = np.where(token == NOT_TEXT, h.other, token)
            ended |= (token == NO_TOKEN) | (token == h.end)
            mixed = mixed ^ np.where(ended, h.end, token).astype(np.uint64) * np.uint64(h.multipliers[i])
            for j in range((i - 1) * h.per_size, i * h.per_size):
                found[:n, j] = mixed % np.uint64(h.sizes[j]) + np.uint64(h.offsets[j])
        return found.reshape(-1).view(np.uint8)


class NgramLayer(NamedTuple):
    """Adds n-gram embeddings to the streams of a layer.

    Values are gated by the similarity of keys and streams. A convolution over gated values `hashes.n` tokens apart is
    added; its inputs are state `number` of the layer.
    """

    hashes: Hashes
    table: Tensor
    key: Linear
    value: Linear
    norm_key: StreamNorm
    norm_query: StreamNorm
    norm_conv: StreamNorm
    kernel: Tensor
    number: int

    @classmethod
    def take(
        cls, w: RoleWeights, table: Tensor, hashes: Hashes, n_embd: int, n: int, kernel: int, number: int
    ) -> NgramLayer:
        """Take `ple_key`, `ple_value`, `ple_norm_key`, `ple_norm_query`, `ple_norm_conv` and `ple_conv1d`.

        Raises InvalidModel.
        """
        width = table.ne[0] * len(hashes.sizes)
        key, query, conv = (StreamNorm.take(w, f"ple_norm_{name}", n_embd, n) for name in ("key", "query", "conv"))
        return cls(
            hashes=hashes,
            table=table,
            key=w.linear("ple_key", width, n * n_embd),
            value=w.linear("ple_value", width, n_embd),
            norm_key=key,
            norm_query=query,
            norm_conv=conv,
            kernel=w.require("ple_conv1d.weight", kernel, n * n_embd),
            number=number,
        )

    def width(self) -> int:
        """Return the width of the state."""
        return (self.kernel.ne[0] - 1) * self.hashes.n * self.kernel.ne[1]

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Apply to streams [n_embd, n, n_tokens]."""
        n_embd, n, n_tokens, _ = x.ne
        rows = step.input(NgramRows(self.hashes, step.shape.n_tokens))
        found = step.get_rows(self.table, rows, "ple_rows")
        found = reshape(found, self.table.ne[0] * len(self.hashes.sizes), n_tokens, name="ple_embd")
        key = reshape(self.key(step, found, f"ple_key-{layer}"), n_embd, n, n_tokens)
        near = sum_rows(mul(self.norm_key(step, key), self.norm_query(step, x)))
        near = scale(near, 1.0 / sqrt(n_embd))
        strength = root(clamp(unary(near, UnaryOp.ABS), 1e-6, inf))
        gate = sigmoid(mul(unary(near, UnaryOp.SGN), strength), f"ple_gate-{layer}")
        value = reshape(self.value(step, found, f"ple_value-{layer}"), n_embd, 1, n_tokens)
        gated = mul(repeat(value, n_embd, n, n_tokens, 1), gate, f"ple_gated_value-{layer}")
        mixed = self._convolve(step, layer, self.norm_conv(step, gated))
        return add(x, add(gated, mixed), f"ple-{layer}")

    def _convolve(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        n_embd, n, n_tokens, _ = x.ne
        channels, n_taps, dilation, n_seqs = n * n_embd, self.kernel.ne[0], self.hashes.n, step.n_seqs
        each, n_before = n_tokens // n_seqs, (n_taps - 1) * dilation
        x = step.graph.expand(reshape(x, channels, each, n_seqs))
        before = reshape(step.read_states(layer, self.number), n_before, channels, n_seqs)
        both = concat(before, cont(transpose(x)), 0, f"ple_conv_input-{layer}")
        last = view_3d(both, n_before, channels, n_seqs, both.nb[1], both.nb[2], each * both.nb[0])
        step.store_states(layer, self.number, reshape(cont(last), n_before * channels, n_seqs))
        total = None
        for i in range(n_taps):
            seen = view_3d(both, each, channels, n_seqs, both.nb[1], both.nb[2], i * dilation * both.nb[0])
            k = self.kernel
            tap = cast(cont(view_2d(k, 1, channels, k.nb[1], i * k.nb[0])), TensorType.F32)
            part = mul(cont(seen), tap)
            total = part if total is None else add(total, part)
        assert total is not None
        return reshape(cont(transpose(silu(total))), n_embd, n, n_tokens, name=f"ple_conv_out-{layer}")
