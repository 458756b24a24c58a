"""Chat handlers by llama-cpp-python's names: they name a model's projector file.

Here the projector file and the model's own chat template decide how pictures are handled, so all handlers do the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from llamado.gguf.sources.hub import fetch_hub_model


@dataclass(frozen=True)
class MTMDChatHandler:
    """The projector file (mmproj) of a model: `Llama(model, chat_handler=MTMDChatHandler(clip_model_path="…"))`."""

    clip_model_path: str | os.PathLike[str]
    verbose: bool = True
    """No effect: `Llama` has this switch."""

    @classmethod
    def from_pretrained(
        cls, repo_id: str, filename: str, cache_dir: str | os.PathLike[str] | None = None, **options: Any
    ) -> Self:
        """Use a projector file of the Hugging Face hub, downloaded to the hub's cache unless it is there.

        `filename`: the file, or a pattern that one file matches. Raises LlamadoError.
        """
        path = fetch_hub_model(repo_id, file_name=filename, cache_dir=None if cache_dir is None else Path(cache_dir))
        return cls(path, **options)


class Llava15ChatHandler(MTMDChatHandler):
    """LLaVA 1.5."""


class Llava16ChatHandler(MTMDChatHandler):
    """LLaVA 1.6."""


class MoondreamChatHandler(MTMDChatHandler):
    """Moondream 2."""


class NanoLlavaChatHandler(MTMDChatHandler):
    """nanoLLaVA."""


class ObsidianChatHandler(MTMDChatHandler):
    """Obsidian."""


class Llama3VisionAlphaChatHandler(MTMDChatHandler):
    """Llama 3 Vision Alpha."""


class MiniCPMv26ChatHandler(MTMDChatHandler):
    """MiniCPM-V 2.6."""


class Qwen25VLChatHandler(MTMDChatHandler):
    """Qwen2.5-VL."""


class Gemma3ChatHandler(MTMDChatHandler):
    """Gemma 3."""
