"""Every type's blocks against digests of what llama.cpp b11434 (`ggml_quantize_chunk`) makes of the same rows.

`python tests/quantize/test_types.py LIBGGML_BASE` prints the digests anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys

import numpy as np
import pytest
from making import importance, odd_rows

from llamado.gguf.types import TensorType as T
from llamado.quantize.errors import QuantizeError
from llamado.quantize.rows import QUANTIZERS, convert, floats, is_rounded, quantize

DIGESTS = {
    "F32": ("e3c81a40971571dd", "e3c81a40971571dd"),
    "F16": ("a89dc9b9a44a3603", "a89dc9b9a44a3603"),
    "BF16": ("0180da7bb6642ff5", "0180da7bb6642ff5"),
    "Q8_0": ("d8ec095069ce10c7", "d8ec095069ce10c7"),
    "Q4_0": ("2d4a49da1220ca90", "b6f944998a01b1e6"),
    "Q4_1": ("6e5ce3b3b68aebc1", "6155d888b16df452"),
    "Q5_0": ("a79001ec292c4e2c", "960a7741baf0ed94"),
    "Q5_1": ("9c41954d323cda7a", "79327174b1b3df35"),
    "Q1_0": ("3ab9436c3b2f51fd", "3ab9436c3b2f51fd"),
    "Q2_0": ("2bce3c47226be783", "2bce3c47226be783"),
    "Q2_K": ("96ab45ee70720d32", "c0fa8245d476ff40"),
    "Q3_K": ("81f6874b9b3b402f", "2d4e6b621629b61c"),
    "Q4_K": ("099ffa86fdfd9d54", "4af7500e94cee4c8"),
    "Q5_K": ("1df64cc97b065318", "5945600e6c388cbf"),
    "Q6_K": ("110fbd77104267a3", "93997e62b3ed63fb"),
    "IQ4_NL": ("a856dcfe35a1443e", "af38f5c036498087"),
    "IQ4_XS": ("f522f669b74093f2", "75d77ed383f64843"),
    "IQ1_S": ("", "0d52a458e3ab3e54"),
    "IQ1_M": ("", "e5b59a623bb6cc18"),
    "IQ2_XXS": ("", "daf9eadf77cc570f"),
    "IQ2_XS": ("", "67c3fd14f3dc9538"),
    "IQ2_S": ("a7e5df0b43a2fd77", "a741c9fa2d6009d7"),
    "IQ3_XXS": ("e5788f927945cfba", "44aa215650d2d83d"),
    "IQ3_S": ("b42eb15efe385be2", "9911f3bcf0b5e51a"),
    "TQ1_0": ("ea6c91b6362360d0", "ea6c91b6362360d0"),
    "TQ2_0": ("3490e978a09784b9", "3490e978a09784b9"),
    "MXFP4": ("5829d2c73c6e0d05", "5829d2c73c6e0d05"),
    "NVFP4": ("b7fe27a9fed96169", "b7fe27a9fed96169"),
}
NEED_WEIGHTS = {"IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIGESTS)
def test_blocks_are_llama_cpps(name: str) -> None:
    plain, weighted = DIGESTS[name]
    if plain:
        assert digest(quantize(odd_rows(), T[name]).tobytes()) == plain
    assert digest(quantize(odd_rows(), T[name], importance()).tobytes()) == weighted


def test_every_type_that_is_written_has_a_digest() -> None:
    assert {type_.name for type_ in QUANTIZERS} == DIGESTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("type_", [T.F16, T.BF16, T.Q8_0, T.Q5_1, T.Q4_K, T.Q6_K, T.IQ4_XS, T.TQ2_0])
def test_quantized_files_read_back(type_: T) -> None:
    """Rows come back to what few bits leave of them."""
    x = odd_rows()[:1]
    if type_ is T.TQ2_0:
        x = np.sign(x)
    back = floats(quantize(x, type_), type_, x.shape[1])
    error = np.sqrt(np.square(back - x).mean() / np.square(x).mean())
    assert error < {T.F16: 1e-3, T.BF16: 1e-2, T.Q8_0: 0.01, T.Q5_1: 0.05, T.Q6_K: 0.03, T.TQ2_0: 1e-3}.get(type_, 0.1)


ROUNDED = [T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]


@pytest.mark.parametrize("target", ROUNDED)
@pytest.mark.parametrize("source", [T.F32, T.F16, T.BF16])
def test_rounding_straight_from_the_file(source: T, target: T) -> None:
    """Converting a file's rows directly equals quantizing their values, wherever rows begin and end."""
    rows = quantize(odd_rows(), source)[:, : 96 * source.block_bytes]
    x = floats(np.ascontiguousarray(rows), source, 96)
    assert is_rounded(source, target, None)
    found = convert(rows, source, 96, target, None)
    assert found is not None and (found == quantize(x, target)).all()
    for i in (0, 7, 15):
        assert (found[i] == quantize(x[i : i + 1], target)[0]).all()


def test_halves_go_away_from_zero() -> None:
    """A value slightly below a half rounds to zero, although its sum with a half rounds to one."""
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = 127, 0.5, -0.5, 1.5, -126.5, np.nextafter(np.float32(0.5), np.float32(0))
    assert quantize(x, T.Q8_0).view(np.int8)[0, 2:8].tolist() == [127, 1, -1, 2, -127, 0]


@pytest.mark.parametrize("target", ROUNDED)
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_rejected(target: T, wrong: float) -> None:
    for place in (0, 13, 95, 3 * 96 + 40, 4 * 96 - 1):
        x = odd_rows()[:4, :96].astype(np.float16)
        x.reshape(-1)[place] = wrong
        assert convert(x.view(np.uint8), T.F16, 96, target, None) is None


def test_a_group_count_that_fills_no_vector() -> None:
    """Rows are computed as if they were alone."""
    x, w = odd_rows(), importance()
    for type_ in (T.Q4_K, T.Q3_K, T.Q6_K, T.IQ4_NL):
        whole = quantize(x, type_, w)
        assert (np.concatenate([quantize(x[i : i + 1], type_, w) for i in range(len(x))]) == whole).all()


def test_a_type_that_is_not_written() -> None:
    with pytest.raises(QuantizeError, match="Q8_1 is not a supported target type"):
        quantize(odd_rows(), T.Q8_1)


def _record(library: str) -> None:
    base = ctypes.CDLL(library)
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    ]  # fmt: skip
    x, w = odd_rows(), importance()
    for type_ in QUANTIZERS:
        found = []
        for weights in (None, w.ctypes.data):
            out = np.zeros(len(x) * type_.row_bytes(x.shape[1]), np.uint8)
            if weights is None and type_.name in NEED_WEIGHTS:
                found.append("")
                continue
            base.ggml_quantize_init(int(type_))
            base.ggml_quantize_chunk(int(type_), x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)
            found.append(digest(out.tobytes()))
        print(f'    "{type_.name}": ("{found[0]}", "{found[1]}"),')


if __name__ == "__main__":
    _record(sys.argv[1])
