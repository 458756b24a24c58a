"""Encoder of sounds of dots3-note: convolutions and layers with rotary positions (clip.cpp, models/dots3note.cpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, mul, norm, rope_ext, unary
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput
from llamado.media.mel import dots3note_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind
from llamado.models.encoders.sounds.convolution import PATCHES, Axis, ConvStem, eighth, patches
from llamado.models.encoders.sounds.encoder import SoundEncoder
from llamado.models.weights import Weights

POSITIONS = "positions"
"""Name of the input: the number of each token."""

_THETA = 10000.0
_ADAPTER_EPS = 1e-5


class Dots3NoteEncoder(SoundEncoder):
    """A token for each 80 ms, in pieces of 60 seconds."""

    begin, end = "<|audio_comp_start|>", "<|audio_comp_end|>"

    def _take_weights(self, weights: Weights) -> None:
        w = weights.shared
        self.n_mel = self.keys.int_("num_mel_bins")
        self._transformer = EncoderTransformer(self.keys, weights, prefix="a", norm=NormKind.RMS)
        n = self._transformer.n_embd
        self._stem = ConvStem.take(w, self.n_mel, n)
        self._norm = w.require("mm.a.norm_pre.weight", n), w.require("mm.a.norm_pre.bias", n)
        n_hidden, self.n_embd = (w.ne(f"mm.a.mlp.{i}.weight")[1] for i in (1, 3))
        self._up, self._down = w.linear("mm.a.mlp.1", n, n_hidden), w.linear("mm.a.mlp.3", n_hidden, self.n_embd)

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return dots3note_mel(samples, self.n_mel)

    def n_tokens(self, n_frames: int) -> int:
        return eighth(n_frames)

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        positions = np.arange(eighth(len(frames)), dtype=np.int32)
        return EncoderInput((len(frames),), {PATCHES: patches(frames, Axis.TIME), POSITIONS: positions})

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(self._transformer.norm_eps)
        x = self._stem(step, self.n_mel, n_frames)
        positions = step.input(POSITIONS, x.ne[1], type=TensorType.I32)
        n_rotated = self._transformer.head_dim // 2

        def rotate(rows: Tensor) -> Tensor:
            return rope_ext(
                rows, positions, None, n_rotated, RopeMode.NEOX, 0, _THETA, 1.0, 0.0, 1.0, 0.0, 0.0, "rotated"
            )

        x = self._transformer(step, x, rotate)
        weight, bias = self._norm
        x = add(mul(norm(x, _ADAPTER_EPS), weight), bias)
        x = unary(self._up(step, x, "mlp_up"), UnaryOp.GELU_ERF)
        step.graph.output(EMBEDDINGS, self._down(step, x, "mlp_down"))
        return step.graph
