"""The bailingmoe3 architecture: Ling 3.0, based on Kimi Linear."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.architectures.moonshot.kimi_linear import KimiLinearModel
from llamado.models.errors import UnsupportedModel
from llamado.models.hparams import HyperParameters, mrope_text_mode, read_experts, with_sections
from llamado.models.keys import Keys
from llamado.models.parts.attention import Mixer, OutputGate
from llamado.models.parts.latent import GatedLatentAttention, LatentAttention, LatentProjection
from llamado.models.parts.recurrent.kimi_delta import KimiDelta
from llamado.models.weights import RoleWeights


class BailingMoe3Model(KimiLinearModel):
    """Kimi Linear with bounded decays, and latent attention with positions and gates."""

    architecture = "bailingmoe3"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        for suffix in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
            if keys.has(suffix):
                raise UnsupportedModel(f"metadata key '{keys.name(suffix)}': bounds of activations are not supported")
        self._bound = keys.float_("kda.gate_lower_bound")
        self._q_rank = keys.int_("attention.q_lora_rank", 0)
        rope = replace(hp.rope, mode=mrope_text_mode(keys, RopeMode.NORMAL))
        rope = with_sections(keys, rope, RopeMode.MROPE)
        return replace(hp, rope=rope, experts=read_experts(keys, hp.n_ff[0], from_file=True))

    def _take_delta(self, w: RoleWeights) -> KimiDelta:
        n_embd, n_head = self.hparams.n_embd, self._sizes.n_head
        return KimiDelta.take(w, n_embd, self._state, n_head, self._kernel, self._bound)

    def _take_latent(self, w: RoleWeights) -> Mixer:
        hp = self.hparams
        compressed = LatentProjection.take(w, hp.n_embd, self._sizes, self._q_rank, hp.rope, None)
        latent = LatentAttention.take(w, hp.n_embd, compressed, hp.attention_scale)
        gate = OutputGate(w.linear("attn_gate", hp.n_embd, self._sizes.n_head), self._sizes.n_head)
        return GatedLatentAttention(latent, gate)
