"""The bailingmoe3 architecture: Ling 3.0, made after Kimi Linear."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import mul, reshape, sigmoid
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.moonshot.kimi_linear import KimiLinearModel
from llamado.models.errors import UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, read_experts, sectioned
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, Gated
from llamado.models.parts.latent import Compressed, LatentAttention
from llamado.models.parts.recurrent.kimi_delta import KimiDelta
from llamado.models.weights import RoleWeights


class GatedLatentAttention(NamedTuple):
    """Latent attention whose heads are each weighted by a gate."""

    latent: LatentAttention
    gate: Linear

    def remembers(self) -> LayerMemory:
        return self.latent.remembers()

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        s, n_tokens = self.latent.compressed.sizes, x.ne[1]
        q, row = self.latent.keys(step, layer, x)
        attended = step.attend_latent(layer, q, row, s.rank, self.latent.scale)
        if attended is None:
            return None
        gate = sigmoid(reshape(self.gate(step, x, f"attn_gate-{layer}"), 1, s.n_head, n_tokens))
        values = reshape(self.latent.values(step, layer, attended), s.value, s.n_head, n_tokens)
        gated = reshape(mul(values, gate), s.value * s.n_head, n_tokens)
        return self.latent.out(step, gated, f"mla_out-{layer}")


class BailingMoe3Model(KimiLinearModel):
    """As Kimi Linear, with decays that have a bound, and latent attention with positions and gates."""

    architecture = "bailingmoe3"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        for suffix in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
            if keys.has(suffix):
                raise UnsupportedModel(f"metadata key '{keys.name(suffix)}': bounds of activations do not run here")
        self._bound = keys.float_("kda.gate_lower_bound")
        self._q_rank = keys.int_("attention.q_lora_rank", 0)
        rope = replace(hp.rope, mode=sectioned(keys, RopeMode.NORMAL))
        return replace(hp, rope=rope, experts=read_experts(keys, hp.n_ff[0], from_file=True))

    def _take_delta(self, w: RoleWeights) -> KimiDelta:
        n_embd, n_head = self.hparams.n_embd, self._sizes.n_head
        return KimiDelta.take(w, n_embd, self._state, n_head, self._kernel, self._bound)

    def _take_latent(self, w: RoleWeights) -> Mixer:
        hp = self.hparams
        compressed = Compressed.take(w, hp.n_embd, self._sizes, self._q_rank, hp.rope, None)
        latent = LatentAttention.take(w, hp.n_embd, compressed, hp.attention_scale)
        return GatedLatentAttention(latent, w.linear("attn_gate", hp.n_embd, self._sizes.n_head))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        assert hp.experts is not None
        if layer < hp.experts.n_dense_layers or not hp.experts.n_ff_shared:
            return super()._take_feed_forward(w, layer)
        shared = Gated.take(w, hp.n_embd, hp.experts.n_ff_shared, suffix="_shexp")
        return Mixture.take(w, hp.n_embd, hp.experts, shared=shared)

    def remembers(self, layer: int) -> LayerMemory:
        """A latent row, or the state of the delta rule."""
        mixer = self._layers[layer].attention
        assert isinstance(mixer, (KimiDelta, GatedLatentAttention))
        return mixer.remembers()
