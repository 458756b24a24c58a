"""The spark2_5 architecture: Spark 2.5."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, rope_dims, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import GEGLU


class Spark25Model(Decoder):
    """Gated heads, GEGLU networks, and window layers that may rotate another fraction of each head."""

    rope_mode = RopeMode.NEOX
    output_gate = UnaryOp.SIGMOID
    feed_forward = GEGLU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n = rope_dims(keys, "rope.dimension_count_swa", hp.rope.n_dims, hp.head_dim_k)
        return with_window(keys, hp, 0, rope=replace(swa_rope(keys, hp.rope), n_dims=n))
