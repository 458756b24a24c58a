"""The command-r architecture: Command R, Command R+, Aya 23."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import ONE_NORM, LayerNormDecoder, ParallelDecoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.attention import Heads
from llamado.models.parts.norms import Norm, take_head_norms
from llamado.models.weights import RoleWeights


class CommandRModel(LayerNormDecoder, ParallelDecoder):
    """Parallel attention and feed-forward network after one layer norm; no biases.

    The largest model has layer norms of queries and keys, with separate weights per head.
    """

    norms = ONE_NORM
    has_norm_bias = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(super()._read_hparams(keys, n_vocab), logit_scale=keys.float_("logit_scale", 0.0) or 1.0)

    def _take_qk_norms(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        return take_head_norms(w, heads.dim_k, heads.n, heads.n_kv)
