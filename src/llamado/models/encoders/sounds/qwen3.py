"""Encoder of Qwen3-ASR and Qwen3-Omni (arXiv 2509.17765): convolutions in chunks of a second, then attention of eight
(clip.cpp, models/qwen3a.cpp).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, reshape, unary
from llamado.ggml.ops import UnaryOp
from llamado.media.chunks import EncoderInput
from llamado.media.mel import QWEN3_CHUNK, qwen3_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer
from llamado.models.encoders.sounds.convolution import PATCHES, Axis, ConvStem, eighth, patches
from llamado.models.encoders.sounds.encoder import SoundEncoder, rows_of
from llamado.models.weights import Weights

_CHUNK_TOKENS = eighth(QWEN3_CHUNK)


class Qwen3AudioEncoder(SoundEncoder):
    """Three convolutions of 3 × 3 that halve frames and bands, layers, and two matrices."""

    begin, end = "<|audio_start|>", "<|audio_end|>"

    def _take_weights(self, weights: Weights) -> None:
        w = weights.shared
        self.n_mel = self.keys.int_("num_mel_bins")
        self._transformer = EncoderTransformer(self.keys, weights, prefix="a", activation=Activation.GELU_ERF)
        n = self._transformer.n_embd
        self._stem = ConvStem.take(w, self.n_mel, n)
        n_positions = max(_CHUNK_TOKENS, w.ne("a.position_embd.weight")[1])
        self._positions = w.require("a.position_embd.weight", n, n_positions)
        n_hidden, self.n_embd = (w.ne(f"mm.a.mlp.{i}.weight")[1] for i in (1, 2))
        self._up, self._down = w.linear("mm.a.mlp.1", n, n_hidden), w.linear("mm.a.mlp.2", n_hidden, self.n_embd)

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return qwen3_mel(samples, self.n_mel)

    def n_tokens(self, n_frames: int) -> int:
        return n_frames // QWEN3_CHUNK * _CHUNK_TOKENS

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        return EncoderInput((len(frames),), {PATCHES: patches(frames, Axis.TIME, QWEN3_CHUNK)})

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        n_chunks = n_frames // QWEN3_CHUNK
        step = EncoderPass(self._transformer.norm_eps)
        x = self._stem(step, self.n_mel, QWEN3_CHUNK, n_chunks)
        # Positions begin anew in each chunk.
        x = add(reshape(x, x.ne[0], _CHUNK_TOKENS, n_chunks), rows_of(self._positions, _CHUNK_TOKENS), "pos_embed")
        x = self._transformer(step, reshape(x, x.ne[0], _CHUNK_TOKENS * n_chunks))
        x = unary(self._up(step, x, "mlp_up"), UnaryOp.GELU_ERF)
        step.graph.output(EMBEDDINGS, self._down(step, x, "mlp_down"))
        return step.graph
