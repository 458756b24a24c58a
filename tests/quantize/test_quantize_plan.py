"""Plans of quantized files: key-values, parts of split models, and the type of a copy."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_llama

from llamado.commands import cli
from llamado.gguf import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.gguf.writer import encode
from llamado.quantize import rows
from llamado.quantize.errors import QuantizeError
from llamado.quantize.file_types import COPY, find_file_type
from llamado.quantize.imatrix import ColumnSums, Imatrix
from llamado.quantize.mixture import ModelShape, TypeOptions
from llamado.quantize.plan import QuantizeRequest, plan
from llamado.quantize.write import write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("m") / "a.gguf", wtype="F16", n_embd=64, n_ff=64, n_layer=5, n_vocab=320)


def request(kind: str, **more: object) -> QuantizeRequest:
    found = find_file_type(kind)
    assert found is not None
    return QuantizeRequest(found, **more)  # type: ignore[arg-type]


def uint32(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def test_key_values_of_the_file(path: Path) -> None:
    """Set ones come last; whole numbers are stored without their sign, and strings in 127 bytes."""
    sums = {"blk.0.attn_q.weight": ColumnSums(np.ones((1, 64), np.float32), np.array([1]))}
    given = request(
        "Q4_K_M",
        overrides=[("a.n", -3), ("a.b", True), ("a.x", 0.5), ("a.s", "é" * 100)],
        imatrix=Imatrix(Path("i.gguf"), sums),
    )
    with GGUFFile.open(path) as file:
        before = file.metadata.keys()
        (one,) = plan(file, given).files
    assert set(before) < set(one.fields)
    assert list(one.fields.items())[-8:] == [
        ("general.quantization_version", uint32(2)),
        ("general.file_type", uint32(15)),
        ("a.n", uint32(3)),
        ("a.b", encode(True)),
        ("a.x", encode(0.5)),
        ("a.s", encode("é" * 63)),
        ("quantize.imatrix.file", encode("i.gguf")),
        ("quantize.imatrix.entries_count", uint32(1)),
    ]


def test_overridden_key_values_act_on_the_types(path: Path) -> None:
    """A model with eight experts gets more bits for its keys."""
    for n, type_ in ((0, T.Q4_0), (8, T.Q8_0)):
        with GGUFFile.open(path) as file:
            (one,) = plan(file, request("Q4_0", overrides=[("llama.expert_count", n)])).files
        assert {t.target.type for t in one.tensor_plans if t.target.name.endswith("attn_k.weight")} == {type_}


def test_a_copy_guesses_the_file_type_and_sorts_the_tensors(path: Path) -> None:
    with GGUFFile.open(path) as file:
        assert "general.file_type" not in file.metadata
        (one,) = plan(file, QuantizeRequest(COPY)).files
        assert one.fields["general.file_type"] == uint32(1 + 1024)
        assert not any(step.is_changed for step in one.tensor_plans)
        names = [step.target.name for step in one.tensor_plans]
    assert names == sorted(names, key=_order)


def _order(name: str) -> tuple[int, str]:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1, name


def test_pruned_layers(path: Path) -> None:
    """The remaining layers are numbered without gaps, and keep the names of their entries in the importance matrix."""
    with GGUFFile.open(path) as file:
        (one,) = plan(file, request("F16", prune=frozenset({1, 2}))).files
    assert one.fields["llama.block_count"] == uint32(3)
    moved = {step.target.name: step.weights_name for step in one.tensor_plans if "attn_q" in step.target.name}
    assert moved == {f"blk.{new}.attn_q.weight": f"blk.{old}.attn_q.weight" for new, old in ((0, 0), (1, 3), (2, 4))}
    with GGUFFile.open(path) as file:
        (one,) = plan(file, request("F16")).files
        assert one.fields["llama.block_count"] == uint32(5)


def test_parts_of_a_split_model_are_kept(path: Path, tmp_path: Path) -> None:
    """Each part has its own tensors, in their order, and its number; the first one has the model's key-values."""
    assert cli.main(["gguf", "split", "--split-max-tensors", "20", str(path), str(tmp_path / "m")]) == 0
    parts = sorted(tmp_path.iterdir())
    with GGUFFile.open(parts[0]) as file:
        assert len(parts) > 2
        shards = [[t.name for t in file.tensors.values() if t.shard == i] for i in range(len(parts))]
        whole = plan(file, request("Q8_0"))
        kept = plan(file, request("Q8_0", keep_split=True))
        assert len(whole.files) == 1 and not any(key.startswith("split.") for key in whole.files[0].fields)
        assert whole.nbytes == kept.nbytes == sum(t.target.nbytes for t in whole.files[0].tensor_plans)
        written = [tmp_path / f"o{i}.gguf" for i in range(len(parts))]
        done: list[tuple[str, int]] = []
        write(file, kept, request("Q8_0", keep_split=True), written, progress=lambda *one: done.append(one))
    assert sum(n for _, n in done) == kept.nbytes and {name for name, _ in done} == {n for one in shards for n in one}
    assert [[t.target.name for t in one.tensor_plans] for one in kept.files] == shards
    n = sum(map(len, shards))
    for i, one in enumerate(kept.files):
        assert list(one.fields.items())[-3:] == [
            ("split.no", struct.pack("<IH", 2, i)),
            ("split.count", struct.pack("<IH", 2, len(parts))),
            ("split.tensors.count", struct.pack("<Ii", 5, n)),
        ]
        assert ("general.architecture" in one.fields) == (i == 0)


def test_types_that_cannot_be_read_or_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TypeOptions(types=[("attn_q", T.Q8_1)])
    with GGUFFile.open(path) as file:
        with pytest.raises(QuantizeError, match=r"attn_q.* Q8_1 is not a supported target type"):
            plan(file, request("Q4_0", type_options=options))
        monkeypatch.setattr("llamado.quantize.plan.is_readable", lambda type_: type_ is not T.F16)
        with pytest.raises(QuantizeError, match="F16 is not a supported source type"):
            plan(file, request("Q4_0"))
    assert rows.is_readable(T.F16)


def test_useless_files_name_a_tensor_and_count_the_others(path: Path, tmp_path: Path) -> None:
    wide = make_llama(tmp_path / "w.gguf", wtype="F16", n_embd=256, n_ff=256, n_layer=2)
    with GGUFFile.open(wide) as file:
        found = plan(file, request("IQ2_XS"))
        assert len(found.needing_imatrix) == 12 and not found.fallbacks
        with pytest.raises(QuantizeError, match=rf"{found.needing_imatrix[0]} and 11 other tensors"):
            write(file, found, request("IQ2_XS"), [tmp_path / "o.gguf"])
        sums = {"x": ColumnSums(np.ones((1, 4), np.float32), np.array([1]))}
        assert plan(file, request("IQ2_XS", imatrix=Imatrix(Path("i"), sums))).needing_imatrix == []


def test_shapes_of_models(path: Path) -> None:
    with GGUFFile.open(path) as file:
        metadata = file.metadata
    per_layer = metadata.with_values({"llama.attention.head_count": 8, "llama.block_count": 7})
    assert ModelShape.of(per_layer).n_heads == 8 and ModelShape.of(per_layer).n_layers == 7
    assert [ModelShape("llama", 1, n, m, 0).heads_per_kv for n, m in ((8, 2), (8, 8), (8, 0))] == [4, 1, 0]
