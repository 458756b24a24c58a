"""The laguna architecture: Laguna XS and M."""

from __future__ import annotations

from llamado.ggml.ops import UnaryOp
from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.hparams import HyperParameters, Rope, rope_dims, swa_rope, with_window
from llamado.models.keys import Keys


class LagunaModel(Dots1Model):
    """dots.llm1 with a gated attention output.

    If the file gives a sliding window, every fourth layer has full attention, and only those use the extended context
    rope.
    """

    output_gate = UnaryOp.SOFTPLUS

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n = rope_dims(keys, "rope.dimension_count_swa", hp.rope.n_dims, hp.head_dim_k)
        base = swa_rope(keys, hp.rope).freq_base
        plain = Rope(n, self.rope_mode, hp.n_ctx_train, base, 1.0, 0.0, 1.0)
        return with_window(keys, hp, 4, rope=plain, optional=True, dense_first=True)
