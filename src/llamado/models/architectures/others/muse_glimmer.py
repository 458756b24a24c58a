"""The muse-glimmer architecture: Muse Glimmer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import mul, rms_norm
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, Layer
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, Heads, OutputGate
from llamado.models.parts.norms import RmsNorm, UnitNorm
from llamado.models.weights import RoleWeights


class MuseGlimmerModel(Decoder):
    """Normed embeddings, gated attention output, and post-norms of both blocks.

    Every fourth layer has full attention without positions; the others have a sliding window and rotary positions.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 4),
            rope_swa=swa_rope(keys, hp.rope),
            logit_scale=keys.float_("logit_scale") or 1.0,
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
        )

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        n_embd = self.hparams.n_embd
        return (
            super()
            ._take_layer(w, layer)
            ._replace(
                attn_post_norm=_PostNorm(w.require("post_attention_norm.weight", n_embd)),
                ffn_post_norm=_PostNorm(w.require("post_ffw_norm.weight", n_embd)),
            )
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp, attention = self.hparams, super()._take_attention(w, layer)
        return replace(
            attention,
            rope=attention.rope if hp.is_swa(layer) else None,
            factors=None,
            q_norm=RmsNorm.take(w, "attn_q_norm", hp.head_dim_k),
            k_norm=RmsNorm.take(w, "attn_k_norm", hp.head_dim_k),
            gate=OutputGate.take(w, hp.n_embd, Heads.of(hp, layer)),
        )

    def _embed(self, step: Pass) -> Tensor:
        return UnitNorm()(step, super()._embed(step), "inp_norm")


class _PostNorm(NamedTuple):
    """An RMS norm with a fixed epsilon."""

    weight: Tensor

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return mul(rms_norm(x, 1e-8), self.weight, name)
