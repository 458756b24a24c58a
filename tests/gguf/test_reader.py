"""The reader against files written by the reference writer, by hand, and by the real world."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import gguf_bytes as by
import numpy as np
import pytest

from llamado.gguf import GgufError, GGUFFile, Metadata, StringArray, TensorType


def written_by_reference(path: Path, **options: object) -> dict[str, np.ndarray]:
    """A file with every metadata type and several tensor types, by the `gguf` package; returns the tensors' data."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_float32("t.f32", 0.1)
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "héllo\n")
    writer.add_array("t.strings", ["a", "", "日本語", "x" * 300])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -1.5])
    writer.add_array("t.bools", [True, False, True])
    rng = np.random.default_rng(1)
    tensors = {
        "a.weight": rng.standard_normal((3, 5), np.float32),
        "b.weight": rng.standard_normal((2, 3, 4, 64), np.float32).astype(np.float16),
        "c.weight": rng.standard_normal(7, np.float32),
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    quantized = gguf.quants.quantize(rng.standard_normal((4, 96), np.float32), gguf.GGMLQuantizationType.Q8_0)
    tensors["d.weight"] = quantized
    writer.add_tensor("d.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("mmap", [True, False])
def test_reads_what_the_reference_writes(tmp_path: Path, mmap: bool) -> None:
    tensors = written_by_reference(tmp_path / "m.gguf")
    with GGUFFile.open(tmp_path / "m.gguf", mmap=mmap) as file:
        m = file.metadata
        assert file.version == 3
        assert m.str_("general.architecture") == "llama"
        assert [m.int_(f"t.{kind}") for kind in ("u8", "i8", "u16", "i16")] == [200, -100, 60000, -30000]
        assert [m.int_("t.u32"), m.int_("t.i32")] == [4_000_000_000, -2_000_000_000]
        assert [m.int_("t.u64"), m.int_("t.i64")] == [2**64 - 1, -(2**63)]
        assert m.float_("t.f32") == float(np.float32(0.1))
        assert m.float_("t.f64") == 0.1
        assert m.bool_("t.bool") is True
        assert m.str_("t.string") == "héllo\n"
        assert list(m.strings("t.strings")) == ["a", "", "日本語", "x" * 300]
        assert m.ints("t.ints") == (1, -2, 3)
        assert m.floats("t.floats") == (0.5, -1.5)
        assert m.bools("t.bools") == (True, False, True)

        assert list(file.tensors) == list(tensors)
        for name, values in tensors.items():
            assert file.data(name).tobytes() == values.tobytes()
        assert file.tensors["b.weight"].ne == (64, 4, 3, 2)
        assert file.tensors["b.weight"].type is TensorType.F16
        assert file.tensors["d.weight"].ne == (96, 4, 1, 1)
        assert file.tensors["d.weight"].type is TensorType.Q8_0
        assert file.tensors["d.weight"].n_elements == 96 * 4
        assert file.nbytes == sum(values.nbytes for values in tensors.values())
        info = file.tensors["c.weight"]
        whole = file.shard_data(0)
        assert len(whole) == (tmp_path / "m.gguf").stat().st_size == file.file_bytes
        assert whole[info.offset : info.offset + info.nbytes].tobytes() == tensors["c.weight"].tobytes()


def test_data_is_a_read_only_view(tmp_path: Path) -> None:
    written_by_reference(tmp_path / "m.gguf")
    for mmap in (True, False):
        file = GGUFFile.open(tmp_path / "m.gguf", mmap=mmap)
        data = file.data("a.weight")
        assert np.shares_memory(data, file.shard_data(0))
        with pytest.raises(ValueError, match="read-only"):
            data[0] = 1
        first = data.tobytes()
        file.close()
        assert data.tobytes() == first  # a view outlives its file
        with pytest.raises(GgufError, match="closed"):
            file.data("a.weight")


def test_reading_into_memory_reports_progress_and_frees_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = written_by_reference(path)
    size = path.stat().st_size
    seen: list[tuple[int, int]] = []
    file = GGUFFile.open(path, mmap=False, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size)
    path.write_bytes(bytes(size))
    assert file.data("a.weight").tobytes() == tensors["a.weight"].tobytes()


def test_version_2_and_alignment(tmp_path: Path) -> None:
    content = by.file(
        [by.u32("general.alignment", 256)],
        [by.tensor("a", [4], offset=256), by.tensor("b", [2, 2])],
        struct.pack("<4f", 1, 2, 3, 4) + bytes(240) + struct.pack("<4f", 5, 6, 7, 8),
        version=2,
        alignment=256,
    )
    with GGUFFile.open(by.save(tmp_path, content)) as file:
        assert (file.version, file.alignment) == (2, 256)
        assert file.data("b").view(np.float32).tolist() == [1, 2, 3, 4]
        assert file.data("a").view(np.float32).tolist() == [5, 6, 7, 8]


def test_nested_arrays(tmp_path: Path) -> None:
    inner = by.array(by.I32, 2, struct.pack("<2i", 1, 2)) + by.array(by.I32, 0, b"")
    middle = by.array(by.ARRAY, 2, inner)
    strings = by.array(by.STRING, 1, by.text("x"))
    content = by.file(
        [
            by.entry("a", by.ARRAY, by.array(by.ARRAY, 2, middle + strings)),
            by.entry("none", by.ARRAY, by.array(by.STRING, 0, b"")),
            by.entry("flags", by.ARRAY, by.array(by.BOOL, 3, b"\0\1\2")),
        ]
    )
    with GGUFFile.open(by.save(tmp_path, content)) as file:
        value = file.metadata["a"]
        assert isinstance(value, list)
        assert isinstance(value[0], list)
        assert np.array_equal(value[0][0], [1, 2])  # type: ignore[arg-type]
        assert value[1] == StringArray.of(["x"])
        assert len(file.metadata.strings("none")) == 0
        assert file.metadata.bools("flags") == (False, True, True)
        assert file.metadata.type_name("a") == "array of array"


def test_unaligned_numbers_are_aligned_for_compiled_code(tmp_path: Path) -> None:
    for pad in range(8):
        content = by.file(
            [
                by.entry("k" * (pad + 1), by.U8, b"\1"),
                by.entry("n", by.ARRAY, by.array(by.F64, 3, struct.pack("<3d", 1, 2, 3))),
            ]
        )
        with GGUFFile.open(by.save(tmp_path, content, f"{pad}.gguf")) as file:
            numbers = file.metadata.array("n")
            assert numbers.flags.aligned and not numbers.flags.writeable
            assert numbers.tolist() == [1, 2, 3]


def test_string_array() -> None:
    strings = StringArray.of(["a", b"\xff\xfe", "", "é"])
    assert len(strings) == 4
    assert strings.raw(1) == b"\xff\xfe"
    assert strings[1] == "\ufffd\ufffd"
    assert strings[-1] == "é"
    assert strings[1:3] == ["\ufffd\ufffd", ""]
    assert strings.raw_list() == [b"a", b"\xff\xfe", b"", "é".encode()]
    assert strings.buffer[strings.offsets[3] : strings.offsets[4]] == "é".encode()
    assert "a" in strings and strings.index("é") == 3
    with pytest.raises(IndexError):
        strings.raw(4)
    with pytest.raises(IndexError):
        strings[-5]


def test_metadata_says_which_key_is_wrong() -> None:
    m = Metadata({"s": "x", "i": 3, "f": 0.5, "b": True, "n": np.array([1, 2], np.int32), "t": StringArray.of(["x"])})
    assert m.int_("gone", 7) == 7
    assert m.int_("gone", None) is None
    assert m.float_("i") == 3.0
    assert m.ints("i", n=3) == (3, 3, 3)
    assert m.bools("b", n=2) == (True, True)
    assert m.floats("f", n=2) == (0.5, 0.5)
    assert m.ints("n", n=2) == (1, 2)
    for access in (m.str_, m.float_, m.bool_, m.ints, m.floats, m.bools, m.array, m.strings, m.int_):
        with pytest.raises(GgufError, match="'gone' is missing"):
            access("gone")
    for access, key in [
        (m.str_, "i"), (m.int_, "s"), (m.int_, "b"), (m.int_, "f"), (m.float_, "b"), (m.bool_, "i"),
        (m.ints, "i"), (m.ints, "t"), (m.floats, "n"), (m.array, "t"), (m.strings, "n"), (m.str_, "t"),
    ]:  # fmt: skip
        with pytest.raises(GgufError, match=f"'{key}' must be"):
            access(key)
    with pytest.raises(GgufError, match="2 values; expected 3"):
        m.ints("n", n=3)
    with pytest.raises(GgufError, match="must be"):
        m.ints("b", n=3)


def test_split_model(tmp_path: Path) -> None:
    tensors = written_by_reference(tmp_path / "m.gguf", split_max_tensors=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with GGUFFile.open(tmp_path / names[0]) as file:
        assert file.n_shards == 2
        assert file.tensors["d.weight"].shard == 1
        for name, values in tensors.items():
            assert file.data(name).tobytes() == values.tobytes()
    with pytest.raises(GgufError, match=r"part 2 of 2 .*open m-00001-of-00002\.gguf"):
        GGUFFile.open(tmp_path / names[1])

    good = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).unlink()
    with pytest.raises(GgufError, match=r"missing beside it: m-00002-of-00002\.gguf"):
        GGUFFile.open(tmp_path / names[0])
    (tmp_path / names[1]).write_bytes((tmp_path / names[0]).read_bytes())
    with pytest.raises(GgufError, match=r"split\.no is 0, expected 1"):
        GGUFFile.open(tmp_path / names[0])
    (tmp_path / names[1]).write_bytes(good[:-64])
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf.*the file has"):
        GGUFFile.open(tmp_path / names[0])
    (tmp_path / names[0]).rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match="must be named like NAME-00001-of-00002"):
        GGUFFile.open(tmp_path / "model.gguf")


def split_keys(number: int, count: int, tensors: int) -> list[bytes]:
    return [
        by.entry("split.no", by.U16, struct.pack("<H", number)),
        by.entry("split.count", by.U16, struct.pack("<H", count)),
        by.entry("split.tensors.count", by.I32, struct.pack("<i", tensors)),
    ]


@pytest.mark.parametrize(
    ("second", "said", "complaint"),
    [
        ("a", 2, "tensor 'a' is already in"),
        ("b", 3, "hold 2 tensors; expected 3"),
    ],
)
def test_shards_that_do_not_fit(tmp_path: Path, second: str, said: int, complaint: str) -> None:
    for number, name in enumerate(("a", second)):
        content = by.file(split_keys(number, 2, said), [by.tensor(name, [8])], bytes(32))
        by.save(tmp_path, content, f"m-0000{number + 1}-of-00002.gguf")
    with pytest.raises(GgufError, match=complaint):
        GGUFFile.open(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.slow
def test_opening_real_models_makes_nothing_for_each_of_their_words(gemma3_path: Path, smollm2_path: Path) -> None:
    for path, tokens in ((gemma3_path, 262144), (smollm2_path, 49152)):
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            file = GGUFFile.open(path)
        finally:
            sys.setprofile(None)
        assert calls < tokens // 4, "Python functions called: some for each tensor and key, none for each word"
        with file:
            vocabulary = file.metadata.strings("tokenizer.ggml.tokens")
            assert len(vocabulary) == len(file.metadata.array("tokenizer.ggml.token_type")) == tokens
            assert int(vocabulary.offsets[-1]) == len(vocabulary.buffer)
            name, info = next(iter(file.tensors.items()))
            assert len(file.data(name)) == info.nbytes
    with GGUFFile.open(gemma3_path) as file:
        vocabulary = file.metadata.strings("tokenizer.ggml.tokens")
        assert [vocabulary[i] for i in (0, 1, 2, 106)] == ["<pad>", "<eos>", "<bos>", "<end_of_turn>"]
        embedding = file.tensors["token_embd.weight"]
        assert (embedding.type, embedding.ne) == (TensorType.Q8_0, (640, 262144, 1, 1))


@pytest.mark.full
def test_agrees_with_the_reference_reader(smollm2_path: Path) -> None:
    reference = gguf.GGUFReader(smollm2_path)
    with GGUFFile.open(smollm2_path) as file:
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            info = file.tensors[tensor.name]
            assert info.offset == tensor.data_offset
            assert info.nbytes == tensor.n_bytes
            assert info.ne[: len(tensor.shape)] == tuple(tensor.shape)
            assert info.type == int(tensor.tensor_type)
        fields = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, field in fields.items():
            ours = file.metadata[name]
            theirs = field.contents()
            assert list(ours) == theirs if isinstance(ours, (StringArray, np.ndarray)) else ours == theirs
