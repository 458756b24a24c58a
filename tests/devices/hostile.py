"""Random graphs for the CPU device, in memory with walls around it: `python hostile.py SEED COUNT [all]`.

Built as a master would build them, then spoiled: other types, shapes, strides, places, sources and parameters, and
memory full of noise. The device may refuse a graph, with DeviceError and nothing else, or run it; it may not touch a
byte outside its buffers. Pages that may not be touched lie around every buffer, so that a kernel that goes astray
ends this process; the bytes up to those pages are looked at after each graph.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import DeviceError
from llamado.devices.kernels.formats import FORMATS
from llamado.errors import LlamadoError
from llamado.ggml import GluOp, Graph, Op, RopeMode, SortOrder, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.ggml.errors import ShapeError
from llamado.ggml.tensor import contiguous_strides
from llamado.gguf.types import TensorType as T

SLACK = 64
"""Bytes behind a buffer that kernels may read: CpuBuffer.allocate promises them."""
FLOATS = (T.F32, T.F32, T.F32, T.F16, T.BF16)
FEW = (T.F32, T.F16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q8_0, T.Q4_K, T.Q6_K, T.IQ4_NL)
ALL = (*FORMATS,)
WEIGHTS = ALL if "all" in sys.argv else FEW
"""Of weights: all, where kernels of many types do not take minutes to compile."""
ANY = (*T,)


class GuardedBuffer:
    """A buffer between two inaccessible pages."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        whole = -(-(size + SLACK) // page) * page
        self.pages = mmap.mmap(-1, whole + 2 * page)
        everything = np.frombuffer(self.pages, np.uint8)
        for at in (0, page + whole):
            assert not ctypes.CDLL(None).mprotect(
                ctypes.c_void_p(everything.ctypes.data + at), ctypes.c_size_t(page), mmap.PROT_READ * 0
            )
        inside = everything[page : page + whole]
        start = whole - size - SLACK
        self.before, self.after = inside[:start], inside[start + size :]
        self.buffer = CpuBuffer(inside[start : start + size])
        self.before[:], self.after[:] = 0xA5, 0x5A

    def untouched(self) -> bool:
        return bool((self.before == 0xA5).all() and (self.after == 0x5A).all())


class Maker:
    """Random tensors and graphs in a few buffers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.buffers = [GuardedBuffer(self.random.choice((1, 100, 4096, 20_001, 66_000))) for _ in range(4)]
        self.buffers.append(GuardedBuffer(70_000))

    def fill(self) -> None:
        """Noise of several kinds: any bits, small numbers, ids, things that are no numbers."""
        for walled in self.buffers:
            memory = walled.buffer.memory
            kind = self.random.randrange(4)
            if kind == 0:
                memory[:] = self.noise.integers(0, 256, memory.size, np.uint8)
            elif kind == 1:
                small = self.noise.integers(-3, 40, memory.size // 4 + 1).astype("<i4")
                memory[:] = np.resize(small.view(np.uint8), memory.size)
            elif kind == 2:
                normal = self.noise.standard_normal(memory.size // 4 + 1).astype("<f4")
                memory[:] = np.resize(normal.view(np.uint8), memory.size)
            else:
                memory[:] = self.random.choice((0, 0xFF, 0x7F, 0x80, 0x7C))

    def place(self, tensor: Tensor) -> Tensor:
        walled = self.random.choice(self.buffers)
        tensor.buffer = walled.buffer
        room = walled.buffer.size - tensor.nbytes
        tensor.offset = self.random.choice((0, max(0, room), self.random.randrange(max(1, room + 1))))
        return tensor

    def new(self, *ne: int, type: T = T.F32) -> Tensor:
        return self.place(g.new_tensor(type, *ne))

    def node(self, made: list[Tensor]) -> Tensor:
        """One operation, of what was made before or of new tensors."""
        pick = self.random.choice
        n, rows, many = pick((1, 3, 8, 32, 64, 256)), pick((1, 2, 5, 9)), pick((1, 1, 2))
        fitting = [t for t in made if t.type == T.F32 and t.ne[0] in (32, 64, 256)]
        x = pick(fitting) if fitting and self.random.random() < 0.7 else self.new(n, rows, many, type=pick(FLOATS))
        n, rows = x.ne[0], x.ne[1]
        makers: list[Callable[[], Tensor]] = [
            lambda: pick((g.add, g.sub, g.mul, g.div))(x, self.new(*pick((x.ne, (n,), (1,), (n, rows))))),
            lambda: pick((g.rms_norm, g.norm))(x, 1e-5),
            lambda: g.unary(x, pick((UnaryOp.SILU, UnaryOp.GELU, UnaryOp.STEP, *UnaryOp))),
            lambda: pick((g.sqr, g.sqrt, g.log, g.sin, g.cos))(x),
            lambda: g.scale(x, self.random.uniform(-2, 2), 0.5),
            lambda: g.clamp(x, -1.0, 1.0),
            lambda: g.glu_split(x, self.new(*x.ne, type=x.type), pick((GluOp.SWIGLU, GluOp.GEGLU))),
            lambda: g.glu(x, GluOp.SWIGLU),
            lambda: g.get_rows(self.new(n, 9, type=pick(WEIGHTS)), self.new(rows, type=T.I32)),
            lambda: g.set_rows(
                self.new(n, 9, *x.ne[2:], type=pick(WEIGHTS)), x, self.new(rows, type=pick((T.I32, T.I64)))
            ),
            lambda: g.mul_mat(self.new(n, pick((1, 5, 8, 13, 40)), type=pick(WEIGHTS)), x),
            lambda: g.mul_mat(self.new(n, pick((2, 9)), x.ne[2], type=pick(WEIGHTS)), x),
            lambda: g.rope_ext(x, self.new(x.ne[2], type=T.I32), pick((None, self.new(max(1, n // 2)))), n // 2 * 2,
                               pick((RopeMode.NORMAL, RopeMode.NEOX)), 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
            lambda: g.soft_max_ext(x, pick((None, self.new(n, rows, type=pick((T.F16, T.F32))))), 0.5, 0.0),
            lambda: self.attention(),
            lambda: g.cast(x, pick((T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.I32))),
            lambda: g.cpy(x, self.new(*x.ne, type=pick(FLOATS))),
            lambda: g.cont(g.permute(x, *pick(((1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3))))),
            lambda: g.repeat(x, 2 * n, *x.ne[1:]),
            lambda: g.concat(x, self.new(*x.ne, type=x.type), self.random.randrange(4)),
            lambda: pick((g.sum_rows, g.mean, g.sum_all, g.cumsum))(x),
            lambda: g.repeat_back(pick((x, g.sqr(x))), n, 1, pick((1, x.ne[2]))),
            lambda: g.argsort(x, pick((*SortOrder,))),
            lambda: g.top_k(x, self.random.randint(1, n)),
            lambda: g.argmax(x),
            lambda: Tensor(T.F32, (n + 3, *x.ne[1:]), contiguous_strides(T.F32, (n + 3, *x.ne[1:])), Op.PAD, (x,),
                           struct.pack("<9i28x", 1, 2, 0, 0, 0, 0, 0, 0, 0)),
            lambda: self.window(x),
            lambda: self.scores(),
            lambda: self.streams(),
            lambda: Tensor(T.F32, (n, 1, 1, 1), contiguous_strides(T.F32, (n, 1, 1, 1)), Op.ARANGE, (),
                           struct.pack("<3f52x", 0.0, float(n), pick((1.0, np.inf)))),
            lambda: g.view_2d(x, n, rows, x.nb[1]),
            lambda: self.experts(n),
            lambda: g.add_id(x, self.new(n, 4), self.new(rows, x.ne[2], type=T.I32)),
            lambda: g.swiglu_oai(x, self.new(*x.ne, type=x.type), 1.7, 7.0),
            lambda: g.fill(x, -np.inf),
            lambda: g.l2_norm(x, 1e-6),
            lambda: self.recurrence(),
            lambda: g.ssm_conv(self.new(pick((3, 4, 12)), pick((3, 20)), many), self.new(pick((3, 4)), pick((3, 20)))),
            lambda: self.stream(),
            lambda: self.scan(),
        ]  # fmt: skip
        return pick(makers)()

    def window(self, x: Tensor) -> Tensor:
        pick = self.random.choice
        k0, s0, p0 = pick((1, 3, 16, 1 << 30)), pick((1, 3, 16)), pick((0, 1, 5, 1 << 30))
        ne = (max((x.ne[0] + 2 * p0 - k0) // s0 + 1, 1), *x.ne[1:])
        params = struct.pack("<7i36x", pick((0, 1, 2)), k0, 1, s0, 1, p0, 0)
        return Tensor(T.F32, ne, contiguous_strides(T.F32, ne), Op.POOL_2D, (x,), params)

    def scores(self) -> Tensor:
        pick = self.random.choice
        dim, heads, n, n_kv, streams = pick((32, 64)), pick((1, 3)), pick((1, 5)), pick((1, 70)), pick((1, 2))
        ne = (n_kv, n, 1, streams)
        sources = (
            self.new(dim, heads, n, streams),
            self.new(dim, 1, n_kv, streams, type=pick((T.F32, T.F16, T.Q8_0))),
            self.new(heads, n, 1, streams),
            self.new(n_kv, n, 1, pick((1, streams)), type=T.F16),
        )
        return Tensor(T.F32, ne, contiguous_strides(T.F32, ne), Op.LIGHTNING_INDEXER, sources)

    def streams(self) -> Tensor:
        pick = self.random.choice
        n, n_streams, n_tokens = pick((1, 32, 100)), pick((1, 3, 4)), pick((1, 5))
        x, row = self.new(n, n_streams, n_tokens), self.new(n, n_tokens)
        parts, mixing = self.new(n_streams, n_tokens), self.new(n_streams, n_streams, n_tokens)
        params = struct.pack("<fi56x", pick((0.0, 1e-6, np.inf, np.nan)), pick((0, 1, 7)))
        op, ne, sources = pick(
            (
                (Op.DSV4_HC_PRE, (n, n_tokens), (x, pick((parts, self.new(n, n_streams, n_tokens))))),
                (Op.DSV4_HC_POST, (n, n_streams, n_tokens), (row, x, parts, *pick(((), (mixing,))))),
                (Op.DSV4_HC_COMB, (4, 4, n_tokens), (self.new(24, n_tokens), self.new(3), self.new(24))),
            )
        )
        shape = (*ne, 1, 1, 1)[:4]
        return Tensor(T.F32, shape, contiguous_strides(T.F32, shape), op, sources, params)

    def experts(self, n: int) -> Tensor:
        pick = self.random.choice
        n_tokens, used = pick((1, 3, 40)), pick((1, 2, 4))
        matrices = self.new(n, pick((4, 8, 20)), pick((1, 3)), type=pick(WEIGHTS))
        return g.mul_mat_id(matrices, self.new(n, pick((1, used)), n_tokens), self.new(used, n_tokens, type=T.I32))

    def recurrence(self) -> Tensor:
        pick = self.random.choice
        size, heads, n, seqs = pick((16, 32)), pick((1, 2, 4)), pick((1, 2, 7)), pick((1, 2))
        if pick((True, False)):
            q, k, v = (self.new(size, many, n, seqs) for many in (pick((1, heads)), heads, heads))
            decays, beta = self.new(pick((1, size)), heads, n, seqs), self.new(1, heads, n, seqs)
            state = self.new(size, size, heads, seqs)
            return g.gated_delta_net(q, k, v, decays, beta, state, pick((1, 3, 1 << 20)))
        x, bonus = [self.new(size, heads, n * seqs) for _ in range(6)], self.new(size, heads)
        state = self.new(size * size * heads, seqs)
        makers: list[Callable[[], Tensor]] = [
            lambda: g.gated_linear_attn(x[0], x[1], x[2], x[3], state, 0.5),
            lambda: g.rwkv_wkv6(x[0], x[1], x[2], bonus, x[3], state),
            lambda: g.rwkv_wkv7(*x, state),  # type: ignore[call-arg, misc]
        ]
        return pick(makers)()

    def stream(self) -> Tensor:
        pick = self.random.choice
        places, channels, tokens, seqs = pick((2, 4)), pick((5, 8, 20)), pick((1, 9, 70)), pick((1, 2))
        before, x = self.new(places - 1, channels, seqs), self.new(channels, tokens, seqs)
        both = g.concat(before, g.transpose(x), 0)
        last = g.cont(g.view_3d(both, *before.ne[:3], both.nb[1], both.nb[2], 4 * tokens))
        return g.add(g.ssm_conv(both, self.new(places, channels)), g.view_1d(last, channels))

    def scan(self) -> Tensor:
        pick = self.random.choice
        lanes, channels = pick((16, 16, 20)), pick((False, True))
        head_dim, heads, tokens, seqs = 1 if channels else pick((8, 5)), pick((8, 6)), pick((1, 7, 40)), pick((1, 2))
        s, x = self.new(lanes, head_dim, heads, 3), self.new(head_dim, heads, tokens, seqs)
        b, c = (self.new(lanes, pick((1, 2)), tokens, seqs) for _ in range(2))
        rates, ids = self.new(lanes if channels else 1, heads), self.new(seqs, type=T.I32)
        made = g.ssm_scan(s, x, self.new(heads, tokens, seqs), rates, b, c, ids, pick((1, 1, 3)))
        width = lanes * head_dim * heads
        states = g.view_2d(made, width, seqs, 4 * width, 4 * x.nelements)
        return pick((made, g.set_rows(g.reshape(s, width, 3), states, self.new(seqs, type=pick((T.I32, T.I64))))))

    def attention(self) -> Tensor:
        pick = self.random.choice
        head, n_kv, n, heads = pick((8, 64)), pick((1, 32, 77)), pick((1, 3, 12)), pick((1, 2, 4))
        type_ = pick((T.F32, T.F16, T.F16, T.Q8_0, T.Q4_0)) if head == 64 else T.F16
        k, v = (self.new(head, n_kv, pick((1, heads)), type=type_) for _ in range(2))
        mask = pick((None, self.new(n_kv, n, type=T.F16)))
        return g.flash_attn_ext(self.new(head, n, heads), k, v, mask, 0.3, 0.0, pick((0.0, 30.0)))

    def spoil(self, tensor: Tensor, made: list[Tensor]) -> None:
        """Changes one thing about a tensor."""
        pick, wild = self.random.choice, (0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)
        d = self.random.randrange(4)
        match self.random.randrange(8):
            case 0:
                ne = list(tensor.ne)
                ne[d] = pick((*wild, ne[d] + 1, max(0, ne[d] - 1), 2 * ne[d]))
                tensor.ne = (ne[0], ne[1], ne[2], ne[3])
            case 1:
                nb = list(tensor.nb)
                nb[d] = pick((*wild, nb[d] + 1, nb[d] + 4, max(0, nb[d] - 4), 2 * nb[d], nb[(d + 1) % 4]))
                tensor.nb = (nb[0], nb[1], nb[2], nb[3])
            case 2:
                tensor.type = pick(ANY)
            case 3:
                tensor.offset = pick((*wild, tensor.offset + 1, 1 << 40, -1, -(1 << 20)))
            case 4:
                params = bytearray(tensor.op_params)
                at = 4 * self.random.randrange(12)
                infinity, no_number, number = b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", struct.pack("<I", pick(wild))
                params[at : at + 4] = pick((bytes(4), infinity, no_number, number))
                tensor.op_params = bytes(params)
            case 5 if tensor.src:
                src: list[Tensor | None] = list(tensor.src)
                src[self.random.randrange(len(src))] = pick((None, *made, self.new(4, 4)))
                tensor.src = tuple(src)
            case 6:
                tensor.view_src, tensor.view_offs = (
                    pick((None, self.new(64, 5), *made[:1])),
                    pick((0, 4, 1, 100, 1 << 33)),
                )
                if tensor.view_src is tensor:
                    tensor.view_src = None
            case _:
                tensor.op = pick((tensor.op, *Op))

    def graph(self) -> Graph:
        graph, made = Graph(), []
        for _ in range(self.random.choice((1, 1, 2, 3, 5))):
            try:
                node = self.node(made)
            except ShapeError:
                continue
            if self.random.random() < 0.6 and node.view_src is None:
                self.place(node)
            graph.expand(node)
            made.append(node)
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 4))):
            everything = [*graph.nodes, *(s for node in graph.nodes for s in node.src if s is not None)]
            if everything:
                self.spoil(self.random.choice(everything), made)
        return graph


def main(seed: int, count: int) -> None:
    device = CpuDevice(2)
    outcome: Counter[str] = Counter()
    kept: deque[Graph] = deque(maxlen=500)  # a program knows its graph by id
    for number in range(seed, seed + count):
        maker = Maker(number)
        graph = maker.graph()
        kept.append(graph)
        began = time.monotonic()
        for _ in range(2):
            maker.fill()
            try:
                print("\rgraph", number, end="", file=sys.stderr, flush=True)
                device.submit(graph)
                outcome["ran"] += 1
            except DeviceError as error:
                outcome["refused"] += 1
                assert str(error)
                break
            except LlamadoError as error:
                raise AssertionError(f"graph {number}: {error!r}") from error
            for walled in maker.buffers:
                assert walled.untouched(), f"graph {number} wrote outside its buffers: {graph.nodes}"
        took = time.monotonic() - began
        assert took < 120, f"graph {number} took {took:.0f} s: {graph.nodes}"
    device.close()
    print(dict(outcome))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
