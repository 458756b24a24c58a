"""The laguna architecture: Laguna XS and M."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import UnaryOp
from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.hparams import (
    HyperParameters,
    Rope,
    read_swa_layers,
    rope_dims,
    swa_rope,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, Heads, OutputGate
from llamado.models.weights import RoleWeights


class LagunaModel(Dots1Model):
    """dots.llm1 with a gated attention output.

    If the file gives a sliding window, every fourth layer has full attention, and only those use the extended context
    rope.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        n = rope_dims(keys, "rope.dimension_count_swa", hp.rope.n_dims, hp.head_dim_k)
        base = swa_rope(keys, hp.rope).freq_base
        plain = Rope(n, self.rope_mode, hp.n_ctx_train, base, 1.0, 0.0, 1.0)
        layers = read_swa_layers(keys, hp.n_layer, 4, dense_first=True)
        return replace(hp, n_swa=n_swa, swa_layers=layers, rope_swa=plain)

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp = self.hparams
        gate = OutputGate.take(w, hp.n_embd, Heads.of(hp, layer), UnaryOp.SOFTPLUS)
        return replace(super()._take_attention(w, layer), gate=gate)
