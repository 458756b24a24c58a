"""The gptneox architecture: GPT-NeoX, Pythia, Dolly, RedPajama."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, Layer, ParallelDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import UngatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights


class GptNeoxModel(ParallelDecoder):
    """Parallel attention and feed-forward network with separate layer norms, or sequential if the file says so.

    A quarter of each head is rotated (arXiv 2204.06745).
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._parallel = keys.bool_("use_parallel_residual")
        eps = "attention.layer_norm_epsilon"
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX, norm_eps=eps)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=LayerNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            ffn_norm=LayerNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=UngatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer], UnaryOp.GELU),
        )

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        order = ParallelDecoder if self._parallel else Decoder
        return order._layer(self, step, layer, x)
