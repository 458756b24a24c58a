"""The olmo2 architecture: OLMo 2 and OLMo 3."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import POST_NORMS, Decoder
from llamado.models.hparams import HyperParameters, with_window
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm


class Olmo2Model(Decoder):
    """Post-norm blocks without pre-norms, and norms of whole query and key rows (arXiv 2501.00656).

    With a sliding window (OLMo 3), every fourth layer has full attention, and only those use the extended context rope.
    """

    rope_mode = RopeMode.NEOX
    norms = POST_NORMS
    qk_norm = QkNorm.ROWS

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        rope = replace(hp.rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
        return with_window(keys, hp, 4, rope=rope, optional=True)
