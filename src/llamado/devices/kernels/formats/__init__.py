"""The number formats with kernels. A new one is a class in a file of this folder, and an entry of `_KINDS`."""

from __future__ import annotations

from llamado.devices.kernels.formats.codebooks.iq1 import IQ1_M, IQ1_S
from llamado.devices.kernels.formats.codebooks.iq2 import IQ2_S, IQ2_XS, IQ2_XXS
from llamado.devices.kernels.formats.codebooks.iq3 import IQ3_S, IQ3_XXS
from llamado.devices.kernels.formats.format import Blocks32, Blocks256, Format
from llamado.devices.kernels.formats.fp4 import MXFP4, NVFP4
from llamado.devices.kernels.formats.iq4 import IQ4_NL, IQ4_XS
from llamado.devices.kernels.formats.low_bits import Q1_0, Q2_0
from llamado.devices.kernels.formats.plain import BF16, F16, F32
from llamado.devices.kernels.formats.q4_0 import Q4_0
from llamado.devices.kernels.formats.q4_1 import Q4_1
from llamado.devices.kernels.formats.q5_0 import Q5_0
from llamado.devices.kernels.formats.q5_1 import Q5_1
from llamado.devices.kernels.formats.q8_0 import Q8_0
from llamado.devices.kernels.formats.super_blocks.q2_k import Q2_K
from llamado.devices.kernels.formats.super_blocks.q3_k import Q3_K
from llamado.devices.kernels.formats.super_blocks.q4_k import Q4_K
from llamado.devices.kernels.formats.super_blocks.q5_k import Q5_K
from llamado.devices.kernels.formats.super_blocks.q6_k import Q6_K
from llamado.devices.kernels.formats.ternary import TQ1_0, TQ2_0
from llamado.gguf.types import TensorType

_KINDS: tuple[type[Format], ...] = (
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    MXFP4,
    NVFP4,
    TQ1_0,
    TQ2_0,
    Q1_0,
    Q2_0,
)

FORMATS: dict[TensorType, Format] = {kind.type: kind() for kind in _KINDS}
"""Formats by tensor type."""


def in_blocks(type_: TensorType) -> Blocks32 | Blocks256:
    """Return the format of weights that products take in blocks."""
    form = FORMATS[type_]
    assert isinstance(form, Blocks32 | Blocks256)
    return form
