"""Linear attention with a state: the delta rule, gated linear attention, RWKV-6 and RWKV-7."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recurrences import KINDS, delta
from running import EACH_LOWERING, Array, Case, jit_for, new, values

from llamado.devices.compile.compiler import Compiler
from llamado.devices.cpu.device import CpuDevice, cpu_target
from llamado.ggml import Op, Tensor
from llamado.ggml import graph as g
from llamado.ggml.errors import ShapeError
from llamado.gguf.types import TensorType as T


def run(result: Tensor, data: dict[Tensor, Any], device: CpuDevice) -> Array:
    return Case({"r": result}, data).run(device)["r"].reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", EACH_LOWERING)
def test_the_reference_computes_the_same(lowering: str) -> None:
    """Every instruction set gives the same bits."""
    device, plain = CpuDevice(2, jit=jit_for(lowering)), CpuDevice(1, jit=jit_for("portable"))
    for name, make in KINDS.items():
        result, data = make()
        Case({"r": result}, data).check(device, rtol=1e-4, atol=1e-5)
        assert run(*make(), device).tobytes() == run(*make(), plain).tobytes(), name


def test_tokens_may_come_one_by_one(best: CpuDevice) -> None:
    """The same bits, in whatever parts a sequence is read, and beside whatever others."""
    for gates in (1, 32):
        whole, data = delta(gates=gates)
        size, heads, n, seqs = whole.src[2].ne  # type: ignore[union-attr]
        found = run(whole, data, best)
        out, states = found[: size * heads * n * seqs].reshape(seqs, n, -1), found[size * heads * n * seqs :]
        for seq in range(seqs):
            state = data[whole.src[5]][seq]  # type: ignore[index]
            for first, last in ((0, 1), (1, 3), (3, 5)):
                part, _ = delta(gates=gates, n=last - first, seqs=1)
                given = {p: data[w][seq, first:last] for p, w in zip(part.src[:5], whole.src, strict=False)}  # type: ignore[index]
                found = run(part, given | {part.src[5]: state}, best)  # type: ignore[dict-item]
                assert found[: out[seq, first:last].size].tobytes() == out[seq, first:last].tobytes()
                state = found[out[seq, first:last].size :].reshape(state.shape)
            assert state.tobytes() == states.reshape(seqs, -1)[seq].tobytes()


def test_states_of_earlier_tokens_can_be_read(best: CpuDevice) -> None:
    found = [run(*delta(seqs=1, snapshots=n), best) for n in (1, 4)]
    size = 32 * 32 * 4
    assert found[1][: found[0].size].tobytes() == found[0].tobytes()  # outputs, and the last state
    for back in (1, 2, 3):
        earlier, _ = delta(seqs=1, n=5 - back)
        whole, all_of_it = delta(seqs=1)
        given = {e: all_of_it[w][:, : 5 - back] for e, w in zip(earlier.src[:5], whole.src, strict=False)}  # type: ignore[index]
        right = run(earlier, given | {earlier.src[5]: all_of_it[whole.src[5]]}, best)[-size:]  # type: ignore[index]
        at = found[0].size + (back - 1) * size
        assert found[1][at : at + size].tobytes() == right.tobytes(), back


def test_mismatched_shapes_are_rejected() -> None:
    q, v, one, state = new(32, 2, 5, 1), new(32, 4, 5, 1), new(1, 4, 5, 1), new(32, 32, 4, 1)
    assert g.gated_delta_net(q, q, v, one, one, state).ne == (128, 5 + 32, 1, 1)
    for wrong in ((new(32, 3, 5), q, v, one, one, state), (q, new(32, 2, 4), v, one, one, state),
                  (q, q, v, new(2, 4, 5), one, state), (q, q, v, one, new(1, 4, 4), state),
                  (q, q, v, one, one, new(32, 16, 4))):  # fmt: skip
        with pytest.raises(ShapeError):
            g.gated_delta_net(*wrong)
    x, many = new(32, 2, 6), new(2048, 4)
    with pytest.raises(ShapeError):
        g.rwkv_wkv7(x, x, x, x, x, x, many)  # six tokens are not those of four sequences


def remembered(kind: str, *, copied: bool) -> tuple[Case, Tensor]:
    """Sequences that go on from rows of a memory, two of them in place; with `copied` others want what they read, so
    that nothing can be read or kept where it lies.
    """
    made, data = KINDS[kind]()
    state = made.src[-1]
    assert state is not None
    n_seqs = state.ne[3] if kind.startswith("delta") else state.ne[1]
    width = state.nelements // n_seqs
    table, reads, writes = new(width, 7), new(n_seqs, type=T.I32), new(n_seqs, type=T.I64)
    chosen = g.get_rows(table, reads)
    made.src = (*made.src[:-1], g.reshape(chosen, *state.ne))
    at = 4 * (made.nelements - state.nelements)
    kept = g.set_rows(table, g.view_2d(made, width, n_seqs, 4 * width, at), writes)
    outputs = {"out": g.view_1d(made, at // 4), "kept": kept, **({"chosen": chosen, "made": made} if copied else {})}
    rows: dict[Tensor, Any] = {table: values(width, 7, seed=9, scale=0.3), reads: [5, 0, 2][:n_seqs]}
    return Case(outputs, data | rows | {writes: [5, 3, 2][:n_seqs]}), table


@pytest.mark.parametrize("kind", ["delta", "wkv7", "wkv6", "gla"])
def test_states_are_read_and_kept_where_they_lie(best: CpuDevice, kind: str) -> None:
    """The bits are those of copies."""
    found, labels = [], []
    for copied in (False, True):
        case, _ = remembered(kind, copied=copied)
        got = case.run(best)
        found.append((got["out"].tobytes(), got["kept"].tobytes()))
        compiler = Compiler(case.graph, cpu_target(best.jit.lowering, 2))
        labels.append([operation.label for operation in compiler.compile()])
    assert found[0] == found[1]
    assert not any("rows" in label for label in labels[0]) and any("get_rows" in label for label in labels[1])


def test_states_that_change_before_they_are_needed_are_copied(best: CpuDevice) -> None:
    """A state is chosen and continued from without another write to the memory in between."""
    whole, _ = remembered("delta", copied=False)
    right = whole.run(best)["out"].tobytes()
    for cleared_before in (True, False):
        case, table = remembered("delta", copied=False)
        case = Case({"out": case.outputs["out"]}, case.data)
        zeros, everywhere = new(table.ne[0], 7), new(7, type=T.I64)
        scaled = g.scale(zeros, 1.0)
        nodes = case.graph.nodes
        at = next(i for i, node in enumerate(nodes) if node.op is Op.GATED_DELTA_NET)
        nodes.insert(at, scaled)
        nodes.insert(at + 1 if cleared_before else len(nodes), g.set_rows(table, scaled, everywhere))
        case.data = {**case.data, everywhere: np.arange(7)}
        assert case.run(best)["out"].tobytes() == right
