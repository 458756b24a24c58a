"""The gemma3 architecture (text): five layers with a sliding window, then one that sees everything, and so on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import add, geglu_split, reshape, scale, tanh
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, inverse_sqrt, read_hparams
from llamado.models.keys import Keys
from llamado.models.weights import Weights

_LAYERS_OF_27B = 62


class Gemma3Layer(NamedTuple):
    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    attn_post_norm: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    ffn_post_norm: Tensor


class Gemma3Model(Model):
    """Decoder with a norm before and after each half of a layer, normed queries and keys, and a GEGLU network."""

    architecture = "gemma3"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        hp = replace(
            hp,
            # Files made by Ollama may call the two bases "global" and "local".
            rope=replace(hp.rope, freq_base=keys.float_("rope.global.freq_base", hp.rope.freq_base)),
            embedding_scale=float(np.sqrt(np.float32(hp.n_embd))),
            # The 27B model alone scales by the width per head instead of the head's own.
            attention_scale=inverse_sqrt(hp.n_embd // hp.n_head[0] if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k),
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
        )
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        return replace(
            hp,
            n_swa=n_swa,
            swa_layers=_swa_layers(keys, hp.n_layer),
            # Context is stretched in the global layers only.
            rope_swa=replace(
                hp.rope,
                freq_base=keys.float_("rope.freq_base_swa", keys.float_("rope.local.freq_base", 10000.0)),
                freq_scale=1.0,
            ),
        )

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._layers = []
        for i in range(hp.n_layer):
            w = weights.layer(i)
            n_q = hp.head_dim_k * hp.n_head[i]
            self._layers.append(
                Gemma3Layer(
                    attn_norm=w.need("attn_norm.weight", hp.n_embd),
                    q=w.need("attn_q.weight", hp.n_embd, n_q),
                    k=w.need("attn_k.weight", hp.n_embd, hp.n_embd_k(i)),
                    v=w.need("attn_v.weight", hp.n_embd, hp.n_embd_v(i)),
                    q_norm=w.need("attn_q_norm.weight", hp.head_dim_k),
                    k_norm=w.need("attn_k_norm.weight", hp.head_dim_k),
                    out=w.need("attn_output.weight", n_q, hp.n_embd),
                    attn_post_norm=w.need("post_attention_norm.weight", hp.n_embd),
                    ffn_norm=w.need("ffn_norm.weight", hp.n_embd),
                    gate=w.need("ffn_gate.weight", hp.n_embd, hp.n_ff[i]),
                    up=w.need("ffn_up.weight", hp.n_embd, hp.n_ff[i]),
                    down=w.need("ffn_down.weight", hp.n_ff[i], hp.n_embd),
                    ffn_post_norm=w.need("post_ffw_norm.weight", hp.n_embd),
                )
            )

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        # What comes in the place of tokens is of the right size already.
        return x if step.shape.embeddings else scale(x, self.hparams.embedding_scale, name="inp_scaled")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        hp, w, i = self.hparams, self._layers[layer], layer
        n_tokens = step.shape.n_tokens
        rope = hp.rope_swa if hp.rope_swa is not None and hp.is_swa(i) else hp.rope

        h = step.norm(x, w.attn_norm, f"attn_norm-{i}")
        q = reshape(step.mul_mat(w.q, h, f"Qcur-{i}"), hp.head_dim_k, hp.n_head[i], n_tokens, name=f"Qcur-{i}")
        k = reshape(step.mul_mat(w.k, h, f"Kcur-{i}"), hp.head_dim_k, hp.n_head_kv[i], n_tokens, name=f"Kcur-{i}")
        v = reshape(step.mul_mat(w.v, h, f"Vcur-{i}"), hp.head_dim_v, hp.n_head_kv[i], n_tokens, name=f"Vcur-{i}")
        q = step.rotate(step.norm(q, w.q_norm, f"Qcur_normed-{i}"), rope, None, f"Qcur-{i}")
        k = step.rotate(step.norm(k, w.k_norm, f"Kcur_normed-{i}"), rope, None, f"Kcur-{i}")
        # Scaled before the product, not after it: the attention's own factor stays 1.
        attended = step.attend(i, scale(q, hp.attention_scale), k, v, 1.0)
        if attended is None:
            return None
        h, x = step.keep_outputs(i, step.mul_mat(w.out, attended, f"attn_out-{i}"), x)
        x = add(step.norm(h, w.attn_post_norm, f"attn_post_norm-{i}"), x, f"sa_out-{i}")

        h = step.norm(x, w.ffn_norm, f"ffn_norm-{i}")
        h = geglu_split(
            step.mul_mat(w.gate, h, f"ffn_gate-{i}"), step.mul_mat(w.up, h, f"ffn_up-{i}"), f"ffn_geglu-{i}"
        )
        h = step.mul_mat(w.down, h, f"ffn_out-{i}")
        return add(step.norm(h, w.ffn_post_norm, f"ffn_post_norm-{i}"), x, f"l_out-{i}")

    def _head(self, step: Pass, x: Tensor) -> Tensor:
        logits, cap = super()._head(step, x), self.hparams.final_logit_softcap
        if cap:
            logits = scale(tanh(scale(logits, 1.0 / cap)), cap, name="result_output")
        return logits


def _swa_layers(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """Which layers have the sliding window: a list in the file, or all but every n-th (default: 6th)."""
    suffix = "attention.sliding_window_pattern"
    if keys.has(suffix) and not keys.is_int(suffix):
        return keys.metadata.bools(keys.name(suffix), n=n_layer)
    period = keys.int_(suffix, 6)
    return tuple(period == 0 or i % period < period - 1 for i in range(n_layer))
