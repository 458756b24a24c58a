"""A graph in parts: operations where their weights lie, cuts where least crosses, values carried over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import make_gemma3, make_llama

from llamado.devices.device import DeviceError
from llamado.devices.split.partition import GraphPart, split
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import BatchShape, load_model
from llamado.models.memory import MemoryOptions


def cut(path: Path, home: Callable[[str, Tensor], int | None], shape: BatchShape) -> list[GraphPart]:
    model = load_model(GGUFFile.open(path))
    kv = model.memory(MemoryOptions(n_cells=512))
    known = {*model.weights.values(), *kv.tensors}
    own: dict[tuple[Tensor, int], Tensor] = {}

    def copy(leaf: Tensor, device: int) -> Tensor:
        return own.setdefault((leaf, device), Tensor(leaf.type, leaf.ne, leaf.nb, name=leaf.name))

    graph = model.build(shape, kv)
    return split(graph, lambda leaf, node: home(leaf.name, node) if leaf in known else None, copy, 0)


def layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else int(name.rsplit("_l", 1)[1])


def by_layers(first: int) -> Callable[[str, Tensor], int | None]:
    """Embedding on device 0, layers before `first` on 1, the others and the head on 2."""

    def home(name: str, node: Tensor) -> int | None:
        if name == "token_embd.weight" and node.op is Op.GET_ROWS:
            return 0
        if name == "rope_freqs.weight":
            return None
        if name.startswith(("blk.", "cache_")):
            return 1 if layer(name) < first else 2
        return 2

    return home


@pytest.mark.parametrize("make", [make_llama, make_gemma3])
def test_only_the_hidden_state_crosses(tmp_path: Path, make: Callable[..., Path]) -> None:
    path = make(tmp_path / "m.gguf", n_layer=4, n_embd=64)
    parts = cut(path, by_layers(2), BatchShape(5, 2, 256))
    assert [part.device for part in parts] == [0, 1, 2]
    assert [[list(t.ne) for t in part.gives.values()] for part in parts] == [[[64, 5, 1, 1]], [[64, 5, 1, 1]], []]
    assert [[*part.takes] for part in parts] == [[], ["0.0"], ["1.0"]]
    assert [[*part.graph.outputs] for part in parts] == [["0.0"], ["1.0"], ["logits"]]
    assert set(parts[0].graph.inputs) == {"tokens"}
    assert "tokens" not in parts[1].graph.inputs and "out_rows" not in parts[1].graph.inputs
    assert "out_rows" in parts[2].graph.inputs


def test_parts_share_no_tensor_and_lose_no_operation(tmp_path: Path) -> None:
    path = make_gemma3(tmp_path / "m.gguf", n_layer=3)
    parts = cut(path, by_layers(1), BatchShape(3, 1, 256))
    seen: set[Tensor] = set()
    for part in parts:
        mine = {t for node in part.graph.nodes for t in (node, *node.src, node.view_src) if t is not None}
        assert not mine & seen
        seen |= mine
    whole = load_model(GGUFFile.open(path))
    graph = whole.build(BatchShape(3, 1, 256), whole.memory(MemoryOptions(n_cells=512)))
    assert [n.op for part in parts for n in part.graph.nodes if not n.is_noop] == [
        n.op for n in graph.nodes if not n.is_noop
    ]


def test_weights_inside_a_layer_may_lie_elsewhere(tmp_path: Path) -> None:
    """The overrides are those of --override-tensor 'ffn_(up|gate|down)=CPU'."""
    path = make_llama(tmp_path / "m.gguf", n_layer=2)
    base = by_layers(0)
    parts = cut(path, lambda name, node: 0 if ".ffn_" in name and "norm" not in name else base(name, node),
                BatchShape(4, 1, 256))  # fmt: skip
    assert [part.device for part in parts] == [0, 2, 0, 2, 0, 2]
    given = [len(part.gives) for part in parts]
    assert given == [1, 2, 1, 2, 1, 0]  # the rows to multiply, and the residual stays in the part before
    taken = {name for part in parts for name in part.takes}
    assert taken == {name for part in parts for name in part.gives}


def test_a_chunk_without_outputs_ends_early(tmp_path: Path) -> None:
    parts = cut(make_llama(tmp_path / "m.gguf", n_layer=2), by_layers(1), BatchShape(8, 0, 256))
    assert [part.device for part in parts] == [0, 1, 2]
    assert not parts[-1].graph.outputs


def test_rows_between_gaps_are_not_transferred() -> None:
    """Bytes go to another device as they lie."""
    for width in (4, 8):
        graph = Graph()
        wide, w = g.new_tensor(T.F32, width, 4, name="wide"), g.new_tensor(T.F32, 4, 4, name="w")
        rows = g.cpy(graph.input("x", T.F32, 4, 4), g.view_2d(wide, 4, 4, nb1=4 * width))
        graph.output("y", g.mul(rows, w))

        def parts(graph: Graph = graph, wide: Tensor = wide, w: Tensor = w) -> list[GraphPart]:
            homes = {wide: 0, w: 1}
            return split(graph, lambda leaf, _: homes.get(leaf), lambda leaf, _: leaf, 0)

        if width == 4:
            assert [part.device for part in parts()] == [0, 1]
        else:
            with pytest.raises(DeviceError, match="has gaps and cannot go to another device"):
                parts()
