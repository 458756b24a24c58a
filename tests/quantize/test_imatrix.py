"""Importance matrices: what a model's products are given, and the files that say it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference import ReferenceDevice
from tiny_models import make_llama

from llamado.commands import cli
from llamado.engine.observed import ProductObserver
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType
from llamado.quantize.errors import QuantizeError
from llamado.quantize.imatrix import (
    CHUNK_COUNT,
    CHUNK_SIZE,
    DATASETS,
    ColumnSums,
    Imatrix,
    is_observed,
    merge,
    read_imatrix,
    write_imatrix,
)
from llamado.quantize.statistics import TensorSums, statistics


def example(seed: int = 0) -> Imatrix:
    rng = np.random.default_rng(seed)

    def sums(n: int, experts: int, counts: list[int]) -> ColumnSums:
        squares = rng.random((experts, n), np.float32)
        return ColumnSums(squares, np.array(counts), squares - np.float32(0.5))

    entries = {"blk.0.a.weight": sums(8, 1, [64]), "blk.0.e.weight": sums(4, 3, [64, 0, 32])}
    return Imatrix(Path("x.gguf"), entries, ("text.txt",), 2, 32)


def test_a_chunk_that_has_begun_counts_in_the_older_format(tmp_path: Path) -> None:
    sums = ColumnSums(np.full((1, 4), 1000, np.float32), np.array([1000]))
    write_imatrix(tmp_path / "i.dat", Imatrix(Path("x"), {"w": sums}, chunk_size=512), legacy=True)
    found = read_imatrix(tmp_path / "i.dat").entries["w"]
    assert found.counts.tolist() == [2] and found.squares.tolist() == [[2] * 4]


@pytest.mark.parametrize("legacy", [False, True])
def test_importance_matrices_read_back(tmp_path: Path, legacy: bool) -> None:
    path, given = tmp_path / "i", example()
    write_imatrix(path, given, legacy=legacy)
    found = read_imatrix(path)
    assert found.legacy == legacy and found.chunk_count == 2 and found.datasets == ("text.txt",)
    for name, weights in given.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=1e-6)
    assert (given.weights["blk.0.e.weight"][4:8] == 1).all()  # nothing went to that expert
    assert given.overrides()[1:] == [
        ("quantize.imatrix.dataset", "text.txt"),
        ("quantize.imatrix.entries_count", 2),
        ("quantize.imatrix.chunks_count", 2),
    ]


@pytest.mark.parametrize("has_plain_sums", [False, True])
def test_sums_and_counts_of_each_expert_read_back(tmp_path: Path, has_plain_sums: bool) -> None:
    """Older files have no plain sums."""
    given = example()
    if not has_plain_sums:
        given = replace(given, entries={name: sums._replace(plain=None) for name, sums in given.entries.items()})
    write_imatrix(tmp_path / "i", given)
    found = read_imatrix(tmp_path / "i").entries
    assert found.keys() == given.entries.keys()
    for name, sums in given.entries.items():
        np.testing.assert_array_equal(found[name].squares, sums.squares, strict=True)
        np.testing.assert_array_equal(found[name].counts, sums.counts)
        if sums.plain is None:
            assert found[name].plain is None
        else:
            np.testing.assert_array_equal(found[name].plain, sums.plain, strict=True)


def test_sums_without_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    write_imatrix(path, example())
    path.write_bytes(path.read_bytes().replace(b"blk.0.a.weight.counts", b"blk.0.a.weight.Counts"))
    with pytest.raises(QuantizeError, match=r"sums without counts for blk\.0\.a\.weight"):
        read_imatrix(path)


@pytest.mark.parametrize("key", [DATASETS, CHUNK_COUNT, CHUNK_SIZE])
def test_a_file_without_one_of_the_keys_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "i.gguf"
    write_imatrix(path, example())
    path.write_bytes(path.read_bytes().replace(key.encode(), key.upper().encode()))
    with pytest.raises(QuantizeError, match=f"not an importance matrix.*{key} is missing"):
        read_imatrix(path)


def test_sums_add_up(tmp_path: Path) -> None:
    one, other = example(), example(1)
    both = merge([one, other], 32)
    name = "blk.0.e.weight"
    np.testing.assert_array_equal(both.entries[name].squares, one.entries[name].squares + other.entries[name].squares)
    assert both.entries[name].counts.tolist() == [128, 0, 64] and both.chunk_count == 4
    write_imatrix(tmp_path / "i.dat", one, legacy=True)
    again = merge([read_imatrix(tmp_path / "i.dat")], 32)
    np.testing.assert_allclose(again.weights["blk.0.a.weight"], one.weights["blk.0.a.weight"], rtol=1e-6)
    wrong = Imatrix(Path("y"), {name: ColumnSums(np.ones((3, 5), np.float32), np.ones(3, np.int64))})
    with pytest.raises(QuantizeError, match="other columns"):
        merge([one, wrong], 32)


@pytest.mark.parametrize(("rows", "chunks"), [(64, 2), (63, 2), (49, 2), (48, 2), (47, 1), (33, 1)])
def test_chunks_are_counted_to_the_nearest(rows: int, chunks: int) -> None:
    """A tensor may be given a few rows less than the chunks have."""
    one = Imatrix(Path("x.gguf"), {"blk.0.a.weight": ColumnSums(np.ones((1, 8), np.float32), np.array([rows]))})
    assert merge([one], 32).chunk_count == chunks


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [([".a.", ".e."], [], "ae"), ([".e.", ".x."], [], "e"), ([], [".a.", ".x."], "e"), ([], [".a.", ".e."], "")],
)
def test_one_of_several_parts_of_a_name_is_enough(include: list[str], exclude: list[str], kept: str) -> None:
    found = example().filtered(include, exclude)
    assert list(found.entries) == list(found.weights) == [f"blk.0.{letter}.weight" for letter in kept]


def test_another_models_matrix_is_refused(tmp_path: Path) -> None:
    given = example()
    assert given.of("blk.0.a.weight", 8, 1) is not None and given.of("blk.9.a.weight", 8, 1) is None
    with pytest.raises(QuantizeError, match="for another model"):
        given.of("blk.0.a.weight", 16, 1)
    (tmp_path / "no.dat").write_bytes(b"\x05\x00\x00\x00\xff\xff\xff\xffabc")
    with pytest.raises(QuantizeError, match="not an importance matrix"):
        read_imatrix(tmp_path / "no.dat")
    with pytest.raises(QuantizeError, match="but not an importance matrix"):
        read_imatrix(make_llama(tmp_path / "m.gguf"))


def test_products_are_observed() -> None:
    """Sums of a dense product and of experts, computed by a device."""
    n, tokens, experts, used = 32, 20, 4, 2
    x, dense = g.new_tensor(TensorType.F32, n, tokens), g.new_tensor(TensorType.F32, n, 8, name="blk.0.d.weight")
    many = g.new_tensor(TensorType.F32, n, 8, experts, name="blk.0.e.weight")
    chosen = g.new_tensor(TensorType.F32, experts, tokens)
    ids = g.top_k(chosen, used)
    graph = Graph()
    graph.output("d", g.mul_mat(dense, x))
    graph.output("e", g.mul_mat_id(many, g.reshape(x, n, 1, tokens), ids))
    observer = ProductObserver({t.name: t for t in (dense, many)}, lambda name: True)
    observer.add(graph)
    rng = np.random.default_rng(3)
    data = {t: rng.standard_normal(t.ne[::-1]).astype(np.float32) for t in (x, dense, many, chosen)}
    found = ReferenceDevice(np.float32).run(graph, data)
    sums = observer.sums(lambda name: np.ascontiguousarray(found[name]).reshape(-1).view(np.float32))
    rows = data[x].reshape(tokens, n).astype(np.float64)
    np.testing.assert_allclose(sums["blk.0.d.weight"].squares[0], (rows**2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(sums["blk.0.d.weight"].plain[0], rows.sum(0), atol=1e-4)
    best = np.argsort(-data[chosen].reshape(tokens, experts), axis=1)[:, :used]
    for expert in range(experts):
        went = rows[(best == expert).any(1)]
        np.testing.assert_allclose(sums["blk.0.e.weight"].squares[expert], (went**2).sum(0), rtol=1e-6)
        assert sums["blk.0.e.weight"].rows[expert] == len(went)


@pytest.mark.slow
def test_a_text_is_read_in_chunks_whatever_their_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums over chunks of 100 tokens, which no one batch fits, and what is added to them."""
    model = make_llama(tmp_path / "m.gguf", wtype="F32", n_embd=64, n_ff=128)
    (tmp_path / "t").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    base = ["imatrix", "-m", str(model), "-f", str(tmp_path / "t"), "-c", "100", "--no-ppl"]
    assert cli.main([*base, "-o", str(tmp_path / "a.gguf"), "--chunks", "2"]) == 0
    assert cli.main([*base, "-o", str(tmp_path / "b.gguf"), "--chunks", "1"]) == 0
    more = ["--chunk", "1", "--chunks", "1", "--in-file", str(tmp_path / "b.gguf")]
    assert cli.main([*base, "-o", str(tmp_path / "c.gguf"), *more]) == 0
    whole, added = read_imatrix(tmp_path / "a.gguf"), read_imatrix(tmp_path / "c.gguf")
    assert whole.chunk_count == added.chunk_count == 2 and len(whole.entries) == 14
    assert {int(sums.counts[0]) for sums in whole.entries.values()} == {200}
    for name, weights in whole.weights.items():
        np.testing.assert_allclose(added.weights[name], weights, rtol=1e-5)
    assert cli.main(["imatrix", "--show-statistics", "--in-file", str(tmp_path / "a.gguf")]) == 0
    assert "blk.1.ffn_down.weight" in capsys.readouterr().out


def test_statistics_of_means() -> None:
    squares = np.array([[1.0, 2.0, 3.0, 4.0]]) * 10
    found = statistics(
        {
            "blk.0.a": TensorSums(squares, np.array([10]), squares),
            "blk.1.a": TensorSums(2 * squares, np.array([10]), 2 * squares),
        }
    )
    one, two = found["blk.0.a"], found["blk.1.a"]
    assert (one.sum_sq, one.mean, one.elements) == (10.0, 2.5, 4)
    assert one.std_deviation == pytest.approx(1.25**0.5) and one.skewness == pytest.approx(0)
    assert two.gain == pytest.approx(2**0.5) and (two.cossim, two.pearson) == pytest.approx((1, 1))
    assert two.l2_dist == pytest.approx(30**0.5) and two.covariance == pytest.approx(2.5)
    assert np.isnan(one.gain)


def test_statistics_of_skewed_means() -> None:
    """Experts without tokens do not count; shares of the columns give the entropy."""
    squares = np.array([[8.0, 4.0, 2.0, 2.0], [9.0, 9.0, 9.0, 9.0]])
    (one,) = statistics({"a": TensorSums(squares, np.array([2, 0]), np.array([[2.0, 0, 0, 0], [7, 7, 7, 7]]))}).values()
    assert (one.sum_sq, one.mean, one.elements) == (8.0, 0.25, 4)
    assert one.std_deviation == pytest.approx(0.1875**0.5)
    assert one.skewness == pytest.approx(0.09375 / 0.1875**1.5) and one.kurtosis == pytest.approx(7 / 3 - 3)
    assert one.h_norm == pytest.approx(100 * 1.75 / 2)
    assert all(np.isnan(x) for x in (one.gain, one.l2_dist, one.cossim, one.pearson, one.covariance))


def sums(*means: float, n: int = 2) -> TensorSums:
    """Return sums with these means of squares, without plain sums."""
    return TensorSums(n * np.array([means]), np.array([n]))


def test_statistics_compare_with_the_nearest_earlier_layer() -> None:
    found = statistics(
        {"blk.1.a": sums(3.0, 1.0), "blk.10.a": sums(0.0, 4.0), "blk.11.b": sums(1.0, 1.0), "a": sums(1.0)}
    )
    one = found["blk.10.a"]
    assert one.gain == 1 and one.l2_dist == pytest.approx(18**0.5)
    assert one.cossim == pytest.approx(4 / (10**0.5 * 4)) and one.pearson == pytest.approx(-1)
    assert one.covariance == pytest.approx(-2)
    assert np.isnan(found["blk.1.a"].gain) and np.isnan(found["blk.11.b"].gain)


def test_statistics_of_tensors_without_any_input() -> None:
    empty, nothing = TensorSums(np.ones((1, 2)), np.array([0])), sums(0.0, 0.0)
    found = statistics({"blk.0.a": nothing, "blk.1.a": nothing, "blk.2.a": sums(1.0, 1.0), "blk.3.a": nothing})
    assert found["blk.1.a"].gain == 1 and np.isnan([found["blk.1.a"].cossim, found["blk.1.a"].pearson]).all()
    assert np.isnan(found["blk.2.a"].gain) and found["blk.2.a"].cossim == 0
    assert found["blk.3.a"].gain == 0 and found["blk.3.a"].h_norm == 0
    assert tuple(statistics({"a": empty})["a"]) == (0,) * 12
    (single,) = statistics({"blk.0.a": sums(5.0)}).values()
    assert single.std_deviation == 0 and np.isnan(single.h_norm)
    other = statistics({"blk.0.a": sums(5.0), "blk.1.a": sums(1.0, 2.0)})["blk.1.a"]
    assert np.isnan(other.gain)  # other columns


def test_merged_matrices_keep_plain_sums_and_datasets() -> None:
    one, other = example(), example(1)
    both = merge([one, other], 32)
    plain = [part.entries["blk.0.a.weight"].plain for part in (one, other, both)]
    assert plain[0] is not None and plain[1] is not None
    np.testing.assert_array_equal(plain[2], plain[0] + plain[1])
    assert both.datasets == ("text.txt", "text.txt") and both.chunk_size == 32 and both.source == one.source
    bare = Imatrix(Path("y"), {name: found._replace(plain=None) for name, found in other.entries.items()})
    assert merge([one, bare], 32).entries["blk.0.a.weight"].plain is None


def test_a_count_for_all_experts_is_added_to_each() -> None:
    name = "blk.0.e.weight"
    common = Imatrix(Path("y"), {name: ColumnSums(np.ones((1, 12), np.float32), np.array([5]))})
    assert merge([example(), common], 32).entries[name].counts.tolist() == [69, 5, 37]
    assert merge([common, example()], 32).entries[name].counts.tolist() == [69, 5, 37]
    two = Imatrix(Path("y"), {name: ColumnSums(np.ones((2, 6), np.float32), np.array([5, 5]))})
    with pytest.raises(QuantizeError, match="other columns"):
        merge([two, example()], 32)


def test_embeddings_of_another_size_have_no_importance() -> None:
    """A tied embedding has sums as an output matrix."""
    entry = ColumnSums(np.ones((1, 8), np.float32), np.array([1]))
    found = Imatrix(Path("x"), {"token_embd.weight": entry})
    assert found.of("token_embd.weight", 16, 1) is None and found.of("token_embd.weight", 8, 1) is not None


@pytest.mark.parametrize("legacy", [False, True])
def test_sums_that_are_not_finite_are_refused(legacy: bool) -> None:
    entry = ColumnSums(np.full((1, 4), np.inf, np.float32), np.array([1]))
    with pytest.raises(QuantizeError, match="w has sums that are not finite"):
        Imatrix(Path("x"), {"w": entry}, legacy=legacy)


def test_an_older_matrix_without_inputs_or_chunks() -> None:
    empty = Imatrix(Path("x"), {"w": ColumnSums(np.full((1, 4), 3, np.float32), np.array([0]))}, legacy=True)
    assert empty.weights["w"].tolist() == [3] * 4 and empty.overrides()[1:] == [("quantize.imatrix.entries_count", 1)]


def test_older_files_leave_out_tensors_without_inputs_and_end_early(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    none = ColumnSums(np.zeros((1, 4), np.float32), np.array([0]))
    given = example()
    write_imatrix(path, Imatrix(Path("x"), {**given.entries, "none": none}, ("a", "b"), 2, 32), legacy=True)
    found = read_imatrix(path)
    assert list(found.entries) == ["blk.0.a.weight", "blk.0.e.weight"] and found.datasets == ("b",)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # neither the number of chunks nor a data set
    bare = read_imatrix(path)
    assert (bare.chunk_count, bare.datasets) == (0, ()) and bare.entries.keys() == found.entries.keys()
    path.write_bytes(whole[:-10])
    with pytest.raises(QuantizeError, match="damaged"):
        read_imatrix(path)


@pytest.mark.parametrize(
    ("name", "always", "with_head"),
    [
        ("blk.3.x", True, True),
        ("output.weight", False, True),
        ("token_embd.weight", False, True),
        ("other", False, False),
    ],
)
def test_observed_weights(name: str, always: bool, with_head: bool) -> None:
    assert (is_observed(name, head=False), is_observed(name, head=True)) == (always, with_head)
