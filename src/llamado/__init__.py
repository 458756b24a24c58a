"""llamado serves GGUF language models over HTTP and splits one model across machines.

`Llama` and the other names here run a model in the calling process with llama-cpp-python's interface (llamado.library).
They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamado.errors import LlamadoError
    from llamado.library.cache import LlamaCache, LlamaDiskCache, LlamaRAMCache
    from llamado.library.grammar import LlamaGrammar
    from llamado.library.hooks import LogitsProcessorList, MinTokensLogitsProcessor, StoppingCriteriaList
    from llamado.library.llama import Llama, LlamaState
    from llamado.library.options import LlamaPromptLookupDecoding

__version__ = "0.1.0"
__all__ = [
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaGrammar",
    "LlamaPromptLookupDecoding",
    "LlamaRAMCache",
    "LlamaState",
    "LlamadoError",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteriaList",
    "__version__",
]

_HOMES = {
    "Llama": "llamado.library.llama",
    "LlamaCache": "llamado.library.cache",
    "LlamaDiskCache": "llamado.library.cache",
    "LlamaGrammar": "llamado.library.grammar",
    "LlamaPromptLookupDecoding": "llamado.library.options",
    "LlamaRAMCache": "llamado.library.cache",
    "LlamaState": "llamado.library.llama",
    "LlamadoError": "llamado.errors",
    "LogitsProcessorList": "llamado.library.hooks",
    "MinTokensLogitsProcessor": "llamado.library.hooks",
    "StoppingCriteriaList": "llamado.library.hooks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llamado' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
