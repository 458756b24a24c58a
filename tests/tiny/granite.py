"""Granite."""

from __future__ import annotations

from tiny.llama import ATTENTION, EXPERT, EXPERT_KEYS, EXPERTS, GATED, KEYS, SHARED
from tiny.mamba import EVERY_OTHER, HEADS, MAMBA2
from tiny.spec import Tiny

FACTORS = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 2.0}

HYBRID = {i: ATTENTION | dict.fromkeys(set(MAMBA2) - set(ATTENTION)) for i in (1, 3)}

MODELS = (
    Tiny("granite", {**KEYS, **FACTORS}, {**ATTENTION, **GATED}, {"output.weight": None}),
    Tiny("granite", {**KEYS, **FACTORS, "rope.scaling.finetuned": False}, {**ATTENTION, **GATED}, variant="nope"),
    Tiny(
        "granitehybrid",
        {**KEYS, **FACTORS, **HEADS, **EVERY_OTHER},
        {**MAMBA2, **GATED},
        {"output.weight": None},
        HYBRID,
    ),
    Tiny(
        "granitehybrid",
        {
            **KEYS,
            **HEADS,
            **EVERY_OTHER,
            **EXPERT_KEYS,
            "feed_forward_length": EXPERT,
            "expert_shared_feed_forward_length": EXPERT,
            "rope.scaling.finetuned": False,
        },
        {**MAMBA2, **EXPERTS, **SHARED},
        layers=HYBRID,
        variant="experts",
    ),
)
