"""Flags → the model, the options of the engine, and the defaults of requests."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamado.commands.split_options import draft_split, listed, split_options
from llamado.engine.options import DRAFT_KINDS, DraftOptions, EngineOptions, FitOptions, ModelSource
from llamado.engine.parameters import PARAMETERS
from llamado.engine.request import Defaults
from llamado.engine.sampling.params import DEFAULT_SAMPLERS, RANDOM_SEED, Sampling, sampler_names
from llamado.engine.sampling.rng import Seed
from llamado.errors import LlamadoError
from llamado.flags import FlagError, ParsedFlags, memory_size
from llamado.models.keys import RopeOptions
from llamado.processes.secret_values import keep

_NO_DRAFTS = {"draft-dspark": "DFlash heads with a Markov head are not supported"}


def model_source(flags: ParsedFlags) -> ModelSource:
    """Return the model that the flags name. Raises FlagError."""
    models = [*(flags.model or []), *([flags.model_url] if flags.model_url else [])]
    if len(models) > 1:
        raise FlagError(f"-m/--model: one model is expected, got {len(models)}: {', '.join(models)}")
    use_hub(flags)
    if not models and not flags.hf_repo:
        raise FlagError("no model: give -m MODEL (a GGUF path or a name, try -m smollm2) or -hf user/repo")
    return ModelSource(spec=models[0] if models else None, hf_repo=flags.hf_repo, hf_file=flags.hf_file)


def use_hub(flags: ParsedFlags) -> None:
    """Apply the flags for Hugging Face to downloads in this process and its children."""
    if flags.hf_token:
        keep("HF_TOKEN", flags.hf_token)
    if flags.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def sampling_defaults(flags: ParsedFlags) -> Defaults:
    """Return the defaults of requests: the values of the flags of PARAMETERS. Raises FlagError."""
    found: dict[str, dict[str, Any]] = {"sampling": {}, "request": {}, "server": {}}
    try:
        for row in PARAMETERS:
            value = flags.values.get(row.name) if row.flags else None
            if value is None:
                continue
            if row.of == "request" and row.type == "integer" and value < row.low:
                label = "/".join(row.flags.split()[:2])
                raise FlagError(f"{label}: expected {row.low:g} or more, got {value}")
            found[row.of][row.name] = _FORMS[row.type](value) if row.type in _FORMS else value
        if not flags.samplers and flags.sampler_seq:
            found["sampling"]["samplers"] = sampler_names(flags.sampler_seq)
        sampling = Sampling(**found["sampling"])
        sampling.validate()
    except FlagError:
        raise
    except LlamadoError as error:
        raise FlagError(str(error)) from None
    return Defaults(sampling=sampling, **found["request"])


def _seed(given: Seed) -> Seed | None:
    return None if given == RANDOM_SEED else given


def _samplers(given: str) -> tuple[str, ...]:
    return sampler_names([name for name in given.split(";") if name]) if given else DEFAULT_SAMPLERS


def _breakers(given: list[str]) -> tuple[str, ...]:
    """Return the sequence breakers that replace the default ones; "none" drops those before it."""
    texts: list[str] = []
    for text in given:
        texts = [] if text == "none" else [*texts, text]
    return tuple(texts)


def _biases(given: list[str]) -> Mapping[int, float]:
    biases = {}
    for text in given:
        split = max(text.find("+"), text.find("-"))
        try:
            token, bias = int(text[:split]), float(text[split:])
        except ValueError:
            raise FlagError(f"-l/--logit-bias: expected TOKEN_ID+BIAS or TOKEN_ID-BIAS, got {text!r}") from None
        if math.isnan(bias) or bias == math.inf:
            raise FlagError(f"-l/--logit-bias: expected a number or -inf, got {text!r}")
        biases[token] = bias
    return biases


_FORMS: dict[str, Callable[[Any], Any]] = {
    "seed": _seed,
    "samplers": _samplers,
    "breakers": _breakers,
    "biases": _biases,
    "texts": tuple,
}
"""Conversions of flag values, by type of parameter."""


def _as_is(value: Any) -> Any:
    return value


def engine_options(flags: ParsedFlags, *, n_slots: int | None = None) -> EngineOptions:
    """Return the options of running the model, for any command. `n_slots`: slots of a command without `--parallel`.

    Raises FlagError.
    """
    for key, low in _LEAST.items():
        value = flags.values.get(key)
        if value is not None and value < low:
            raise FlagError(f"--{key.replace('_', '-')}: expected {low} or more, got {value}")
    for key in ("threads", "threads_batch"):
        if flags.values[key] == 0:
            raise FlagError(f"--{key.replace('_', '-')}: expected 1 or more, got 0")
    slots = _slots(flags) if n_slots is None else {"n_slots": n_slots}
    mode = flags.load_mode
    return EngineOptions(
        **_given_options(flags),
        **slots,
        fit=fit_options(flags),
        mmap=flags.mmap and mode not in ("none", "mlock"),
        mlock=flags.mlock or "mlock" in mode,
        chat_template=_template(flags),
        split=split_options(flags),
        drafts=draft_options(flags),
        cache_disk=_cache_folder(flags),
        lora=_scaled(flags, "lora"),
        control=_scaled(flags, "control_vector"),
        metadata=tuple(metadata_overrides(flags.override_kv or [])),
        rope=rope_options(flags),
        **_projector(flags),
    )


def _projector(flags: ParsedFlags) -> dict[str, Any]:
    """Return the options of media encoders. Raises FlagError."""
    if "mmproj" not in flags.values:  # a command without pictures
        return {}
    low, high = flags.image_min_tokens or 0, flags.image_max_tokens or 0
    if high and low > high:
        raise FlagError(f"--image-min-tokens: expected at most --image-max-tokens {high}, got {low}")
    return {
        "mmproj": flags.mmproj or flags.mmproj_url or None,
        "mmproj_auto": flags.mmproj_auto,
        "mmproj_offload": flags.mmproj_offload,
        "mmproj_device": flags.mmproj_device or "",
        "image_min_tokens": low,
        "image_max_tokens": high,
    }


def _slots(flags: ParsedFlags) -> dict[str, Any]:
    """Return the options of a command with slots."""
    n = flags.parallel
    if n == 0 or n < -1:
        raise FlagError(f"-np/--parallel: expected 1 or more, got {n}")
    # llama-server: an automatic number is 4 slots over one shared context; a given number divides the context.
    unified = n < 0 if flags.kv_unified is None else flags.kv_unified
    found = {"n_slots": 4 if n < 0 else n, "unified": unified, "cont_batching": flags.cont_batching}
    if flags.values.get("cache_idle_slots"):
        found["cache_idle_slots"] = "clear" if unified else "keep"
    return found


def _given_options(flags: ParsedFlags) -> dict[str, Any]:
    """Return the options of the flags that the command has; the others keep their defaults."""
    found = {
        option: form(flags.values[flag])
        for option, (flag, form) in _OPTION_FLAGS.items()
        if flags.values.get(flag) is not None
    }
    if flags.values.get("memory_f32"):
        found |= {"type_k": "f32", "type_v": "f32"}
    if found.get("reranking") and not found.get("pooling"):
        found["pooling"] = "rank"
    return found


def _cache_folder(flags: ParsedFlags) -> str | None:
    folder: str | None = flags.values.get("cache_disk")
    if folder and not flags.values.get("cache_ram"):
        raise FlagError("--cache-disk: prompts go there from the prompt cache in memory, which --cache-ram 0 turns off")
    return str(Path(folder).expanduser()) if folder else None


def draft_options(flags: ParsedFlags) -> DraftOptions:
    """Return the sources of draft tokens. Raises FlagError."""
    if "spec_type" not in flags.values:  # a command without answers for users
        return DraftOptions()
    kinds = _draft_kinds(flags)
    model = None
    if flags.model_draft or flags.hf_repo_draft:
        model = ModelSource(spec=flags.model_draft, hf_repo=flags.hf_repo_draft)
    else:
        for kind in ("draft-simple", "draft-eagle3", "draft-dflash"):
            if kind in (kinds or ()):
                raise FlagError(f"--spec-type {kind}: -md/--model-draft names the model that drafts")
    for key, low in (
        ("spec_draft_n_max", 0), ("spec_draft_n_min", 0), ("spec_draft_threads", -1), ("spec_draft_threads_batch", -1),
    ):  # fmt: skip
        value = flags.values[key]
        if value is not None and (value < low or (value == 0 and "threads" in key)):
            raise FlagError(f"--{key.replace('_', '-')}: expected {max(low, 1) if low else 0} or more, got {value}")
    if not 0 <= flags.spec_draft_p_min <= 1:
        raise FlagError(f"--spec-draft-p-min: expected 0 to 1, got {flags.spec_draft_p_min}")
    threads, threads_batch = _threads(flags.spec_draft_threads), _threads(flags.spec_draft_threads_batch)
    return DraftOptions(
        kinds=kinds,
        most=flags.spec_draft_n_max,
        least=flags.spec_draft_n_min,
        p_min=flags.spec_draft_p_min,
        model=model,
        split=draft_split(flags),
        n_threads=threads,
        n_threads_batch=threads if threads_batch is None else threads_batch,
        type_k=flags.spec_draft_type_k,
        type_v=flags.spec_draft_type_v,
        lookup_static=flags.lookup_cache_static,
        lookup_dynamic=flags.lookup_cache_dynamic,
    )


def _draft_kinds(flags: ParsedFlags) -> tuple[str, ...] | None:
    given = listed([flags.spec_type])
    for name in given:
        if name in _NO_DRAFTS:
            raise FlagError(f"--spec-type {name}: {_NO_DRAFTS[name]}; these do: auto, none, {', '.join(DRAFT_KINDS)}")
        if name not in (*DRAFT_KINDS, "auto", "none"):
            raise FlagError(f"--spec-type: expected auto, none or some of {', '.join(DRAFT_KINDS)}, got {name!r}")
    if "none" in given:
        return ()
    if flags.spec_default:
        return tuple(dict.fromkeys([*(name for name in given if name != "auto"), "ngram-mod"]))
    return None if "auto" in given or not given else tuple(dict.fromkeys(given))


def fit_options(flags: ParsedFlags) -> FitOptions:
    """Return the options that memory fitting may change. Raises FlagError."""
    try:
        target = [int(text) for text in re.split("[,/]+", flags.fit_target)]
    except ValueError:
        target = [-1]
    if min(target) < 0:
        raise FlagError(f"-fitt/--fit-target: expected MiB, comma-separated, got {flags.fit_target!r}")
    if flags.fit_ctx < 1:
        raise FlagError(f"-fitc/--fit-ctx: expected 1 or more, got {flags.fit_ctx}")
    return FitOptions(
        on=flags.fit != "off",
        target=tuple(n << 20 for n in target),
        least_context=flags.fit_ctx,
        batch=not flags.given & {"batch_size", "ubatch_size"},
        cache=not flags.given & {"cache_type_k", "cache_type_v", "memory_f32"},
    )


def _similarity(share: float) -> float:
    if not 0 <= share <= 1:
        raise FlagError(f"-sps/--slot-prompt-similarity: expected 0 to 1, got {share}")
    return share


def _scaled(flags: ParsedFlags, key: str) -> tuple[tuple[str, float], ...]:
    """Return the files of a flag with scale 1, then those of its variant with scales. Raises FlagError."""
    files = [(path, 1.0) for path in listed(flags.values.get(key) or [])]
    for item in listed(flags.values.get(f"{key}_scaled") or []):
        path, _, text = item.rpartition(":")
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not path or not math.isfinite(scale):
            raise FlagError(f"--{key.replace('_', '-')}-scaled: expected FILE:SCALE, got {item!r}")
        files.append((path, scale))
    return tuple(files)


def _layers(given: Sequence[int]) -> tuple[int, int]:
    first, last = given
    if 0 < last < first:
        raise FlagError(f"--control-vector-layer-range: expected the first layer, then the last, got {first} {last}")
    return first, last


def rope_options(flags: ParsedFlags) -> RopeOptions:
    """Return the RoPE options. Raises FlagError."""

    def number(key: str, nothing: float) -> float:
        value = flags.values[key]
        if value is None:
            return nothing
        if not -math.inf < value < math.inf or (nothing == 0 and value < 0):
            raise FlagError(f"--{key.replace('_', '-')}: expected a number above 0, got {value}")
        return nothing if value < 0 else float(value)

    scale, freq_scale = number("rope_scale", 0.0), number("rope_freq_scale", 0.0)
    return RopeOptions(
        scaling=flags.rope_scaling,
        freq_base=number("rope_freq_base", 0.0),
        freq_scale=freq_scale or (1.0 / scale if scale else 0.0),
        n_ctx_orig=int(number("yarn_orig_ctx", 0.0)),
        ext_factor=number("yarn_ext_factor", -1.0),
        attn_factor=number("yarn_attn_factor", -1.0),
        beta_fast=number("yarn_beta_fast", -1.0),
        beta_slow=number("yarn_beta_slow", -1.0),
    )


def metadata_overrides(given: list[str]) -> list[tuple[str, int | float | bool | str]]:
    """Parse the values of --override-kv. Raises FlagError."""
    found: list[tuple[str, int | float | bool | str]] = []
    for item in listed(given):
        key, equals, rest = item.partition("=")
        kind, _, text = rest.partition(":")
        value: int | float | bool | str
        try:
            if kind == "int":
                value = int(text)
            elif kind == "float":
                value = float(text)
            elif kind == "bool" and text in ("true", "false"):
                value = text == "true"
            elif kind == "str":
                value = text
            else:
                raise ValueError
        except ValueError:
            key = ""
        if not key or not equals:
            raise FlagError(f"--override-kv: expected KEY=TYPE:VALUE with int, float, bool or str, got {item!r}")
        found.append((key, value))
    return found


def _threads(given: int | None) -> int | None:
    return None if given is None or given < 0 else given  # llama-server: negative is automatic


def _template(flags: ParsedFlags) -> str | None:
    file = flags.values.get("chat_template_file")
    if file:
        return read_file("--chat-template-file", file)
    given: str | None = flags.values.get("chat_template")
    return given


def read_file(flag: str, path: str) -> str:
    """Read the text file that a flag names. Raises FlagError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FlagError(f"{flag} {path}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FlagError(f"{flag} {path}: it is not UTF-8 text: {error}") from None


_LEAST = {
    "ctx_size": 0,
    "batch_size": 1,
    "ubatch_size": 1,
    "cache_ram": -1,
    "max_queue": 0,
    "image_min_tokens": 0,
    "image_max_tokens": 0,
    "embd_normalize": -1,
    "ctx_checkpoints": 0,
    "checkpoint_min_step": 0,
}
"""Least values of flags."""

_OPTION_FLAGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "n_ctx": ("ctx_size", _as_is),
    "n_batch": ("batch_size", _as_is),
    "n_ubatch": ("ubatch_size", _as_is),
    "n_threads": ("threads", _threads),
    "n_threads_batch": ("threads_batch", _threads),
    "type_k": ("cache_type_k", _as_is),
    "type_v": ("cache_type_v", _as_is),
    "rotated": ("attn_rot_disable", operator.not_),
    "numa": ("numa", _as_is),
    "slot_prompt_similarity": ("slot_prompt_similarity", _similarity),
    "context_shift": ("context_shift", _as_is),
    "cache_ram": ("cache_ram", _as_is),
    "cache_disk_size": ("cache_disk_size", lambda size: memory_size(size, "--cache-disk-size")),
    "ctx_checkpoints": ("ctx_checkpoints", _as_is),
    "checkpoint_min_step": ("checkpoint_min_step", _as_is),
    "max_queue": ("max_queue", _as_is),
    "lora_apply": ("lora_init_without_apply", operator.not_),
    "control_layers": ("control_vector_layer_range", _layers),
    "embeddings": ("embedding", _as_is),
    "reranking": ("rerank", _as_is),
    "pooling": ("pooling", _as_is),
    "embd_normalize": ("embd_normalize", _as_is),
}
"""Options of the engine: the flag of each, and its conversion."""
