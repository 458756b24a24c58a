"""The smollm3 architecture: SmolLM3."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

_NO_POSITIONS_STEP = 4


class SmolLm3Model(Decoder):
    """Llama without positions in every fourth layer (NoPE, arXiv 2501.18795)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope if (layer + 1) % _NO_POSITIONS_STEP else None,
                scale=hp.attention_scale,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
        )
