"""Mixtures of experts: hyper-parameters, routing, and the output of a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import ReferenceDevice
from tiny import TINY, make

from llamado.ggml import graph as g
from llamado.ggml.ops import GluOp, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import InvalidModel, UnsupportedModel, load_model
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import Experts, Gating, read_experts
from llamado.models.inputs import ForwardGraph
from llamado.models.keys import Keys
from llamado.models.parts.experts import ExpertLinear, ExpertRouter, Mixture
from llamado.models.parts.feedforward import GatedFeedForward

Array = np.ndarray[Any, Any]

N, N_FF, N_TOKENS = 16, 8, 7
RNG = np.random.default_rng(3)


def hp(**changed: Any) -> Experts:
    plain: dict[str, Any] = {
        "n": 8, "n_used": 3, "n_ff": N_FF, "gating": Gating.SOFTMAX, "normalized": False, "scale": 1.0, "n_groups": 0,
        "n_groups_used": 0, "n_shared": 0, "n_ff_shared": 0, "n_dense_layers": 0,
    }  # fmt: skip
    return Experts(**(plain | changed))


class Run:
    """Tensors with values, and a part's output for them on the reference device."""

    def __init__(self) -> None:
        self.device = ReferenceDevice()
        step = object.__new__(Pass)
        step.graph, step._adapters = ForwardGraph(), []
        self.step = step
        self.x, self.values = self.tensor(N, N_TOKENS)

    def tensor(self, *ne: int, scale: float = 1.0) -> tuple[Tensor, Array]:
        tensor = g.new_tensor(T.F32, *ne)
        values = (RNG.standard_normal(ne[::-1]) * scale).astype(np.float32)
        self.device.set(tensor, values)
        return tensor, values.astype(np.float64)

    def get(self, tensor: Tensor) -> Array:
        self.step.graph.expand(tensor)
        for node in self.step.graph.nodes:
            self.device.compute(node)
        return self.device.get(tensor)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("by_logits", [False, True])
def test_selection_and_weights_of_experts(gating: Gating, normalized: bool, biased: bool, by_logits: bool) -> None:
    run = Run()
    matrix, weights = run.tensor(N, 8, scale=0.5)
    shift, shifts = run.tensor(8)
    bias, biases = run.tensor(8)
    router = ExpertRouter(
        Linear(matrix, shift), hp(gating=gating, normalized=normalized, scale=2.5), bias if biased else None, by_logits
    )
    chosen, weighted = router(run.step, 0, run.x)
    logits = run.values @ weights.T + shifts
    probs = {Gating.SOFTMAX: softmax, Gating.SIGMOID: sigmoid, Gating.SOFTMAX_WEIGHT: lambda x: x}[gating](logits)
    scores = (logits if by_logits else probs) + (biases if biased else 0)
    right = np.argsort(-scores, axis=-1, kind="stable")[:, :3]
    picked = np.take_along_axis(probs, right, -1)
    if gating is Gating.SOFTMAX_WEIGHT:
        picked = softmax(picked)
    if normalized:
        picked = picked / np.maximum(picked.sum(-1, keepdims=True), 6.103515625e-5)
    found = run.get(weighted)
    assert np.array_equal(run.device.get(chosen)[0, 0], right)
    np.testing.assert_allclose(found[0, :, :, 0], picked * 2.5, rtol=1e-5)


@pytest.mark.parametrize(("n_groups", "n_groups_used"), [(4, 2), (2, 1)])
def test_groups_of_experts(n_groups: int, n_groups_used: int) -> None:
    """A group's score is the sum of its two best."""
    run = Run()
    matrix, weights = run.tensor(N, 8)
    experts = hp(gating=Gating.SIGMOID, n_groups=n_groups, n_groups_used=n_groups_used, n_used=3)
    router = ExpertRouter(Linear(matrix), experts)
    chosen, weighted = router(run.step, 0, run.x)
    run.get(weighted)
    probs = sigmoid(run.values @ weights.T)
    for token, found in enumerate(run.device.get(chosen)[0, 0]):
        n, two = 8 // n_groups, np.sort(probs[token].reshape(n_groups, -1))[:, -2:]
        groups = np.argsort(-two.sum(-1))[:n_groups_used]
        allowed = np.concatenate([np.arange(n * group, n * (group + 1)) for group in groups])
        assert list(found) == sorted(allowed, key=lambda e: -probs[token][e])[:3]


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def swiglu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def swiglu_oai(gate: Array, up: Array) -> Array:
    return np.minimum(gate, 7) * sigmoid(1.702 * np.minimum(gate, 7)) * (np.clip(up, -7, 7) + 1)


def test_the_output_of_a_mixture() -> None:
    """Separate and fused matrices, biases, scales, weighted inputs and outputs, and a gated shared expert."""
    run = Run()
    gate, gates = run.tensor(N, N_FF, 8, scale=0.3)
    up, ups = run.tensor(N, N_FF, 8, scale=0.3)
    both = g.new_tensor(T.F32, N, 2 * N_FF, 8)
    run.device.set(both, np.concatenate([gates, ups], axis=1).astype(np.float32))
    down, downs = run.tensor(N_FF, N, 8, scale=0.3)
    bias, biases = run.tensor(N_FF, 8)
    factor, factors = run.tensor(8)
    router_weight, _ = run.tensor(N, 8)
    shared = [run.tensor(*ne, scale=0.3) for ne in ((N, 5), (N, 5), (5, N))]
    gate_vector, vector = run.tensor(N)
    router = ExpertRouter(Linear(router_weight), hp())
    x = run.values

    def expected(choice: Array, weights: Array, act: Any, *, bias: Array, factor: Array, before: bool = False) -> Array:
        y = np.zeros((N_TOKENS, N))
        for t, e in np.ndindex(N_TOKENS, 3):
            expert, weight = choice[t, e], weights[t, e]
            row = x[t] * weight if before else x[t]
            h = act(gates[expert] @ row, ups[expert] @ row + bias[expert])
            y[t] += downs[expert] @ h * factor[expert] * (1 if before else weight)
        return y

    none, ones = np.zeros((8, N_FF)), np.ones(8)
    plain = Mixture(router, ExpertLinear(down), ExpertLinear(gate), ExpertLinear(up))
    chosen, weighted = router(run.step, 0, run.x)
    run.step.graph.expand(weighted)
    fused = plain._replace(gate=ExpertLinear(both), up=None)
    fixed = {"bias": none, "factor": ones}
    parts = [
        (plain, fixed, swiglu),
        (fused, fixed, swiglu),
        (plain._replace(up=ExpertLinear(up, bias)), {**fixed, "bias": biases}, swiglu),
        (plain._replace(down=ExpertLinear(down, scale=factor)), {**fixed, "factor": factors}, swiglu),
        (plain._replace(activation=GluOp.REGLU), fixed, lambda a, b: np.maximum(a, 0) * b),
        (plain._replace(activation=GluOp.SWIGLU_OAI), fixed, swiglu_oai),
        (plain._replace(gate=None, activation=UnaryOp.RELU, squared=True), fixed, lambda a, b: np.maximum(b, 0) ** 2),
        (plain._replace(weigh_input=True), {**fixed, "before": True}, swiglu),
    ]
    results = [mixture(run.step, i, run.x) for i, (mixture, _, _) in enumerate(parts)]
    gated = GatedFeedForward(*(Linear(tensor) for tensor, _ in shared), GluOp.SWIGLU)
    with_shared = plain._replace(shared=gated, shared_gate=gate_vector)(run.step, 9, run.x)
    shared_alone = plain._replace(shared=gated)(run.step, 10, run.x)
    for tensor in (*results, with_shared):
        run.step.graph.expand(tensor)
    run.get(shared_alone)
    choice = run.device.get(chosen)[0, 0].astype(int)
    weights = run.device.get(weighted)[0, :, :, 0]
    for result, (_, options, act) in zip(results, parts, strict=True):
        np.testing.assert_allclose(
            run.device.get(result)[0, 0], expected(choice, weights, act, **options), rtol=1e-4, atol=1e-5
        )
    more = silu(x @ shared[0][1].T) * (x @ shared[1][1].T) @ shared[2][1].T
    first = run.device.get(results[0])[0, 0]
    np.testing.assert_allclose(run.device.get(shared_alone)[0, 0] - first, more, rtol=1e-4, atol=1e-5)
    behind = more * sigmoid(x @ vector)[:, None]
    np.testing.assert_allclose(run.device.get(with_shared)[0, 0] - first, behind, rtol=1e-4, atol=1e-5)


# --- hyper-parameters -------------------------------------------------------------------------------------------------


def keys(**values: Any) -> Keys:
    given = {"expert_count": 8, "expert_used_count": 2} | values
    return Keys(Metadata({"general.architecture": "some", **{f"some.{key}": value for key, value in given.items()}}))


def test_hparams_of_experts() -> None:
    given = {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}
    assert read_experts(keys(**given), 99) == hp(n_used=2, n_ff=99)
    told = read_experts(keys(**given, expert_feed_forward_length=7), 99, from_file=True)
    assert told == hp(n_used=2, n_ff=7, gating=Gating.SIGMOID, scale=2.5, normalized=True)
    assert read_experts(keys(), 99, gating=Gating.SIGMOID, normalized=True, from_file=True) == hp(
        n_used=2, n_ff=99, gating=Gating.SIGMOID, normalized=True
    )


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"expert_used_count": 9}, InvalidModel, "are 8 and 9; a token uses between one and all"),
        ({"expert_used_count": 0}, InvalidModel, "are 8 and 0"),
        ({"expert_count": 2000}, InvalidModel, "'some.expert_count' is 2000"),
        ({"expert_group_count": 3, "expert_group_used_count": 1}, InvalidModel, "are 3 and 1 for 8 experts"),
        ({"expert_group_count": 8, "expert_group_used_count": 1}, InvalidModel, "are 8 and 1 for 8 experts"),
        ({"expert_group_count": 4, "expert_group_used_count": 4}, InvalidModel, "fewer used"),
        (
            {"expert_group_count": 4, "expert_group_used_count": 1, "expert_used_count": 3},
            InvalidModel,
            "the groups that are used have 2 experts",
        ),
        ({"expert_gating_func": 9}, UnsupportedModel, "'some.expert_gating_func' is 9; supported are 1 .softmax., 2"),
    ],
)
def test_invalid_sizes_of_experts_are_rejected(values: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read_experts(keys(**values), 99, from_file=True)


def test_roles_of_experts_have_their_number(tmp_path: Path) -> None:
    with GGUFFile.open(make(TINY["qwen2moe"], tmp_path / "m.gguf")) as file:
        roles = load_model(file).roles
    for name, (role, *_) in roles.items():
        assert (role.experts, role.used) == ((8, 3) if "_exps." in name else (1, 1)), name
