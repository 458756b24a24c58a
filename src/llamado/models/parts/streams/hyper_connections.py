"""Manifold-constrained hyper-connections (arXiv 2409.19606, arXiv 2512.24880).

Each block reads a weighted sum of several residual streams, and adds its output to each stream with a weight of its
own. The streams mix by doubly stochastic matrices: rows and columns sum to one.
"""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import (
    add,
    add_to_streams,
    cont,
    mix_streams,
    mul,
    read_streams,
    reshape,
    rms_norm,
    scale,
    sigmoid,
    view_1d,
    view_2d,
)
from llamado.ggml.tensor import Tensor
from llamado.models.errors import UnsupportedModel
from llamado.models.forward import Pass
from llamado.models.keys import Keys
from llamado.models.weights import RoleWeights

N_STREAMS = 4
"""Number of streams that `mix_streams` supports."""


class ConnectionSizes(NamedTuple):
    """Number of streams, Sinkhorn rounds, and the epsilon added to their sums."""

    n: int
    n_rounds: int
    eps: float

    @classmethod
    def read(cls, keys: Keys) -> ConnectionSizes:
        """Read the sizes. Raises GgufError, InvalidModel or UnsupportedModel."""
        n, n_rounds = keys.int_("hyper_connection.count"), keys.int_("hyper_connection.sinkhorn_iterations")
        if n != N_STREAMS:
            raise UnsupportedModel(
                f"metadata key '{keys.name('hyper_connection.count')}' is {n}; only {N_STREAMS} streams are supported"
            )
        return cls(n, n_rounds, keys.float_("hyper_connection.epsilon"))


class StreamState(NamedTuple):
    """Stream state while a block runs.

    Streams [n_embd, n, n_tokens], the weights of the block's output [n, n_tokens], and the mixing matrix [to, from,
    n_tokens].
    """

    streams: Tensor
    added: Tensor
    mixing: Tensor

    def keep_output_rows(self, step: Pass, layer: int) -> StreamState:
        """In the last layer, keep only the output rows."""
        rows = (reshape(t, t.ne[0] * t.ne[1], t.ne[2]) for t in (self.streams, self.mixing))
        streams, mixing, added = step.keep_outputs(layer, *rows, self.added)
        n = added.ne[1]
        return StreamState(reshape(streams, *self.streams.ne[:2], n), added, reshape(mixing, *self.mixing.ne[:2], n))


class HyperConnections(NamedTuple):
    """Read weights, output weights and mixing matrix of a block, projected from all normed streams by one matrix.

    `factor` scales each of these three; `shift` is added to all.
    """

    sizes: ConnectionSizes
    matrix: Tensor
    factor: Tensor
    shift: Tensor

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_embd: int, sizes: ConnectionSizes) -> HyperConnections:
        """Take `name_fn`, `name_scale` and `name_base`. Raises InvalidModel."""
        n = sizes.n
        return cls(
            sizes,
            w.require(f"{name}_fn.weight", n * n_embd, (2 + n) * n),
            w.require(f"{name}_scale.weight", 3),
            w.require(f"{name}_base.weight", (2 + n) * n),
        )

    def read(self, step: Pass, x: Tensor, name: str) -> tuple[Tensor, StreamState]:
        """Return a block's input [n_embd, n_tokens] for streams [n_embd, n, n_tokens], and the stream state."""
        (n_embd, n, n_tokens, _), eps = x.ne, self.sizes.eps
        row = rms_norm(reshape(x, n * n_embd, n_tokens), step.norm_eps)
        mixes = step.mul_mat(self.matrix, row, f"{name}_mixes")
        read = scale(sigmoid(self._part(mixes, 0)), 1.0, eps, f"{name}_pre")
        added = scale(sigmoid(self._part(mixes, 1)), 2.0, name=f"{name}_post")
        mixing = mix_streams(mixes, self.factor, self.shift, eps, self.sizes.n_rounds, f"{name}_comb")
        return read_streams(x, read, f"{name}_in"), StreamState(x, added, step.graph.expand(mixing))

    def _part(self, mixes: Tensor, i: int) -> Tensor:
        n, size = self.sizes.n, mixes.nb[0]
        part = cont(view_2d(mixes, n, mixes.ne[1], mixes.nb[1], i * n * size))
        return add(mul(part, view_1d(self.factor, 1, i * size)), view_1d(self.shift, n, i * n * size))


def add_output(made: Tensor, held: StreamState, name: str) -> Tensor:
    """Return the streams after a block has output `made` [n_embd, n_tokens]."""
    return add_to_streams(made, held.streams, held.added, held.mixing, name)
