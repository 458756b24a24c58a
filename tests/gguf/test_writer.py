import io
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from llamado.gguf import GgufError, GGUFFile, StringArray, TensorType, ValueType
from llamado.gguf.writer import NewFile, NewTensor, encode, header_bytes, read_fields, write_gguf


def written(path: Path, alignment: int | None = None) -> None:
    """A file with every kind of value, made by the reference's own writer."""
    writer = gguf.GGUFWriter(path, "tiny")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_bool("a.bool", True)
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -300)
    writer.add_uint64("a.u64", 2**63)
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_string("a.text", "naïve")
    writer.add_array("a.texts", ["one", "", "drei"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_tensor("b.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("a.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [None, 128])
def test_a_file_written_again_is_the_same_file(tmp_path: Path, alignment: int | None) -> None:
    written(tmp_path / "a.gguf", alignment)
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        fields = read_fields(file.path)
        tensors = [NewTensor(t.name, t.type, t.ne) for t in file.tensors.values()]
        pieces = (iter([file.data(t.name)[:4], file.data(t.name)[4:].tobytes()]) for t in tensors)
        write_gguf(tmp_path / "b.gguf", fields, tensors, pieces)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_values_are_encoded_as_they_are_read(tmp_path: Path) -> None:
    fields = {
        "i": encode(-5),
        "u": encode(7, ValueType.UINT32),
        "f": encode(1.5),
        "b": encode(True),
        "t": encode("x"),
        "s": encode(["p", "q"]),
        "n": encode([1, 2], ValueType.UINT64),
        "m": encode(np.array([1.5, 2.5])),
    }
    write_gguf(tmp_path / "a.gguf", fields, [], [])
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        found = file.metadata
        assert [found[key] for key in "iufbt"] == [-5, 7, 1.5, True, "x"]
        assert found["s"] == StringArray.of(["p", "q"])
        assert [found.type_name(key) for key in "unm"] == ["uint32", "array of uint64", "array of float64"]
    with pytest.raises(ValueError, match="-1 is no uint32"):
        encode(-1, ValueType.UINT32)


def test_trailing_ones_are_no_dimensions() -> None:
    tensors = [NewTensor("t", TensorType.F32, (4, 1, 1, 1)), NewTensor("u", TensorType.F32, (1, 3, 1, 1))]
    data = header_bytes({}, tensors)
    stream = io.BytesIO(data[24:])
    for name, ne, offset in (("t", [4], 0), ("u", [1, 3], 32)):
        assert stream.read(8 + len(name)) == len(name).to_bytes(8, "little") + name.encode()
        n = int.from_bytes(stream.read(4), "little")
        assert [int.from_bytes(stream.read(8), "little") for _ in range(n)] == ne
        assert (int.from_bytes(stream.read(4), "little"), int.from_bytes(stream.read(8), "little")) == (0, offset)


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    with pytest.raises(GgufError, match="got 4 bytes of data; expected 8"):
        write_gguf(path, {}, [NewTensor("t", TensorType.F32, (2,))], [b"abcd"])
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.gguf"]
    with pytest.raises(GgufError, match=r"cannot be written: No such file"):
        write_gguf(tmp_path / "no" / "a.gguf", {}, [], [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    """The buffered part cannot be written when the file is closed, either."""
    with pytest.raises(GgufError, match="cannot be written: No space left on device"), NewFile(tmp_path / "a") as file:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file._stream.fileno())
        file._stream.write(b"x" * 10)
        file.write(b"y" * (8 << 20))
    assert [*tmp_path.iterdir()] == []
