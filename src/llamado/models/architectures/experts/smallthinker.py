"""The smallthinker architecture: SmallThinker 4B-A0.6B, 21B-A3B."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add
from llamado.ggml.ops import GluOp, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, Rope, RouterKind, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForwardKind

_WINDOW, _PERIOD = 4096, 4


class SmallThinkerModel(Decoder):
    """ReGLU experts, selected by the layer's input before attention (arXiv 2507.20984).

    In the larger model, three of four layers have rotary positions and a sliding window of 4096 tokens; the size in the
    file is ignored.
    """

    rope_mode = RopeMode.NEOX
    feed_forward = FeedForwardKind(GluOp.REGLU)
    router = RouterKind(from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        assert hp.experts is not None
        hp = replace(hp, experts=replace(hp.experts, normalized=True, scale=1.0))
        hp = with_window(keys, hp, _PERIOD, rope=swa_rope(keys, hp.rope), optional=True, dense_first=True)
        return replace(hp, n_swa=_WINDOW) if hp.n_swa else hp

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope_of(layer) if not self.hparams.n_swa or layer % _PERIOD else None

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        assert w.attn_norm is not None and w.ffn_norm is not None and isinstance(w.feed_forward, Mixture)
        attended = w.attention(step, i, w.attn_norm(step, x, f"attn_norm-{i}"))
        if attended is None:
            return None
        attended, x = step.keep_outputs(i, attended, x)
        y = add(attended, x, f"ffn_inp-{i}")
        h = w.feed_forward(step, i, w.ffn_norm(step, y, f"ffn_norm-{i}"), router_input=x)
        return add(h, y, f"l_out-{i}")
