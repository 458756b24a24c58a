"""All families, in the order in which templates are tested: more specific ones first."""

from __future__ import annotations

from llamado.text.dialects.families import (
    deepseek,
    functionary,
    gemma,
    glm,
    harmony,
    hermes,
    lfm,
    llama,
    mistral,
    others,
)
from llamado.text.dialects.family import Family

FAMILIES: tuple[Family, ...] = (
    mistral.MINISTRAL,
    harmony.HARMONY,
    functionary.V32,
    others.KIMI,
    others.COHERE_MOE,
    lfm.LFM,
    others.GIGACHAT,
    deepseek.V32,
    deepseek.V4,
    gemma.OLD_GEMMA,
    gemma.GEMMA,
    others.MINICPM,
    hermes.STEP,
    hermes.QWEN_CODER,
    hermes.SEED,
    glm.HUNYUAN,
    glm.LING,
    glm.LAGUNA,
    glm.GLM,
    others.MINIMAX_M2,
    others.SOLAR,
    others.COMMAND_R,
    others.COMMAND_R_PLUS,
    deepseek.R1,
    deepseek.V31,
    mistral.SMALL,
    mistral.NEMO,
    others.NEMOTRON,
    others.APERTUS,
    others.FIREFUNCTION,
    others.GRANITE,
    functionary.V31,
    others.APRIEL,
    hermes.HERMES,
    others.MINIMAX_M1,
    llama.LLAMA,
)


def family_of(source: str) -> Family | None:
    """Return the family of a template; None if it has none."""
    return next((family for family in FAMILIES if family.knows(source)), None)
