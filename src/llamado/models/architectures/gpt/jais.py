"""The jais architecture: Jais 13B, 30B."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import LayerNormDecoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys


class JaisModel(LayerNormDecoder):
    """Layer norms, SwiGLU networks with biases, and ALiBi (arXiv 2308.16149).

    Query-key products are divided by the head size, not its square root.
    """

    has_rope = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp, slope = super()._read_hparams(keys, n_vocab), keys.float_("attention.max_alibi_bias", 0.0)
        return replace(hp, attention_scale=1.0 / hp.head_dim_v, max_alibi_bias=slope)
