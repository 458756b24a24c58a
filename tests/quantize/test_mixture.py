from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY, make
from tiny_models import make_llama

from llamado.commands import cli
from llamado.gguf import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.quantize import write as quantize_write
from llamado.quantize.errors import QuantizeError
from llamado.quantize.file_types import COPY, find_file_type
from llamado.quantize.imatrix import ColumnSums, Imatrix
from llamado.quantize.mixture import TypeOptions
from llamado.quantize.plan import FilePlan, QuantizeRequest, plan
from llamado.quantize.rows import convert
from llamado.quantize.write import output_paths, write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("m") / "a.gguf", wtype="F16", n_embd=256, n_ff=512, n_layer=8, n_vocab=320
    )


def request(kind: str, **more: object) -> QuantizeRequest:
    found = find_file_type(kind)
    assert found is not None
    return QuantizeRequest(found, **more)  # type: ignore[arg-type]


def types(what: FilePlan) -> dict[str, T]:
    return {step.target.name: step.target.type for file in what.files for step in file.tensor_plans}


def test_some_tensors_get_more_bits(path: Path) -> None:
    with GGUFFile.open(path) as file:
        found = types(plan(file, request("q4_k_m")))
        assert [i for i in range(8) if found[f"blk.{i}.ffn_down.weight"] is T.Q6_K] == [0, 3, 6, 7]
        assert found["output.weight"] is T.Q6_K and found["token_embd.weight"] is T.Q4_K
        assert found["blk.0.attn_norm.weight"] is T.F32
        assert Counter(types(plan(file, request("Q4_K_M", type_options=TypeOptions(pure=True)))).values())[T.Q6_K] == 0


def test_explicit_types_take_precedence(path: Path) -> None:
    type_options = TypeOptions(
        output=T.Q8_0, embedding=T.F16, types=[("blk\\.[12]\\..*attn_k", T.Q5_0), ("attn_k", T.IQ4_XS)]
    )
    with GGUFFile.open(path) as file:
        found = types(plan(file, request("Q3_K_S", type_options=type_options)))
    assert found["output.weight"] is T.Q8_0 and found["token_embd.weight"] is T.F16
    assert [found[f"blk.{i}.attn_k.weight"] for i in range(4)] == [T.IQ4_XS, T.Q5_0, T.Q5_0, T.IQ4_XS]


def test_rows_that_fit_no_block_get_another_type(tmp_path: Path) -> None:
    with GGUFFile.open(make_llama(tmp_path / "b.gguf", wtype="F16", n_embd=96)) as file:
        what = plan(file, request("Q4_K_S"))
    assert types(what)["blk.0.attn_q.weight"] is T.Q5_0 and types(what)["output.weight"] is T.Q8_0
    assert "blk.0.attn_q.weight" in what.fallbacks


def test_layers_are_left_out_and_the_rest_numbered_anew(path: Path, tmp_path: Path) -> None:
    pruned = request("F16", prune=frozenset({0, 3}))
    with GGUFFile.open(path) as file:
        write(file, plan(file, pruned), pruned, [tmp_path / "p.gguf"])
        with GGUFFile.open(tmp_path / "p.gguf") as small:
            assert small.metadata.int_("llama.block_count") == 6
            assert (small.data("blk.1.attn_q.weight") == file.data("blk.2.attn_q.weight")).all()
            assert (small.data("blk.5.ffn_up.weight") == file.data("blk.7.ffn_up.weight")).all()


@pytest.mark.slow
def test_pieces_and_threads_change_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    seen = []
    with GGUFFile.open(path) as file:
        entries = {
            t.name: ColumnSums(rng.random((1, t.ne[0]), np.float32), np.array([1]))
            for t in file.tensors.values()
            if t.ne[1] > 1
        }
        given = request("Q3_K_M", imatrix=Imatrix(Path("i.gguf"), entries))
        for piece, threads in ((1 << 16, 2), (9000, 3)):
            monkeypatch.setattr("llamado.quantize.write.PIECE", piece)
            write(file, plan(file, given), given, [tmp_path / "o.gguf"], n_threads=threads)
            seen.append((tmp_path / "o.gguf").read_bytes())
    assert seen[0] == seen[1]


def test_tensors_of_odd_sizes_are_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.quantize.write._BYTES", 100)
    given = request("COPY")
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_embd=20, n_ff=36, wtype="F32")) as file:
        assert any(tensor.nbytes % 32 for tensor in file.tensors.values())
        write(file, plan(file, given), given, [tmp_path / "o.gguf"])
        with GGUFFile.open(tmp_path / "o.gguf") as found:
            assert {name: found.data(name).tobytes() for name in found.tensors} == {
                name: file.data(name).tobytes() for name in file.tensors
            }


@pytest.mark.slow
def test_each_expert_is_quantized_by_its_own_importance(tmp_path: Path) -> None:
    name, n = "blk.0.ffn_up_exps.weight", 128
    importance = np.random.default_rng(4).random((8, n), np.float32) ** 4
    with GGUFFile.open(make(TINY["llama-experts"], tmp_path / "e.gguf")) as file:
        given = request("Q4_0", imatrix=Imatrix(Path("i.gguf"), {name: ColumnSums(importance, np.ones(8, np.int64))}))
        write(file, plan(file, given), given, [tmp_path / "o.gguf"])
        rows = file.data(name).reshape(8, -1, 4 * n).copy()
    with GGUFFile.open(tmp_path / "o.gguf") as file:
        assert file.tensors[name].type is T.Q4_0
        found = file.data(name).reshape(8, -1).copy()
    for i in range(8):
        own, other = (convert(rows[i], T.F32, n, T.Q4_0, importance[j]) for j in (i, i - 1))
        assert own is not None and other is not None
        assert (found[i] == own.reshape(-1)).all() and (own != other).any()


@pytest.mark.slow
def test_impossible_requests_are_errors(path: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    with GGUFFile.open(path) as file:
        with pytest.raises(QuantizeError, match="compute one with llamado imatrix"):
            write(file, plan(file, request("IQ2_XXS")), request("IQ2_XXS"), [small])
        with pytest.raises(QuantizeError, match="this is the model itself"):
            write(file, plan(file, request("Q8_0")), request("Q8_0"), [path])
        write(file, plan(file, request("Q8_0")), request("Q8_0"), [small])
    with GGUFFile.open(small) as file:
        with pytest.raises(QuantizeError, match=r"is Q8_0 already.*--allow-requantize"):
            plan(file, request("Q4_0"))
        again = request("Q4_0", allow_requantize=True)
        write(file, plan(file, again), again, [tmp_path / "again.gguf"])
        copied = QuantizeRequest(COPY)
        write(file, plan(file, copied), copied, [tmp_path / "copy.gguf"])
    with GGUFFile.open(tmp_path / "copy.gguf") as copy, GGUFFile.open(small) as file:
        assert copy.metadata.int_("general.file_type") == 7
        assert all((copy.data(name) == file.data(name)).all() for name in file.tensors)


def test_few_pieces_wait_to_be_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are computed a little ahead of the file, so memory does not grow with the model."""
    waiting = most = 0

    class CountingPool(ThreadPoolExecutor):
        def submit(self, *job: Any) -> Any:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            return super().submit(*job)

    def progress(*_: object) -> None:
        nonlocal waiting
        waiting -= 1

    monkeypatch.setattr(quantize_write, "ThreadPoolExecutor", CountingPool)
    with GGUFFile.open(path) as file:
        given = request("Q8_0")
        write(file, plan(file, given), given, [tmp_path / "a.gguf"], n_threads=2, progress=progress)
    assert waiting == 0 and most == 4


def test_no_part_of_a_split_model_is_overwritten(path: Path, tmp_path: Path) -> None:
    assert cli.main(["gguf", "split", "--split-max-tensors", "60", str(path), str(tmp_path / "m")]) == 0
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 1
    with GGUFFile.open(parts[0]) as file:
        for part in parts:
            with pytest.raises(QuantizeError, match="this is the model itself"):
                write(file, plan(file, request("Q8_0")), request("Q8_0"), [part])


def test_damaged_weights_stop_quantizing_and_leave_no_file(tmp_path: Path) -> None:
    bad = make_llama(tmp_path / "b.gguf", wtype="F16")
    with GGUFFile.open(bad) as file:
        at = file.tensors["blk.1.ffn_up.weight"].offset
    data = bytearray(bad.read_bytes())
    data[at + 1] = 0x7C
    data[at] = 0
    bad.write_bytes(data)
    with GGUFFile.open(bad) as file, pytest.raises(QuantizeError, match=r"blk\.1\.ffn_up\.weight.*not finite"):
        write(file, plan(file, request("Q4_0")), request("Q4_0"), [tmp_path / "out.gguf"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.gguf"]


def test_names_of_the_parts() -> None:
    given = request("Q8_0", keep_split=True)
    assert [p.name for p in output_paths(Path("x/m.gguf"), given, 2)] == [
        "m-00001-of-00002.gguf", "m-00002-of-00002.gguf",
    ]  # fmt: skip
