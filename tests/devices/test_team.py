"""The thread team: many programs, few threads, no work for idle hands, a clean end."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from running import Case, jit_for, new, values, weight_bytes
from tiers import chosen
from waiting import until

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.team import _NONE_LEFT
from llamado.devices.device import DeviceError
from llamado.devices.kernel import kernel
from llamado.devices.simd import GROUP, Code, Work
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


def case() -> Case:
    """A few operations that depend on one another."""
    x, w, up = new(64, 11), new(64, 64, type=T.Q8_0), new(64, 11)
    y = g.rms_norm(g.mul_mat(w, g.silu(x)), 1e-5)
    y = g.add(g.mul_mat(w, y), up)
    data = {x: values(64, 11), w: weight_bytes(T.Q8_0, 64, 64), up: values(64, 11, seed=1)}
    return Case({"y": g.mul_mat(w, y)}, data)


def team_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("llamado-cpu")]


@kernel("items", "n", "share")
def count(c: Code, a: SimpleNamespace, work: Work) -> None:
    """One more for each item."""
    with c.shares(work, a.n, a.share) as item:
        c.atomic_add(a.items + item * 8, 1)


@pytest.mark.parametrize("n_threads", [1, 2, 7, 8, 9, 20, 33])
def test_present_threads_do_the_work_of_absent_ones(n_threads: int) -> None:
    """Threads that come help their own group and all others; each item is done once, even if some are taken already."""
    function = jit_for("portable").function(count)
    groups = -(-n_threads // GROUP)
    for n, share, busy in ((1, 1, ()), (5, 2, ()), (100, 1, ()), (1000, 7, (0, n_threads - 1)), (77, 3, (0,))):
        items, counters = np.zeros(n, np.int64), np.zeros((n_threads + groups, 3), np.int64)
        for one in set(busy):  # has taken three items, and does them
            counters[one, 1] = min(3, n * (one + 1) // n_threads - n * one // n_threads)
            items[n * one // n_threads :][: counters[one, 1]] = 1
        fields = np.array([items.ctypes.data, n, share], np.int64)
        for thread in ((n_threads * 2) // 3, 0, n_threads - 1):
            function(fields.ctypes.data, thread, n_threads, counters.ctypes.data + 8, counters.strides[0])
            assert items.tolist() == [1] * n
        assert not counters[:, 0].any() and not counters[:, 2].any()  # other operations' counters
        assert counters[n_threads:, 1].tolist() == [1] * groups


@pytest.mark.slow
@pytest.mark.parametrize("n", chosen([1, 2, 3, 5, 9, 17], (2, 9)))
def test_many_programs_in_a_row_on_any_number_of_threads(n: int) -> None:
    """This includes more threads than cores, and programs that use fewer threads than the team has."""
    device, one = CpuDevice(n, jit=jit_for("portable")), case()
    expected = one.run(device)["y"].tobytes()
    compiled = device.prepare(one.graph)
    for i in range(250):
        device.team.run(compiled.program.table, compiled.program.counters, 1 + i % n)
        if i % 25 == 0:
            time.sleep(0.002)  # long enough to fall asleep
        assert device.read(one.outputs["y"], 0, len(expected)).result().tobytes() == expected
    device.close()


@pytest.mark.slow
@pytest.mark.parametrize("n", chosen([1, 2, 3, 9, 17], (2, 9)))
def test_a_late_caller_helps(n: int) -> None:
    """At once, between any two operations, when all is done: who is there does its work, and the bits are the same."""
    device, one = CpuDevice(n, jit=jit_for("portable")), case()
    expected = one.run(device)["y"].tobytes()
    compiled = device.prepare(one.graph)
    output = device._bytes(one.outputs["y"])
    for i in range(200):
        n_threads = 1 + i % n
        output[:] = 0
        device.team.launch(compiled.program.table, compiled.program.counters, n_threads)
        busy_until = time.perf_counter() + 1e-6 * (i % 40)
        while time.perf_counter() < busy_until:
            pass
        if i % 50 == 49 and n_threads > 1:
            until(lambda: output.tobytes() == expected, "the others do not do it all")
        device.team.join()
        assert output.tobytes() == expected
    device.close()


def test_reads_wait_for_launched_graphs() -> None:
    device, one = CpuDevice(2, jit=jit_for("portable")), case()
    expected = one.run(device)["y"].tobytes()
    x = next(iter(one.data))
    for ask in (
        lambda: device.read(one.outputs["y"], 0, len(expected)).result(),
        lambda: device.write(x, device.read(x, 0, x.nbytes).result()),
        lambda: device.copy(x, x),
        lambda: device.submit(one.graph),
        lambda: device.drop_graphs([]),
        lambda: device.prepare(one.graph),
        device.trim_memory,
        device.finish,
        device.close,
    ):
        device.launch(one.graph)
        assert device.team._launched
        ask()
        assert not device.team._launched
    with pytest.raises(DeviceError, match="closed"):
        device.launch(one.graph)


@pytest.mark.slow
def test_an_idle_team_takes_no_time() -> None:
    device, one = CpuDevice(4, jit=jit_for("portable")), case()
    one.run(device)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    device.close()


def test_close_ends_the_threads_and_later_work_is_refused() -> None:
    before = len(team_threads())
    device, one = CpuDevice(3, jit=jit_for("portable")), case()
    assert len(team_threads()) == before + 2
    one.run(device)
    device.close()
    assert len(team_threads()) == before
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.submit(one.graph)
    idle = CpuDevice(2, jit=jit_for("portable"))  # never ran a program
    idle.close()
    assert len(team_threads()) == before


@pytest.mark.slow
def test_python_runs_while_a_program_does() -> None:
    """The caller gives Python's lock away: other threads of the server go on."""
    device = CpuDevice(1, jit=jit_for("portable"))
    w, x = new(4096, 2048, type=T.F32), new(4096, 64)
    graph = Case({"y": g.mul_mat(w, x)}, {w: np.ones((2048, 4096), np.float32), x: values(4096, 64)})
    graph.run(device)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(0.0005):
            ticks[0] += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    most = 0
    for _ in range(200):  # on a busy machine the other thread may sleep through some of them
        before = ticks[0]
        device.submit(graph.graph)
        most = max(most, ticks[0] - before)
        if most > 3:
            break
    stop.set()
    ticker.join()
    device.close()
    assert most > 3, "while one program ran"


def test_small_batches_take_the_threads_for_decoding() -> None:
    """However a graph calls its inputs: the columns of its products count."""
    device = CpuDevice(1, 3, jit=jit_for("portable"))
    for n, threads in ((1, 1), (8, 1), (9, 3)):
        w, x, keys = new(8, 4), new(8, n), new(8, 40, 2)
        scores = g.mul_mat(keys, g.repeat(g.reshape(g.mul_mat(new(8, 8), x), 8, n, 1), 8, n, 2))
        one = Case({"y": g.mul_mat(w, x), "scores": scores}, {x: values(8, n)})
        one.bind(device)
        assert device.prepare(one.graph).n_threads == threads
    for n, threads in ((3, 1), (30, 3)):  # no product
        x = new(8, n)
        one = Case({"y": g.silu(x)}, {x: values(8, n)})
        one.bind(device)
        assert device.prepare(one.graph).n_threads == threads
    device.close()


@pytest.mark.parametrize("filled", [0, 0x3F, 0xFF])
def test_operations_of_a_program_that_is_left_touch_nothing(filled: int) -> None:
    """Whatever those before them, which did nothing either, have left in memory: numbers of tiles, of experts."""
    device = CpuDevice(2, jit=Jit())
    n_kv, n = 96, 40
    q, k, v = new(64, n, 6), new(64, n_kv, 2, type=T.F16), new(64, n_kv, 2, type=T.F16)
    mask, experts, ids = new(n_kv, n, type=T.F16), new(64, 32, 4, type=T.Q8_0), new(2, n, type=T.I32)
    x = new(64, 1, n)
    outputs = {
        "attention": g.flash_attn_ext(q, k, v, mask, scale=0.125),
        "experts": g.mul_mat_id(experts, x, ids),
        "order": g.argsort(new(50, n)),
    }
    case = Case(outputs, {q: values(64, n, 6)})
    case.bind(device)
    program = device.prepare(case.graph).program
    program.counters.fill(_NONE_LEFT)
    device._arena.memory[:] = filled
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
    for i, (kernel_, fields, _) in enumerate(program.table.tolist()):
        for thread in range(2):
            kind(kernel_)(fields, thread, 2, program.counters.ctypes.data + 8 * i, program.counters.strides[0])
    assert (device._arena.memory == filled).all()
    device.close()


@pytest.mark.slow
def test_two_devices_at_once() -> None:
    """Each with its own threads, called from two threads of Python."""
    devices = [CpuDevice(2, jit=jit_for("portable")) for _ in range(2)]
    cases = [case(), case()]
    expected = [c.run(d)["y"].tobytes() for c, d in zip(cases, devices, strict=True)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(200):
            devices[i].submit(cases[i].graph)
            if devices[i].read(cases[i].outputs["y"], 0, len(expected[i])).result().tobytes() != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in devices:
        device.close()
    assert not wrong
