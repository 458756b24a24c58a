"""DFlash (arXiv 2602.06036): a few layers that draft a block of tokens at once with bidirectional attention."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

from llamado.ggml.graph import add, mul, scale
from llamado.ggml.ops import GluOp, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.batch import BatchShape
from llamado.models.decoder import take_factors
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.heads.fused import FusedHead
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.inputs import ForwardGraph
from llamado.models.keys import Keys
from llamado.models.memory import Memory
from llamado.models.parts.attention import Heads, as_heads
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm, UnitNorm
from llamado.models.weights import RoleWeights, Weights

_ACTIVATIONS = {"silu": GluOp.SWIGLU, "gelu": GluOp.GEGLU, "gelu_pytorch_tanh": GluOp.GEGLU}
_BLOCK = 16
"""Default block size."""


class _Layer(NamedTuple):
    """Weights of a Qwen3-like layer; some are optional."""

    norm: RmsNorm
    q: Linear
    k: Linear
    v: Linear | None
    out: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    post_norm: RmsNorm | None
    ffn_norm: RmsNorm
    network: GatedFeedForward
    ffn_post_norm: RmsNorm | None
    sinks: Tensor | None
    scale: Tensor | None


class DFlashHead(FusedHead):
    """DFlash draft head, which runs two kinds of batches.

    For tokens that the target computed, keys and values are projected from their fused states (`Batch.hidden_states`)
    and stored, and there is no output. A block, the last token followed by mask tokens, sees those and itself; each of
    its positions predicts its own token.
    """

    name: ClassVar[str] = "dflash"
    n_block: int
    """Maximum block size."""
    mask: int
    """The mask token."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        for suffix, what in (
            ("attention.sliding_window", "sliding windows"),
            ("hyper_connection.count", "hyper-connections (DSpark of DeepSeek-V4)"),
        ):
            if keys.metadata.get(keys.name(suffix)):
                raise UnsupportedModel(
                    f"metadata key '{keys.name(suffix)}': DFlash heads with {what} are not supported"
                )
        activation = keys.str_("hidden_activation", "silu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModel(
                f"metadata key '{keys.name('hidden_activation')}' is '{activation}'; {', '.join(_ACTIVATIONS)} are "
                "supported"
            )
        self._activation = _ACTIVATIONS[activation]
        self._value_scale = keys.float_("attention.value_scale", 0.0)
        self.n_block = keys.int_("block_size", _BLOCK)
        self.mask = keys.int_("tokenizer.ggml.mask_token_id")
        if self.mask >= n_vocab:
            raise InvalidModel(f"metadata key 'tokenizer.ggml.mask_token_id' is {self.mask} of {n_vocab} tokens")
        return replace(
            hp,
            causal=keys.bool_("attention.causal", False),
            attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale,
            embedding_scale=keys.float_("embedding_scale", 0.0) or 1.0,
        )

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        for name, what in (
            ("markov_w1.weight", "a Markov head (draft-dspark)"),
            ("selector_hidden.weight", "a selector (DFlash 2)"),
        ):
            if weights.has(name):
                raise UnsupportedModel(f"tensor '{name}': DFlash heads with {what} are not supported")
        self._fc = weights.input.linear("fc", self.hidden_widths[0], hp.n_embd)
        self._fc_norm = RmsNorm.take(weights.input, "enc.output_norm", hp.n_embd)
        self._factors = take_factors(weights, hp.head_dim_k // 2)
        self._layers = [self._take_layer(weights.layer(i), i) for i in range(hp.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> _Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        n = hp.n_embd

        def optional(name: str) -> RmsNorm | None:
            return RmsNorm.take(w, name, n) if w.has(f"{name}.weight") else None

        return _Layer(
            norm=RmsNorm.take(w, "attn_norm", n),
            q=w.linear("attn_q", n, heads.n * heads.dim_k),
            k=w.linear("attn_k", n, heads.n_kv * heads.dim_k),
            v=w.linear("attn_v", n, heads.n_kv * heads.dim_v) if w.has("attn_v.weight") else None,
            out=w.linear("attn_output", heads.n * heads.dim_v, n),
            q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k),
            k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k),
            post_norm=optional("post_attention_norm"),
            ffn_norm=RmsNorm.take(w, "ffn_norm", n),
            network=GatedFeedForward.take(w, n, hp.n_ff[layer], self._activation),
            ffn_post_norm=optional("post_ffw_norm"),
            sinks=w.optional("attn_sinks.weight", heads.n),
            scale=w.optional("layer_output_scale.weight", 1),
        )

    def _tied(self, embedding: Tensor | None) -> Tensor | None:
        return embedding

    def build(self, shape: BatchShape, memory: Memory) -> ForwardGraph:
        """Build the forward pass of a batch; one with hidden states has no output."""
        if not shape.hidden_width:
            return super().build(shape, memory)
        step = Pass(self.hparams, replace(shape, n_outputs=0), memory)
        x = self._fc_norm(step, self._fc(step, step.hidden_states(), "fc_out"), "enc_norm_out")
        for i, w in enumerate(self._layers):
            step.store(i, *self._keys_values(step, i, w, x))
        return step.graph

    def _keys_values(self, step: Pass, i: int, w: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of all tokens: [head_dim, heads, n_tokens]."""
        heads, n_tokens = Heads.of(self.hparams, i), x.ne[1]
        k = as_heads(w.k(step, x, f"Kcur-{i}"), heads.dim_k, heads.n_kv, n_tokens, f"Kcur-{i}")
        if w.v is None:
            v = UnitNorm()(step, k, f"Vcur_normed-{i}")
        else:
            v = as_heads(w.v(step, x, f"Vcur-{i}"), heads.dim_v, heads.n_kv, n_tokens, f"Vcur-{i}")
        k = w.k_norm(step, k, f"Kcur_normed-{i}")
        return step.rotate(k, self.hparams.rope, self._factors, f"Kcur_rope-{i}"), v

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i, heads = self._layers[layer], layer, Heads.of(self.hparams, layer)
        h = w.norm(step, x, f"noise_norm-{i}")
        q = as_heads(w.q(step, h, f"Qcur-{i}"), heads.dim_k, heads.n, x.ne[1], f"Qcur-{i}")
        q = step.rotate(w.q_norm(step, q, f"Qcur_normed-{i}"), self.hparams.rope, self._factors, f"Qcur_rope-{i}")
        k, v = self._keys_values(step, i, w, h)
        attended = step.attend(i, q, k, v, self.hparams.attention_scale, sinks=w.sinks)
        if attended is None:
            return None
        attended, x = step.keep_outputs(i, attended, x)
        h = w.out(step, attended, f"attn_out-{i}")
        if self._value_scale:
            h = scale(h, self._value_scale)
        if w.post_norm is not None:
            h = w.post_norm(step, h, f"attn_post_norm-{i}")
        x = add(h, x, f"ffn_inp-{i}")
        h = w.network(step, i, w.ffn_norm(step, x, f"ffn_norm-{i}"))
        if w.ffn_post_norm is not None:
            h = w.ffn_post_norm(step, h, f"ffn_post_norm-{i}")
        x = add(h, x, f"l_out-{i}")
        return x if w.scale is None else mul(x, w.scale, f"l_out_scaled-{i}")
