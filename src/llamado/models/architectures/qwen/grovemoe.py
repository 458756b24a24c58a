"""The grovemoe architecture: GroveMoE, derived from Qwen3-30B-A3B (arXiv 2508.07785)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import add, argsort_top_k, cast, scale, sigmoid, soft_max_ext
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.errors import InvalidModel
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys
from llamado.models.parts.experts import ExpertLinear, Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class Groves(NamedTuple):
    """Expert groups: `n` experts per group, and the width `n_ff` and output `factor` of a group's adjugate expert."""

    n: int
    n_ff: int
    factor: float


class GroveMixture(NamedTuple):
    """A mixture of experts, whose output then goes through the adjugate experts of the selected experts' groups.

    A selection's adjugate expert has the router weight of the expert whose number equals the group's (build_moe_ffn,
    llama-graph.cpp).
    """

    large: Mixture
    small: Mixture
    groves: Groves

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        router = self.large.router
        logits = router.gate(step, x, f"ffn_moe_logits-{layer}")
        probs = soft_max_ext(logits, None, 1.0, name=f"ffn_moe_probs-{layer}")
        scores = sigmoid(logits, f"ffn_moe_scores-{layer}")
        chosen = argsort_top_k(scores, router.experts.n_used, f"ffn_moe_topk-{layer}")
        y = self.large.run_experts(step, layer, x, chosen, router.weights(step, layer, probs, chosen))
        groups = scale(cast(chosen, TensorType.F32), float(np.float32(1) / np.float32(self.groves.n)))
        shared = cast(groups, TensorType.I32, f"ffn_moe_groups-{layer}")
        more = self.small.run_experts(step, layer, y, shared, router.weights(step, layer, probs, shared))
        return add(y, scale(more, self.groves.factor), f"ffn_final_moe_out-{layer}")


class GroveMoeModel(Qwen3Model):
    """Qwen3 with a mixture of experts in each layer, and adjugate experts shared by groups."""

    router = RouterKind(normalized=True, split_width=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        experts, n = hp.experts, keys.int_("experts_per_group")
        assert experts is not None
        if experts.n // n < experts.n_used:
            raise InvalidModel(
                f"metadata key '{keys.name('experts_per_group')}' is {n} for {experts.n} experts; at least as many "
                f"groups as experts per token, {experts.n_used}, are expected"
            )
        n_ff = keys.int_("expert_chunk_feed_forward_length", 0) or hp.head_dim_k
        self._groves = Groves(n, n_ff, keys.float_("expert_group_scale"))
        return hp

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, hp, groves = self.hparams.n_embd, self.hparams.experts, self._groves
        assert hp is not None
        large = Mixture.take(w, n_embd, hp)
        n = hp.n // groves.n
        e = w.experts(n, hp.n_used)
        small = large._replace(
            gate=ExpertLinear.take(e, "ffn_gate_chexps", n_embd, groves.n_ff, n),
            up=ExpertLinear.take(e, "ffn_up_chexps", n_embd, groves.n_ff, n),
            down=ExpertLinear.take(e, "ffn_down_chexps", groves.n_ff, n_embd, n),
        )
        return GroveMixture(large, small, groves)
