"""The maple architecture."""

from __future__ import annotations

from llamado.ggml.ops import GluOp
from llamado.models.architectures.qwen.qwen3moe import Qwen3MoeModel
from llamado.models.hparams import HyperParameters, Rope, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class MapleModel(Qwen3MoeModel):
    """Qwen3 MoE with clamped activations; only the sliding-window layers have rotary positions."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._limits = keys.floats_per_layer("swiglu_clamp_exp", hp.n_layer)
        return with_window(keys, hp, 0, rope=swa_rope(keys, hp.rope))

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope_swa if self.hparams.is_swa(layer) else None

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        assert hp.experts is not None
        return Mixture.take(w, hp.n_embd, hp.experts, GluOp.SWIGLU_CLAMP, limit=self._limits[layer])
