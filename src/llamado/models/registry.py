"""Every architecture that runs here, by the name files give it in `general.architecture`."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from llamado.models.base import Model

_FOLDER = "llamado.models.architectures"


class Architecture(NamedTuple):
    """Where an architecture is (`family.module:Class`), and models that have it."""

    place: str
    models: str

    def load(self) -> type[Model]:
        """Its class; the file is read when it is first wanted."""
        module, name = self.place.split(":")
        found: type[Model] = getattr(import_module(f"{_FOLDER}.{module}"), name)
        return found


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("encoders.bert:BertModel", "BERT, MiniLM, BGE, E5, GTE; rerankers made of them"),
    "gemma3": Architecture("gemma.gemma3:Gemma3Model", "Gemma 3"),
    "llama": Architecture("llama.llama:LlamaModel", "Llama 1 to 3, Mistral, Mixtral, SmolLM2, TinyLlama, Yi"),
    "qwen2": Architecture("qwen.qwen2:Qwen2Model", "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen"),
    "qwen2moe": Architecture("qwen.qwen2moe:Qwen2MoeModel", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "qwen3": Architecture("qwen.qwen3:Qwen3Model", "Qwen3, Qwen3-Embedding"),
    "qwen3moe": Architecture("qwen.qwen3moe:Qwen3MoeModel", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
}


ELSEWHERE = {
    "glm4moelite": "Ollama's own name for GLM-4.7-Flash, in a layout of its own: take the file of the Hugging Face "
    "hub, whose architecture is deepseek2 (the name glm, or hf:unsloth/GLM-4.7-Flash-GGUF)",
}
"""Names that no file made by llama.cpp's tools has, and what to take instead."""
