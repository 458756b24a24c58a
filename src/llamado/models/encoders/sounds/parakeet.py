"""Encoder of sounds of Nemotron Omni: Parakeet's FastConformer (arXiv 2305.05084; clip.cpp, models/parakeet.cpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, div, mul, relu, rms_norm, sqr, sqrt, sub
from llamado.media.chunks import EncoderInput
from llamado.media.mel import parakeet_bank, parakeet_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.sounds.conformer import ConformerLayer, ConvModule, Subsampler, Window
from llamado.models.encoders.sounds.convolution import PATCHES, Axis, eighth, patches
from llamado.models.encoders.sounds.encoder import SoundEncoder
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.weights import RoleWeights, Weights

_WINDOW, _FREQUENCIES = 400, 257
_PROJECTOR_EPS = 1e-6
_MOST_FULL, _REACH = 8192, 128
"""Longer sounds attend to frames in reach only."""


class ParakeetEncoder(SoundEncoder):
    """A token for each 80 ms. Window and mel filters of the spectrogram are those of the file."""

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.n_mel = keys.int_("num_mel_bins")
        self.norm_eps = keys.float_("attention.layer_norm_epsilon")
        self.width = n = keys.int_("embedding_length")
        self.n_head = n_head = keys.int_("attention.head_count")
        if n % n_head or n % 2:
            raise InvalidModel(f"{n_head} heads do not share a width of {n} evenly")
        if keys.int_("subsampling_factor") != 8:
            raise UnsupportedModel(f"'{keys.name('subsampling_factor')}' must be 8")
        n_kernel = keys.int_("conv_kernel_size")
        if n_kernel % 2 == 0:
            raise InvalidModel(f"'{keys.name('conv_kernel_size')}' is {n_kernel}; an odd number is expected")
        self._subsampling = Subsampler.take(w, self.n_mel, n)
        self._convs = [
            _BatchNormConv(weights.layer(i, stack="a.blk"), n, n_kernel) for i in range(keys.int_("block_count"))
        ]
        self._layers = [
            ConformerLayer.take(weights.layer(i, stack="a.blk"), n, n_head, conv.module)
            for i, conv in enumerate(self._convs)
        ]
        self._norm = w.require("mm.a.norm_pre.weight", n)
        n_hidden, self.n_embd = (w.ne(f"mm.a.mlp.{i}.weight")[1] for i in (1, 2))
        self._up, self._down = w.linear("mm.a.mlp.1", n, n_hidden), w.linear("mm.a.mlp.2", n_hidden, self.n_embd)
        window, filters = weights.values("a.window"), weights.values("a.mel_filters")
        if window.size != _WINDOW or filters.size != self.n_mel * _FREQUENCIES:
            raise InvalidModel(f"'a.window' and 'a.mel_filters' have {window.size} and {filters.size} numbers")
        if not (np.isfinite(window).all() and np.isfinite(filters).all()):
            raise InvalidModel("'a.window' or 'a.mel_filters' has values that are not finite")
        self._bank = parakeet_bank(window, filters.reshape(self.n_mel, _FREQUENCIES))

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [parakeet_mel(samples, self._bank)]

    def n_tokens(self, n_frames: int) -> int:
        return eighth(n_frames)

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        window = self._window(eighth(len(frames)))
        return EncoderInput((len(frames),), {PATCHES: patches(frames, Axis.BAND), **window.arrays(self.width)})

    def _window(self, n: int) -> Window:
        return Window.of(n, self.n_head, _REACH if n > _MOST_FULL else None)

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(self.norm_eps)
        x = self._subsampling(step, self.n_mel, n_frames)
        window = self._window(x.ne[1])
        for i, layer in enumerate(self._layers):
            x = layer._replace(conv=self._convs[i].folded())(step, x, window, str(i))
        x = mul(rms_norm(x, _PROJECTOR_EPS), self._norm)
        x = sqr(relu(self._up(step, x, "mlp_up")))
        step.graph.output(EMBEDDINGS, self._down(step, x, "mlp_down"))
        return step.graph


class _BatchNormConv:
    """Convolution of a layer with mean and variance of its batch norm."""

    def __init__(self, w: RoleWeights, n: int, n_kernel: int) -> None:
        """Take the weights. Raises InvalidModel."""
        self.module = ConvModule(
            w.linear("conv_pw1", n, 2 * n),
            w.require("conv_dw.weight", n_kernel, n),
            None,
            w.require("conv_norm.weight", n),
            w.require("conv_norm.bias", n),
            None,
            w.linear("conv_pw2", n, n),
            n_kernel // 2,
            n_kernel // 2,
        )
        self._mean, self._variance = w.require("conv_norm_mean", n), w.require("conv_norm_var", n)

    def folded(self) -> ConvModule:
        """Return the convolution with the norm as a factor and a shift, in a graph."""
        weight, bias = self.module.scale, self.module.shift
        assert weight is not None and bias is not None
        factor = div(weight, sqrt(self._variance))
        return self.module._replace(scale=factor, shift=sub(bias, mul(self._mean, factor)))
