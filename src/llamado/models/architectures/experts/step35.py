"""The step35 architecture: Step 3.5 Flash."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import Gating, HyperParameters, RouterKind, read_swa_layers, rope_dims, swa_rope
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, Heads, OutputGate
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class Step35Model(Decoder):
    """Gated heads, partial rotary embedding, sliding windows, and clamped activations in some layers.

    Full-attention layers rotate half of each head; window layers rotate another fraction.
    """

    rope_mode = RopeMode.NEOX
    router = RouterKind(Gating.SIGMOID, from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n, n_blocks = hp.rope.n_dims, keys.int_("block_count")
        self._limits = keys.floats_per_layer("swiglu_clamp_exp", n_blocks, 0.0)
        self._shared_limits = keys.floats_per_layer("swiglu_clamp_shexp", n_blocks, 0.0)
        rope_swa = swa_rope(keys, hp.rope, freq_base=10000.0, freq_scale=1.0)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=keys.of_layers(read_swa_layers(keys, n_blocks, 0)),
            rope=replace(hp.rope, n_dims=n // 2),
            rope_swa=replace(rope_swa, n_dims=rope_dims(keys, "rope.dimension_count_swa", n, hp.head_dim_k)),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp, n = self.hparams, self.hparams.head_dim_k
        gated = w.has("attn_gate.weight")
        return replace(
            super()._take_attention(w, layer),
            factors=None if hp.is_swa(layer) else self._freq_factors,
            q_norm=RmsNorm.take(w, "attn_q_norm", n) if w.has("attn_q_norm.weight") else None,
            k_norm=RmsNorm.take(w, "attn_k_norm", n) if w.has("attn_k_norm.weight") else None,
            gate=OutputGate.take(w, hp.n_embd, Heads.of(hp, layer)) if gated else None,
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        network, limit = super()._take_feed_forward(w, layer), self._shared_limits[layer]
        if isinstance(network, GatedFeedForward):
            return network._replace(limit=limit)
        assert isinstance(network, Mixture) and isinstance(network.shared, GatedFeedForward)
        return network._replace(limit=self._limits[layer], shared=network.shared._replace(limit=limit))
