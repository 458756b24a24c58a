"""The gemma4 architecture (text): two head sizes, layers that share keys and values, optional experts."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import add, mul, rms_norm, scale
from llamado.ggml.ops import GluOp, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.errors import InvalidModel
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_experts, read_hparams, read_swa_layers, rope_dims
from llamado.models.keys import Keys
from llamado.models.memory import KeysValues, LayerMemory, SharedMemory
from llamado.models.parts.attention import Heads
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.parts.per_layer import LayerEmbeddings, LayerInput
from llamado.models.parts.sharing import SharedKvAttention
from llamado.models.weights import RoleWeights, Weights


class GemmaMixture(NamedTuple):
    """A mixture of experts parallel to a layer's dense network, with norms and a router scale of its own."""

    mixture: Mixture
    gate_scale: Tensor
    norm: RmsNorm
    post_norm: RmsNorm
    dense_post_norm: RmsNorm

    def __call__(self, step: Pass, layer: int, dense: Tensor, x: Tensor) -> Tensor:
        """Return the sum of the dense network's output and the experts' output for x."""
        seen = mul(scale(rms_norm(x, step.norm_eps), 1.0 / sqrt(x.ne[0])), self.gate_scale)
        y = self.mixture(step, layer, self.norm(step, x, f"ffn_norm_2-{layer}"), seen)
        y = self.post_norm(step, y, f"ffn_moe-{layer}")
        return add(self.dense_post_norm(step, dense, f"ffn_mlp-{layer}"), y, f"ffn_moe_combined-{layer}")


class Gemma4Layer(NamedTuple):
    attn_norm: RmsNorm
    attention: SharedKvAttention
    attn_post_norm: RmsNorm
    ffn_norm: RmsNorm
    feed_forward: GatedFeedForward
    experts: GemmaMixture | None
    ffn_post_norm: RmsNorm
    input: LayerInput | None
    out_scale: Tensor | None


class Gemma4Model(Model):
    """Pre- and post-norms of both blocks; the last layers share keys and values; optional per-layer embeddings."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        self._dim_swa = keys.int_("attention.key_length_swa")
        hp = replace(
            hp,
            embedding_scale=float(np.sqrt(np.float32(hp.n_embd))),
            attention_scale=1.0,
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 6),
            # Only the global layers use the extended context rope.
            rope_swa=replace(
                hp.rope,
                n_dims=rope_dims(keys, "rope.dimension_count_swa", hp.rope.n_dims, self._dim_swa),
                freq_base=keys.float_("rope.freq_base_swa", 10000.0),
                freq_scale=1.0,
            ),
            experts=read_experts(keys, hp.n_ff[0], normalized=True) if keys.int_("expert_count", 0) else None,
        )
        self._n_input = keys.int_("embedding_length_per_layer_input")
        self._n_own = hp.n_layer - keys.int_("attention.shared_kv_layers", 0)
        if not 0 < self._n_own <= hp.n_layer or any(self._owner(hp, i) < 0 for i in range(self._n_own, hp.n_layer)):
            raise InvalidModel(
                f"metadata key '{keys.name('attention.shared_kv_layers')}' is {hp.n_layer - self._n_own} of "
                f"{hp.n_layer} layers; two are expected before them, the first with a window and the second without"
            )
        return hp

    def _owner(self, hp: HyperParameters, layer: int) -> int:
        """Return the layer whose keys and values `layer` shares; -1 if there is none of its kind."""
        owner = self._n_own - (2 if hp.is_swa(layer) else 1)
        return owner if owner >= 0 and hp.is_swa(owner) == hp.is_swa(layer) else -1

    def _heads(self, layer: int) -> Heads:
        hp = self.hparams
        dim = self._dim_swa if hp.is_swa(layer) else hp.head_dim_k
        return Heads(hp.n_head[layer], hp.n_head_kv[layer], dim, dim)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values with the layer's head size, or those of an earlier layer."""
        hp, heads = self.hparams, self._heads(layer)
        if layer >= self._n_own:
            return SharedMemory(self._owner(hp, layer))
        n = heads.n_kv * heads.dim_k
        return KeysValues(n, n, hp.n_swa if hp.is_swa(layer) else 0)

    def _take_weights(self, weights: Weights) -> None:
        hp, n = self.hparams, self._n_input
        self._factors = weights.shared.optional("rope_freqs.weight", hp.rope.n_dims // 2)
        self._inputs = LayerEmbeddings.take(weights, hp.n_embd, n, hp.n_layer, hp.n_vocab) if n else None
        self._layers = [self._take_layer(weights.layer(i), i) for i in range(hp.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> Gemma4Layer:
        hp = self.hparams
        factors = None if hp.is_swa(layer) else self._factors
        return Gemma4Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=SharedKvAttention.take(
                w, hp.n_embd, self._heads(layer), hp.rope_of(layer), factors, shares=layer >= self._n_own
            ),
            attn_post_norm=RmsNorm.take(w, "post_attention_norm", hp.n_embd),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], GluOp.GEGLU),
            experts=self._take_experts(w) if w.has("ffn_gate_inp.weight") else None,
            ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", hp.n_embd),
            input=LayerInput.take(w, hp.n_embd, self._n_input) if self._n_input else None,
            out_scale=w.optional("layer_output_scale.weight", 1),
        )

    def _take_experts(self, w: RoleWeights) -> GemmaMixture:
        n, experts = self.hparams.n_embd, self.hparams.experts
        if experts is None:
            raise InvalidModel("a layer has experts, but the metadata gives no number of experts")
        return GemmaMixture(
            Mixture.take(w, n, experts, GluOp.GEGLU),
            w.require("ffn_gate_inp.scale", n),
            RmsNorm.take(w, "pre_ffw_norm_2", n),
            RmsNorm.take(w, "post_ffw_norm_2", n),
            RmsNorm.take(w, "post_ffw_norm_1", n),
        )

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        input = None if self._inputs is None else self._inputs.of(step, i, x)
        attended = w.attention(step, i, w.attn_norm(step, x, f"attn_norm-{i}"))
        if attended is None:
            return None
        attended, x = step.keep_outputs(i, attended, x)
        x = add(w.attn_post_norm(step, attended, f"attn_post_norm-{i}"), x, f"sa_out-{i}")
        h = w.feed_forward(step, i, w.ffn_norm(step, x, f"ffn_norm-{i}"))
        if w.experts is not None:
            h = w.experts(step, i, h, x)
        x = add(w.ffn_post_norm(step, h, f"ffn_post_norm-{i}"), x, f"ffn_add-{i}")
        if w.input is not None and input is not None:
            (input,) = step.keep_outputs(i, input)
            x = add(x, w.input(step, i, x, input), f"per_layer_add-{i}")
        return x if w.out_scale is None else mul(x, w.out_scale, f"l_out-{i}")
