"""EAGLE-3 (arXiv 2503.01840): a one-layer draft head that reads hidden states of three target layers."""

from __future__ import annotations

from typing import ClassVar

from llamado.ggml.graph import add, concat
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.batch import FEATURES
from llamado.models.decoder import take_factors
from llamado.models.errors import InvalidModel
from llamado.models.forward import Pass
from llamado.models.heads.fused import FusedHead
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads, Projections
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import Weights

_LAYERS = 3


class Eagle3Head(FusedHead):
    """Attention reads the normed fused state beside the normed embedding of the token, and adds to the state."""

    name: ClassVar[str] = "eagle3"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)

    def _read_own(self, keys: Keys) -> None:
        hp = self.hparams
        if hp.n_layer != 1:
            raise InvalidModel(f"metadata key '{keys.name('block_count')}' is {hp.n_layer}; one layer is expected")
        if len(self._target_layers) != _LAYERS:
            raise InvalidModel(
                f"metadata key '{keys.name('target_layers')}' names {len(self._target_layers)} layers; three are "
                "expected"
            )
        self._target_width = keys.int_("target_hidden_size")
        if _LAYERS * self._target_width == hp.n_embd:
            raise InvalidModel(f"metadata key '{keys.name('target_hidden_size')}' is a third of the head's own width")
        self._normed_residual = keys.bool_("norm_before_residual", False)
        self._normed_states = keys.bool_("norm_before_fc", False)
        self.hidden_widths = (_LAYERS * self._target_width, hp.n_embd)

    def _take_weights(self, weights: Weights) -> None:
        hp, w, n, fused = self.hparams, weights.layer(0), self.hparams.n_embd, self.hidden_widths[0]
        heads = Heads.of(hp, 0)
        self._fc_norm = RmsNorm.take(weights.input, "enc.output_norm", fused) if self._normed_states else None
        self._fc = weights.input.linear("fc", fused, n)
        self._embd_norm = RmsNorm.take(w, "attn_norm", n)
        self._state_norm = RmsNorm.take(w, "attn_norm_2", n)
        project = Projections(
            w.linear("attn_q", 2 * n, heads.n * heads.dim_k),
            w.linear("attn_k", 2 * n, heads.n_kv * heads.dim_k),
            w.linear("attn_v", 2 * n, heads.n_kv * heads.dim_v),
        )
        self._attention = Attention(
            matrices=AttentionMatrices(heads, project, w.linear("attn_output", heads.n * heads.dim_v, n)),
            scale=hp.attention_scale,
            rope=hp.rope,
            factors=take_factors(weights, hp.rope.n_dims // 2),
        )
        self._ffn_norm = RmsNorm.take(w, "ffn_norm", n)
        self._network = GatedFeedForward.take(w, n, hp.n_ff[0])

    def _embed(self, step: Pass) -> Tensor:
        state = step.hidden_states()
        if step.shape.hidden_width != self.hidden_widths[0]:
            return state
        if self._fc_norm is not None:
            state = self._fc_norm(step, state, "enc_input_norm")
        return self._fc(step, state, "fc_out")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        token = self._embd_norm(step, step.get_rows(self._token_embd, step.tokens(), "inp_embd"), "embd_norm-0")
        state = self._state_norm(step, x, "g_norm-0")
        attended = self._attention(step, layer, concat(token, state, 0, "concat_embd-0"))
        if attended is None:
            return None
        attended, x = step.keep_outputs(layer, attended, state if self._normed_residual else x)
        x = add(attended, x, "ffn_inp-0")
        return add(self._network(step, layer, self._ffn_norm(step, x, "ffn_norm-0")), x, "eagle3_prenorm")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        step.graph.output(FEATURES, x)
        return super()._hidden(step, x)
