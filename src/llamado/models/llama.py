"""The llama architecture: Llama 1 to 3, Mistral, SmolLM and all others that are saved under its name."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, reshape, swiglu_split
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.weights import Weights


class LlamaLayer(NamedTuple):
    attn_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    ffn_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class LlamaModel(Model):
    """Pre-norm decoder: grouped-query attention with rotary positions, then a SwiGLU feed-forward network."""

    architecture = "llama"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)
        if hp.rope.n_dims != hp.head_dim_k:
            raise InvalidModel(
                f"metadata key '{keys.name('rope.dimension_count')}' is {hp.rope.n_dims}; {hp.head_dim_k} is expected"
            )
        return hp

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        # Llama 3 stretches its context by dividing each rotary frequency by its own factor.
        self._freq_factors = weights.shared.maybe("rope_freqs.weight", hp.rope.n_dims // 2)

        self._layers = []
        for i in range(hp.n_layer):
            w = weights.layer(i)
            n_q = hp.head_dim_k * hp.n_head[i]
            self._layers.append(
                LlamaLayer(
                    attn_norm=w.need("attn_norm.weight", hp.n_embd),
                    q=w.linear("attn_q", hp.n_embd, n_q),
                    k=w.linear("attn_k", hp.n_embd, hp.n_embd_k(i)),
                    v=w.linear("attn_v", hp.n_embd, hp.n_embd_v(i)),
                    out=w.linear("attn_output", n_q, hp.n_embd),
                    ffn_norm=w.need("ffn_norm.weight", hp.n_embd),
                    gate=w.linear("ffn_gate", hp.n_embd, hp.n_ff[i]),
                    up=w.linear("ffn_up", hp.n_embd, hp.n_ff[i]),
                    down=w.linear("ffn_down", hp.n_ff[i], hp.n_embd),
                )
            )

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        hp, w, i = self.hparams, self._layers[layer], layer
        n_tokens = step.shape.n_tokens

        h = step.norm(x, w.attn_norm, f"attn_norm-{i}")
        q = reshape(w.q(step, h, f"Qcur-{i}"), hp.head_dim_k, hp.n_head[i], n_tokens, name=f"Qcur-{i}")
        k = reshape(w.k(step, h, f"Kcur-{i}"), hp.head_dim_k, hp.n_head_kv[i], n_tokens, name=f"Kcur-{i}")
        v = reshape(w.v(step, h, f"Vcur-{i}"), hp.head_dim_v, hp.n_head_kv[i], n_tokens, name=f"Vcur-{i}")
        q = step.rotate(q, hp.rope, self._freq_factors, f"Qcur-{i}")
        k = step.rotate(k, hp.rope, self._freq_factors, f"Kcur-{i}")
        attended = step.attend(i, q, k, v, hp.attention_scale)
        if attended is None:
            return None
        h, x = step.keep_outputs(i, w.out(step, attended, f"attn_out-{i}"), x)
        x = add(h, x, f"ffn_inp-{i}")

        h = step.norm(x, w.ffn_norm, f"ffn_norm-{i}")
        h = swiglu_split(w.gate(step, h, f"ffn_gate-{i}"), w.up(step, h, f"ffn_up-{i}"), f"ffn_swiglu-{i}")
        return add(w.down(step, h, f"ffn_out-{i}"), x, f"l_out-{i}")
