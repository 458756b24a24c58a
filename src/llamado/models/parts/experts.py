"""Mixtures of experts (arXiv 1701.06538): a router selects the feed-forward networks that a token uses."""

from __future__ import annotations

import math
from typing import NamedTuple

from llamado.ggml.graph import (
    add,
    add_id,
    argsort_top_k,
    clamp,
    cont,
    div,
    fill,
    get_rows,
    mul,
    repeat,
    reshape,
    scale,
    set_rows,
    sigmoid,
    soft_max_ext,
    sqr,
    sum_rows,
    unary,
    view_2d,
    view_3d,
)
from llamado.ggml.ops import GluOp, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import Experts, Gating, HyperParameters
from llamado.models.parts.feedforward import SWIGLU, FeedForward, FeedForwardKind, Situ, limited_glu
from llamado.models.weights import RoleWeights

_LEAST_SUM = 6.103515625e-5
"""Minimum divisor of expert weights: the smallest normal f16."""


class ExpertLinear(NamedTuple):
    """One matrix per expert, with optional scale and bias per expert."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_in: int, n_out: int, n: int) -> ExpertLinear:
        """Take `name.weight` [n_in, n_out, n], and `name.bias` [n_out, n] and `name.scale` [n] if present.

        Raises InvalidModel.
        """
        weight = w.require(f"{name}.weight", n_in, n_out, n)
        return cls(weight, w.optional(f"{name}.bias", n_out, n), w.optional(f"{name}.scale", n))

    def __call__(self, step: Pass, x: Tensor, chosen: Tensor, name: str) -> Tensor:
        """Project x by the experts `chosen` [n_used, n_tokens]: [n_out, n_used, n_tokens].

        x is [n_in, 1 or n_used, n_tokens].
        """
        y = step.mul_mat_id(self.weight, x, chosen, name)
        if self.scale is not None:
            n, n_tokens = self.scale.ne[0], x.ne[2]
            each = get_rows(repeat(reshape(self.scale, 1, n, 1), 1, n, n_tokens, 1), chosen)
            y = mul(y, each, name)
        return y if self.bias is None else add_id(y, self.bias, chosen, name)


class ExpertRouter(NamedTuple):
    """Selects experts and computes the weights of their outputs.

    `bias` is added to the selection scores, not to the weights (arXiv 2408.15664). With `select_by_logits`, experts are
    selected by the router logits instead of the gated probabilities.
    """

    gate: Linear
    experts: Experts
    bias: Tensor | None = None
    select_by_logits: bool = False

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts, I32 [n_used, n_tokens], for x [n, n_tokens], and weights F32 [1, n_used, n_tokens]."""
        hp = self.experts
        probs = logits = self.gate(step, x, f"ffn_moe_logits-{layer}")
        if hp.gating is Gating.SOFTMAX:
            probs = soft_max_ext(logits, None, 1.0, name=f"ffn_moe_probs-{layer}")
        elif hp.gating is Gating.SIGMOID:
            probs = sigmoid(logits, f"ffn_moe_probs-{layer}")
        scores = logits if self.select_by_logits else probs
        if self.bias is not None:
            scores = add(scores, self.bias, f"ffn_moe_probs_biased-{layer}")
        if hp.n_groups > 1:
            scores = self._in_best_groups(layer, scores)
        chosen = argsort_top_k(scores, hp.n_used, f"ffn_moe_topk-{layer}")
        return chosen, self.weights(step, layer, probs, chosen)

    def weights(self, step: Pass, layer: int, probs: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of the selected experts from `probs` [n, n_tokens]: F32 [1, n_used, n_tokens]."""
        hp, n_tokens = self.experts, chosen.ne[1]
        weights = get_rows(reshape(probs, 1, probs.ne[0], n_tokens), chosen, f"ffn_moe_weights-{layer}")
        if hp.gating is Gating.SOFTMAX_WEIGHT or hp.normalized:
            weights = reshape(weights, hp.n_used, n_tokens)
            if hp.gating is Gating.SOFTMAX_WEIGHT:
                weights = soft_max_ext(weights, None, 1.0, name=f"ffn_moe_weights_softmax-{layer}")
            if hp.normalized:
                weights = div(weights, clamp(sum_rows(weights), _LEAST_SUM, math.inf), f"ffn_moe_weights_norm-{layer}")
            weights = reshape(weights, 1, hp.n_used, n_tokens)
        if hp.scale not in (0.0, 1.0):
            weights = scale(weights, hp.scale, name=f"ffn_moe_weights_scaled-{layer}")
        return step.graph.expand(weights)

    def _in_best_groups(self, layer: int, scores: Tensor) -> Tensor:
        """Mask the scores of experts outside the groups with the greatest sum of their two best scores."""
        hp, n_tokens = self.experts, scores.ne[1]
        n = hp.n // hp.n_groups
        groups = reshape(scores, n, hp.n_groups, n_tokens)
        two = get_rows(reshape(groups, 1, n, hp.n_groups, n_tokens), argsort_top_k(groups, 2))
        sums = reshape(sum_rows(reshape(two, 2, hp.n_groups, n_tokens)), hp.n_groups, n_tokens)
        best = argsort_top_k(sums, hp.n_groups_used, f"ffn_moe_group_topk-{layer}")
        masked = set_rows(fill(groups, -math.inf), get_rows(groups, best), best)
        return reshape(masked, hp.n, n_tokens, name=f"ffn_moe_probs_masked-{layer}")


class Mixture(NamedTuple):
    """Weighted sum of down(act(gate x) · up x) over the selected experts, plus the shared expert.

    - `gate` None: down(act(up x)), with the activation squared if `squared`. `up` None: `gate` holds the rows of gate
      and up.
    - `shared` sees every token; it is weighted by sigmoid(shared_gate · x) if `shared_gate` is set.
    - `weigh_input`: the router weights multiply the experts' input, not their output.
    - `limit`: see `limited_glu`.
    """

    router: ExpertRouter
    down: ExpertLinear
    gate: ExpertLinear | None
    up: ExpertLinear | None
    activation: GluOp | UnaryOp | Situ = GluOp.SWIGLU
    squared: bool = False
    shared: FeedForward | None = None
    shared_gate: Tensor | None = None
    weigh_input: bool = False
    limit: float = 0.0

    @classmethod
    def take(
        cls,
        w: RoleWeights,
        n_embd: int,
        hp: Experts,
        activation: GluOp | UnaryOp | Situ = GluOp.SWIGLU,
        *,
        squared: bool = False,
        weigh_input: bool = False,
        shared: FeedForward | None = None,
        shared_gate: Tensor | None = None,
        limit: float = 0.0,
        router_width: int = 0,
    ) -> Mixture:
        """Take the router (`ffn_gate_inp`, `exp_probs_b`) and the experts. Raises InvalidModel.

        The experts are `ffn_down_exps` and `ffn_gate_up_exps`, or `ffn_gate_exps` and `ffn_up_exps`, or only
        `ffn_up_exps` for an activation without a gate. `router_width` is the width of the router's input, if it
        differs.
        """
        e, n_ff = w.experts(hp.n, hp.n_used), hp.n_ff
        gate: ExpertLinear | None
        up: ExpertLinear | None
        if e.has("ffn_gate_up_exps.weight"):
            gate, up = ExpertLinear.take(e, "ffn_gate_up_exps", n_embd, 2 * n_ff, hp.n), None
        else:
            gated = not isinstance(activation, UnaryOp)
            gate = ExpertLinear.take(e, "ffn_gate_exps", n_embd, n_ff, hp.n) if gated else None
            up = ExpertLinear.take(e, "ffn_up_exps", n_embd, n_ff, hp.n)
        # Not `linear`: in Gemma 4, `ffn_gate_inp.scale` is a scale of the router's input.
        gate_inp = Linear(
            w.require("ffn_gate_inp.weight", router_width or n_embd, hp.n), w.optional("ffn_gate_inp.bias", hp.n)
        )
        return cls(
            router=ExpertRouter(
                gate_inp,
                hp,
                w.optional("exp_probs_b.bias", hp.n) or w.optional("exp_probs_b", hp.n),
                select_by_logits=weigh_input,
            ),
            down=ExpertLinear.take(e, "ffn_down_exps", n_ff, n_embd, hp.n),
            gate=gate,
            up=up,
            activation=activation,
            squared=squared,
            shared=shared,
            shared_gate=shared_gate,
            weigh_input=weigh_input,
            limit=limit,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Apply to x [n_embd, n_tokens]; `router_input` is the router's input, if it is not x."""
        y = self.run_experts(step, layer, x, *self.router(step, layer, x if router_input is None else router_input))
        if self.shared is None:
            return y
        more = self.shared(step, layer, x)
        if self.shared_gate is not None:
            more = mul(more, sigmoid(step.mul_mat(self.shared_gate, x, f"ffn_shexp_gate-{layer}")))
        return add(y, more, f"ffn_out-{layer}")

    def run_experts(self, step: Pass, layer: int, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run x [n_embd, n_tokens] through the `chosen` experts and sum their weighted outputs."""
        n_embd, n_tokens = x.ne[0], x.ne[1]
        h = reshape(x, n_embd, 1, n_tokens)
        if self.weigh_input:
            h = mul(repeat(h, n_embd, chosen.ne[0], n_tokens, 1), weights, f"ffn_moe_weighted-{layer}")
        h = self.down(step, self._activated(step, layer, h, chosen), chosen, f"ffn_moe_down-{layer}")
        if not self.weigh_input:
            h = mul(h, weights, f"ffn_moe_weighted-{layer}")
        return add_up(step, h, f"ffn_moe_out-{layer}")

    def _activated(self, step: Pass, layer: int, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the input of `down`: F32 [n_ff, n_used, n_tokens]."""
        if isinstance(self.activation, UnaryOp):
            assert self.up is not None
            h = unary(self.up(step, x, chosen, f"ffn_moe_up-{layer}"), self.activation, f"ffn_moe_act-{layer}")
            return sqr(h, f"ffn_moe_sqr-{layer}") if self.squared else h
        assert self.gate is not None
        if self.up is None:
            both = self.gate(step, x, chosen, f"ffn_moe_gate_up-{layer}")
            n = both.ne[0] // 2
            gate, up = (
                view_3d(both, n, both.ne[1], both.ne[2], both.nb[1], both.nb[2], at) for at in (0, n * both.nb[0])
            )
        else:
            up = self.up(step, x, chosen, f"ffn_moe_up-{layer}")
            gate = self.gate(step, x, chosen, f"ffn_moe_gate-{layer}")
        return limited_glu(gate, up, self.activation, self.limit, f"ffn_moe_act-{layer}")


def add_up(step: Pass, each: Tensor, name: str) -> Tensor:
    """Sum [n, n_used, n_tokens] over dimension 1, in order."""
    step.graph.expand(each)
    n, n_used, n_tokens = each.ne[:3]
    parts = [step.graph.expand(view_2d(each, n, n_tokens, each.nb[2], i * each.nb[1])) for i in range(n_used)]
    if n_used == 1:
        return cont(parts[0], name=name)
    total = parts[0]
    for part in parts[1:]:
        total = step.graph.expand(add(total, part, name))
    return total


def take_experts(w: RoleWeights, hp: HyperParameters, layer: int, kind: FeedForwardKind = SWIGLU) -> FeedForward:
    """Take a mixture with its shared expert, if any; in a layer without a router, one network of the same kind.

    The shared expert is gated if the file has `ffn_gate_inp_shexp`. Raises InvalidModel.
    """
    if not w.has("ffn_gate_inp.weight"):
        return kind.take(w, hp.n_embd, hp.n_ff[layer])
    if hp.experts is None:
        raise InvalidModel("a layer has experts, but the metadata gives no number of experts")
    shared = shared_gate = None
    if hp.experts.n_shared or hp.experts.n_ff_shared or w.has("ffn_up_shexp.weight"):
        fused = isinstance(kind.activation, GluOp) and not w.has("ffn_gate_shexp.weight")
        n_ff = w.ne("ffn_down_shexp.weight")[0]
        shared = kind._replace(fused=fused).take(w, hp.n_embd, n_ff, suffix="_shexp")
        shared_gate = w.optional("ffn_gate_inp_shexp.weight", hp.n_embd)
    return Mixture.take(
        w, hp.n_embd, hp.experts, kind.activation, squared=kind.squared, shared=shared, shared_gate=shared_gate
    )
