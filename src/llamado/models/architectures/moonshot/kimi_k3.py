"""The kimi-k3 architecture: Kimi K3."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add, concat, cont, mul, soft_max_ext, sum_rows, view_2d
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.moonshot.kimi_linear import KimiLinearModel
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.attention import Mixer, OutputGate
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward, Situ
from llamado.models.parts.latent import GatedLatentAttention, LatentAttention, LatentProjection
from llamado.models.parts.latent_experts import LatentMixture
from llamado.models.parts.norms import RmsNorm
from llamado.models.parts.recurrent.kimi_delta import KimiDelta
from llamado.models.weights import RoleWeights, Weights


class KimiK3Model(KimiLinearModel):
    """Kimi Linear with latent experts, gated latent attention, and attention residuals.

    The residual stream restarts every few layers; each block reads a weighted mean of all streams so far.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._bound = keys.float_("kda.gate_lower_bound", 0.0)
        self._q_rank = keys.int_("attention.q_lora_rank", 0)
        self._latent = keys.int_("expert_latent_length", 0)
        self._every = keys.int_("attn_res.block_size")
        self._act = Situ(keys.float_("activation.situ_beta"), keys.float_("activation.situ_linear_beta"))
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], from_file=True))

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        if self._every:
            n_embd = self.hparams.n_embd
            self._scores_out = weights.output.require("output_res_score.weight", n_embd)
            layers = [weights.layer(layer) for layer in range(self.hparams.n_layer)]
            self._scores_attn = [w.require("attn_res_score.weight", n_embd) for w in layers]
            self._scores_ffn = [w.require("ffn_res_score.weight", n_embd) for w in layers]

    def _take_delta(self, w: RoleWeights) -> KimiDelta:
        n_embd, n_head = self.hparams.n_embd, self._sizes.n_head
        return KimiDelta.take(w, n_embd, self._state, n_head, self._kernel, self._bound, negative=True)

    def _take_latent(self, w: RoleWeights) -> Mixer:
        hp, s = self.hparams, self._sizes
        compressed = LatentProjection.take(w, hp.n_embd, s, self._q_rank, None)
        latent = LatentAttention.take(w, hp.n_embd, compressed, hp.attention_scale)
        if not w.has("attn_gate.weight"):
            return latent
        return GatedLatentAttention(latent, OutputGate(w.linear("attn_gate", hp.n_embd, s.n_head * s.value), s.n_head))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp, act = self.hparams, self._act
        assert hp.experts is not None
        if layer < hp.experts.n_dense_layers:
            return GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], act)
        n, shared = self._latent or hp.n_embd, None
        if w.has("ffn_gate_shexp.weight"):
            shared = GatedFeedForward.take(
                w, hp.n_embd, hp.experts.n_ff * max(hp.experts.n_shared, 1), act, suffix="_shexp"
            )
        return LatentMixture(
            Mixture.take(w, n, hp.experts, act, router_width=hp.n_embd),
            shared,
            w.linear("ffn_routed_down", hp.n_embd, n) if self._latent else None,
            w.linear("ffn_routed_up", n, hp.n_embd) if self._latent else None,
            RmsNorm.take(w, "ffn_routed_norm", n) if w.has("ffn_routed_norm.weight") else None,
        )

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        assert w.attn_norm is not None and w.ffn_norm is not None
        h = x if not self._every else self._mean(step, i, self._before(step, i), x, self._scores_attn[i])
        begins = bool(self._every) and i % self._every == 0
        if begins:
            step.shared(f"stream-{i}", lambda: x)
        attended = w.attention(step, i, w.attn_norm(step, h, f"attn_norm-{i}"))
        if attended is None:
            return None
        attended, x, *before = step.keep_outputs(i, attended, x, *self._before(step, i + 1))
        if i == self.hparams.n_layer - 1:
            for number, stream in enumerate(before):
                step.shared(f"stream_out-{number}", lambda stream=stream: stream)  # type: ignore[misc]
        x = attended if begins else add(x, attended, f"ffn_inp-{i}")
        h = x if not self._every else self._mean(step, i, before, x, self._scores_ffn[i])
        return add(x, w.feed_forward(step, i, w.ffn_norm(step, h, f"ffn_norm-{i}")), f"l_out-{i}")

    def _before(self, step: Pass, layer: int) -> list[Tensor]:
        """Return the streams that ended before a layer."""
        return [step.get_shared(f"stream-{i}") for i in range(0, layer, self._every)] if self._every else []

    def _mean(self, step: Pass, layer: int, before: list[Tensor], x: Tensor, scores: Tensor) -> Tensor:
        """Return the mean of the streams, weighted by the softmax of their normed products with `scores`."""
        if not before:
            return x
        streams, size, n_tokens = [*before, x], 4, x.ne[1]
        weights = sum_rows(step.norm(streams[0], scores, f"res_score-{layer}"))
        for stream in streams[1:]:
            weights = concat(weights, sum_rows(step.norm(stream, scores, f"res_score-{layer}")), 0)
        weights = soft_max_ext(weights, None, 1.0, name=f"res_probs-{layer}")
        parts = [
            mul(stream, cont(view_2d(weights, 1, n_tokens, weights.nb[1], i * size)))
            for i, stream in enumerate(streams)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = add(total, part, f"res_mean-{layer}")
        return total

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        if self._every:
            n_layer = self.hparams.n_layer
            before = [step.get_shared(f"stream_out-{i}") for i in range(len(self._before(step, n_layer)))]
            x = self._mean(step, n_layer, before, x, self._scores_out)
        return super()._hidden(step, x)
