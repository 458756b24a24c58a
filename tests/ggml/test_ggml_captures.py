"""Our graphs against those a real llama-server b11434 sent to a real ggml-rpc-server.

The captures are payloads of GRAPH_COMPUTE (protocol 7.0), made with `-c 2048 --parallel 2 -ngl 99`. Every node of
theirs must be in ours, in the same order, with the same operation, type, shape, strides, parameter bytes and sources,
but for what follows from a different way of working: see `without_differences` and the docstrings of the tests.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from llamado.ggml import Op, Tensor, TensorFlag
from llamado.ggml.graph import Graph
from llamado.gguf.reader import GGUFFile
from llamado.models import BatchShape, load_model
from llamado.models.memory import SPARE, MemoryOptions

CAPTURES = Path(__file__).parent / "captures"

RPC_TENSOR = np.dtype(
    [
        ("id", "<u8"),
        ("type", "<u4"),
        ("buffer", "<u8"),
        ("ne", "<u4", 4),
        ("nb", "<u4", 4),
        ("op", "<u4"),
        ("op_params", "V64"),
        ("flags", "<i4"),
        ("src", "<u8", 10),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("data", "<u8"),
        ("name", "S64"),
        ("use_count", "<i4"),
    ]
)


@dataclass(eq=False)
class Wire:
    """A tensor of a capture."""

    name: str
    op: Op
    type: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    op_params: bytes
    flags: int
    view_offs: int
    use_count: int
    src: list[Wire] = field(default_factory=list)
    view_src: Wire | None = None


def decode(path: Path) -> list[Wire]:
    """The nodes of a GRAPH_COMPUTE payload, in order."""
    payload = lzma.decompress(path.read_bytes())
    n_nodes = int(np.frombuffer(payload, "<u4", 1, 4)[0])
    ids = np.frombuffer(payload, "<u8", n_nodes, 8).tolist()
    at = 8 + 8 * n_nodes
    n_tensors = int(np.frombuffer(payload, "<u4", 1, at)[0])
    records = np.frombuffer(payload, RPC_TENSOR, n_tensors, at + 4)
    assert at + 4 + records.nbytes == len(payload)
    tensors = {
        int(r["id"]): Wire(
            name=r["name"].decode(),
            op=Op(r["op"]),
            type=int(r["type"]),
            ne=tuple(r["ne"].tolist()),
            nb=tuple(r["nb"].tolist()),
            op_params=r["op_params"].tobytes(),
            flags=int(r["flags"]),
            view_offs=int(r["view_offs"]),
            use_count=int(r["use_count"]),
        )
        for r in records
    }
    for r in records:
        tensor = tensors[int(r["id"])]
        tensor.src = [tensors[i] for i in r["src"].tolist() if i]
        tensor.view_src = tensors[int(r["view_src"])] if r["view_src"] else None
    return [tensors[i] for i in ids]


def without_differences(nodes: list[Wire]) -> list[Wire]:
    """Their nodes without those we have no use for, and without the place of a sequence's cells.

    - DUP and SET_ROWS at the start prepare batches that mix tokens and embeddings; they lack the flag COMPUTE and are
      not run.
    - A cache has one stream per sequence there, so SET_ROWS sees it through a RESHAPE that joins them, and the second
      sequence reads from a VIEW that starts in the middle. Here a cache is one pool of cells.
    """
    kept = []
    for node in nodes:
        if not node.flags & TensorFlag.COMPUTE:
            continue
        if node.op == Op.RESHAPE and node.src[0].op == Op.NONE:
            continue
        if node.op == Op.VIEW and node.src[0].op == Op.NONE:
            node.op_params, node.view_offs = bytes(64), 0
        if node.op == Op.PERMUTE and node.view_src is not None and node.view_src.op == Op.NONE:
            node.view_offs = 0
        node.src = [s.src[0] if s.op == Op.RESHAPE and s.src[0].op == Op.NONE else s for s in node.src]
        kept.append(node)
    return kept


# Leafs they call otherwise; weights and caches have the same names.
LEAF_NAMES = {
    "inp_pos": "positions",
    "attn_inp_k_idxs": "cells",
    "attn_inp_v_idxs": "cells",
    "attn_inp_kq_mask": "mask",
    "out_ids": "out_rows",
    "embd": "hidden",
    "inp_scaled": "hidden",
}


def leaf_name(tensor: Wire | Tensor) -> str:
    """`RPC0[127.0.0.1:50252]#inp_pos#0` is the copy of `inp_pos` for that server."""
    name = tensor.name.split("#")[1] if tensor.name.startswith("RPC0[") else tensor.name
    return LEAF_NAMES.get(name, name)


def compare(ours: list[Tensor], theirs: list[Wire]) -> None:
    assert [t.op.name for t in ours] == [t.op.name for t in theirs]
    ours_at = {t: i for i, t in enumerate(ours)}
    theirs_at = {t: i for i, t in enumerate(theirs)}
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        where = f"node {i}: {our} / {their.name}"
        spare = SPARE if our.op == Op.SET_ROWS else 0  # rows of a cache for what fills a batch up
        ne = their.ne[0], their.ne[1] + spare, *their.ne[2:]
        assert (our.type, our.ne) == (their.type, ne), where
        assert our.nb[:2] == their.nb[:2] and our.nb[2] == their.nb[2] + spare * our.nb[1], where
        # The fourth stride of their caches steps from one sequence's half to the next.
        cache = our.view_src is not None and our.view_src.name.startswith("cache_")
        assert our.nb[3] == their.nb[3] or cache or spare, where
        assert our.op_params == their.op_params, where
        assert our.view_offs == their.view_offs, where
        sources = [s for s in our.src if s is not None]
        assert len(sources) == len(their.src), where
        for s, t in zip(sources, their.src, strict=True):
            if s in ours_at or t in theirs_at:
                assert ours_at[s] == theirs_at[t], where
            elif "mask_swa" in (s.name, t.name):
                assert leaf_name(t) == "mask", where  # both of their masks have the same name
            else:
                assert leaf_name(s) == leaf_name(t), where
                assert s.ne[:1] == t.ne[:1] and s.type == t.type, where
        view_of = our.view_src
        if view_of is None or their.view_src is None:
            assert view_of is their.view_src, where
        elif view_of in ours_at:
            assert ours_at[view_of] == theirs_at[their.view_src], where
        else:
            assert view_of.name == their.view_src.name, where


def build(path: Path, shape: BatchShape) -> Graph:
    with GGUFFile.open(path) as file:
        model = load_model(file)
        return model.build(shape, model.memory(MemoryOptions(n_cells=2048)))


@pytest.mark.parametrize(("capture", "n_tokens"), [("graph_0", 2), ("graph_1", 5)])
def test_smollm2_equals_llama_cpp(smollm2_path: Path, capture: str, n_tokens: int) -> None:
    """The embedding's GET_ROWS stays on the machine of the master, so what it sends starts from hidden states."""
    theirs = without_differences(decode(CAPTURES / f"smollm2-135m-instruct-q4_1.{capture}.bin.xz"))
    ours = build(smollm2_path, BatchShape(n_tokens, 1, 256))
    assert len(theirs) == 935
    compare(ours.nodes[1:], theirs)


def test_gemma3_equals_llama_cpp(gemma3_path: Path) -> None:
    """Their first node multiplies by a row of scales, for batches with images; ours is a SCALE by sqrt(n_embd)."""
    theirs = without_differences(decode(CAPTURES / "gemma-3-270m-q4_k_m.graph_0.bin.xz"))
    assert (theirs[0].op, theirs[0].name) == (Op.MUL, "inp_scaled")
    ours = build(gemma3_path, BatchShape(2, 1, 256)).nodes
    compare(ours[2:], theirs[1:])
    embedding = ours[:2]
    assert [t.op for t in embedding] == [Op.GET_ROWS, Op.SCALE]
    assert embedding[1].op_params[:4] == np.float32(640**0.5).tobytes()


def test_a_batch_without_outputs_stops_at_the_last_cache(gemma3_path: Path) -> None:
    """Theirs goes on with tensors of no columns; ours ends where the cache is written, with the same nodes so far."""
    theirs = without_differences(decode(CAPTURES / "gemma-3-270m-q4_k_m.graph_1.bin.xz"))
    assert theirs[-1].ne == (262144, 0, 1, 1)
    ours = build(gemma3_path, BatchShape(2, 0, 256))
    assert ours.outputs == {}
    last_write = max(i for i, t in enumerate(theirs) if t.op == Op.SET_ROWS)
    # The last layer's queries (MUL_MAT, RESHAPE, norm, ROPE, SCALE) are not computed.
    n_query = 6
    assert len(ours.nodes) - 1 == last_write + 1 - n_query
    assert [t.op for t in ours.nodes[2:]][-6:] == [t.op for t in theirs[: last_write + 1]][-6:]
    assert [t.op for t in ours.nodes if t.op == Op.SET_ROWS] == [t.op for t in theirs if t.op == Op.SET_ROWS]


def test_use_counts_equal_llama_cpp(smollm2_path: Path) -> None:
    theirs = without_differences(decode(CAPTURES / "smollm2-135m-instruct-q4_1.graph_1.bin.xz"))
    graph = build(smollm2_path, BatchShape(5, 1, 256))
    counts = graph.use_counts()
    assert [counts.get(t, 0) for t in graph.nodes[1:]] == [t.use_count for t in theirs]
