"""Damaged and malicious files: each ends in a `GgufError` that says where, and none costs memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf_bytes as by
import numpy as np
import pytest
from tiers import first_of

from llamado.gguf import GgufError, GGUFFile
from llamado.gguf.values import MAX_NESTED_ARRAYS

HUGE = 2**60
N_MUTATIONS = 3_000


def string_array(n: int, payload: bytes) -> bytes:
    return by.entry("s", by.ARRAY, by.array(by.STRING, n, payload))


def one(tensor: bytes, data: int = 4096) -> bytes:
    return by.file([], [tensor], bytes(data))


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "short magic": (b"GG", "not a GGUF file"),
    "no magic": (b"ABCD" + bytes(100), "not a GGUF file: it begins with b'ABCD"),
    "safetensors": (b"\x3d" + bytes(7) + b'{"w": {"dtype": "F32"}}', "it looks like safetensors: .*convert_hf_to_gguf"),
    "JSON": (b'{"a": 1}', "it looks like JSON"),
    "web page": (b"<!DOCTYPE html><html>404</html>", "web page"),
    "zip": (b"PK\3\4" + bytes(50), "zip archive"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "only magic": (b"GGUF", "ends too early"),
    "no counts": (b"GGUF\3\0\0\0", "ends too early"),
    "version 0": (by.file(version=0), "version 0 is unknown"),
    "version 1": (by.file(version=1), "version 1 is no longer read"),
    "version 4": (by.file(version=4), "version 4 is unknown"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (by.file(n_tensors=HUGE), "does not fit"),
    "huge key count": (by.file(n_keys=HUGE), "does not fit"),
    "negative count": (by.file(n_keys=2**64 - 1), "does not fit"),
    "one key too many": (by.file([by.u32("a", 1)], n_keys=2, alignment=1), "does not fit"),
    "more keys than bytes": (by.file([by.u32("a", 1)], n_keys=9, data=bytes(200)), "key is empty"),
    "empty key": (by.file([by.u32("", 1)]), "key is empty"),
    "key twice": (by.file([by.u32("a", 1), by.u32("a", 2)]), "appears twice"),
    "key not UTF-8": (by.file([by.entry(b"\xff\xfe", by.U8, b"\0")]), "not UTF-8"),
    "key too long": (by.file([by.u32("k" * 65536, 1)]), "longer than 65535"),
    "key runs over the end": (
        by.file(n_keys=1, data=struct.pack("<Q", 500) + bytes(99), alignment=1),
        "ends too early",
    ),
    "unknown value type": (by.file([by.entry("a", 13, bytes(8))]), "value type 13"),
    "huge value type": (by.file([by.entry("a", 2**32 - 1, bytes(8))]), "value type 4294967295"),
    "string over the end": (by.file([by.entry("a", by.STRING, struct.pack("<Q", 1000))]), "ends too early"),
    "huge string": (by.file([by.entry("a", by.STRING, struct.pack("<Q", 2**64 - 1))]), "ends too early"),
    "scalar over the end": (by.file([by.entry("a", by.F64, b"\0")], alignment=1), "ends too early"),
    "unknown element type": (by.file([by.entry("a", by.ARRAY, by.array(77, 1, b"\0"))]), "value type 77"),
    "huge number array": (by.file([by.entry("a", by.ARRAY, by.array(by.U8, HUGE, b""))]), "does not fit"),
    "array a little too long": (by.file([by.entry("a", by.ARRAY, by.array(by.F32, 50, bytes(80)))]), "does not fit"),
    "huge string array": (by.file([string_array(HUGE, b"")]), "does not fit"),
    "string in array over the end": (by.file([string_array(2, by.text("x") + struct.pack("<Q", 99))]), "runs over"),
    "huge string in array": (by.file([string_array(2, struct.pack("<QQ", 2**64 - 1, 0))]), "runs over"),
    "string lengths that wrap": (by.file([string_array(3, struct.pack("<QQQ", 2**63, 2**63, 0))]), "runs over"),
    "last string over the end": (by.file([string_array(1, struct.pack("<Q", 1 << 40))]), "runs over"),
    "huge nested array": (by.file([by.entry("a", by.ARRAY, by.array(by.ARRAY, HUGE, b""))]), "does not fit"),
    "arrays in arrays in arrays": (
        by.file([by.entry("a", by.ARRAY, by.array(by.ARRAY, 1, b"") * 500 + by.array(by.U8, 1, b"\0"))]),
        "nested more than 4 deep",
    ),
    "too many nested arrays": (
        by.file(
            [
                by.entry(
                    "a",
                    by.ARRAY,
                    by.array(by.ARRAY, MAX_NESTED_ARRAYS + 1, by.array(by.U8, 0, b"") * (MAX_NESTED_ARRAYS + 1)),
                )
            ]
        ),
        "nested arrays",
    ),
    "alignment 0": (by.file([by.u32("general.alignment", 0)]), "power of two"),
    "alignment 48": (by.file([by.u32("general.alignment", 48)]), "power of two"),
    "alignment 2^31": (by.file([by.u32("general.alignment", 2**31)]), "power of two"),
    "alignment of a wrong type": (
        by.file([by.entry("general.alignment", by.U64, struct.pack("<Q", 32))]),
        "must be a uint32",
    ),
    "alignment is a string": (by.file([by.entry("general.alignment", by.STRING, by.text("32"))]), "must be a uint32"),
    "tensor twice": (by.file([], [by.tensor("a", [8]), by.tensor("a", [8], offset=32)], bytes(64)), "appears twice"),
    "tensor name too long": (one(by.tensor("n" * 64, [8])), "longer than 63"),
    "tensor name not UTF-8": (one(by.tensor(b"\xc3\x28", [8])), "not UTF-8"),
    "five dimensions": (one(by.tensor("a", [1] * 5)), "5 dimensions"),
    "huge n_dims": (one(by.tensor("a", [1], n_dims=2**32 - 1)), "4294967295 dimensions"),
    "zero dimension": (one(by.tensor("a", [4, 0])), "dimension 1 is zero"),
    "huge dimension": (one(by.tensor("a", [2**63])), "more than 2"),
    "product over 2^63": (one(by.tensor("a", [2**32, 2**32])), "more than 2"),
    "product wraps to nothing": (one(by.tensor("a", [2**16] * 4)), "more than 2"),
    "many elements": (one(by.tensor("a", [2**62])), "the file has 4096"),
    "unknown tensor type": (one(by.tensor("a", [32], kind=1000)), "tensor type 1000 is unknown"),
    "removed tensor type": (one(by.tensor("a", [32], kind=31)), "Q4_0_4_4 has been removed"),
    "half a block": (one(by.tensor("a", [33], kind=2)), "not a whole number of Q4_0 blocks of 32"),
    "half a super-block": (one(by.tensor("a", [128, 2], kind=12)), "not a whole number of Q4_K blocks of 256"),
    "misaligned offset": (one(by.tensor("a", [8], offset=4)), "not a multiple of the alignment 32"),
    "offset over the end": (one(by.tensor("a", [8], offset=1 << 20)), "the file has 4096"),
    "huge offset": (one(by.tensor("a", [8], offset=2**64 - 32)), "the file has 4096"),
    "data cut off": (one(by.tensor("a", [1024]), 4095), "needs data bytes 0 to 4096"),
    "no data": (by.file([], [by.tensor("a", [8])]), "the file has 0"),
    "overlap": (by.file([], [by.tensor("a", [64]), by.tensor("b", [8], offset=32)], bytes(512)), "overlaps"),
    "overlap of a byte": (
        by.file([], [by.tensor("a", [33], kind=24), by.tensor("b", [8], offset=32)], bytes(512)),  # of I8
        "overlaps",
    ),
    "same place": (by.file([], [by.tensor("a", [8]), by.tensor("b", [8])], bytes(512)), "overlaps"),
    "overlap out of order": (
        by.file([], [by.tensor("a", [64], offset=32), by.tensor("b", [16])], bytes(512)),
        "overlaps",
    ),
    "split count of a wrong type": (by.file([by.entry("split.count", by.STRING, by.text("2"))]), "must be an integer"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    content, complaint = CASES[name]
    path = by.save(tmp_path, content)
    with pytest.raises(GgufError, match=complaint) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    assert caught.value.path == path
    assert caught.value.field
    if "split" not in name:
        assert caught.value.offset is not None and 0 <= caught.value.offset <= len(content)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="directory"):
        GGUFFile.open(tmp_path)
    with pytest.raises(GgufError, match="no such file"):
        GGUFFile.open(tmp_path / "none.gguf")
    with pytest.raises(GgufError, match="cannot be opened"):
        GGUFFile.open("zero\0byte")
    with pytest.raises(GgufError, match="cannot be opened"):
        GGUFFile.open("/dev/null/x.gguf")


def small_file() -> bytes:
    """A valid file of under 2 kB that has everything in it."""
    scalars = [
        by.entry("u8", by.U8, b"\1"),
        by.entry("i16", by.I16, b"\1\0"),
        by.u32("u32", 7),
        by.entry("u64", by.U64, bytes(8)),
        by.entry("f32", by.F32, struct.pack("<f", 0.5)),
        by.entry("f64", by.F64, struct.pack("<d", 0.5)),
        by.entry("bool", by.BOOL, b"\1"),
        by.entry("string", by.STRING, by.text("some text")),
        by.u32("general.alignment", 32),
    ]
    nested = by.array(by.U8, 3, b"abc") + by.array(by.STRING, 2, by.text("x") + by.text("yz"))
    arrays = [
        by.entry("floats", by.ARRAY, by.array(by.F32, 4, struct.pack("<4f", 1, 2, 3, 4))),
        by.entry("strings", by.ARRAY, by.array(by.STRING, 5, b"".join(by.text("w" * i) for i in range(5)))),
        by.entry("nested", by.ARRAY, by.array(by.ARRAY, 2, nested)),
    ]
    tensors = [
        by.tensor("a.weight", [32, 2], kind=8, offset=0),
        by.tensor("b.weight", [8, 2, 2], kind=0, offset=96),
        by.tensor("c.weight", [256], kind=12, offset=224),
    ]
    return by.file(scalars + arrays, tensors, bytes(range(256)) + bytes(112))


def touch_everything(path: Path) -> bool:
    """Open a file and read all that it offers; False where it is refused. Anything but `GgufError` comes through."""
    try:
        file = GGUFFile.open(path)
    except GgufError:
        return False
    with file:
        size = path.stat().st_size
        for name, info in file.tensors.items():
            data = file.data(name)
            assert len(data) == info.nbytes and info.offset + info.nbytes <= size
            if len(data):
                int(data[0]) + int(data[-1])
        for value in file.metadata.values():
            if not isinstance(value, (int, float, str)):
                for item in value:
                    repr(item)
            if isinstance(value, np.ndarray):
                assert value.nbytes <= size
    return True


def touch_metadata(path: Path) -> bool:
    try:
        GGUFFile.open(path).close()
    except GgufError:
        return False
    return True


def mutate(rng: random.Random, original: bytes) -> bytes:
    content = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(content)) if rng.random() < 0.3 else rng.randrange(min(len(content), 900))
        match rng.randrange(7):
            case 0:
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                content[at] = rng.choice((0, 1, 4, 8, 9, 0x7F, 0x80, 0xFF))
            case 2:
                content[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 255, 2**31, 2**32, HUGE, 2**63, 2**64 - 1)))
            case 3:
                content[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 8, 9, 10, 255, 2**31, 2**32 - 1)))
            case 4:
                del content[at : at + rng.randrange(1, 20)]
            case 5:
                source = rng.randrange(len(content))
                content[at:at] = content[source : source + rng.randrange(1, 40)]
            case _:
                del content[at:]
        if not content:
            break
    return bytes(content)


@pytest.mark.slow
def test_truncated_anywhere(tmp_path: Path) -> None:
    original = small_file()
    assert touch_everything(by.save(tmp_path, original))
    path = tmp_path / "cut.gguf"
    for n in range(len(original)):
        path.write_bytes(original[:n])
        assert not touch_everything(path), f"the file cut to {n} bytes was accepted"


@pytest.mark.slow
@pytest.mark.parametrize("n", first_of([N_MUTATIONS // 3, N_MUTATIONS]))
def test_mutations(tmp_path: Path, n: int) -> None:
    rng = random.Random(20240607)
    original = small_file()
    path = tmp_path / "mutated.gguf"
    accepted = 0
    for i in range(n):
        content = mutate(rng, original)
        path.write_bytes(content)
        watched = i % 20 == 0
        if watched:
            tracemalloc.start()
        accepted += touch_everything(path)
        if watched:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            # Python objects for each key and tensor, and the error with its traceback; far from any declared 2^31.
            assert peak < 200_000, f"mutation {i} took {peak} bytes"
    assert n // 100 < accepted < n * 0.99  # the mutations neither miss nor destroy everything
    print(f"{accepted} of {n} mutated files were still valid")


@pytest.mark.parametrize("kind", ["numbers", "strings", "empty strings", "nested"])
def test_memory_stays_in_proportion_to_the_file(tmp_path: Path, kind: str) -> None:
    n = 20_000
    payload = {
        "numbers": by.array(by.F64, n, bytes(8 * n)),
        "strings": by.array(by.STRING, n, by.text("some text") * n),
        "empty strings": by.array(by.STRING, n, by.text("") * n),
        "nested": by.array(by.ARRAY, n, by.array(by.U8, 0, b"") * n),
    }[kind]
    path = by.save(tmp_path, by.file([by.entry("a", by.ARRAY, payload)]))
    tracemalloc.start()
    assert touch_metadata(path) == (kind != "nested")  # so many nested arrays are refused
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * path.stat().st_size + 100_000
