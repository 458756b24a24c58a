"""All families, in the order in which templates are tested: more specific ones first."""

from __future__ import annotations

from llamado.text.dialects.families import (
    by_tags,
    deepseek,
    functionary,
    gemma,
    glm,
    harmony,
    hermes,
    lfm,
    llama,
    mistral,
)
from llamado.text.dialects.family import Family

FAMILIES: tuple[Family, ...] = (
    mistral.MINISTRAL,
    harmony.HARMONY,
    functionary.V32,
    by_tags.KIMI,
    by_tags.COHERE_MOE,
    lfm.LFM,
    by_tags.GIGACHAT,
    deepseek.V32,
    deepseek.V4,
    gemma.OLD_GEMMA,
    gemma.GEMMA,
    by_tags.MINICPM,
    hermes.STEP,
    hermes.QWEN_CODER,
    hermes.SEED,
    glm.HUNYUAN,
    glm.LING,
    glm.LAGUNA,
    glm.GLM,
    by_tags.MINIMAX_M2,
    by_tags.SOLAR,
    by_tags.COMMAND_R,
    by_tags.COMMAND_R_PLUS,
    deepseek.R1,
    deepseek.V31,
    mistral.SMALL,
    mistral.NEMO,
    by_tags.NEMOTRON,
    by_tags.APERTUS,
    by_tags.FIREFUNCTION,
    by_tags.GRANITE,
    functionary.V31,
    by_tags.APRIEL,
    hermes.HERMES,
    by_tags.MINIMAX_M1,
    llama.LLAMA,
)


def family_of(source: str) -> Family | None:
    """Return the family of a template; None if it has none."""
    return next((family for family in FAMILIES if family.matches(source)), None)
