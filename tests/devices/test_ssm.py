"""State spaces on the CPU: the reference's numbers, and the same bits however a sequence is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recurrences import Scan
from running import EACH_LOWERING, Array, Case, check, jit_for, new, values

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml import Tensor
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


@pytest.mark.parametrize(("places", "channels"), [(4, 40), (16, 5)])
def test_a_convolution(device: CpuDevice, places: int, channels: int) -> None:
    for n_tokens, n_seqs in ((1, 3), (21, 2)):
        x, kernel = new(places - 1 + n_tokens, channels, n_seqs), new(places, channels)
        check(device, g.ssm_conv(x, kernel), {x: values(*x.ne[:3]), kernel: values(*kernel.ne[:2], seed=1)})
        turned = new(channels, places - 1 + n_tokens, n_seqs)
        data = {turned: values(*turned.ne[:3]), kernel: values(*kernel.ne[:2], seed=1)}
        check(device, g.ssm_conv(g.permute(turned, 1, 0, 2, 3), kernel), data)


@pytest.mark.parametrize(("places", "channels"), [(4, 40), (3, 13), (2, 5)])
def test_a_convolution_that_goes_on(device: CpuDevice, places: int, channels: int) -> None:
    """The tokens before, then those of now; and the last of them, for the next ones: as one operation, or as three."""
    found = {}
    for n_tokens, n_seqs in ((1, 3), (70, 2)):
        for alone in (True, False):
            before, x = new(places - 1, channels, n_seqs), new(channels, n_tokens, n_seqs)
            kernel, ids = new(places, channels), new(n_seqs, type=T.I64)
            both = g.concat(before, g.transpose(x), 0)
            ne, nb = (places - 1, channels, n_seqs), both.nb
            last = g.cont(g.view_3d(both, *ne, nb[1], nb[2], 4 * n_tokens))
            width = (places - 1) * channels
            kept = g.set_rows(new(width, n_seqs + 1), g.reshape(last, width, n_seqs), ids)
            outputs = {"kept": kept, "y": g.ssm_conv(both, kernel)} | ({} if alone else {"both": both})
            data: dict[Tensor, Any] = {t: values(*t.ne[:3], seed=i) for i, t in enumerate((before, x, kernel))}
            data[ids] = np.arange(1, n_seqs + 1)
            case = Case(outputs, data)
            got = case.check(device)
            found[alone] = got["y"].tobytes(), got["kept"].tobytes()
            labels = [operation.label for operation in device.profile(case.graph)]
            assert ("copy" not in labels) == alone
        assert found[True] == found[False]


@pytest.mark.parametrize("per_lane", [False, True])
def test_heads_that_are_not_whole_vectors(device: CpuDevice, per_lane: bool) -> None:
    scan = Scan(24, 1, 5, 1, 3, 1, per_lane=True) if per_lane else Scan(8, 5, 3, 1, 70, 1)
    check(device, scan.node(), scan.data, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", EACH_LOWERING)
@pytest.mark.parametrize("per_lane", [False, True])
def test_the_same_bits_in_any_pieces(lowering: str, per_lane: bool) -> None:
    """Each piece goes on from the state that the one before kept; two threads, and one."""
    lanes, head_dim, n_head, n = 32, 1 if per_lane else 8, 8, 41
    whole = Scan(lanes, head_dim, n_head, 1, n, 1, per_lane=per_lane)
    found = []
    for pieces, n_threads in (([n], 1), ([n], 2), ([1] * n, 2), ([32, 5, 4], 1)):
        state, rows, at = whole.data[whole.s], [], 0
        for size in pieces:
            scan = Scan(lanes, head_dim, n_head, 1, size, 1, per_lane=per_lane)
            data = scan.data | {scan.a: whole.data[whole.a], scan.s: state}
            for mine, all_ in ((scan.x, whole.x), (scan.b, whole.b), (scan.c, whole.c)):
                data[mine] = whole.data[all_][:, at : at + size]
            data[scan.dt] = whole.data[whole.dt][:, :, at : at + size]
            y, state = run_and_keep(CpuDevice(n_threads, jit=jit_for(lowering)), scan, data)
            rows.append(y)
            at += size
        found.append((np.concatenate(rows).tobytes(), state[2].tobytes()))
    assert found[0] == found[1] == found[2] == found[3]


def run_and_keep(device: CpuDevice, scan: Scan, data: dict[Tensor, Any]) -> tuple[Array, Array]:
    """Return each token's output and all states; the new states replace the old ones in place."""
    node = scan.node()
    n, width = scan.x.nelements, scan.s.nelements // scan.s.ne[3]
    keep = new(scan.x.ne[3], type=T.I64)
    flat = g.reshape(scan.s, width, scan.s.ne[3])
    kept = g.set_rows(flat, g.view_2d(node, width, scan.x.ne[3], 4 * width, 4 * n), keep)
    data = {**data, keep: np.array([2]), scan.ids: np.array([2])}
    case = Case({"y": g.cont(g.view_1d(node, n)), "states": kept}, data)
    found = case.run(device)
    return found["y"].reshape(-1), found["states"].reshape(scan.s.ne[::-1])


@pytest.mark.slow
def test_a_state_stored_at_once_is_the_resulting_one() -> None:
    """The scan itself puts it where it is kept; where others want it too, it is copied there."""
    device, found, labels = CpuDevice(2), [], []
    for shared in (False, True):
        scan = Scan(16, 8, 4, 2, 5, 3)
        node, n, width, keep = scan.node(), scan.x.nelements, 16 * 8 * 4, new(3, type=T.I64)
        states = g.view_2d(node, width, 3, 4 * width, 4 * n)
        kept = g.set_rows(g.reshape(scan.s, width, 5), states, keep)
        outputs = {"kept": kept, "y": g.cont(g.view_1d(node, n))} | ({"more": g.scale(states, 2.0)} if shared else {})
        case = Case(outputs, {**scan.data, keep: np.array([4, -1, 0]), scan.ids: np.array([1, 2, 9])})
        values_ = case.run(device)
        found.append((values_["kept"].tobytes(), values_["y"].tobytes()))
        labels.append([operation.label for operation in device.profile(case.graph)])
    assert found[0] == found[1]
    assert not any("set_rows" in label for label in labels[0]) and any("set_rows" in label for label in labels[1])


def test_operations_before_the_state_is_stored_read_the_old_state() -> None:
    scan = Scan(16, 8, 4, 2, 5, 1)
    node, width, keep = scan.node(), 16 * 8 * 4, new(1, type=T.I64)
    flat = g.reshape(scan.s, width, 3)
    kept = g.set_rows(flat, g.view_2d(node, width, 1, 4 * width, 4 * scan.x.nelements), keep)
    outputs = {"y": g.cont(g.view_1d(node, scan.x.nelements)), "before": g.scale(flat, 2.0), "kept": kept}
    Case(outputs, {**scan.data, keep: np.array([1])}).check(CpuDevice(2), rtol=1e-4, atol=1e-5)
