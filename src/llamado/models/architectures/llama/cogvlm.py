"""The cogvlm architecture: the text model of CogVLM."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, Rope
from llamado.models.keys import Keys
from llamado.models.weights import RoleWeights


class CogVlmModel(Decoder):
    """Llama with a fixed rotary embedding, not read from the file; the matrices for images are ignored."""

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        plain = Rope(hp.head_dim_k, self.rope_mode, 0, 10000.0, 1.0, 0.0, 1.0)
        return replace(hp, rope=plain)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        w.ignore(*(f"vis_{name}.weight" for name in ("attn_qkv", "attn_output", "gate", "down", "up")))
        return super()._take_layer(w, layer)
