"""Encoder of sounds of LFM2-Audio: a FastConformer and two matrices (clip.cpp, models/conformer.cpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, unary
from llamado.ggml.ops import UnaryOp
from llamado.media.chunks import EncoderInput
from llamado.media.errors import MediaError
from llamado.media.mel import conformer_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.sounds.conformer import (
    ConformerLayer,
    ConvModule,
    Subsampler,
    Window,
)
from llamado.models.encoders.sounds.convolution import PATCHES, Axis, bias_of, eighth, patches
from llamado.models.encoders.sounds.encoder import SoundEncoder
from llamado.models.errors import InvalidModel
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights

_EPS = 1e-5
_KERNEL = 9


class Lfm2AudioEncoder(SoundEncoder):
    """A token for each 80 ms; all frames see all."""

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.n_mel = keys.int_("num_mel_bins")
        self.width = n = keys.int_("embedding_length")
        self.n_head = n_head = keys.int_("attention.head_count")
        if n % n_head or n % 2:
            raise InvalidModel(f"{n_head} heads do not share a width of {n} evenly")
        self._subsampling = Subsampler.take(w, self.n_mel, n)
        self._layers = [
            ConformerLayer.take(layer, n, n_head, _conv(layer, n))
            for layer in (weights.layer(i, stack="a.blk") for i in range(keys.int_("block_count")))
        ]
        self.most_frames = 2 * w.ne("a.position_embd.weight")[1] + 1
        self._norm = LayerNorm.take(w, "mm.a.mlp.0", n)
        n_hidden, self.n_embd = (w.ne(f"mm.a.mlp.{i}.weight")[1] for i in (1, 3))
        self._up, self._down = w.linear("mm.a.mlp.1", n, n_hidden), w.linear("mm.a.mlp.3", n_hidden, self.n_embd)

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        found = conformer_mel(samples, self.n_mel)
        if len(found) > self.most_frames:
            raise MediaError(
                f"the sound is too long: it has {len(found):,} frames of 10 ms; this model takes {self.most_frames:,}"
            )
        return [found]

    def n_tokens(self, n_frames: int) -> int:
        return eighth(n_frames)

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        window = Window.of(eighth(len(frames)), self.n_head)
        return EncoderInput((len(frames),), {PATCHES: patches(frames, Axis.BAND), **window.arrays(self.width)})

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(_EPS)
        x = self._subsampling(step, self.n_mel, n_frames)
        window = Window.of(x.ne[1], self.n_head)
        for i, layer in enumerate(self._layers):
            x = layer(step, x, window, str(i))
        x = unary(self._up(step, self._norm(step, x, "norm"), "mlp_up"), UnaryOp.GELU_ERF)
        step.graph.output(EMBEDDINGS, self._down(step, x, "mlp_down"))
        return step.graph


def _conv(w: RoleWeights, n: int) -> ConvModule:
    """Take the convolution of a layer; the batch norm is folded into a factor and a shift. Raises InvalidModel."""
    return ConvModule(
        w.linear("conv_pw1", n, 2 * n),
        w.require("conv_dw.weight", _KERNEL, n),
        bias_of(w, "conv_dw", n),
        w.require("conv_norm.weight", n),
        w.require("conv_norm.bias", n),
        None,
        w.linear("conv_pw2", n, n),
        _KERNEL // 2,
        _KERNEL // 2,
    )
