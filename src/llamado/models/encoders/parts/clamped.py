"""Matrices of Gemma 4 whose input and output are limited (Gemma4ClippableLinear)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import clamp
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights

_LARGEST = float(np.finfo(np.float32).max)


class Limits(NamedTuple):
    """Least and greatest numbers of a matrix's input and output."""

    input_min: float = -_LARGEST
    input_max: float = _LARGEST
    output_min: float = -_LARGEST
    output_max: float = _LARGEST


_UNLIMITED = Limits()


class ClampedPass(EncoderPass):
    """Forward pass in which inputs and results of matrices stay within limits, by the name of the weight."""

    __slots__ = ("_limits",)

    def __init__(self, norm_eps: float, limits: dict[str, Limits]) -> None:
        super().__init__(norm_eps)
        self._limits = limits

    def mul_mat(self, weight: Tensor, x: Tensor, name: str) -> Tensor:
        limits = self._limits.get(weight.name, _UNLIMITED)
        if limits[:2] != _UNLIMITED[:2]:
            x = clamp(x, *limits[:2])
        y = super().mul_mat(weight, x, name)
        return y if limits[2:] == _UNLIMITED[2:] else clamp(y, *limits[2:])


def read_limits(weights: Weights) -> dict[str, Limits]:
    """Return the limits of the matrices that were taken, by the name of the weight. Raises InvalidModel."""
    return {name: _limits(weights, name) for name in weights.taken if name.endswith(".weight")}


def _limits(weights: Weights, name: str) -> Limits:
    """Return the limits of a matrix. Raises InvalidModel."""
    found: dict[str, float] = {}
    for which in Limits._fields:
        limit = f"{name.removesuffix('.weight')}.{which}"
        if weights.has(limit):
            values = weights.values(limit)
            if values.size != 1 or np.isnan(values[0]):
                raise InvalidModel(f"tensor '{limit}' is not a number")
            found[which] = float(np.clip(values[0], -_LARGEST, _LARGEST))
    return Limits(**found)
