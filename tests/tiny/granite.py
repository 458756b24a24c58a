"""Granite."""

from __future__ import annotations

from tiny.llama import ATTENTION, GATED, KEYS
from tiny.spec import Tiny

FACTORS = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 2.0}

MODELS = (
    Tiny("granite", {**KEYS, **FACTORS}, {**ATTENTION, **GATED}, {"output.weight": None}),
    Tiny("granite", {**KEYS, **FACTORS, "rope.scaling.finetuned": False}, {**ATTENTION, **GATED}, variant="nope"),
)
