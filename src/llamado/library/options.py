"""Arguments by llama-cpp-python's names → what the engine takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from llamado.devices.split.placement import ALL_LAYERS, SplitOptions, share_problem
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.gguf.types import TensorType
from llamado.library.errors import LibraryError
from llamado.library.hooks import LogitsProcessor, StoppingCriteria
from llamado.models.hparams import Pooling
from llamado.models.keys import RopeOptions
from llamado.rpc.endpoint import Endpoint

Value = int | float | bool | str

# `chat_format` → the template of that name here; others go by the same name, or are templates themselves.
_CHAT_FORMATS = {
    "llama-2": "llama2-sys",
    "llama-3": "llama3",
    "mistral-instruct": "mistral-v1",
    "chatml-function-calling": "chatml",
}
_ROPE_TYPES = {0: "none", 1: "linear", 2: "yarn"}
_WITHOUT_EFFECT = frozenset(
    {
        "split_mode", "main_gpu", "attention_type", "offload_kqv", "flash_attn", "op_offload", "swa_full",
        "no_perf",
    }
)  # fmt: skip
_REFUSED = {
    "vocab_only": "a model is loaded as a whole",
    "lora_base": "adapters are added while computing, whatever type the weights have",
    "chat_handler": "chats are text, by the model's own template, or that of chat_format",
    "tokenizer": "a model's tokenizer is the one in its file",
    "functions": "tools are its successor",
    "function_call": "tool_choice is its successor",
}
_WITHOUT_FIELD = ("tfs_z", "penalize_nl", "logits_processor", "stopping_criteria")
_RANDOM_SEEDS = (None, -1, 0xFFFFFFFF)


@dataclass(frozen=True)
class LlamaPromptLookupDecoding:
    """Drafts what followed before in the prompt: as `draft_model` it has probable next tokens evaluated along.

    How many that are is found out here, so the numbers are taken and not needed.
    """

    max_ngram_size: int = 2
    num_pred_tokens: int = 10


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn; what is left out is llama.cpp's own."""

    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    seed: int | None
    tfs_z: float
    """No effect: llama.cpp has given it up."""
    penalize_nl: bool
    """The same."""
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    """Functions of (input_ids, scores) that return the logits to draw from."""
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None
    """Functions of (input_ids, logits); the answer ends where one of them returns True."""


def refuse(given: Mapping[str, Any]) -> None:
    """Raises LibraryError for arguments that would mean something which is not here."""
    for name, why in _REFUSED.items():
        if given.get(name) not in (None, False):
            raise LibraryError(f"{name} is not supported: {why}")


def request_fields(
    temperature: float, max_tokens: int | None, stop: str | Sequence[str] | None, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of Request and Sampling. Raises LibraryError."""
    refuse(sampling)
    unknown = sampling.keys() - SamplingOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    fields = {name: value for name, value in sampling.items() if name not in (*_REFUSED, *_WITHOUT_FIELD)}
    if "mirostat_mode" in fields:
        fields["mirostat"] = fields.pop("mirostat_mode")
    if fields.get("logit_bias"):
        fields["logit_bias"] = {int(token): float(bias) for token, bias in fields["logit_bias"].items()}
    fields["temperature"] = temperature
    fields["n_predict"] = -1 if max_tokens is None or max_tokens <= 0 else max_tokens
    fields["stop"] = [stop] if isinstance(stop, str) else [*(stop or ())]
    return fields


def is_random(seed: int | None) -> bool:
    """Whether a seed asks for a fresh one."""
    return seed in _RANDOM_SEEDS


def engine_options(
    *,
    n_gpu_layers: int | None,
    tensor_split: Sequence[float] | None,
    rpc_servers: str | None,
    use_mmap: bool,
    use_mlock: bool,
    kv_overrides: Mapping[str, Value] | None,
    n_ctx: int,
    n_batch: int,
    n_ubatch: int,
    n_threads: int | None,
    n_threads_batch: int | None,
    rope: Mapping[str, Any],
    pooling_type: int,
    embedding: bool,
    lora_path: str | None,
    lora_scale: float,
    numa: bool | int | str,
    chat_format: str | None,
    draft_model: LlamaPromptLookupDecoding | None,
    type_k: int | str | None,
    type_v: int | str | None,
    n_slots: int,
    others: Mapping[str, Any],
) -> EngineOptions:
    """How a model is loaded. Raises LibraryError."""
    refuse(others)
    unknown = others.keys() - _WITHOUT_EFFECT - _REFUSED.keys()
    if unknown:
        raise TypeError(f"Llama() got an unexpected keyword argument {min(unknown)!r}")
    if draft_model is not None and not isinstance(draft_model, LlamaPromptLookupDecoding):
        raise LibraryError("draft_model: only LlamaPromptLookupDecoding drafts here")
    split = None
    if rpc_servers:
        if problem := share_problem(tensor_split or ()):
            raise LibraryError(f"tensor_split: {problem}")
        split = SplitOptions(
            rpc=tuple(str(Endpoint.parse(text.strip())) for text in rpc_servers.split(",") if text.strip()),
            tensor_split=None if tensor_split is None else tuple(tensor_split),
            n_gpu_layers=ALL_LAYERS if n_gpu_layers is not None and n_gpu_layers < 0 else n_gpu_layers,
        )
    return EngineOptions(
        n_ctx=n_ctx,
        n_slots=n_slots,
        n_batch=n_batch,
        n_ubatch=min(n_batch, n_ubatch),
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        type_k=_type("type_k", type_k),
        type_v=_type("type_v", type_v),
        mmap=use_mmap,
        mlock=use_mlock,
        numa=numa if isinstance(numa, str) else "distribute" if numa else None,
        chat_template=None if chat_format is None else _CHAT_FORMATS.get(chat_format, chat_format),
        split=split,
        drafts=DraftOptions(kinds=None if draft_model is None else ("suffix",)),
        lora=() if lora_path is None else ((lora_path, lora_scale),),
        embeddings=embedding,
        pooling=None if pooling_type < 0 else Pooling(pooling_type).name.lower(),
        metadata=tuple((kv_overrides or {}).items()),
        rope=_rope(**rope),
        rotated=os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") in ("", "0"),  # libllama reads it, too
    )


def _type(name: str, given: int | str | None) -> str:
    if given is None:
        return "f16"
    if isinstance(given, str):
        return given
    try:
        return TensorType(given).name.lower()
    except ValueError:
        raise LibraryError(f"{name}: {given} is no number of a ggml type") from None


def _rope(
    *,
    rope_scaling_type: int | None,
    rope_freq_base: float,
    rope_freq_scale: float,
    yarn_ext_factor: float,
    yarn_attn_factor: float,
    yarn_beta_fast: float,
    yarn_beta_slow: float,
    yarn_orig_ctx: int,
) -> RopeOptions:
    return RopeOptions(
        scaling=None if rope_scaling_type is None else _ROPE_TYPES.get(rope_scaling_type),
        freq_base=rope_freq_base,
        freq_scale=rope_freq_scale,
        n_ctx_orig=yarn_orig_ctx,
        ext_factor=yarn_ext_factor,
        # The usual says nothing.
        attn_factor=-1.0 if yarn_attn_factor == 1.0 else yarn_attn_factor,
        beta_fast=-1.0 if yarn_beta_fast == 32.0 else yarn_beta_fast,
        beta_slow=-1.0 if yarn_beta_slow == 1.0 else yarn_beta_slow,
    )
