"""Runs one graph on the CPU device and on the reference, over the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from bits import BITS, normal
from block_types import encode
from reference import ReferenceDevice
from tiers import chosen

from llamado.devices.cpu import lowerings
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings import LOWERINGS, choose
from llamado.devices.cpu.lowerings.host import processor
from llamado.devices.device import Device
from llamado.ggml import Graph, RopeMode, Tensor
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

Array = np.ndarray[Any, Any]

WEIGHTS = (
    T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS,
    T.MXFP4, T.NVFP4, T.TQ1_0, T.TQ2_0, T.Q1_0, T.Q2_0,
)  # fmt: skip
CODEBOOKS = (T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S)
"""Types that take long to compile: not all tests of WEIGHTS have them."""
PLAIN = (T.F32, T.F16, T.BF16)


def new(*ne: int, type: T = T.F32, name: str = "") -> Tensor:
    return g.new_tensor(type, *ne, name=name)


def values(*ne: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Normally distributed numbers for a tensor of shape `ne`."""
    return (normal(np.random.default_rng(seed), ne[::-1]) * scale).astype(np.float32)


def weight_bytes(type: T, ne0: int, rows: int, seed: int = 0) -> Array:
    """The bytes of a random weight."""
    data = encode(np.random.default_rng(seed), type, rows, ne0, ne0**-0.5)
    return np.ascontiguousarray(data).view(np.uint8).reshape(-1)


@dataclass
class Case:
    """A graph, and the bytes of what it starts from: numbers for plain tensors, raw bytes (uint8) for any."""

    outputs: Mapping[str, Tensor]
    data: Mapping[Tensor, Any]
    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        self.graph = Graph()
        for name, tensor in self.outputs.items():
            self.graph.output(name, tensor)

    def leaf_bytes(self) -> dict[Tensor, Array]:
        """Return fresh bytes of every leaf; leaves without data are zero."""
        device = ReferenceDevice()
        found: dict[Tensor, Array] = {}
        all_ = (*self.graph.leafs, *(s for n in self.graph.nodes for s in n.src if s))
        leafs = dict.fromkeys(t.root()[0] for t in all_)  # in the graph's order
        for leaf in leafs:
            if leaf.src:
                continue
            given = self.data.get(leaf)
            if isinstance(given, np.ndarray) and given.dtype == np.uint8:
                assert given.nbytes == leaf.nbytes
                found[leaf] = given.copy()
                continue
            if given is not None:
                device.set(leaf, given)
            found[leaf] = device._bytes(leaf)[0].copy()
        return found

    def expected(self, dtype: type[np.floating[Any]] = np.float64) -> dict[str, Array]:
        """Every output (4-d) by the reference."""
        device = ReferenceDevice(dtype)
        for leaf, memory in self.leaf_bytes().items():
            device.bind(leaf, memory)
        for node in self.graph.nodes:
            device.compute(node)
        return {name: device.get(tensor) for name, tensor in self.outputs.items()}

    def bind(self, device: Device) -> dict[Tensor, Array]:
        """Writes every leaf, to memory it keeps: programs know where it is. Gives what was written."""
        leafs = self.leaf_bytes()
        for leaf, memory in leafs.items():
            if leaf.buffer is None:
                device.place([leaf])
            device.write(leaf, memory)
        return leafs

    def run(self, device: Device) -> dict[str, Array]:
        """Every output (4-d) by the device; bits are those of other lowerings."""
        leafs = self.bind(device)
        device.submit(self.graph)
        seen = ReferenceDevice(np.float32)
        found = {}
        for name, tensor in self.outputs.items():
            root = tensor.root()[0]
            seen.bind(root, np.array(device.read(root, 0, root.nbytes).result()))
            found[name] = seen.get(tensor)
        BITS.note(leafs.values(), found.values())
        return found

    def check(self, device: CpuDevice, rtol: float = 1e-5, atol: float = 1e-6) -> dict[str, Array]:
        """Runs both; all outputs must be close, atol counted in units of each output's largest number."""
        found, expected = self.run(device), self.expected()
        for name, right in expected.items():
            top = np.abs(right[np.isfinite(right)]).max(initial=1e-30)
            np.testing.assert_allclose(found[name], right, rtol=rtol, atol=atol * top, err_msg=name)
        return found


def check(
    device: CpuDevice, result: Tensor, data: Mapping[Tensor, Any], rtol: float = 1e-5, atol: float = 1e-6
) -> Array:
    """Checks one result; gives what the device computed."""
    return Case({"result": result}, data).check(device, rtol, atol)["result"]


def turned_by_sections(mode: RopeMode) -> tuple[Tensor, dict[Tensor, Any]]:
    """Rotations of pairs by four positions of each token."""
    x, positions = new(40, 3, 7), new(4 * 7, type=T.I32)
    n_dims = 20 if mode is RopeMode.VISION else 32  # VISION rotates whole heads, and n_dims counts pairs
    turned = g.rope_ext(x, positions, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, sections=(5, 4, 3, 2))
    return turned, {x: values(*x.ne), positions: np.arange(28) * 5 % 23}


# --- lowerings ---

FEATURES = processor()[1]
BEST = choose(FEATURES).name


def can_run(lowering: str) -> bool:
    """Return True if this machine has the instructions of a lowering."""
    return lowerings.can_run(LOWERINGS[lowering], FEATURES)


EACH_LOWERING = chosen(sorted(LOWERINGS), (BEST,))
"""Parameters: the lowering of this machine in each run, the others in the full one."""

COMMON_TYPES = {T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q8_0, T.Q4_K, T.Q6_K, T.MXFP4}
"""Weight types of nearly all published models: they share their code paths with the others."""


def each_type(types: Iterable[T]) -> list[Any]:
    """Return parameters: common weight types in each run, the others in the full one."""
    return chosen(types, COMMON_TYPES, lambda t: str(t.name))


_jits: dict[str, Jit] = {}


def jit_for(lowering: str) -> Jit:
    """One Jit per lowering for the whole session: a kernel is loaded once."""
    if not can_run(lowering):
        pytest.skip(f"this machine has no {' '.join(LOWERINGS[lowering].needs)}")
    if lowering not in _jits:
        _jits[lowering] = Jit(LOWERINGS[lowering])
    return _jits[lowering]
