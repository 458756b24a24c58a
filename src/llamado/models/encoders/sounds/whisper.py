"""Whisper encoders (arXiv 2212.04356) with the projectors of several models (clip.cpp, models/whisper-enc.cpp)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    Graph,
    add,
    concat,
    mul,
    reshape,
    rms_norm,
    scale,
    silu,
    swiglu_split,
    unary,
    view_1d,
    view_2d,
)
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.media.mel import WHISPER_FRAMES, whisper_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer
from llamado.models.encoders.sounds.convolution import Conv1d
from llamado.models.encoders.sounds.encoder import SoundEncoder, rows_of
from llamado.models.errors import InvalidModel
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights

_ULTRAVOX_EPS = 1e-6


class WhisperEncoder(SoundEncoder):
    """Whisper's encoder: pieces of 30 seconds, two convolutions, layers; and a projector.

    `pools`: neighboring positions are averaged behind the layers. `stack`: positions whose hidden states are one row of
    the projector.
    """

    pools: ClassVar[bool] = False
    stacks: ClassVar[bool] = True

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.n_mel = keys.int_("num_mel_bins")
        self._transformer = EncoderTransformer(keys, weights, prefix="a", activation=Activation.GELU_ERF)
        n = self._transformer.n_embd
        # Positions are averaged between the layers and the norm behind them.
        self._norm, self._transformer.post_norm = self._transformer.post_norm, None
        self._conv1 = Conv1d.take(w, "a.conv1d.1", self.n_mel, n)
        self._conv2 = Conv1d.take(w, "a.conv1d.2", n, n, stride=2)
        n_positions = w.ne("a.position_embd.weight")[1]
        if n_positions < WHISPER_FRAMES // 2:
            raise InvalidModel(f"'a.position_embd.weight' has {n_positions} positions; at least 1500 are expected")
        self._positions = w.require("a.position_embd.weight", n, n_positions)
        self.stack = keys.int_("projector.stack_factor") if self.stacks else 1
        self._take_projector(w, n * self.stack)

    @abstractmethod
    def _take_projector(self, w: RoleWeights, n_in: int) -> None:
        """Take the weights of the projector, whose rows are of `n_in`, and set `n_embd`. Raises InvalidModel."""

    @abstractmethod
    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the embeddings: F32 [n_embd, n_tokens], of hidden states [n_in, n_tokens]."""

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return whisper_mel(samples, self.n_mel)

    def n_tokens(self, n_frames: int) -> int:
        return n_frames // 2 // (2 if self.pools else 1) // self.stack

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(self._transformer.norm_eps)
        x = self.input(step, self.n_mel, n_frames)
        for i, conv in enumerate((self._conv1, self._conv2), 1):
            x = unary(conv(step, x, f"conv{i}"), UnaryOp.GELU_ERF)
        x = self._transformer(step, add(x, rows_of(self._positions, x.ne[1]), "pos_embed"))
        if self.pools:
            x = averaged_pairs(x)
        if self._norm is not None:
            x = self._norm(step, x, "post_ln")
        step.graph.output(EMBEDDINGS, self._project(step, x))
        return step.graph

    def _stacked(self, x: Tensor) -> Tensor:
        """Return rows of `stack` positions; positions that do not fill one are left out."""
        n, n_rows = x.ne[0] * self.stack, x.ne[1] // self.stack
        return reshape(view_1d(x, n * n_rows), n, n_rows)


def averaged_pairs(x: Tensor) -> Tensor:
    """Return the mean of each two neighboring rows; a last one alone is left out."""
    n = x.ne[1] // 2
    first, second = (view_2d(x, x.ne[0], n, 2 * x.nb[1], i * x.nb[1]) for i in (0, 1))
    return scale(add(first, second), 0.5)


class _TwoLayers(WhisperEncoder):
    """Projector of two matrices with GELU between them."""

    _activation: ClassVar[UnaryOp] = UnaryOp.GELU_ERF

    def _take_projector(self, w: RoleWeights, n_in: int) -> None:
        n, self.n_embd = w.ne("mm.a.mlp.1.weight")[1], w.ne("mm.a.mlp.2.weight")[1]
        self._up, self._down = w.linear("mm.a.mlp.1", n_in, n), w.linear("mm.a.mlp.2", n, self.n_embd)

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = self._up(step, self._stacked(x), "mlp_up")
        return self._down(step, unary(x, self._activation), "mlp_down")


class VoxtralEncoder(_TwoLayers):
    """Voxtral: pairs of positions averaged, then stacked."""

    begin = "[BEGIN_AUDIO]"
    pools = True


class MusicFlamingoEncoder(_TwoLayers):
    """Music Flamingo and Audio Flamingo 3: pairs of positions averaged."""

    begin = "<sound>"
    pools = True
    stacks = False


class Qwen2AudioEncoder(WhisperEncoder):
    """Qwen2-Audio and Qwen2.5-Omni: pairs of positions averaged; one matrix."""

    begin, end = "<|audio_bos|>", "<|audio_eos|>"
    pools = True
    stacks = False

    def _take_projector(self, w: RoleWeights, n_in: int) -> None:
        self.n_embd = w.ne("mm.a.fc.weight")[1]
        self._out = w.linear("mm.a.fc", n_in, self.n_embd)

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return self._out(step, x, "fc")


class UltravoxEncoder(WhisperEncoder):
    """Ultravox: positions stacked; two matrices with SwiGLU between them and RMS norms before each."""

    def _take_projector(self, w: RoleWeights, n_in: int) -> None:
        n, self.n_embd = w.ne("mm.a.mlp.1.weight")[1], w.ne("mm.a.mlp.2.weight")[1]
        self._up, self._down = w.linear("mm.a.mlp.1", n_in, n), w.linear("mm.a.mlp.2", n // 2, self.n_embd)
        self._pre_norm = w.require("mm.a.norm_pre.weight", n_in)
        self._mid_norm = w.require("mm.a.norm_mid.weight", n // 2)

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = mul(rms_norm(self._stacked(x), _ULTRAVOX_EPS), self._pre_norm)
        # The second half is the gate.
        rows = self._up(step, x, "mlp_up")
        n = rows.ne[0] // 2
        up, gate = (view_2d(rows, n, rows.ne[1], rows.nb[1], 4 * i * n) for i in (0, 1))
        x = swiglu_split(gate, up)
        return self._down(step, mul(rms_norm(x, _ULTRAVOX_EPS), self._mid_norm), "mlp_down")


class MeralionEncoder(WhisperEncoder):
    """MERaLiON: positions stacked, a layer norm, and four matrices, the middle two of which are gate and values."""

    def _take_projector(self, w: RoleWeights, n_in: int) -> None:
        n, n_gated, self.n_embd = (w.ne(f"mm.a.mlp.{i}.weight")[1] for i in (0, 1, 3))
        self._pre_norm = LayerNorm.take(w, "mm.a.norm_pre", n_in)
        self._compress = w.linear("mm.a.mlp.0", n_in, n)
        self._gate, self._values = (w.linear(f"mm.a.mlp.{i}", n, n_gated) for i in (1, 2))
        self._out = w.linear("mm.a.mlp.3", n_gated, self.n_embd)

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = self._pre_norm(step, self._stacked(x), "norm_pre")
        x = silu(self._compress(step, x, "compress"))
        gate = silu(self._gate(step, x, "gate"))
        return self._out(step, mul(gate, self._values(step, x, "values")), "out")


class GlmEncoder(_TwoLayers):
    """GLM-ASR: a layer norm, positions stacked, two matrices; embeddings of the file begin and end each piece."""

    def _take_projector(self, w: RoleWeights, n_in: int) -> None:
        super()._take_projector(w, n_in)
        self._pre_norm = LayerNorm.take(w, "mm.a.norm_pre", n_in // self.stack)
        self._begin, self._end = (w.require(f"v.{which}", self.n_embd) for which in ("boi", "eoi"))

    def n_tokens(self, n_frames: int) -> int:
        return super().n_tokens(n_frames) + 2

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = super()._project(step, self._pre_norm(step, x, "norm_pre"))
        return concat(concat(self._begin, x, 1), self._end, 1)
