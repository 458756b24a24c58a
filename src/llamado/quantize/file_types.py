"""Kinds of quantized files: names and numbers that llama-quantize takes, and the type most tensors get (llama.h)."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.gguf.types import TensorType as T
from llamado.quantize.errors import QuantizeError


@dataclass(frozen=True)
class FileType:
    """A kind of file: `number` is `general.file_type`, `about` its bits a weight, or what llama-quantize says of it."""

    name: str
    number: int
    default: T
    about: str


FILE_TYPES = (
    FileType("Q1_0", 40, T.Q1_0, "1.125 bits a weight"),
    FileType("Q2_0", 41, T.Q2_0, "2.25 bits a weight (groups of 64)"),
    FileType("Q4_0", 2, T.Q4_0, "4.5 bits a weight, one scale a block"),
    FileType("Q4_1", 3, T.Q4_1, "5 bits a weight, scale and least value"),
    FileType("MXFP4_MOE", 38, T.MXFP4, "experts in 4.25 bits (MXFP4), the rest in Q8_0"),
    FileType("Q5_0", 8, T.Q5_0, "5.5 bits a weight, one scale a block"),
    FileType("Q5_1", 9, T.Q5_1, "6 bits a weight, scale and least value"),
    FileType("IQ2_XXS", 19, T.IQ2_XXS, "2.06 bits a weight, needs --imatrix"),
    FileType("IQ2_XS", 20, T.IQ2_XS, "2.31 bits a weight, needs --imatrix"),
    FileType("IQ2_S", 28, T.IQ2_XS, "2.5 bits a weight, needs --imatrix"),
    FileType("IQ2_M", 29, T.IQ2_S, "2.7 bits a weight, needs --imatrix"),
    FileType("IQ1_S", 24, T.IQ1_S, "1.56 bits a weight, needs --imatrix"),
    FileType("IQ1_M", 31, T.IQ1_M, "1.75 bits a weight, needs --imatrix"),
    FileType("TQ1_0", 36, T.TQ1_0, "1.69 bits a weight, ternary"),
    FileType("TQ2_0", 37, T.TQ2_0, "2.06 bits a weight, ternary"),
    FileType("Q2_K", 10, T.Q2_K, "2.63 bits a weight and more for some tensors"),
    FileType("Q2_K_S", 21, T.Q2_K, "2.63 bits a weight, needs --imatrix"),
    FileType("IQ3_XXS", 23, T.IQ3_XXS, "3.06 bits a weight, needs --imatrix"),
    FileType("IQ3_S", 26, T.IQ3_S, "3.44 bits a weight"),
    FileType("IQ3_M", 27, T.IQ3_S, "3.66 bits a weight"),
    FileType("Q3_K", 12, T.Q3_K, "another name of Q3_K_M"),
    FileType("IQ3_XS", 22, T.IQ3_S, "3.3 bits a weight, needs --imatrix"),
    FileType("Q3_K_S", 11, T.Q3_K, "3.44 bits a weight"),
    FileType("Q3_K_M", 12, T.Q3_K, "3.44 bits a weight and more for some tensors"),
    FileType("Q3_K_L", 13, T.Q3_K, "as Q3_K_M, with more for these"),
    FileType("IQ4_NL", 25, T.IQ4_NL, "4.5 bits a weight, levels that are not equally far apart"),
    FileType("IQ4_XS", 30, T.IQ4_XS, "4.25 bits a weight, levels that are not equally far apart"),
    FileType("Q4_K", 15, T.Q4_K, "another name of Q4_K_M"),
    FileType("Q4_K_S", 14, T.Q4_K, "4.5 bits a weight"),
    FileType("Q4_K_M", 15, T.Q4_K, "4.5 bits a weight and more for some tensors"),
    FileType("Q5_K", 17, T.Q5_K, "another name of Q5_K_M"),
    FileType("Q5_K_S", 16, T.Q5_K, "5.5 bits a weight"),
    FileType("Q5_K_M", 17, T.Q5_K, "5.5 bits a weight and more for some tensors"),
    FileType("Q6_K", 18, T.Q6_K, "6.56 bits a weight"),
    FileType("Q8_0", 7, T.Q8_0, "8.5 bits a weight"),
    FileType("F16", 1, T.F16, "16 bits a weight"),
    FileType("BF16", 32, T.BF16, "16 bits a weight"),
    FileType("F32", 0, T.F32, "32 bits a weight"),
)
COPY = FileType("COPY", 0, T.F32, "tensors as they are")
GUESSED = 1024
"""Is added to a file's number where the file itself says none."""

_OF_FILES = {
    T.F32: 0, T.F16: 1, T.BF16: 32, T.Q4_0: 2, T.Q4_1: 3, T.Q5_0: 8, T.Q5_1: 9, T.Q8_0: 7, T.Q2_K: 10, T.Q3_K: 12,
    T.Q4_K: 15, T.Q5_K: 17, T.Q6_K: 18, T.TQ1_0: 36, T.TQ2_0: 37, T.IQ2_XXS: 19, T.IQ2_XS: 20, T.IQ2_S: 28,
    T.IQ3_XXS: 23, T.IQ1_S: 24, T.IQ1_M: 31, T.IQ4_NL: 25, T.IQ4_XS: 30, T.IQ3_S: 26, T.NVFP4: 39, T.Q1_0: 40,
    T.Q2_0: 41,
}  # fmt: skip


_NAMES = {kind.number: kind.name for kind in FILE_TYPES}  # of two names the later one, which says the mixture


def file_type_name(number: int) -> str | None:
    """What a kind of file is called by its `general.file_type`; None for a number that stands for none."""
    return _NAMES.get(number & ~GUESSED)


def find_file_type(text: str) -> FileType | None:
    """The kind of file of that name, in any case, or number."""
    for kind in (*FILE_TYPES, COPY):
        if kind.name == text.upper():
            return kind
    return next((kind for kind in FILE_TYPES if str(kind.number) == text), None)


def file_type_of(most: T) -> int:
    """The number of a file in which that type is the most frequent one."""
    return _OF_FILES.get(most, 0)


def tensor_type(text: str) -> T:
    """A type of tensors by its name, in any case. Raises QuantizeError."""
    try:
        return T[text.upper()]
    except KeyError:
        raise QuantizeError(f"there is no tensor type {text!r}; types are q4_k, q8_0, f16 and so on") from None
