"""The apertus architecture: Apertus 8B, 70B."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import xielu
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class ApertusModel(Qwen3Model):
    """Qwen3 with ungated networks and the xIELU activation, with parameters per layer (arXiv 2509.14233)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        names = ("alpha_n", "alpha_p", "beta", "eps")
        rows = (keys.floats_per_layer(f"xielu.{name}", hp.n_layer) for name in names)
        self._curves = list(zip(*rows, strict=True))
        return replace(hp, attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, n_ff = self.hparams.n_embd, self.hparams.n_ff[layer]
        return _XieluFeedForward(
            w.linear("ffn_up", n_embd, n_ff), w.linear("ffn_down", n_ff, n_embd), *self._curves[layer]
        )


class _XieluFeedForward(NamedTuple):
    """down(xIELU(up x))."""

    up: Linear
    down: Linear
    alpha_n: float
    alpha_p: float
    beta: float
    eps: float

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        h = xielu(self.up(step, x, f"ffn_up-{layer}"), *self[2:], name=f"ffn_act-{layer}")
        return self.down(step, h, f"ffn_out-{layer}")
