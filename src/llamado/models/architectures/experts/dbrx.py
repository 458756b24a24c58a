"""The dbrx architecture: DBRX."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import LayerNormDecoder, NormNames
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class DbrxModel(LayerNormDecoder):
    """Layer norms, clamped queries, keys and values, and a mixture of experts in each layer."""

    rope_mode = RopeMode.NEOX
    has_norm_bias = None
    norms = NormNames(ffn="attn_output_norm")  # in the file the "attention output norm"
    router = RouterKind(normalized=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(super()._read_hparams(keys, n_vocab), clamp_kqv=keys.float_("attention.clamp_kqv"))
