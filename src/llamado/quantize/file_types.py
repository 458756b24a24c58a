"""Quantized file types: llama-quantize's names and numbers, and the type of most tensors (llama.h)."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.gguf.types import TensorType as T
from llamado.quantize.errors import QuantizeError


@dataclass(frozen=True)
class FileType:
    """A quantized file type.

    `number` is `general.file_type`, `default` the type of most tensors, `bits` their bits per weight, `about` a short
    description.
    """

    name: str
    number: int
    default: T
    bits: float
    about: str


FILE_TYPES = (
    FileType("Q1_0", 40, T.Q1_0, 1.125, "for models trained with one bit"),
    FileType("Q2_0", 41, T.Q2_0, 2.25, "for models trained with two bits"),
    FileType("Q4_0", 2, T.Q4_0, 4.5, "one scale per block; Q4_K_M is better"),
    FileType("Q4_1", 3, T.Q4_1, 5, "scale and minimum per block; Q4_K_M is better"),
    FileType("MXFP4_MOE", 38, T.MXFP4, 4.25, "mixtures of experts: experts in MXFP4, the rest in Q8_0"),
    FileType("Q5_0", 8, T.Q5_0, 5.5, "one scale per block; Q5_K_M is better"),
    FileType("Q5_1", 9, T.Q5_1, 6, "scale and minimum per block; Q5_K_M is better"),
    FileType("IQ2_XXS", 19, T.IQ2_XXS, 2.06, "very small, needs --imatrix"),
    FileType("IQ2_XS", 20, T.IQ2_XS, 2.31, "very small, needs --imatrix"),
    FileType("IQ2_S", 28, T.IQ2_XS, 2.5, "very small, needs --imatrix"),
    FileType("IQ2_M", 29, T.IQ2_S, 2.7, "very small, needs --imatrix"),
    FileType("IQ1_S", 24, T.IQ1_S, 1.56, "the smallest, needs --imatrix"),
    FileType("IQ1_M", 31, T.IQ1_M, 1.75, "nearly the smallest, needs --imatrix"),
    FileType("TQ1_0", 36, T.TQ1_0, 1.69, "for models trained with ternary weights"),
    FileType("TQ2_0", 37, T.TQ2_0, 2.06, "for models trained with ternary weights; larger and faster"),
    FileType("Q2_K", 10, T.Q2_K, 2.63, "small, large quality loss; more bits for some tensors"),
    FileType("Q2_K_S", 21, T.Q2_K, 2.63, "small, large quality loss, needs --imatrix"),
    FileType("IQ3_XXS", 23, T.IQ3_XXS, 3.06, "small, needs --imatrix"),
    FileType("IQ3_S", 26, T.IQ3_S, 3.44, "small; better than Q3_K_S"),
    FileType("IQ3_M", 27, T.IQ3_S, 3.66, "small; more bits for some tensors"),
    FileType("Q3_K", 12, T.Q3_K, 3.44, "same as Q3_K_M"),
    FileType("IQ3_XS", 22, T.IQ3_S, 3.3, "small, needs --imatrix"),
    FileType("Q3_K_S", 11, T.Q3_K, 3.44, "small, large quality loss"),
    FileType("Q3_K_M", 12, T.Q3_K, 3.44, "small; more bits for some tensors"),
    FileType("Q3_K_L", 13, T.Q3_K, 3.44, "like Q3_K_M, with more bits for those tensors"),
    FileType("IQ4_NL", 25, T.IQ4_NL, 4.5, "non-linear levels, for rows that do not fit Q4_K blocks"),
    FileType("IQ4_XS", 30, T.IQ4_XS, 4.25, "smaller than Q4_K_S and about as good"),
    FileType("Q4_K", 15, T.Q4_K, 4.5, "same as Q4_K_M"),
    FileType("Q4_K_S", 14, T.Q4_K, 4.5, "slightly smaller than Q4_K_M"),
    FileType("Q4_K_M", 15, T.Q4_K, 4.5, "a good default; more bits for some tensors"),
    FileType("Q5_K", 17, T.Q5_K, 5.5, "same as Q5_K_M"),
    FileType("Q5_K_S", 16, T.Q5_K, 5.5, "slightly smaller than Q5_K_M"),
    FileType("Q5_K_M", 17, T.Q5_K, 5.5, "close to the original; more bits for some tensors"),
    FileType("Q6_K", 18, T.Q6_K, 6.56, "very close to the original"),
    FileType("Q8_0", 7, T.Q8_0, 8.5, "nearly the original"),
    FileType("F16", 1, T.F16, 16, "half precision, as a source for quantizing"),
    FileType("BF16", 32, T.BF16, 16, "half precision with the range of F32, as a source for quantizing"),
    FileType("F32", 0, T.F32, 32, "single precision"),
)
COPY = FileType("COPY", 0, T.F32, 0, "copies tensors unchanged")
GUESSED = 1024
"""Flag added to a file type number that was derived from the tensors instead of read from the file."""

_OF_FILES = {
    T.F32: 0, T.F16: 1, T.BF16: 32, T.Q4_0: 2, T.Q4_1: 3, T.Q5_0: 8, T.Q5_1: 9, T.Q8_0: 7, T.Q2_K: 10, T.Q3_K: 12,
    T.Q4_K: 15, T.Q5_K: 17, T.Q6_K: 18, T.TQ1_0: 36, T.TQ2_0: 37, T.IQ2_XXS: 19, T.IQ2_XS: 20, T.IQ2_S: 28,
    T.IQ3_XXS: 23, T.IQ1_S: 24, T.IQ1_M: 31, T.IQ4_NL: 25, T.IQ4_XS: 30, T.IQ3_S: 26, T.NVFP4: 39, T.Q1_0: 40,
    T.Q2_0: 41,
}  # fmt: skip


_NAMES = {
    kind.number: kind.name for kind in FILE_TYPES
}  # of two names for a number, the later one, which names the mixture


def file_type_name(number: int) -> str | None:
    """Return the name of a `general.file_type`; None if the number is unknown."""
    return _NAMES.get(number & ~GUESSED)


def find_file_type(text: str) -> FileType | None:
    """Return the file type with this name (case-insensitive) or number."""
    for kind in (*FILE_TYPES, COPY):
        if kind.name == text.upper():
            return kind
    return next((kind for kind in FILE_TYPES if str(kind.number) == text), None)


def file_type_of(most: T) -> int:
    """Return the number of a file whose most frequent tensor type is `most`."""
    return _OF_FILES.get(most, 0)


def tensor_type(text: str) -> T:
    """Return the tensor type with this name, case-insensitive. Raises QuantizeError."""
    try:
        return T[text.upper()]
    except KeyError:
        raise QuantizeError(f"unknown tensor type {text!r}; examples: q4_k, q8_0, f16") from None
