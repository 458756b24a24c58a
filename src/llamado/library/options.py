"""Arguments by llama-cpp-python's names, and their conversion to the engine's options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from llamado.devices.split.placement import ALL_LAYERS, SplitOptions, share_problem
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.gguf.types import TensorType
from llamado.library.chat_handlers import MTMDChatHandler
from llamado.library.errors import LibraryError
from llamado.library.hooks import LogitsProcessor, StoppingCriteria
from llamado.models.hparams import Pooling
from llamado.models.keys import RopeOptions
from llamado.rpc.endpoint import Endpoint

Value = int | float | bool | str

RANDOM = 0xFFFFFFFF
"""The seed that requests a random one."""

_DEFAULTS = EngineOptions(n_ctx=512, n_batch=512)
"""Options without arguments: llama-cpp-python's where the engine's own differ."""

# `chat_format` → our name of that template; other formats have the same name here, or are templates themselves
_CHAT_FORMATS = {
    "llama-2": "llama2-sys",
    "llama-3": "llama3",
    "mistral-instruct": "mistral-v1",
    "chatml-function-calling": "chatml",
}
_SPLIT_MODES = {0: "none", 1: "layer", 2: "row"}
_ROPE_TYPES = {0: "none", 1: "linear", 2: "yarn"}
_REFUSED = {
    "vocab_only": "a model is loaded as a whole",
    "lora_base": "adapters are added while computing, whatever type the weights have",
    "tokenizer": "a model's tokenizer is the one in its file",
    "functions": "tools are its successor",
    "function_call": "tool_choice is its successor",
}
"""Reasons for rejecting arguments."""
_WITHOUT_FIELD = ("tfs_z", "penalize_nl", "logits_processor", "stopping_criteria")
_RANDOM_SEEDS = (None, -1, RANDOM)


@dataclass(frozen=True)
class LlamaPromptLookupDecoding:
    """Prompt lookup: propose the tokens that followed an earlier occurrence of the last ones, as `draft_model`.

    The engine measures how many draft tokens pay, so the numbers are accepted but not used.
    """

    max_ngram_size: int = 2
    num_pred_tokens: int = 10


class LlamaArguments(TypedDict, total=False):
    """Arguments of `Llama`; those left out have llama-cpp-python's defaults."""

    n_ctx: int
    """Tokens of context of all slots together; 0: as many as the model was trained with. 512 by default."""
    n_batch: int
    """Most tokens in a step. 512 by default."""
    n_ubatch: int
    """Most tokens in a forward pass."""
    n_slots: int
    """Requests that are answered at a time."""
    n_threads: int | None
    n_threads_batch: int | None
    n_gpu_layers: int | None
    """The last layers that go to graphics cards and workers; -1: all of them, 0 or None: no card is used."""
    tensor_split: Sequence[float] | None
    """Shares of the workers, of the cards, in order, and of the CPU; None: as much as fits the cards, or with workers
    the least time per token.
    """
    split_mode: int
    """0: one device takes all layers, 1: layers are divided. 2 (rows) is rejected if there are cards."""
    main_gpu: int
    """Number of the device that takes all layers with `split_mode` 0."""
    offload_kqv: bool
    """False to keep the KV cache with the CPU."""
    rpc_servers: str | None
    """Workers that share the model: "host:port,host:port"."""
    use_mmap: bool
    use_mlock: bool
    numa: bool | int | str
    kv_overrides: Mapping[str, Value] | None
    """Values in place of the file's metadata."""
    type_k: int | str | None
    """Type of the KV cache: a ggml number, or a name."""
    type_v: int | str | None
    rope_scaling_type: int | None
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    pooling_type: int
    embedding: bool
    """True to make `embed` possible, beside answers."""
    lora_path: str | None
    lora_scale: float
    chat_format: str | None
    """A chat template, or the name of one, in place of the file's."""
    draft_model: LlamaPromptLookupDecoding | None
    seed: int
    """Seed of requests without their own; random by default."""
    logits_all: bool
    """True to keep the logits after every evaluated token in `scores`: n_ctx · n_vocab numbers."""
    last_n_tokens_size: int
    """Tokens that penalties look back. 64 by default."""
    spm_infill: bool
    """True if an infill prompt has the suffix first."""
    mmproj: str | os.PathLike[str] | None
    """The projector file for pictures and sounds, or a name of one as for `model_path`."""
    chat_handler: MTMDChatHandler | None
    """A handler of `llamado.library.chat_handlers`, which names the projector file."""
    mmproj_offload: bool
    """True to encode pictures and sounds on a graphics card that the model may use, as by default."""
    mmproj_device: str
    """Name of the card that encodes, such as "CUDA1"; "none": the CPU."""
    image_min_tokens: int
    """Least and most tokens of a picture; 0: the model's own."""
    image_max_tokens: int
    verbose: bool
    """False: log errors only. The logger is "llamado"."""

    # no effect
    attention_type: int
    flash_attn: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool

    # rejected, unless they are None or False
    vocab_only: bool
    lora_base: str | None
    tokenizer: Any


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters; those left out have llama.cpp's defaults."""

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
    """No effect: llama.cpp removed this sampler."""
    penalize_nl: bool
    """No effect: llama.cpp removed this option."""
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    """Functions of (input_ids, scores) that return the logits to sample from."""
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None
    """Functions of (input_ids, logits); the answer ends if one of them returns True."""


def refuse(given: Mapping[str, Any]) -> None:
    """Raise LibraryError for arguments that llamado does not support."""
    for name, why in _REFUSED.items():
        if given.get(name) not in (None, False):
            raise LibraryError(f"{name} is not supported: {why}")


def request_fields(
    temperature: float, max_tokens: int | None, stop: str | Sequence[str] | None, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return fields of Request and Sampling. Raises LibraryError, and TypeError for an unknown argument."""
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
    """Return True if a seed requests a random one."""
    return seed in _RANDOM_SEEDS


def engine_options(given: LlamaArguments) -> EngineOptions:
    """Return the options of the engine. Raises LibraryError, and TypeError for an unknown argument."""
    unknown = given.keys() - LlamaArguments.__annotations__.keys()
    if unknown:
        raise TypeError(f"Llama() got an unexpected keyword argument {min(unknown)!r}")
    refuse(given)
    draft_model = given.get("draft_model")
    if draft_model is not None and not isinstance(draft_model, LlamaPromptLookupDecoding):
        raise LibraryError("draft_model: only LlamaPromptLookupDecoding drafts here")
    values: Mapping[str, Any] = given
    options = {
        option: form(values[name]) for option, (name, form) in _OPTION_ARGUMENTS.items() if values.get(name) is not None
    }
    if draft_model is not None:
        options["drafts"] = DraftOptions(kinds=("suffix",))
    if (path := given.get("lora_path")) is not None:
        options["lora"] = ((path, given.get("lora_scale", 1.0)),)
    if (handler := given.get("chat_handler")) is not None:
        if not isinstance(handler, MTMDChatHandler):
            raise LibraryError("chat_handler: expected one of llamado.library.chat_handlers, as Llava15ChatHandler")
        options.setdefault("mmproj", os.fspath(handler.clip_model_path))
    return replace(
        _DEFAULTS,
        split=_split(given),
        rope=_rope(given),
        rotated=os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") in ("", "0"),  # libllama reads it, too
        **options,
    )


def _split(given: LlamaArguments) -> SplitOptions | None:
    workers, shares, n_layers = given.get("rpc_servers"), given.get("tensor_split"), given.get("n_gpu_layers")
    if not (workers or n_layers):
        return None
    if problem := share_problem(shares or ()):
        raise LibraryError(f"tensor_split: {problem}")
    return SplitOptions(
        rpc=tuple(str(Endpoint.parse(text.strip())) for text in (workers or "").split(",") if text.strip()),
        gpus=bool(n_layers),
        joins=False,
        mode=_SPLIT_MODES.get(given.get("split_mode", 1), "layer"),
        main_gpu=given.get("main_gpu", 0) if given.get("split_mode") == 0 else None,
        kv_offload=given.get("offload_kqv", True),
        tensor_split=None if shares is None else tuple(shares),
        n_gpu_layers=ALL_LAYERS if n_layers is not None and n_layers < 0 else n_layers,
    )


def _rope(given: LlamaArguments) -> RopeOptions:
    values: Mapping[str, Any] = given
    fields = {field: values[name] for field, name in _ROPE_ARGUMENTS.items() if name in values}
    for field, usual in (("attn_factor", 1.0), ("beta_fast", 32.0), ("beta_slow", 1.0)):
        if fields.get(field) == usual:  # llama-cpp-python's default, which leaves the choice to the file
            del fields[field]
    kind = given.get("rope_scaling_type")
    return RopeOptions(scaling=None if kind is None else _ROPE_TYPES.get(kind), **fields)


def _cache_type(name: str) -> Callable[[int | str], str]:
    def convert(given: int | str) -> str:
        if isinstance(given, str):
            return given
        try:
            return TensorType(given).name.lower()
        except ValueError:
            raise LibraryError(f"{name}: {given} is no number of a ggml type") from None

    return convert


def _numa(given: bool | int | str) -> str | None:
    return given if isinstance(given, str) else "distribute" if given else None


def _pooling(number: int) -> str | None:
    return None if number < 0 else Pooling(number).name.lower()


def _template(chat_format: str) -> str:
    return _CHAT_FORMATS.get(chat_format, chat_format)


_OPTION_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "n_ctx": ("n_ctx", int),
    "n_batch": ("n_batch", int),
    "n_ubatch": ("n_ubatch", int),
    "n_slots": ("n_slots", int),
    "n_threads": ("n_threads", int),
    "n_threads_batch": ("n_threads_batch", int),
    "mmap": ("use_mmap", bool),
    "mlock": ("use_mlock", bool),
    "numa": ("numa", _numa),
    "metadata": ("kv_overrides", lambda overrides: tuple(overrides.items())),
    "type_k": ("type_k", _cache_type("type_k")),
    "type_v": ("type_v", _cache_type("type_v")),
    "pooling": ("pooling_type", _pooling),
    "embeddings": ("embedding", bool),
    "chat_template": ("chat_format", _template),
    "mmproj": ("mmproj", os.fspath),
    "mmproj_offload": ("mmproj_offload", bool),
    "mmproj_device": ("mmproj_device", str),
    "image_min_tokens": ("image_min_tokens", int),
    "image_max_tokens": ("image_max_tokens", int),
}
"""Options of the engine: the argument of each, and its conversion."""

_ROPE_ARGUMENTS = {
    "freq_base": "rope_freq_base",
    "freq_scale": "rope_freq_scale",
    "n_ctx_orig": "yarn_orig_ctx",
    "ext_factor": "yarn_ext_factor",
    "attn_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
